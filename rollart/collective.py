"""Broadcast of a weight version from the trainer's ranks to engines, and its reception in an engine.

One process group per rank of the trainer (a *lane*): the rank is its root, and every worker of every participating
engine is a member. NCCL between GPUs, gloo between CPUs; the code is the same. A lane is a stream of bytes, the tensors
of the rank one after the other, cut into buckets. The layout of a lane, each bucket's sha256 and the members that have
the whole version are in the trainer's TCPStore; the groups carry nothing but buckets.

Imports nothing of rollart: vLLM's workers import this very file, from `integrations/vllm`.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import math
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore

ALIGN = 64
"""Every tensor begins at a multiple of this many bytes, so that it can be viewed in place as any type."""

JOIN_S = 30.0
"""Longest wait for the other members when a group is formed: all were invited a moment before."""

STALL_S, PATIENCE = 20.0, 8.0
"""Longest time of a bucket: this many seconds, or this multiple of the longest bucket before it. Beyond it a member
hangs."""

CLOSE_S = 1.0
"""Longest wait for a thread at the end."""

NCCL_ERRORS = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


@dataclass(frozen=True, slots=True)
class BroadcastOrder:
    """Instructions to take part in one broadcast. `address` is the store's `host:port`; `group` names the groups (a new
    name: they are formed anew), `stamp` the broadcast: a version that is published again has a new stamp. Seconds."""

    address: str
    group: str
    backend: str
    size: int
    """Members of each lane's group, its root included."""
    lanes: int
    stamp: str
    version: int
    limit_s: float
    first: int = 1
    """Rank of the engine's first worker in each group."""

    @property
    def endpoint(self) -> tuple[str, int]:
        host, _, port = self.address.rpartition(":")
        return host.strip("[]"), int(port)


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """The content of a lane: (name, type, shape) of each tensor, in order."""

    tensors: tuple[tuple[str, str, tuple[int, ...]], ...]
    bucket: int
    """Bytes of each bucket but the last."""
    config: str = ""
    """The model's config.json, from the first lane."""

    def spans(self) -> Iterator[tuple[str, torch.dtype, tuple[int, ...], int, int]]:
        """Name, type, shape, first byte and bytes of every tensor."""
        at = 0
        for name, kind, shape in self.tensors:
            dtype: torch.dtype = getattr(torch, kind)
            size = math.prod(shape) * dtype.itemsize
            yield name, dtype, shape, at, size
            at += -(-size // ALIGN) * ALIGN

    @property
    def size(self) -> int:
        """Bytes of the lane."""
        return max((at + size for _, _, _, at, size in self.spans()), default=0)

    def buckets(self) -> list[tuple[int, int]]:
        """First byte and end of each."""
        total = self.size
        return [(at, min(at + self.bucket, total)) for at in range(0, total, self.bucket)]

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str) -> TensorLayout:
        raw = json.loads(text)
        tensors = tuple((str(n), str(k), tuple(int(s) for s in shape)) for n, k, shape in raw["tensors"])
        return cls(tensors, int(raw["bucket"]), str(raw["config"]))


class BroadcastGroup:
    """One lane's process group, independent of the process's other groups, and its own connection to the store: a
    caller that waits for a key blocks the connection. Constructed by all members at once.

    `broadcast` begins to send or to receive a bucket; `finish` waits for it. Closing a group (`close`) ends its
    connections, which the other members notice at once; an operation in flight that waits for a hanging member ends
    when that member's timeout expires.
    """

    def __init__(self, order: BroadcastOrder, lane: int, *, rank: int, device: torch.device) -> None:
        """RuntimeError when the other members do not come."""
        self.name, self.lane = order.group, lane
        self._nccl = order.backend == "nccl"
        self._longest_s = 0.0
        (host, port), limit = order.endpoint, seconds(min(JOIN_S, order.limit_s))
        self.store: Any = TCPStore(host, port, is_master=False, timeout=limit, wait_for_workers=False)
        own = PrefixStore(f"{order.group}/{lane}", self.store)
        if self._nccl:
            from torch._C._distributed_c10d import ProcessGroupNCCL

            torch.cuda.set_device(device)
            nccl_options = ProcessGroupNCCL.Options()
            nccl_options._timeout = seconds(order.limit_s)
            with without_nccl_error_handling():
                self._group: Any = ProcessGroupNCCL(own, rank, order.size, nccl_options)
        else:
            from torch._C._distributed_c10d import ProcessGroupGloo

            gloo: Any = ProcessGroupGloo
            options = gloo._Options()
            options._devices = [gloo.create_device(hostname=_local_address_towards(host, port))]
            options._timeout = limit
            self._group = gloo(own, rank, order.size, options)

    def broadcast(self, bucket: Tensor, *, within_s: float) -> Any:
        return self._group.broadcast(bucket, 0, timeout=seconds(within_s))

    def finish(self, work: Any, *, within_s: float) -> None:
        """RuntimeError when a member is gone or hangs."""
        began = time.monotonic()
        if self._nccl:  # NCCL's `wait` would only block the stream, for ever
            while not work.is_completed():
                if time.monotonic() - began > within_s:
                    raise RuntimeError(f"a bucket has been on its way for {within_s:.3g} s")
                time.sleep(0.0005)
        work.wait()
        self._longest_s = max(self._longest_s, time.monotonic() - began)

    @property
    def patience_s(self) -> float:
        """Longest time that a bucket may take."""
        return max(STALL_S, PATIENCE * self._longest_s)

    def close(self, *, wait_s: float = 0.0) -> None:
        """Runs in a thread of its own: it waits for operations in flight, which end by themselves."""
        group, self._group = self._group, None
        if group is not None:
            dropping = threading.Thread(target=_drop, args=([group], self._nccl), daemon=True)
            del group
            dropping.start()
            dropping.join(wait_s)


