"""The pending items of one function: their waiters, deduplication, cached results, retries and routing."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from serverless import wire
from serverless.backends.base import Backend
from serverless.cache import Cache
from serverless.deploy.package import Package
from serverless.meter import MeterSink, Saving
from serverless.pipeline_chain import FallbackOrder
from serverless.pipeline_entry import PendingItem, Waiter
from serverless.pipeline_lane import ProviderQueue
from serverless.pipeline_stats import FunctionHealth, OffloadStage, StageCounts
from serverless.pipeline_timers import Timers
from serverless.policy.dedupe import cacheable, copy_outcome, item_key
from serverless.policy.limits import AnchorTimes, prompt_key
from serverless.policy.retry import RetryBudget, retry_delay
from serverless.settings import PipelineSpec
from serverless.types import Cause, FaultKind, InfraFault, Invocation, Item, ModelFault, Outcome, Scored, Throttle

__all__ = ["FunctionQueue", "Spawn"]

Spawn = Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]


class FunctionQueue:
    """Owns the pending items of one function, their waiters and timers, and a provider queue per provider, in fallback
    order.

    An item is either waiting in a provider queue, in a call of a provider queue, or in the pause before a retry. Every
    waiter gets exactly one outcome: when its item has one, when its own deadline passes, or when the queue closes.
    """

    def __init__(
        self,
        package: Package,
        backends: Sequence[Backend],
        settings: PipelineSpec,
        *,
        cache: Cache | None,
        meter: MeterSink,
        spawn: Spawn,
        seed: int,
    ) -> None:
        self.spec = package.spec
        self.spawn = spawn
        self._version = package.version
        self._settings = settings
        self._meter = meter
        self._rng = random.Random(f"{seed}/{self.spec.name}")
        self._budget = RetryBudget(settings.retry) if settings.retry.enabled else None
        self._cache = cache if self.spec.deterministic else None
        self._flights: dict[bytes, PendingItem] | None = (
            {} if settings.dedupe.enabled and self.spec.deterministic else None
        )
        limited = settings.limits.applies(declared=self.spec.timeout_floor is not None)
        self._anchors = AnchorTimes(settings.limits) if limited else None
        self._live: dict[PendingItem, None] = {}
        self._deadlines: Timers[Waiter] = Timers(self._expire, lambda waiter: waiter.outcome.done())
        self._stages = {stage: StageCounts() for stage in OffloadStage}
        self._validated, self._checked = self._stages[OffloadStage.VALIDATE], self._stages[OffloadStage.SCHEMA]
        self._retries, self._fallbacks = self._stages[OffloadStage.RETRY], self._stages[OffloadStage.FALLBACK]
        self._dedupes = self._stages[OffloadStage.DEDUPE]
        self.health = FunctionHealth()
        self._billed_s = 0.0
        self._billed_items = 0
        chain = backends if settings.fallback.enabled else backends[:1]
        alone = len(chain) == 1
        self.provider_queues = [
            ProviderQueue(self, n, self.spec, b, settings, self._rng, alone=alone) for n, b in enumerate(chain)
        ]
        breakers, fallbacks = self._stages[OffloadStage.BREAKER], self._fallbacks
        self._fallback_order = FallbackOrder(
            self.spec.name, self.provider_queues, breakers=breakers, fallbacks=fallbacks, give_up=self._settle
        )

    @property
    def waiting(self) -> int:
        return sum(provider_queue.waiting for provider_queue in self.provider_queues)

    @property
    def stages(self) -> dict[OffloadStage, StageCounts]:
        return self._stages

    async def submit(self, item: Item, deadline_s: float) -> Outcome:
        self._validated.entered += 1
        encoded = wire.encode(item)
        try:
            size = wire.size(encoded)
        except (TypeError, ValueError, OverflowError) as error:
            detail = f"item {item.id} has no wire form: {error}"
            return self._refused(InfraFault(FaultKind.ENVIRONMENT, retryable=False, detail=detail))
        if deadline_s <= 0.0:
            detail = "the deadline had passed at submission"
            return self._refused(InfraFault(FaultKind.DEADLINE, retryable=False, detail=detail))
        key: bytes | None = None
        if self._flights is not None or self._cache is not None:
            key = item_key(self._version, encoded)
        known = self._cached(key)
        if known is not None:
            self.health.note(known)
            return known
        entry = self._equal_in_flight(key)
        if entry is None:
            if self.waiting >= self.spec.queue and not self._purge_finished():
                detail = f"{self.spec.queue} items wait for {self.spec.name}"
                fault = InfraFault(FaultKind.THROTTLED, retryable=True, detail=detail, throttle=Throttle.QUEUE)
                return self._refused(fault)
            entry = self._entry(item, encoded, size, key)
        return await self._wait(entry, deadline_s)

    async def _wait(self, entry: PendingItem, deadline_s: float) -> Outcome:
        loop = asyncio.get_running_loop()
        now = loop.time()
        waiter = Waiter(entry, loop.create_future(), now + deadline_s, deadline_s)
        self._deadlines.add(waiter.expires, waiter)
        entry.waiters.append(waiter)
        entry.expires = max(entry.expires, waiter.expires)
        if len(entry.waiters) == 1 and entry not in self._live:
            self._live[entry] = None
            entry.since = now
            self._fallback_order.route(entry, now)
        try:
            return await waiter.outcome
        finally:
            self._leave(waiter)

    def close(self) -> None:
        """Resolve all waiters with a fault and cancel the calls in flight."""
        fault = InfraFault(FaultKind.UNAVAILABLE, retryable=False, detail="the offload was closed")
        for provider_queue in self.provider_queues:
            provider_queue.close()
        for entry in list(self._live):
            self._settle(entry, fault)
        self._deadlines.close()

    def count(self, stage: OffloadStage) -> StageCounts:
        return self._stages[stage]

    def limit(self, entry: PendingItem) -> float | None:
        if self._anchors is None:
            return None
        limit = min(self._anchors.limit(entry.prompt), self.spec.timeout_s)
        wanted = entry.wire["metadata"].get("timeout_s")
        self._stages[OffloadStage.LIMITS].acted += 1
        if isinstance(wanted, int | float) and not isinstance(wanted, bool) and wanted > 0:
            return min(limit, float(wanted))
        return limit

    def billed(self, invocation: Invocation) -> None:
        self._billed_s += invocation.billed_s
        self._billed_items += invocation.items

    def receive(self, entry: PendingItem, outcome: Outcome, *, seconds: float | None = None) -> None:
        """Deliver an item's outcome to its waiters, unless another attempt is worthwhile."""
        if seconds is not None:
            self._checked.entered += 1
        if entry.done:
            return
        if isinstance(outcome, InfraFault):
            schema_fault = outcome.kind is FaultKind.BAD_ANSWER and seconds is not None
            self._checked.acted += schema_fault
            floor = self.spec.timeout_floor
            if outcome.kind is FaultKind.TIMEOUT and floor is not None and seconds is not None:
                # The handler's own time limit stopped this item.
                outcome, seconds = ModelFault(floor, outcome.detail), None
            elif self._schedule_retry(entry, outcome):
                return
        elif isinstance(outcome, Scored) and self._anchors is not None and seconds is not None:
            self._anchors.learn(entry.prompt, outcome, seconds)
        # A timeout is no property of the item: it is reported, and not cached.
        self._settle(entry, outcome, keep=seconds is not None)

    def provider_failed(self, index: int, entry: PendingItem, fault: InfraFault) -> None:
        """Route the item to the next provider; after the last one, treat the fault as final or retry."""
        if entry.done:
            return
        if index < entry.provider_index or index + 1 >= len(self.provider_queues) or self._fallback_order.hopeless():
            self.receive(entry, fault)
            return
        entry.provider_index = index + 1
        entry.attempts = max(0, entry.attempts - 1)
        entry.throttles = 0
        entry.cause = Cause.FALLBACK
        self._fallbacks.acted += 1
        self.again(entry)

    def again(self, entry: PendingItem) -> None:
        now = asyncio.get_running_loop().time()
        entry.call = None
        entry.since = now
        self._fallback_order.route(entry, now)

    def provider_unavailable(self, index: int) -> None:
        self._fallback_order.provider_unavailable(index)

    def provider_available(self, index: int) -> None:
        self._fallback_order.provider_available(index)

    def _cached(self, key: bytes | None) -> Outcome | None:
        """The cached result of an item, None if there is none."""
        cache = self._cache
        if key is None or cache is None or not cache.on:
            return None
        stage = self._stages[OffloadStage.CACHE]
        stage.entered += 1
        known = cache.get(key)
        if known is not None:
            self._saved(stage, "cache", 1)
        return known

    def _equal_in_flight(self, key: bytes | None) -> PendingItem | None:
        """The pending entry of an equal item that is in flight."""
        if key is None or self._flights is None:
            return None
        stage = self._dedupes
        stage.entered += 1
        entry = self._flights.get(key)
        if entry is not None:
            stage.acted += 1
        return entry

    def _entry(self, item: Item, encoded: wire.WireItem, size: int, key: bytes | None) -> PendingItem:
        entry = PendingItem(encoded, size, key, "", 0.0, 0.0)
        if self._anchors is not None:
            self._stages[OffloadStage.LIMITS].entered += 1
            entry.prompt = prompt_key(item)
        if key is not None and self._flights is not None:
            self._flights[key] = entry
        if self._budget is not None:
            self._retries.entered += 1
            self._budget.earn()
        return entry

    def _saved(self, stage: StageCounts, name: str, items: int) -> None:
        each = self._billed_s / self._billed_items if self._billed_items else 0.0
        stage.acted += items if name == "cache" else 0
        stage.saved_calls += items
        stage.saved_billed_s += each * items
        now = asyncio.get_running_loop().time()
        self._meter.saving(Saving(self.spec.name, name, now, items, each * items, self.spec.memory_mb))

    def _refused(self, fault: InfraFault) -> InfraFault:
        self._validated.acted += 1
        self.health.note(fault)
        return fault

    def _purge_finished(self) -> bool:
        for provider_queue in self.provider_queues:
            provider_queue.purge()
        return self.waiting < self.spec.queue

    def _schedule_retry(self, entry: PendingItem, fault: InfraFault) -> bool:
        """Schedule another attempt, if the policy and the budget allow one and a provider may answer it."""
        if self._budget is None or self._fallback_order.hopeless():
            return False
        loop = asyncio.get_running_loop()
        remaining_s = entry.expires - loop.time()
        wait = retry_delay(self._settings.retry, fault, max(1, entry.attempts), remaining_s, self._rng)
        if wait is None or not self._budget.take():
            return False
        stage = self._retries
        stage.acted += 1
        stage.waited_s += wait
        entry.cause, entry.retried, entry.call = Cause.RETRY, True, None
        entry.retry = loop.call_later(wait, self._resume, entry)
        return True

    def _resume(self, entry: PendingItem) -> None:
        entry.retry = None
        if not entry.done:
            self.again(entry)

    def _expire(self, waiter: Waiter) -> None:
        detail = f"no outcome of {self.spec.name} in {waiter.deadline_s:g} s"
        fault = InfraFault(FaultKind.DEADLINE, retryable=False, detail=detail)
        self.health.note(fault)
        waiter.outcome.set_result(fault)
        self._leave(waiter)

    def _leave(self, waiter: Waiter) -> None:
        """Remove a waiter; its item ends with its last waiter. Idempotent."""
        entry = waiter.entry
        if not entry.done:
            if waiter in entry.waiters:
                entry.waiters.remove(waiter)
            if not entry.waiters:
                self._end(entry)

    def _end(self, entry: PendingItem) -> None:
        """End an item that has no waiters left."""
        entry.done = True
        self._live.pop(entry, None)
        if entry.key is not None and self._flights is not None and self._flights.get(entry.key) is entry:
            del self._flights[entry.key]
        if entry.retry is not None:
            entry.retry.cancel()
            entry.retry = None
        call, entry.call = entry.call, None
        if call is not None:
            self.provider_queues[call.provider_index].abandon(call)

    def _settle(self, entry: PendingItem, outcome: Outcome, *, keep: bool = False) -> None:
        if entry.done:
            return
        scored = not isinstance(outcome, InfraFault)
        self._retries.helped += scored and entry.retried
        self._fallbacks.helped += scored and entry.sent_to > 0
        limited = self._anchors is not None and isinstance(outcome, ModelFault)
        if keep and entry.key is not None and self._cache is not None and not limited and cacheable(outcome):
            assert not isinstance(outcome, InfraFault)
            self._cache.put(entry.key, outcome)
        waiters, entry.waiters = entry.waiters, []
        self._end(entry)
        if scored and len(waiters) > 1:
            self._saved(self._dedupes, "dedupe", len(waiters) - 1)
        for position, waiter in enumerate(waiters):
            self.health.note(outcome)
            if not waiter.outcome.done():
                waiter.outcome.set_result(copy_outcome(outcome) if position else outcome)
