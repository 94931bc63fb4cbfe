"""One function on one provider: gathers waiting items into calls within the provider's limits, and delivers answers."""

from __future__ import annotations

import asyncio
import math
import random
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from typing import Any, Protocol

from serverless import wire
from serverless.meter import billed_seconds
from serverless.pipeline.admission import BreakerState, CircuitBreaker, ConcurrencyWindow, is_provider_failure
from serverless.pipeline.hedging import Hedger
from serverless.pipeline.items import BatchPolicy, CallAttempt, PendingItem, PipelineCall, WaitingItems
from serverless.pipeline.retrying import (
    CAUSED_BY,
    cause_of,
    is_divisible,
    is_outcome_unknown,
    limited,
    retryable_elsewhere,
)
from serverless.pipeline.stages import OffloadStage, PipelineSpec, StageCounts
from serverless.providers.base import Backend, Reply
from serverless.spec import FunctionSpec
from serverless.types import Cause, FaultKind, InfraFault, Invocation, ModelFault, Outcome

Spawn = Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]
"""Starts a task of the offload."""


class ProviderQueueCallbacks(Protocol):
    """The callbacks of a provider queue into its function queue, all synchronous. `index` is that of the provider queue
    in the fallback order."""

    def limit(self, entry: PendingItem) -> float | None:
        """The item's current time limit in seconds, None for none."""

    def receive(self, entry: PendingItem, outcome: Outcome, *, seconds: float | None = None) -> None:
        """Deliver an item's outcome. `seconds` is the duration of its call if a worker gave the outcome, None if the
        provider queue made it."""

    def provider_failed(self, index: int, entry: PendingItem, fault: InfraFault) -> None:
        """This provider cannot serve the item; another one may."""

    def again(self, entry: PendingItem) -> None:
        """Route the item again."""

    def billed(self, invocation: Invocation) -> None: ...

    def provider_unavailable(self, index: int) -> None:
        """The provider queue admits no calls for a while: its breaker opened, its trial is in flight, or its provider
        refuses."""

    def provider_available(self, index: int) -> None:
        """The breaker of the provider queue closed."""


_UNANSWERED = InfraFault(FaultKind.DEADLINE, retryable=False, detail="a trial had no answer before its deadline")
"""The fault of a trial that was cancelled because the deadlines of its items had passed."""

_EPS = 1e-9
"""Tolerance for comparing loop times, in seconds."""


