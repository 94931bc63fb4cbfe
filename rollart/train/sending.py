"""Sends a version from this rank's memory to participating engines: the root's side of `rollart.collective`."""

from __future__ import annotations

import json
import socket
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from rollart.collective import (
    ALIGN,
    JOIN_S,
    BroadcastGroup,
    BroadcastOrder,
    TensorLayout,
    digest_of,
    error_line,
    lane_key,
    left_s,
    member_key,
    seconds,
)
from rollart.errors import TrainerError
from rollart.lora import ADAPTER_KEY, ADAPTERS_KEY, adapter_file
from rollart.model import BroadcastResult
from rollart.train.checkpoint import LearnerSnapshot

MAX_BUCKETS_AHEAD = 2
"""Buckets in memory: one in transfer, one being filled and hashed."""


@dataclass(frozen=True, slots=True)
class OutgoingVersion:
    """This rank's tensors of a version, as in its files (of one with adapters, the adapters' alone), and the model's
    config.json."""

    tensors: Mapping[str, Tensor]
    config: str


def outgoing_version(snapshot: LearnerSnapshot) -> OutgoingVersion:
    several = any(snapshot.names)
    whole = {
        adapter_file(str(Path(file).parent), name) if several else name: tensor
        for file, tensors in snapshot.files.items()
        if not file.startswith("trainer/")
        for name, tensor in tensors.items()
    }
    if snapshot.adapter is None:
        return OutgoingVersion(whole, snapshot.config)
    adapter = json.loads(snapshot.adapter)
    given = {ADAPTERS_KEY: dict.fromkeys(snapshot.names, adapter)} if several else {ADAPTER_KEY: adapter}
    return OutgoingVersion(whole, json.dumps(json.loads(snapshot.config) | given))


class BroadcastSender:
    """Owns this rank's group and, on rank 0, the rendezvous store. Used by one thread at a time, except `address`."""

    def __init__(self, device: torch.device, *, rank: int, host: str) -> None:
        self._device, self._rank, self._host = device, rank, host
        self.listening_store: TCPStore | None = None
        """The store at which engines meet the trainer."""
        self._group: BroadcastGroup | None = None
        self._previous: tuple[BroadcastOrder, int] | None = None
        """The previous broadcast, whose keys are still in the store, and its number of buckets."""

    def address(self) -> str:
        """The rendezvous address for members, at a port of its own on this host. TrainerError if no port can be
        opened."""
        if self.listening_store is None:
            family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
            listener = socket.socket(family)
            try:
                listener.bind((self._host, 0))
                port = listener.getsockname()[1]
                listener.listen(128)
                self.listening_store = TCPStore(
                    self._host,
                    port,
                    is_master=True,
                    timeout=seconds(JOIN_S),
                    wait_for_workers=False,
                    master_listen_fd=listener.detach(),
                )
            except (OSError, RuntimeError) as error:
                listener.close()
                raise TrainerError(
                    f"no meeting point for weights can be opened at {self._host}: {error_line(error)}"
                ) from error
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"{host}:{self.listening_store.port}"

    def send(self, order: BroadcastOrder, version: OutgoingVersion, *, bucket: int) -> BroadcastResult:
        """Never raises for failures of members: the result lists them."""
        began = time.monotonic()
        ends = began + order.limit_s
        errors: dict[int, str] = {}
        sent = 0
        try:
            if order.backend == "nccl" and self._device.type != "cuda":
                raise RuntimeError("weights.collective.backend is nccl, and the trainer has no GPU (rule: gloo)")
            if self._group is None or self._group.name != order.group:
                self.leave()
                self._group = BroadcastGroup(order, self._rank, rank=0, device=self._device)
            if self._previous is not None:  # a member that still reads its keys has missed that broadcast
                before, buckets = self._previous
                keys = [lane_key(before, self._rank, name) for name in ("layout", *range(buckets))]
                keys += [member_key(before, member) for member in range(1, before.size)] if self._rank == 0 else []
                self._previous = None
                for key in keys:
                    self._group.store.delete_key(key)
            sent = self._stream(self._group, order, version, bucket)
        except (RuntimeError, OSError) as error:
            errors[0] = error_line(error)
            self.leave()
        reports = self._collect_reports(order, ends, broken=bool(errors)) if self._rank == 0 else {}
        errors |= {member: str(a["error"]) for member, a in reports.items() if "error" in a}
        if errors:  # the next broadcast forms a new group
            self.leave()
        received = {m: (int(a["bytes"]), float(a["seconds"])) for m, a in reports.items() if "error" not in a}
        return BroadcastResult(sent, time.monotonic() - began, received, errors)

    def leave(self, *, wait_s: float = 0.0) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.close(wait_s=wait_s)

    def _stream(self, group: BroadcastGroup, order: BroadcastOrder, version: OutgoingVersion, bucket: int) -> int:
        ends = time.monotonic() + order.limit_s
        kinds = tuple((n, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for n, t in version.tensors.items())
        layout = TensorLayout(kinds, -(-bucket // ALIGN) * ALIGN, version.config)
        self._previous = order, len(layout.buckets())
        group.store.set(lane_key(order, self._rank, "layout"), layout.encode())
        flat = [version.tensors[name].contiguous().view(-1).view(torch.uint8) for name, *_ in layout.spans()]
        slots = [(at, size) for *_, at, size in layout.spans()]
        moving: deque[tuple[Any, Tensor, Tensor]] = deque()
        spare = [torch.zeros(min(layout.bucket, layout.size), dtype=torch.uint8) for _ in range(MAX_BUCKETS_AHEAD)]
        first = 0
        for number, (start, end) in enumerate(layout.buckets()):
            while first < len(slots) and sum(slots[first]) <= start:
                first += 1
            if len(moving) == MAX_BUCKETS_AHEAD:
                work, buffer, _ = moving.popleft()
                group.finish(work, within_s=group.patience_s)
                spare.append(buffer)
            buffer = spare.pop()
            filled = buffer[: end - start]
            for tensor, (offset, size) in zip(flat[first:], slots[first:], strict=True):
                if offset >= end:
                    break
                low, high = max(offset, start), min(offset + size, end)
                if low < high:  # gaps between tensors keep their old contents
                    filled[low - start : high - start].copy_(tensor[low - offset : high - offset])
            group.store.set(lane_key(order, self._rank, number), digest_of(filled))
            on_device = filled if order.backend == "gloo" else filled.to(self._device)
            work = group.broadcast(on_device, within_s=min(group.patience_s, left_s(ends)))
            moving.append((work, buffer, on_device))
        for work, *_ in moving:
            group.finish(work, within_s=group.patience_s)
        return layout.size

    def _collect_reports(self, order: BroadcastOrder, ends: float, *, broken: bool) -> dict[int, dict[str, Any]]:
        """The members' reports by number; a missing report is an error. After a failed broadcast, only reports that
        exist already."""
        found: dict[int, dict[str, Any]] = {}
        store: Any = self.listening_store
        patience = self._group.patience_s if self._group is not None else 0.0
        last = min(ends, time.monotonic() + patience)
        for member in range(1, order.size):
            key = member_key(order, member)
            try:
                if not broken:
                    store.wait([key], seconds(left_s(last)))
                if store is not None and store.check([key]):
                    found[member] = json.loads(store.get(key))
            except RuntimeError:
                pass
            found.setdefault(
                member, {"error": "the broadcast broke off" if broken else "it did not confirm the whole version"}
            )
        return found
