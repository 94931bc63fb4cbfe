"""`Offload.submit(function, item, deadline_s) -> Outcome`: the only path by which a reward leaves the process.

The stages in order: validation, deduplication of equal items in flight, result cache, admission, batching, time limit
and deadline, call, hedging, isolation of the failing item of a batch, retry, circuit breaker, fallback provider, check
of the answer. `PipelineSpec` switches and configures every stage; `Offload.stages` reports the effect of each.

`Offload` has a `FunctionQueue` per function for its pending items and their waiters, and that has a `ProviderQueue` per
provider for the calls. The decisions of the stages are pure and stand beside them in this package.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import pathlib
import random
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any

from serverless import wire
from serverless.deploy.package import Package
from serverless.errors import BackendFailed, UnknownFunction
from serverless.meter import MeterSink, NullMeter, Saving
from serverless.pipeline.cache import Cache, cacheable, copy_outcome, item_key
from serverless.pipeline.items import PendingItem, Timers, Waiter
from serverless.pipeline.limits import AnchorTimes, prompt_key
from serverless.pipeline.provider_queue import ProviderQueue, Spawn
from serverless.pipeline.retrying import RetryBudget, retry_delay
from serverless.pipeline.stages import FunctionHealth, OffloadStage, PipelineSpec, StageCounts
from serverless.providers.base import Backend
from serverless.spec import FunctionSpec
from serverless.types import Cause, FaultKind, InfraFault, Invocation, Item, ModelFault, Outcome, Scored, Throttle


class Offload:
    """Scores items through one backend, or several in order of preference. Use `async with`: entering deploys the
    functions (`Package.spec.name`) on each of the (already open) backends.

    Owns the waiting items of every function and a task per invocation in flight. Any number of tasks may call `submit`;
    each waits for its own outcome and is unblocked by that outcome, by its deadline or by its cancellation. A call is
    cancelled when the last of its waiters has left. Invariants: at most `concurrency` invocations are in flight per
    function and provider; at most `queue` items wait per function; every submit gets exactly one outcome; an item is
    called at most `max_attempts` times, not counting refusals, other providers and isolation; retries <= reserve + 10 %
    of items; hedges <= 5 % of calls.

    `cache` is the file of the result cache. `meter` receives savings (the backends report calls). `warn` receives
    warnings for the user. `overrides` are settings by function.
    """

    def __init__(
        self,
        packages: Sequence[Package],
        backends: Backend | Sequence[Backend],
        *,
        seed: int = 0,
        settings: PipelineSpec | None = None,
        overrides: Mapping[str, PipelineSpec] | None = None,
        cache: pathlib.Path | None = None,
        meter: MeterSink | None = None,
        warn: Callable[[str], None] | None = None,
    ) -> None:
        self._packages = tuple(packages)
        self._backends: tuple[Backend, ...] = tuple(backends) if isinstance(backends, Sequence) else (backends,)
        if not self._backends:
            raise BackendFailed("an offload needs a backend", remedy="give one, or several in order of preference")
        common = settings or PipelineSpec()
        self._cache: Cache | None = None
        if cache is not None and common.cache.enabled:
            warn = warn or logging.getLogger(__name__).warning
            self._cache = Cache(cache, max_entries=common.cache.max_entries, warn=warn)
        self._queues: dict[str, FunctionQueue] = {}
        for package in self._packages:
            chosen = (overrides or {}).get(package.spec.name, common)
            self._queues[package.spec.name] = FunctionQueue(
                package,
                self._backends,
                chosen,
                cache=self._cache if chosen.cache.enabled else None,
                meter=meter or NullMeter(),
                spawn=self._spawn,
                seed=seed,
            )
        self._group: asyncio.TaskGroup | None = None

    @property
    def functions(self) -> Mapping[str, FunctionSpec]:
        """The deployed functions by name, with their decorators' settings."""
        return {p.spec.name: p.spec for p in self._packages}

    @property
    def waiting(self) -> int:
        """Items that wait for a call."""
        return sum(queue.waiting for queue in self._queues.values())

    def waiting_for(self, function: str) -> int:
        """Items of one function that wait for a call."""
        return self._queue_of(function).waiting

    def stages(self) -> dict[str, dict[OffloadStage, StageCounts]]:
        """The counts of every stage since the start, by function: a copy."""
        return {name: {s: replace(c) for s, c in queue.stages.items()} for name, queue in self._queues.items()}

    def health(self) -> dict[str, FunctionHealth]:
        """The fault rates of the functions as their callers observed them. The caller decides on the tolerated rate."""
        return {name: queue.health for name, queue in self._queues.items()}

    def providers(self, function: str) -> dict[str, tuple[str, int]]:
        """The providers of a function in order of preference: the state of the circuit breaker ("closed" if there is
        none) and the number of calls that may be in flight."""
        return {
            queue.provider: (str(queue.breaker.state), queue.window)
            for queue in self._queue_of(function).provider_queues
        }

    async def submit(self, function: str, item: Item, deadline_s: float) -> Outcome:
        """Score one item within `deadline_s` seconds from now. Every failure is returned as a value.

        Raises `UnknownFunction` and `BackendFailed` (not open) for the caller's mistakes.
        """
        queue = self._queue_of(function)
        if self._group is None:
            raise BackendFailed("the offload is not open", remedy="use `async with`")
        return await queue.submit(item, deadline_s)

    async def __aenter__(self) -> Offload:
        for backend in self._backends:
            for package in self._packages:
                await backend.deploy(package)
        if self._cache is not None:
            self._cache.open()
        self._group = asyncio.TaskGroup()
        await self._group.__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        group, self._group = self._group, None
        with contextlib.ExitStack() as stack:
            if self._cache is not None:
                stack.callback(self._cache.close)
            for queue in self._queues.values():
                queue.close()
            if group is not None:
                await group.__aexit__(None, None, None)

    def _queue_of(self, function: str) -> FunctionQueue:
        queue = self._queues.get(function)
        if queue is None:
            raise UnknownFunction(f"no function {function!r}", remedy=f"functions: {', '.join(self._queues) or 'none'}")
        return queue

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a task for a provider queue."""
        assert self._group is not None
        return self._group.create_task(work)


class FunctionQueue:
    """Owns the pending items of one function, their waiters and timers, and a provider queue per provider, in fallback
    order.

    An item is either waiting in a provider queue, in a call of a provider queue, or in the pause before a retry. Every
    waiter gets exactly one outcome: when its item has one, when its own deadline passes, or when the queue closes.

    While no provider admits calls, items wait at the provider with the earliest trial, and are routed again as trials
    begin, fail and succeed. Bound: once `trials` trials of each provider have failed in a row, all waiting items are
    given up at the next failed trial of any provider.
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
        self._version = package.version
        self._settings = settings
        self._meter = meter
        self._rng = random.Random(f"{seed}/{self.spec.name}")
        self._budget = RetryBudget(settings.retry)
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
        order = backends if settings.fallback.enabled else backends[:1]
        self.provider_queues = [
            ProviderQueue(
                self,
                index,
                self.spec,
                backend,
                settings,
                stages=self._stages,
                spawn=spawn,
                rng=self._rng,
                alone=len(order) == 1,
            )
            for index, backend in enumerate(order)
        ]

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
            self._route(entry, now)
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
        if index < entry.provider_index or index + 1 >= len(self.provider_queues) or self._is_hopeless():
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
        self._route(entry, now)

    def provider_unavailable(self, index: int) -> None:
        """A provider queue stopped admitting calls: route its items to a provider that admits them sooner, or give them
        up."""
        queues = self.provider_queues
        if not math.isinf(queues[index].open_at()) and self._is_hopeless():
            # The text is the same throughout an outage: a run reports its most frequent fault.
            causes = "; ".join(f"{queue.provider} failed trial after trial: {queue.why}" for queue in queues)
            detail = f"no provider of {self.spec.name} answers: {causes}"[:500]
            fault = InfraFault(FaultKind.UNAVAILABLE, retryable=True, detail=detail)
            for queue in queues:
                for entry in queue.drain():
                    self._settle(entry, fault)
        elif len(queues) > 1:
            now = asyncio.get_running_loop().time()
            for entry in queues[index].drain():
                self._route(entry, now)

    def provider_available(self, index: int) -> None:
        """A provider queue admits calls again: route the items to it that wait for another provider's trial."""
        now = asyncio.get_running_loop().time()
        for queue in self.provider_queues:
            if queue.index != index and not queue.admits(now):
                for entry in queue.drain():
                    self._route(entry, now)

    def _route(self, entry: PendingItem, now: float) -> None:
        """Send an item to the first provider that admits it, from the first one that has not failed it; if there is
        none, to the one that admits calls the earliest. Ties: the earlier in the order."""
        queues = self.provider_queues
        chosen = queues[entry.provider_index]
        self._stages[OffloadStage.BREAKER].entered += self._settings.breaker.enabled
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

    def _is_hopeless(self) -> bool:
        """True if every provider has failed the maximal number of trials in a row."""
        return all(queue.breaker.hopeless for queue in self.provider_queues)

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
        self._retries.entered += self._settings.retry.enabled
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
        if not self._settings.retry.enabled or self._is_hopeless():
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
