"""The providers of one function in order of preference: where an item waits, and when waiting has no point any more."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence

from serverless.pipeline_entry import PendingItem
from serverless.pipeline_lane import ProviderQueue
from serverless.pipeline_stats import StageCounts
from serverless.types import Cause, FaultKind, InfraFault

__all__ = ["FallbackOrder"]


class FallbackOrder:
    """Decides between lanes; owns nothing that waits. `give_up` tells an entry's waiters.

    An entry goes to the first provider that lets it through, from the one on that it has not failed on; if none does,
    to any. While all are shut it waits where the next trial will be; as trials begin, fail and succeed, those who wait
    move on. Bound: once `trials` trials of each provider have failed in a row, whatever waits is given up with the next
    trial that fails, wherever that is.
    """

    def __init__(
        self,
        function: str,
        lanes: Sequence[ProviderQueue],
        *,
        breakers: StageCounts,
        fallbacks: StageCounts,
        give_up: Callable[[PendingItem, InfraFault], None],
    ) -> None:
        self._function = function
        self._lanes = tuple(lanes)
        self._breakers = breakers
        self._fallbacks = fallbacks
        self._give_up = give_up

    def route(self, entry: PendingItem, now: float) -> None:
        """Where it can go first. Ties: the earlier in the chain."""
        lanes = self._lanes
        chosen = lanes[entry.lane]
        self._breakers.entered += chosen.breaker is not None
        if len(lanes) > 1 and not chosen.admits(now):
            in_order = (*lanes[entry.lane :], *lanes[: entry.lane])
            chosen = next((lane for lane in in_order if lane.admits(now)), None) or min(
                lanes, key=ProviderQueue.open_at
            )
        if chosen.index > entry.lane and chosen.index != entry.on:
            self._fallbacks.acted += 1
        if chosen.index > entry.lane:
            entry.cause = Cause.FALLBACK
        elif entry.on > chosen.index:  # it waited elsewhere, and its own provider is back
            entry.cause = Cause.RETRY if entry.retried else Cause.FALLBACK if entry.lane else Cause.CALL
        entry.on = chosen.index
        chosen.enqueue(entry)

    def shut(self, index: int) -> None:
        """A lane admits nothing for a while: what waits there goes where it can go sooner, or is given up."""
        if not math.isinf(self._lanes[index].open_at()) and self.hopeless():
            fault = self._fault()
            for lane in self._lanes:
                for entry in lane.drain():
                    self._give_up(entry, fault)
        elif len(self._lanes) > 1:
            now = asyncio.get_running_loop().time()
            for entry in self._lanes[index].drain():
                self.route(entry, now)

    def back(self, index: int) -> None:
        """A lane admits calls again: what waits for a trial elsewhere need not."""
        now = asyncio.get_running_loop().time()
        for lane in self._lanes:
            if lane.index != index and not lane.admits(now):
                for entry in lane.drain():
                    self.route(entry, now)

    def hopeless(self) -> bool:
        """Whether no provider has answered a trial for as many as count."""
        return all(lane.breaker is not None and lane.breaker.hopeless for lane in self._lanes)

    def _fault(self) -> InfraFault:
        # The same text for all of one outage: a run names its most frequent fault.
        said = "; ".join(f"{lane.provider} failed trial after trial: {lane.why}" for lane in self._lanes)
        detail = f"no provider of {self._function} answers: {said}"[:500]
        return InfraFault(FaultKind.UNAVAILABLE, retryable=True, detail=detail)