class ProviderQueue:
    """Owns the items that wait for this provider and a task per invocation.

    Invariants: invocations in flight, hedges included, stay within the concurrency window, and the window within
    `concurrency`; no invocation begins while the window is in back-off or the breaker is open; an item is in at most
    one call; hedges <= budget * calls. Order: groups under isolation, then late calls, then waiting items in order of
    arrival.
    """

    def __init__(
        self,
        callbacks: ProviderQueueCallbacks,
        index: int,
        spec: FunctionSpec,
        backend: Backend,
        settings: PipelineSpec,
        *,
        stages: Mapping[OffloadStage, StageCounts],
        spawn: Spawn,
        rng: random.Random,
        alone: bool,
    ) -> None:
        self._callbacks = callbacks
        self.index = index
        self._spec = spec
        self._backend = backend
        self.provider = backend.provider
        self.why = ""
        """The detail of the fault that last opened the breaker."""
        self._settings = settings
        self._rng = rng
        self._only_provider = alone
        batch = settings.batch
        items = spec.batch.max_items if batch.enabled else 1
        wait_s = spec.batch.max_wait_ms / 1000.0 if batch.enabled else 0.0
        policy = BatchPolicy(items, wait_s, spec.batch.max_bytes)
        self._counts, self._spawn = stages, spawn
        self._hedges, self._batches = stages[OffloadStage.HEDGE], stages[OffloadStage.BATCH]
        self._admissions = stages[OffloadStage.ADMISSION]
        self._queue = WaitingItems(policy, by_length=batch.enabled and batch.by_length)
        self._groups: deque[list[PendingItem]] = deque()
        self._window = ConcurrencyWindow(spec.concurrency, settings.admission)
        self.breaker = CircuitBreaker(settings.breaker)
        self._hedger = Hedger(settings.hedge, self._hedges, has_room=self._room_to_hedge, start_hedge=self._start_hedge)
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

    def admits(self, now: float) -> bool:
        """True if items should wait here: the breaker admits a call, and the provider does not refuse every call."""
        return self.breaker.admits(now) and not self._window.exhausted(now)

    def open_at(self) -> float:
        """The earliest time of the next admission, loop seconds; infinite while a trial is in flight."""
        return max(self.breaker.until, self._window.ready_at())

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
        self._hedger.close()
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
            return False
        ready = self._window.ready_at()
        if not self.breaker.admits(now):
            if math.isinf(self.breaker.until):
                return False  # a trial is in flight
            ready = max(ready, self.breaker.until)
        if ready <= now + _EPS:
            return True
        self._timer = loop.call_at(ready, self._pump)
        return False

    def _begin(self, entries: list[PendingItem], cause: Cause, now: float) -> None:
        limits = [self._callbacks.limit(entry) for entry in entries]
        wires = [e.wire if t is None else limited(e.wire, t) for e, t in zip(entries, limits, strict=True)]
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
        self._hedger.called(call, now)
        if call.tries[0].trial:  # it blocks other calls here: another provider may be sooner
            self._callbacks.provider_unavailable(self.index)

    def _count(self, call: PipelineCall, waited: float) -> None:
        items = len(call.entries)
        batching = min(waited, items * self._queue.policy.max_wait_s)
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
        attempt = CallAttempt(call, cause, now, self.breaker.begin(now), self._window.begin(len(self._attempts)))
        call.tries.append(attempt)
        self._attempts[attempt] = None
        attempt.task = self._spawn(self._run(attempt))
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
        self._attempts.pop(attempt, None)
        now = asyncio.get_running_loop().time()
        if not attempt.reported:
            over = attempt.trial and now >= attempt.call.expires - _EPS
            self._record_end(attempt, _UNANSWERED if over else None, now, cancelled=True)
        self._hedger.pump()
        self._pump()

    def _start_hedge(self, call: PipelineCall) -> None:
        self._start_attempt(call, Cause.HEDGE)

    def _room_to_hedge(self) -> bool:
        """True if a hedge may begin: there is a free slot, the window is not in back-off and the breaker is closed."""
        if self._closed or len(self._attempts) >= self.window:
            return False
        if self.breaker.state is not BreakerState.CLOSED:
            return False
        return self._window.ready_at() <= asyncio.get_running_loop().time() + _EPS

    def _answered(self, attempt: CallAttempt, reply: Reply) -> None:
        """Handle an attempt's reply. The first answer, or the last fault, becomes the call's."""
        call, now = attempt.call, asyncio.get_running_loop().time()
        self._record_reply(attempt, reply, now)
        call.tries.remove(attempt)
        hedge = self._hedges
        if call.done or (reply.fault is not None and call.tries):
            hedge.extra_billed_s += reply.invocation.billed_s if reply.invocation is not None else 0.0
            return
        for loser in call.tries:
            hedge.extra_billed_s += billed_seconds(now - loser.began)
        hedge.helped += attempt.cause is Cause.HEDGE and reply.fault is None
        self._finish(call)
        for entry in call.entries:
            entry.call = None
        self._conclude(call, reply, now - attempt.began)

    def _record_reply(self, attempt: CallAttempt, reply: Reply, now: float) -> None:
        """Update the window, the hedger and the breaker from a reply."""
        attempt.reported = True
        del self._attempts[attempt]  # at once: replies that arrive together must not count each other as in flight
        seconds, items, others = now - attempt.began, len(attempt.call.entries), len(self._attempts)
        if reply.invocation is not None:
            self._callbacks.billed(reply.invocation)
            if attempt.call.cause in CAUSED_BY:
                self._counts[CAUSED_BY[attempt.call.cause]].extra_billed_s += reply.invocation.billed_s
        fault = reply.fault
        if fault is None:
            self._window.answered(now, seconds, items, in_flight=others, number=attempt.number)
            cold_s = reply.invocation.cold_start_s if reply.invocation is not None else 0.0
            self._hedger.answered(max(0.0, seconds - cold_s), items)
        elif fault.kind is FaultKind.THROTTLED:
            self._window.throttled(fault, now, attempt.number, self._rng, in_flight=others)
        self._record_end(attempt, fault, now)

    def _record_end(
        self, attempt: CallAttempt, fault: InfraFault | None, now: float, *, cancelled: bool = False
    ) -> None:
        """Report an attempt's end to the breaker, and reroute waiting items if its state changes."""
        failed = None if cancelled else False
        if fault is not None:
            failed = is_provider_failure(fault, alone=self._only_provider)
        if failed and not attempt.trial and (attempt.cause is Cause.ISOLATION or self._items_fault(fault)):
            failed = None  # most likely caused by the item
        elif attempt.trial and fault is not None and fault.kind is FaultKind.DEADLINE:
            failed = True if self.breaker.unanswered(now - attempt.began) else None
        if self.breaker.ended(now, failed, trial=attempt.trial):
            self.why = fault.detail if fault is not None else ""
            self._counts[OffloadStage.BREAKER].acted += 1
            self._callbacks.provider_unavailable(self.index)
        elif attempt.trial and self.breaker.state is BreakerState.CLOSED:
            self._window.restart()
            self._callbacks.provider_available(self.index)

    def _items_fault(self, fault: InfraFault | None) -> bool:
        return fault is not None and fault.kind is FaultKind.TIMEOUT and self._spec.timeout_floor is not None

    def _finish(self, call: PipelineCall) -> None:
        """Mark a call as finished and cancel its remaining attempts."""
        call.done = True
        self._hedger.over(call)
        for attempt in call.tries:
            if attempt.task is not None:
                attempt.task.cancel()

    def _conclude(self, call: PipelineCall, reply: Reply, seconds: float) -> None:
        fault, entries = reply.fault, call.entries
        if fault is None:
            read = wire.outcomes(reply.body, call.event, deterministic=self._spec.deterministic)
            for entry, outcome in zip(entries, read, strict=True):
                self._callbacks.receive(entry, outcome, seconds=seconds)
            return
        if fault.kind is FaultKind.THROTTLED and fault.retryable and self._settings.admission.enabled:
            self._readmit(call, fault)
            return
        if is_outcome_unknown(fault, reply.invocation):  # may have been executed: retry only if repetition is harmless
            fault = replace(fault, retryable=self._may_repeat(fault))
        if len(entries) > 1 and self._settings.isolation.enabled and is_divisible(fault, reply.invocation):
            self._isolate(call)
        elif retryable_elsewhere(fault, reply.invocation):
            for entry in entries:
                entry.alone = entry.alone or call.cause is Cause.ISOLATION
                self._callbacks.provider_failed(self.index, entry, fault)
        else:
            for entry in entries:
                entry.alone = entry.alone or call.cause is Cause.ISOLATION
                self._failed(entry, call, fault, reply.invocation)

    def _may_repeat(self, fault: InfraFault) -> bool:
        return fault.kind is FaultKind.UNAVAILABLE and self._settings.retry.lost and self._spec.deterministic

    def _failed(self, entry: PendingItem, call: PipelineCall, fault: InfraFault, bill: Invocation | None) -> None:
        """Apply a call's fault to one item. If a time limit passed while a worker ran the item, the fault may be the
        item's."""
        if fault.kind is FaultKind.DEADLINE and not entry.done:
            left = entry.expires - asyncio.get_running_loop().time()
            if call.limit is not None and left > _EPS:
                detail = f"no answer in the {call.limit:.3g} s of this prompt's answers"
                fault = InfraFault(FaultKind.TIMEOUT, retryable=True, detail=detail)
                ran_s = bill.t1 - bill.t0 - bill.cold_start_s if bill is not None else 0.0
                bill = bill if ran_s >= 0.9 * call.limit else None
            elif entry.expires > call.expires + _EPS and left > _EPS:
                entry.attempts -= call.counted
                self._callbacks.again(entry)  # a submit with a later deadline joined after the call had begun
                return
        floor = self._spec.timeout_floor
        if fault.kind is FaultKind.TIMEOUT and floor is not None and bill is not None and bill.items:
            self._callbacks.receive(entry, ModelFault(floor, fault.detail))
        else:
            self._callbacks.receive(entry, fault)

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
                self._callbacks.provider_failed(self.index, entry, fault)
                continue
            entry.attempts -= call.counted
            entry.since = now
            back.append(entry)
        if fault.retry_after_s:
            asyncio.get_running_loop().call_later(fault.retry_after_s, self._put_back, back, call.cause)
        else:
            self._put_back(back, call.cause)
        if self._window.exhausted(now):
            self._callbacks.provider_unavailable(self.index)

    def _put_back(self, entries: list[PendingItem], cause: Cause) -> None:
        """Return items to the front, or route them again if this provider stopped admitting calls meanwhile."""
        if self._closed:
            return
        if not self.admits(asyncio.get_running_loop().time()):
            for entry in entries:
                if not entry.done:
                    self._callbacks.again(entry)
        elif cause is Cause.ISOLATION:
            self._groups.appendleft(entries)
        else:
            for entry in reversed(entries):
                self._queue.put_back(entry)
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
