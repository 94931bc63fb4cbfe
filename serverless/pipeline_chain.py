"""The fallback order of one function's providers: routes items, and gives them up when all providers are down."""

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
    """Routes items between provider queues; owns no waiting items. `give_up` delivers a fault to an item's waiters.

    An item goes to the first provider that admits it, starting from the first provider that has not failed it; if there
    is none, to any other. While no provider admits calls, the item waits at the provider with the earliest trial, and
    waiting items are routed again as trials begin, fail and succeed. Bound: once `trials` trials of each provider have
    failed in a row, all waiting items are given up at the next failed trial of any provider.
    """

    def __init__(
        self,
        function: str,
        queues: Sequence[ProviderQueue],
        *,
        breakers: StageCounts,
        fallbacks: StageCounts,
        give_up: Callable[[PendingItem, InfraFault], None],
    ) -> None:
        self._function = function
        self._queues = tuple(queues)
        self._breakers = breakers
        self._fallbacks = fallbacks
        self._give_up = give_up

    def route(self, entry: PendingItem, now: float) -> None:
        """Send an item to the provider that admits it first. Ties: the earlier in the order."""
        queues = self._queues
        chosen = queues[entry.provider_index]
        self._breakers.entered += chosen.breaker is not None
        if len(queues) > 1 and not chosen.admits(now):
            in_order = (*queues[entry.provider_index :], *queues[: entry.provider_index])
            chosen = next((queue for queue in in_order if queue.admits(now)), None) or min(
                queues, key=ProviderQueue.open_at
            )
        if chosen.index > entry.provider_index and chosen.index != entry.sent_to:
            self._fallbacks.acted += 1
        if chosen.index > entry.provider_index:
            entry.cause = Cause.FALLBACK
        elif entry.sent_to > chosen.index:  # returned from another provider
            entry.cause = Cause.RETRY if entry.retried else Cause.FALLBACK if entry.provider_index else Cause.CALL
        entry.sent_to = chosen.index
        chosen.enqueue(entry)

    def provider_unavailable(self, index: int) -> None:
        """A provider queue stopped admitting calls: route its items to a provider that admits them sooner, or give them
        up."""
        if not math.isinf(self._queues[index].open_at()) and self.hopeless():
            fault = self._fault()
            for queue in self._queues:
                for entry in queue.drain():
                    self._give_up(entry, fault)
        elif len(self._queues) > 1:
            now = asyncio.get_running_loop().time()
            for entry in self._queues[index].drain():
                self.route(entry, now)

    def provider_available(self, index: int) -> None:
        """A provider queue admits calls again: route the items to it that wait for another provider's trial."""
        now = asyncio.get_running_loop().time()
        for queue in self._queues:
            if queue.index != index and not queue.admits(now):
                for entry in queue.drain():
                    self.route(entry, now)

    def hopeless(self) -> bool:
        """True if every provider has failed the maximal number of trials in a row."""
        return all(queue.breaker is not None and queue.breaker.hopeless for queue in self._queues)

    def _fault(self) -> InfraFault:
        # The text is the same throughout an outage: a run reports its most frequent fault.
        causes = "; ".join(f"{queue.provider} failed trial after trial: {queue.why}" for queue in self._queues)
        detail = f"no provider of {self._function} answers: {causes}"[:500]
        return InfraFault(FaultKind.UNAVAILABLE, retryable=True, detail=detail)