@dataclass(frozen=True, slots=True)
class ReceivedWeights:
    """A whole version, in host memory."""

    stamp: str
    config: str
    tensors: Mapping[str, Tensor]
    bytes: int


class WeightReceiver:
    """A worker's end. `take_part` returns at once: threads receive the version while the engine continues. A complete
    version with correct checksums replaces the previous one; an incomplete one never does. `take` returns a version
    once.

    Called by one thread; the threads of an abandoned broadcast notice that another has begun, and leave nothing.
    """

    def __init__(self, device: torch.device, *, check: Callable[[ReceivedWeights], None] = lambda _: None) -> None:
        """`check` raises ValueError for a version that this worker could not load."""
        self._device, self._check = device, check
        self._lock = threading.Lock()
        self._stamp = ""
        self._name = ""
        self._lanes: list[BroadcastGroup] = []
        self._whole: ReceivedWeights | None = None
        self._threads: list[threading.Thread] = []

    def take_part(self, order: BroadcastOrder, *, worker: int = 0) -> None:
        """ValueError where the backend does not support this worker's device."""
        if order.backend == "nccl" and self._device.type != "cuda":
            raise ValueError("weights.collective.backend is nccl, and this engine has no GPU (rule: gloo)")
        with self._lock:
            self._stamp = order.stamp
        thread = threading.Thread(target=self._run, args=(order, order.first + worker), daemon=True)
        self._threads = [one for one in self._threads if one.is_alive()] + [thread]
        thread.start()

    def take(self, stamp: str) -> ReceivedWeights | None:
        """None if that version was not received completely."""
        with self._lock:
            whole = self._whole
            if whole is None or whole.stamp != stamp:
                return None
            self._whole = None
            return whole

    def close(self) -> None:
        """Call before the process ends: a thread inside torch would abort it."""
        with self._lock:
            self._stamp, self._whole = "", None
            self._leave(wait_s=CLOSE_S)
        for thread in self._threads:
            thread.join(CLOSE_S)

    def _run(self, order: BroadcastOrder, rank: int) -> None:
        began = time.monotonic()
        lanes: list[BroadcastGroup] = []
        try:
            lanes = self._join(order, rank)
            received = self._receive(order, lanes)
            self._check(received)
            with self._lock:
                if self._stamp != order.stamp:
                    raise RuntimeError("another broadcast has begun")
                self._whole = received
            answer: dict[str, Any] = {"bytes": received.bytes, "seconds": time.monotonic() - began}
        except Exception as error:  # the engine continues, and loads this version from files
            answer = {"error": error_line(error)}
            with self._lock:
                if self._name == order.group:
                    self._leave()
        if lanes:
            with contextlib.suppress(RuntimeError):  # the trainer is gone
                lanes[0].store.set(member_key(order, rank), json.dumps(answer))

    def _join(self, order: BroadcastOrder, rank: int) -> list[BroadcastGroup]:
        with self._lock:
            if self._name == order.group:
                return self._lanes
            self._leave()
        lanes: list[BroadcastGroup] = []
        try:
            for number in range(order.lanes):
                lanes.append(BroadcastGroup(order, number, rank=rank, device=self._device))
            with self._lock:
                if self._stamp != order.stamp:
                    raise RuntimeError("another broadcast has begun")
                self._name, self._lanes = order.group, lanes
        except BaseException:
            for group in lanes:
                group.close()
            raise
        return lanes

    def _leave(self, *, wait_s: float = 0.0) -> None:
        for group in self._lanes:
            group.close(wait_s=wait_s)
        self._name, self._lanes = "", []

    def _receive(self, order: BroadcastOrder, lanes: list[BroadcastGroup]) -> ReceivedWeights:
        """Receive all lanes concurrently. Raises the first error of any lane, after all have ended."""
        parts: list[tuple[TensorLayout, Tensor] | Exception] = [RuntimeError("it did not begin")] * len(lanes)

        def one(number: int) -> None:
            try:
                parts[number] = self._stream(lanes[number], order)
            except Exception as error:
                parts[number] = error

        threads = [threading.Thread(target=one, args=(n,), daemon=True) for n in range(1, len(lanes))]
        for thread in threads:
            thread.start()
        one(0)
        for thread in threads:
            thread.join()
        tensors: dict[str, Tensor] = {}
        config, total = "", 0
        for part in parts:
            if isinstance(part, Exception):
                raise part
            layout, whole = part
            config, total = config or layout.config, total + layout.size
            for name, dtype, shape, at, size in layout.spans():
                tensors[name] = whole[at : at + size].view(dtype).view(shape)
        return ReceivedWeights(order.stamp, config, tensors, total)

    def _stream(self, group: BroadcastGroup, order: BroadcastOrder) -> tuple[TensorLayout, Tensor]:
        """Receive every bucket, checking each while the next arrives. Checksum errors are raised at the end: the other
        members must not wait."""
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        ends = time.monotonic() + order.limit_s

        def get(name: object) -> str:
            """Waits for the key."""
            key = lane_key(order, group.lane, name)
            group.store.wait([key], seconds(left_s(ends)))
            found: bytes = group.store.get(key)
            return found.decode()

        layout = TensorLayout.decode(get("layout"))
        whole = torch.empty(layout.size, dtype=torch.uint8)
        digests: list[str] = []
        for number, (start, end) in enumerate(layout.buckets()):
            into = whole[start:end]
            buffer = into if order.backend == "gloo" else into.to(self._device)
            work = group.broadcast(buffer, within_s=left_s(ends))
            if number:
                digests.append(digest_of(whole[start - layout.bucket : start]))
            group.finish(work, within_s=left_s(ends))
            if buffer is not into:
                into.copy_(buffer)
            if end == layout.size:
                digests.append(digest_of(into))
        for number, digest in enumerate(digests):
            if digest != get(number):
                raise ValueError(f"bucket {number} is damaged: its sha256 is not the one that was sent")
        return layout, whole


