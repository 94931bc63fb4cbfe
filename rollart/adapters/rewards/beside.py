"""Reward functions that keep state run in this process, one call at a time; all others are offloaded."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from rollart.model import InfraFault, Item, Outcome
from serverless.inline import InlineScorer
from serverless.pipeline import Offload
from serverless.types import FaultKind

__all__ = ["RewardFunctions"]


class RewardFunctions:
    """Functions by name, local and offloaded. Any number of tasks may call `submit`."""

    def __init__(self, offload: Offload, local: Mapping[str, InlineScorer]) -> None:
        self._offload = offload
        self._local = dict(local)

    @property
    def functions(self) -> Mapping[str, Any]:
        """Names that `submit` accepts."""
        return {**self._offload.functions, **self._local}

    async def submit(self, function: str, item: Item, deadline_s: float) -> Outcome:
        """See `Offload.submit`. The deadline of a local function covers its wait for its turn and its awaits."""
        scorer = self._local.get(function)
        if scorer is None:
            return await self._offload.submit(function, item, deadline_s)
        try:
            async with asyncio.timeout(deadline_s):
                return await scorer.score(item)
        except TimeoutError:
            detail = f"no outcome of {function} in {deadline_s:g} s"
            return InfraFault(FaultKind.DEADLINE, retryable=False, detail=detail)
