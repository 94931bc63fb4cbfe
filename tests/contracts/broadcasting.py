"""Any engine behind HTTP, whose versions come by a broadcast from this process and from nowhere else."""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
from pathlib import Path

import torch

from rollart.adapters.engines.http import HttpEngine
from rollart.adapters.engines.vllm import VllmEngine
from rollart.collective import BroadcastOrder
from rollart.engine.weights import read_tensors
from rollart.errors import EngineError
from rollart.model import BroadcastResult, WeightsRef
from rollart.train.sending import BroadcastSender, OutgoingVersion

__all__ = ["BroadcastEngine", "BroadcastVllm", "give"]

NOWHERE = "/nowhere"
"""Path that an engine is given instead of files: it has none."""


class _Broadcast(HttpEngine):
    _sender: BroadcastSender | None = None
    _group = ""

    async def close(self) -> None:
        if self._sender is not None:
            self._sender.leave(wait_s=60.0)
        await super().close()

    async def update_weights(self, weights: WeightsRef) -> None:
        if self._sender is None:
            self._sender, self._group = (
                BroadcastSender(torch.device("cpu"), rank=0, host="127.0.0.1"),
                secrets.token_hex(4),
            )
        stamp = secrets.token_hex(4)
        workers = await self.members()
        order = BroadcastOrder(
            self._sender.address(), self._group, "gloo", 1 + workers, 1, stamp, weights.version, limit_s=60.0
        )
        sent = await give(self._sender, order, Path(weights.path), self)
        if sent.errors:
            raise EngineError(str(sent.errors), retryable=False)
        self.received(weights.version, stamp)
        await super().update_weights(dataclasses.replace(weights, path=NOWHERE))


class BroadcastEngine(_Broadcast):
    pass


class BroadcastVllm(_Broadcast, VllmEngine):
    pass


async def give(
    sender: BroadcastSender, order: BroadcastOrder, directory: Path, *engines: HttpEngine
) -> BroadcastResult:
    """One broadcast of a published directory's tensors, in small buckets."""
    for number, engine in enumerate(engines, start=1):
        await engine.take_part(dataclasses.asdict(dataclasses.replace(order, first=number)))
    outgoing = OutgoingVersion(read_tensors(directory), (directory / "config.json").read_text())
    return await asyncio.get_running_loop().run_in_executor(None, lambda: sender.send(order, outgoing, bucket=4096))