def member_key(order: BroadcastOrder, member: int) -> str:
    """The store's key of a member's result: `{bytes, seconds}` once it has the whole version, or `{error}`."""
    return f"{order.stamp}/has/{member}"


def lane_key(order: BroadcastOrder, lane: int, name: object) -> str:
    """The store's key of a lane's `layout`, or of the sha256 of one of its buckets by number."""
    return f"{order.stamp}/{lane}/{name}"


def left_s(ends: float) -> float:
    return max(0.001, ends - time.monotonic())


def seconds(value: float) -> datetime.timedelta:
    return datetime.timedelta(seconds=value)


def error_line(error: BaseException) -> str:
    """The first line of the error's text; for gloo without the source location."""
    text = re.sub(r"^\[/\S+\] ", "", str(error).strip()).splitlines()
    return text[0].partition(". This is typically")[0][:200] if text else type(error).__name__


def digest_of(bucket: Tensor) -> str:
    """The sha256 of bytes in host memory."""
    array: Any = bucket.numpy()
    return hashlib.sha256(array).hexdigest()


@contextlib.contextmanager
def without_nccl_error_handling() -> Iterator[None]:
    """Evaluated when a group is made: a member's failure closes the group instead of ending the process."""
    before, os.environ[NCCL_ERRORS] = os.environ.get(NCCL_ERRORS), "0"
    try:
        yield
    finally:  # the setting must not affect the process's other groups
        del os.environ[NCCL_ERRORS]
        os.environ |= {} if before is None else {NCCL_ERRORS: before}


def _drop(holder: list[Any], nccl: bool) -> None:
    group = holder.pop()
    if nccl:
        group.abort()
    del group


def _local_address_towards(host: str, port: int) -> str:
    """This host's address on the route to the trainer, at which the other members reach it."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return str(probe.getsockname()[0])
