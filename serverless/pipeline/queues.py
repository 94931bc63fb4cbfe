"""The queues of the pipeline: the pending items of a function, and their calls to each of its providers.

`FunctionQueue` owns the items and their waiters. Its `ProviderQueue`s gather waiting items into calls within the limits
of a provider, and deliver the answers.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any

from serverless import wire
from serverless.deploy.package import Package
from serverless.meter import NO_SCORE, MeterSink, Saving, TokenBill, billed_seconds
from serverless.pipeline.admission import (
    BreakerState,
    CallQuota,
    CircuitBreaker,
    ConcurrencyWindow,
    is_provider_failure,
)
from serverless.pipeline.answer_times import AnchorTimes, Latencies, prompt_key
from serverless.pipeline.cache import Cache, copy_outcome, item_key
from serverless.pipeline.items import CallAttempt, PendingItem, PipelineCall, Timers, Waiter, WaitingItems
from serverless.pipeline.retrying import (
    CAUSED_BY,
    TokenBucket,
    cause_of,
    is_divisible,
    is_outcome_unknown,
    retry_delay,
    retryable_elsewhere,
)
from serverless.pipeline.stages import FunctionHealth, OffloadStage, PipelineSpec, RefusingLimit, StageCounts
from serverless.providers.base import Backend, Reply
from serverless.types import Cause, FaultKind, InfraFault, Invocation, Item, ModelFault, Outcome, Scored, Throttle

Spawn = Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]
"""Starts a task of the offload."""


_UNANSWERED = InfraFault(FaultKind.DEADLINE, retryable=False, detail="a trial had no answer before its deadline")
"""The fault of a trial that was cancelled because the deadlines of its items had passed."""

_SAVED = 5.0
"""Maximum number of hedges saved in a quiet time for a burst of late calls."""

_EPS = 1e-9
"""Tolerance for comparing loop times, in seconds."""


def run_seconds(bill: Invocation) -> float:
    """The duration of a call without its cold start. Where calls wait for a worker, `t0` follows the start; elsewhere
    the start lies between `t0` and `t1`."""
    start_s = 0.0 if bill.queued_s else bill.cold_start_s
    return max(0.0, bill.t1 - bill.t0 - start_s)


class ProviderQueue:
    """Owns the items that wait for this provider and a task per invocation.

    Invariants: invocations in flight, hedges included, stay within the concurrency window, and the window within
    `concurrency`; no invocation begins while the window is in back-off or the breaker is open; an item is in at most
    one call; hedges <= budget * calls. Order: groups under isolation, then late calls, then waiting items in order of
    arrival.
    """

    def __init__(self, function: FunctionQueue, index: int, backend: Backend, quota: CallQuota) -> None:
        """`index`: the position in the fallback order. `quota`: the run's calls at the provider."""
        self._function = function
        self.index = index
        self._spec = spec = function.spec
        self._settings = settings = function.settings
        self._backend = backend
        self.provider = backend.provider
        self.why = ""
        """The detail of the fault that last opened the breaker."""
        self._counts = stages = function.stages
        self._hedges, self._batches = stages[OffloadStage.HEDGE], stages[OffloadStage.BATCH]
        self._admissions = stages[OffloadStage.ADMISSION]
        batching = settings.batch.enabled
        single = {} if batching else {"max_items": 1, "max_wait_ms": 0.0}
        batch = spec.batch.model_copy(update=single)
        self._queue = WaitingItems(batch, by_length=batching and settings.batch.by_length)
        self._groups: deque[list[PendingItem]] = deque()
        self._window = ConcurrencyWindow(spec.concurrency, settings.admission)
        self._quota = quota
        self._refusals = Counter[str]()
        self.breaker = CircuitBreaker(settings.breaker)
        self._latencies = Latencies(settings.hedge)
        self._hedge_budget = TokenBucket(settings.hedge.budget, most=max(_SAVED, settings.hedge.budget))
        self._watched: Timers[PipelineCall] = Timers(self._became_late, lambda call: call.done)
        self._late: dict[PipelineCall, None] = {}
        self._attempts: dict[CallAttempt, None] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    @property
    def waiting(self) -> int:
        return len(self._queue) + sum(map(len, self._groups))

    @property
    def window(self) -> int:
        """The number of invocations that may be in flight now."""
        return self._window.size

    @property
    def refusals(self) -> dict[str, int]:
        """Refused or delayed calls by the limit that caused it: a `Throttle` or a `RefusingLimit`."""
        counts = self._refusals.copy()
        counts[RefusingLimit.COMPETED] = self._window.competed
        return {limit: n for limit, n in counts.items() if n}

    def admits(self, now: float) -> bool:
        """True if items should wait here: the breaker admits a call, and the provider does not refuse every call."""
        return self.breaker.admits(now) and not self._window.exhausted(now)

    def open_at(self) -> float:
        """The earliest time of the next admission, loop seconds; infinite while a trial is in flight."""
        return max(self.breaker.until, self._window.ready)

    def enqueue(self, entry: PendingItem) -> None:
        """Append an item. Looks for a due call only if this item can have made one due."""
        if self._queue.add(entry) or self._timer is None:
            self._pump()

    def purge(self) -> None:
        """Drop finished items."""
        self._queue.purge()
        self._groups = deque([e for e in group if not e.done] for group in self._groups)

    def drain(self) -> list[PendingItem]:
        """Remove and return all waiting items."""
        entries = [e for group in self._groups for e in group if not e.done]
        for entry in entries:
            entry.alone = True
        self._groups.clear()
        return entries + self._queue.drain()

    def close(self) -> None:
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        self._watched.close()
        self._late.clear()
        self.drain()

    def abandon(self, call: PipelineCall) -> None:
        """Remove one item from a call; after the last one the call is cancelled."""
        call.alive -= 1
        if call.alive == 0:
            self._finish(call)

    def _pump(self) -> None:
        """Start the due calls. Runs when an item may have made a call due, when a call ended, and at a timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        loop = asyncio.get_running_loop()
        while (self._groups or self._queue) and not self._closed:
            now = loop.time()
            if not self._may_begin(now, loop):
                return
            if self._groups:
                group = [e for e in self._groups.popleft() if not e.done]
                if group:
                    self._begin(group, Cause.ISOLATION, now)
                continue
            batch, wait = self._queue.take(now)
            if batch:
                self._begin(batch, cause_of(batch), now)
            elif wait is not None:
                self._timer = loop.call_later(wait, self._pump)
                return

    def _may_begin(self, now: float, loop: asyncio.AbstractEventLoop) -> bool:
        """False if a call's end or the timer set here will pump again."""
        if len(self._attempts) >= self.window:
            widens = self._window.widen(now)
            if len(self._attempts) >= self.window:
                if not math.isinf(widens):
                    self._timer = loop.call_at(widens, self._pump)
                return False
        if not self._quota.admits(self._turn):
            self._refusals[RefusingLimit.QUOTA] += self._quota.wait(self._turn)
            return False
        ready = self._window.ready
        if not self.breaker.admits(now):
            if math.isinf(self.breaker.until):
                return False  # a trial is in flight
            ready = max(ready, self.breaker.until)
        if ready <= now + _EPS:
            return True
        self._timer = loop.call_at(ready, self._pump)
        return False

    def _begin(self, entries: list[PendingItem], cause: Cause, now: float) -> None:
        limits = [self._function.limit(entry) for entry in entries]
        wires = [
            e.wire if t is None else {**e.wire, "metadata": {**e.wire["metadata"], "timeout_s": t}}
            for e, t in zip(entries, limits, strict=True)
        ]
        expires = max([entry.expires for entry in entries])
        limit = limits[0] if len(entries) == 1 and (limits[0] or 0.0) < self._spec.timeout_s else None
        counted = cause is not Cause.ISOLATION or len(entries) == 1
        call = PipelineCall(entries, wire.events(wires), cause, expires, limit, len(entries), self.index, counted)
        waited = 0.0
        for entry in entries:
            entry.call = call
            entry.attempts += counted
            waited += now - entry.since
        self._count(call, waited)
        self._start_attempt(call, cause)
        if self._settings.hedge.enabled:
            self._hedges.entered += 1
            self._hedge_budget.earn()
            after = self._latencies.late_after(len(entries))
            # The faults of a call that isolates a failing item are needed.
            if cause is not Cause.ISOLATION and after is not None and expires - now > after:
                self._watched.add(now + after, call)
            self._hedge_late_calls()
        if call.tries[0].trial:  # it blocks other calls here: another provider may be sooner
            self._function.provider_unavailable(self.index)

    def _count(self, call: PipelineCall, waited: float) -> None:
        items = len(call.entries)
        batching = min(waited, items * self._queue.max_wait_s)
        if self._settings.batch.enabled:
            batch = self._batches
            batch.entered += items
            batch.waited_s += batching
            if items > 1:
                batch.acted += items
                batch.saved_calls += items - 1
        if self._settings.admission.enabled:
            admission = self._admissions
            admission.entered += items
            admission.waited_s += waited - batching
        if call.cause in CAUSED_BY:
            self._counts[CAUSED_BY[call.cause]].extra_calls += 1

    def _start_attempt(self, call: PipelineCall, cause: Cause) -> None:
        now = asyncio.get_running_loop().time()
        attempt = CallAttempt(call, cause, now, self.breaker.begin(), self._window.begin(len(self._attempts)))
        call.tries.append(attempt)
        self._attempts[attempt] = None
        self._quota.begin(self._turn)
        attempt.task = self._function.spawn(self._run(attempt))
        # Not a `finally` of the task: a task that is cancelled before its first step runs no code.
        attempt.task.add_done_callback(lambda _: self._ended(attempt))

    async def _run(self, attempt: CallAttempt) -> None:
        call = attempt.call
        left = call.expires - asyncio.get_running_loop().time()
        if call.limit is not None:
            left = min(left, call.limit)
        reply = await self._backend.invoke(self._spec.name, call.event, deadline_s=left, cause=attempt.cause)
        self._answered(attempt, reply)

    def _ended(self, attempt: CallAttempt) -> None:
        now = asyncio.get_running_loop().time()
        if not attempt.reported:
            self._remove(attempt)
            over = attempt.trial and now >= attempt.call.expires - _EPS
            self._record_end(attempt, _UNANSWERED if over else None, now, cancelled=True)
        self._hedge_late_calls()
        self._pump()

    def _remove(self, attempt: CallAttempt) -> None:
        """Remove an attempt that is no longer in flight; other functions may use its share of the quota."""
        del self._attempts[attempt]
        if (turn := self._quota.end()) is not None:
            asyncio.get_running_loop().call_soon(turn)

    def _turn(self) -> None:
        """Begin a call with the share of the quota that has become free."""
        self._pump()
        if (turn := self._quota.taken(self._turn)) is not None:
            asyncio.get_running_loop().call_soon(turn)

    def _became_late(self, call: PipelineCall) -> None:
        if self._room_to_hedge() and self._hedge_budget.take():
            self._hedge(call)
        else:
            self._late[call] = None

    def _hedge_late_calls(self) -> None:
        """Hedge late calls, the most recent first, while there is room and a token in reserve.

        A call that has just become late needs no token in reserve. If the share of stragglers equals the budget, most
        are then hedged at once and a few not at all, instead of all of them after a wait.
        """
        while self._late and self._room_to_hedge() and self._hedge_budget.take(spare=1.0):
            self._hedge(self._late.popitem()[0])

    def _hedge(self, call: PipelineCall) -> None:
        self._hedges.acted += 1
        self._hedges.extra_calls += 1
        self._start_attempt(call, Cause.HEDGE)

    def _room_to_hedge(self) -> bool:
        """True if a hedge may begin: there is a free slot, the window is not in back-off and the breaker is closed."""
        if self._closed or len(self._attempts) >= self.window or self.breaker.state is not BreakerState.CLOSED:
            return False
        if not self._quota.admits(self._turn):
            return False
        return self._window.ready <= asyncio.get_running_loop().time() + _EPS

    def _answered(self, attempt: CallAttempt, reply: Reply) -> None:
        """Handle an attempt's reply. The first answer, or the last fault, becomes the call's."""
        call, fault, bill, now = attempt.call, reply.fault, reply.invocation, asyncio.get_running_loop().time()
        attempt.reported = True
        self._remove(attempt)  # at once: replies that arrive together must not count each other as in flight
        seconds, items, others = now - attempt.began, len(call.entries), len(self._attempts)
        if bill is not None:
            self._function.billed(bill)
            if call.cause in CAUSED_BY:
                self._counts[CAUSED_BY[call.cause]].extra_billed_s += bill.billed_s
        if fault is None:
            self._function.tokens(self.provider, reply.body, attempt.cause)
            waiting = len(self._queue)
            self._window.answered(now, seconds, items, in_flight=others, number=attempt.number, waiting=waiting)
            self._latencies.add(max(0.0, seconds - (bill.cold_start_s if bill is not None else 0.0)), items)
        elif fault.kind is FaultKind.THROTTLED:
            self._refusals[fault.throttle or RefusingLimit.UNKNOWN] += 1
            self._window.throttled(fault, now, attempt.number, self._function.rng, in_flight=others)
        self._record_end(attempt, fault, now)
        call.tries.remove(attempt)
        hedge = self._hedges
        if call.done or (fault is not None and call.tries):
            hedge.extra_billed_s += bill.billed_s if bill is not None else 0.0
            return
        for loser in call.tries:
            hedge.extra_billed_s += billed_seconds(now - loser.began)
        hedge.helped += attempt.cause is Cause.HEDGE and fault is None
        self._finish(call)
        for entry in call.entries:
            entry.call = None
        self._conclude(call, reply, seconds)

    def _record_end(
        self, attempt: CallAttempt, fault: InfraFault | None, now: float, *, cancelled: bool = False
    ) -> None:
        """Report an attempt's end to the breaker, and reroute waiting items if its state changes."""
        failed = None if cancelled else False
        if fault is not None:
            failed = is_provider_failure(fault, alone=len(self._function.provider_queues) == 1)
            timed_out = fault.kind is FaultKind.TIMEOUT and self._spec.timeout_floor is not None
            if failed and not attempt.trial and (attempt.cause is Cause.ISOLATION or timed_out):
                failed = None  # most likely caused by the item
            elif attempt.trial and fault.kind is FaultKind.DEADLINE:  # failed if it had enough time
                failed = True if now - attempt.began >= self._settings.breaker.open_s else None
        if self.breaker.ended(now, failed, trial=attempt.trial):
            self.why = fault.detail if fault is not None else ""
            self._counts[OffloadStage.BREAKER].acted += 1
            self._function.provider_unavailable(self.index)
        elif attempt.trial and self.breaker.state is BreakerState.CLOSED:
            self._window.restart()
            self._function.provider_available(self.index)

    def _finish(self, call: PipelineCall) -> None:
        """Mark a call as finished and cancel its remaining attempts."""
        call.done = True
        self._late.pop(call, None)
        for attempt in call.tries:
            if attempt.task is not None:
                attempt.task.cancel()

    def _conclude(self, call: PipelineCall, reply: Reply, seconds: float) -> None:
        fault, entries = reply.fault, call.entries
        if fault is None:
            read = wire.outcomes(reply.body, call.event, deterministic=self._spec.deterministic)
            for entry, outcome in zip(entries, read, strict=True):
                self._function.receive(entry, outcome, seconds=seconds)
            return
        if fault.kind is FaultKind.THROTTLED and fault.retryable and self._settings.admission.enabled:
            self._readmit(call, fault)
            return
        if is_outcome_unknown(fault, reply.invocation):  # may have been executed: retry only if repetition is harmless
            repeat = fault.kind is FaultKind.UNAVAILABLE and self._settings.retry.lost and self._spec.deterministic
            fault = replace(fault, retryable=repeat)
        if len(entries) > 1 and self._settings.isolation.enabled and is_divisible(fault, reply.invocation):
            self._isolate(call)
        elif retryable_elsewhere(fault, reply.invocation):
            for entry in entries:
                entry.alone = entry.alone or call.cause is Cause.ISOLATION
                self._function.provider_failed(self.index, entry, fault)
        else:
            for entry in entries:
                entry.alone = entry.alone or call.cause is Cause.ISOLATION
                self._failed(entry, call, fault, reply.invocation)

    def _failed(self, entry: PendingItem, call: PipelineCall, fault: InfraFault, bill: Invocation | None) -> None:
        """Apply a call's fault to one item. If a time limit passed while a worker ran the item, the fault may be the
        item's."""
        if fault.kind is FaultKind.DEADLINE and not entry.done:
            left = entry.expires - asyncio.get_running_loop().time()
            if call.limit is not None and left > _EPS:
                detail = f"no answer in the {call.limit:.3g} s of this prompt's answers"
                fault = InfraFault(FaultKind.TIMEOUT, retryable=True, detail=detail)
                bill = bill if bill is not None and run_seconds(bill) >= 0.9 * call.limit else None
            elif entry.expires > call.expires + _EPS and left > _EPS:
                entry.attempts -= call.counted
                self._function.again(entry)  # a submit with a later deadline joined after the call had begun
                return
        floor = self._spec.timeout_floor
        if fault.kind is FaultKind.TIMEOUT and floor is not None and bill is not None and bill.items:
            self._function.receive(entry, ModelFault(floor, fault.detail))
        else:
            self._function.receive(entry, fault)

    def _readmit(self, call: PipelineCall, fault: InfraFault) -> None:
        """Return the items of a refused call to the front. The call was not executed, so no attempt or retry token is
        spent."""
        stage, back = self._admissions, []
        now = asyncio.get_running_loop().time()
        stage.extra_calls += 1
        for entry in call.entries:
            if entry.done:
                continue
            stage.acted += 1
            entry.throttles += 1
            if entry.throttles > self._settings.admission.max_throttles:
                self._function.provider_failed(self.index, entry, fault)
                continue
            entry.attempts -= call.counted
            entry.since = now
            back.append(entry)
        if fault.retry_after_s:
            asyncio.get_running_loop().call_later(fault.retry_after_s, self.put_back, back, call.cause)
        else:
            self.put_back(back, call.cause)
        if self._window.exhausted(now):
            self._function.provider_unavailable(self.index)

    def hold(self, until: float) -> None:
        """An API behind the function limits its rate. Begin no call before `until`, and few calls then."""
        self._window.hold(until)
        self._window.restart()

    def limited_by_api(self) -> None:
        """Count an answer that was refused by an API behind the function."""
        self._refusals[RefusingLimit.API] += 1

    def put_back(self, entries: list[PendingItem], cause: Cause) -> None:
        """Return items to the front, or route them again if this provider stopped admitting calls meanwhile."""
        if self._closed:
            return
        if not self.admits(asyncio.get_running_loop().time()):
            for entry in entries:
                if not entry.done:
                    self._function.again(entry)
        elif cause is Cause.ISOLATION:
            self._groups.appendleft(entries)
        else:
            for entry in reversed(entries):
                self._queue.add(entry, front=True)
        self._pump()

    def _isolate(self, call: PipelineCall) -> None:
        """Split a shared call that failed as a whole into halves, so that in the end only the guilty item fails.

        Bound: 2 * ceil(log2 n) calls for one guilty item of n. Isolation is no retry: it costs no attempt and no
        budget.
        """
        live = [entry for entry in call.entries if not entry.done]
        self._counts[OffloadStage.ISOLATION].acted += len(live)
        now = asyncio.get_running_loop().time()
        for entry in live:
            entry.attempts -= call.counted
            entry.alone = True
            entry.since = now
        middle = len(live) // 2
        for half in (live[:middle], live[middle:]):
            if half:
                self._groups.append(half)


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
        quotas: Sequence[CallQuota],
    ) -> None:
        """`quotas`: one per backend, shared by all functions."""
        self.spec = package.spec
        if not self.spec.hedge:
            settings = settings.model_copy(update={"hedge": settings.hedge.model_copy(update={"enabled": False})})
        self.settings = settings
        self.spawn = spawn
        self.rng = random.Random(f"{seed}/{self.spec.name}")
        self._version = package.version
        self._meter = meter
        self._budget = TokenBucket(settings.retry.budget, most=settings.retry.reserve, tokens=settings.retry.reserve)
        self._cache = cache if self.spec.reusable else None
        self._flights: dict[bytes, PendingItem] | None = {} if settings.dedupe.enabled and self.spec.reusable else None
        scope = settings.limits.scope
        limited = scope == "all" or (scope == "declared" and self.spec.timeout_floor is not None)
        self._anchors = AnchorTimes(settings.limits) if limited else None
        self._live: dict[PendingItem, None] = {}
        self._deadlines: Timers[Waiter] = Timers(self._expire, lambda waiter: waiter.outcome.done())
        self.stages = {stage: StageCounts() for stage in OffloadStage}
        self._validated, self._checked = self.stages[OffloadStage.VALIDATE], self.stages[OffloadStage.SCHEMA]
        self._retries, self._fallbacks = self.stages[OffloadStage.RETRY], self.stages[OffloadStage.FALLBACK]
        self._dedupes = self.stages[OffloadStage.DEDUPE]
        self.health = FunctionHealth()
        self._billed_s = 0.0
        self._billed_items = 0
        self._held_until = -math.inf
        self._held_in_a_row = 0
        self._scored = 0
        order = backends if settings.fallback.enabled else backends[:1]
        self.provider_queues = [
            ProviderQueue(self, index, backend, quota)
            for index, (backend, quota) in enumerate(zip(order, quotas, strict=False))
        ]

    @property
    def waiting(self) -> int:
        return sum(provider_queue.waiting for provider_queue in self.provider_queues)

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
        entry: PendingItem | None = None
        if key is not None and self._flights is not None:
            self._dedupes.entered += 1
            entry = self._flights.get(key)
            self._dedupes.acted += entry is not None
        if entry is None:
            if self.waiting >= self.spec.queue:
                for provider_queue in self.provider_queues:
                    provider_queue.purge()
            if self.waiting >= self.spec.queue:
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
        """The item's current time limit in seconds, None for none."""
        if self._anchors is None:
            return None
        limit = min(self._anchors.limit(entry.prompt), self.spec.timeout_s)
        wanted = entry.wire["metadata"].get("timeout_s")
        self.stages[OffloadStage.LIMITS].acted += 1
        if isinstance(wanted, int | float) and not isinstance(wanted, bool) and wanted > 0:
            return min(limit, float(wanted))
        return limit

    def billed(self, invocation: Invocation) -> None:
        self._billed_s += invocation.billed_s
        self._billed_items += invocation.items

    def tokens(self, provider: str, body: object, cause: Cause) -> None:
        """Report the tokens that a call consumed."""
        for used, scored in wire.usage(body):
            now = asyncio.get_running_loop().time()
            why = NO_SCORE if not scored else Cause.HEDGE if cause is Cause.HEDGE else Cause.CALL
            self._meter.tokens(TokenBill(self.spec.name, provider, now, why, used))

    def receive(self, entry: PendingItem, outcome: Outcome, *, seconds: float | None = None) -> None:
        """Deliver an item's outcome to its waiters, unless another attempt is worthwhile. `seconds` is the duration of
        its call if a worker gave the outcome, None if the pipeline made it."""
        if seconds is not None:
            self._checked.entered += 1
        if entry.done:
            return
        if isinstance(outcome, InfraFault):
            self._checked.acted += outcome.kind is FaultKind.BAD_ANSWER and seconds is not None
            floor = self.spec.timeout_floor
            if outcome.kind is FaultKind.TIMEOUT and floor is not None and seconds is not None:
                # The handler's own time limit stopped this item.
                outcome, seconds = ModelFault(floor, outcome.detail), None
            elif self._hold(entry, outcome, answered=seconds is not None) or self._schedule_retry(entry, outcome):
                return
        elif isinstance(outcome, Scored) and seconds is not None:
            self._held_in_a_row = 0
            self._scored += 1
            if self._anchors is not None:
                self._anchors.learn(entry.prompt, outcome, seconds)
        # A timeout is no property of the item: it is reported, and not cached.
        self._settle(entry, outcome, keep=seconds is not None)

    def provider_failed(self, index: int, entry: PendingItem, fault: InfraFault) -> None:
        """Provider `index` cannot serve the item: route it to the next one; after the last one, treat the fault as
        final or retry."""
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
        """Route the item again."""
        now = asyncio.get_running_loop().time()
        entry.call = None
        entry.since = now
        self._route(entry, now)

    def provider_unavailable(self, index: int) -> None:
        """A provider queue stopped admitting calls, as its breaker opened, its trial is in flight or its provider
        refuses: route its items to a provider that admits them sooner, or give them up."""
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
        self.stages[OffloadStage.BREAKER].entered += self.settings.breaker.enabled
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
        stage = self.stages[OffloadStage.CACHE]
        stage.entered += 1
        known = cache.get(key)
        if known is not None:
            stage.acted += 1
            self._saved(OffloadStage.CACHE, 1)
        return known

    def _entry(self, item: Item, encoded: wire.WireItem, size: int, key: bytes | None) -> PendingItem:
        entry = PendingItem(encoded, size, key, "", 0.0, 0.0)
        if self._anchors is not None:
            self.stages[OffloadStage.LIMITS].entered += 1
            entry.prompt = prompt_key(item)
        if key is not None and self._flights is not None:
            self._flights[key] = entry
        self._retries.entered += self.settings.retry.enabled
        self._budget.earn()
        return entry

    def _saved(self, stage: OffloadStage, items: int) -> None:
        each = self._billed_s / self._billed_items if self._billed_items else 0.0
        self.stages[stage].saved_calls += items
        self.stages[stage].saved_billed_s += each * items
        now = asyncio.get_running_loop().time()
        self._meter.saving(Saving(self.spec.name, str(stage), now, items, each * items, self.spec.memory_mb))

    def _refused(self, fault: InfraFault) -> InfraFault:
        self._validated.acted += 1
        self.health.note(fault)
        return fault

    def _hold(self, entry: PendingItem, fault: InfraFault, *, answered: bool) -> bool:
        """Hold the function's queue at all providers if its answer says that an API behind it limits the rate, and
        return the item to the front. The limit applies to every provider. False if that is not the fault, and after
        `max_throttles` such answers for the item between which no other was scored."""
        settings = self.settings.admission
        limited = answered and fault.kind is FaultKind.THROTTLED and fault.throttle is Throttle.RATE
        if not limited or not fault.retryable or not settings.enabled:
            return False
        if entry.scored_before != self._scored:
            entry.scored_before, entry.throttles = self._scored, 0
        entry.throttles += 1
        if entry.throttles > settings.max_throttles:
            return False
        now, wait = asyncio.get_running_loop().time(), fault.retry_after_s
        if wait is None and now < self._held_until:
            wait = 0.0
        elif wait is None:
            longest = min(settings.max_wait_s, settings.wait_s * 2.0 ** min(self._held_in_a_row, 30))
            wait = self.rng.uniform(longest / 2.0, longest)
        self._held_in_a_row += now >= self._held_until
        self._held_until = max(self._held_until, now + wait)
        for queue in self.provider_queues:
            queue.hold(self._held_until)
        self.provider_queues[entry.sent_to].limited_by_api()
        stage = self.stages[OffloadStage.ADMISSION]
        stage.acted += 1
        entry.attempts = max(0, entry.attempts - 1)
        entry.cause, entry.retried, entry.call, entry.since = Cause.RETRY, True, None, now
        self.provider_queues[entry.sent_to].put_back([entry], Cause.RETRY)
        return True

    def _schedule_retry(self, entry: PendingItem, fault: InfraFault) -> bool:
        """Schedule another attempt, if the policy and the budget allow one and a provider may answer it."""
        if not self.settings.retry.enabled or self._is_hopeless():
            return False
        loop = asyncio.get_running_loop()
        remaining_s = entry.expires - loop.time()
        wait = retry_delay(self.settings.retry, fault, max(1, entry.attempts), remaining_s, self.rng)
        if wait is None or not self._budget.take():
            return False
        stage = self._retries
        stage.acted += 1
        stage.waited_s += wait
        entry.cause, entry.retried, entry.call = Cause.RETRY, True, None
        entry.retry = loop.call_later(wait, self.again, entry)
        return True

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
        # A fault of the platform is no property of the item.
        if keep and entry.key and self._cache is not None and not limited and not isinstance(outcome, InfraFault):
            self._cache.put(entry.key, outcome)
        waiters, entry.waiters = entry.waiters, []
        self._end(entry)
        if scored and len(waiters) > 1:
            self._saved(OffloadStage.DEDUPE, len(waiters) - 1)
        for position, waiter in enumerate(waiters):
            self.health.note(outcome)
            if not waiter.outcome.done():
                waiter.outcome.set_result(copy_outcome(outcome) if position else outcome)
