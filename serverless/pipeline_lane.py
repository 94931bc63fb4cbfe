"""One function on one provider: waiting items become calls, within what it bears, and calls become answers."""

from __future__ import annotations

import asyncio
import math
import random
from collections import deque
from dataclasses import replace

from serverless import wire
from serverless.backends.base import Backend, Reply
from serverless.meter import billed_seconds
from serverless.pipeline_calls import CAUSED_BY, cause_of, is_divisible, limited, retryable_elsewhere
from serverless.pipeline_entry import CallAttempt, PendingItem, PipelineCall
from serverless.pipeline_hedge import Hedger
from serverless.pipeline_owner import ProviderQueueCallbacks
from serverless.pipeline_queue import WaitingItems
from serverless.pipeline_stats import OffloadStage
from serverless.policy.batch import BatchPolicy
from serverless.policy.breaker import BreakerState, CircuitBreaker, is_provider_failure
from serverless.policy.concurrency import ConcurrencyWindow
from serverless.policy.retry import is_outcome_unknown
from serverless.settings import PipelineSpec
from serverless.spec import FunctionSpec
from serverless.types import Cause, FaultKind, InfraFault, Invocation, ModelFault

__all__ = ["ProviderQueue"]

_UNANSWERED = InfraFault(FaultKind.DEADLINE, retryable=False, detail="a trial had no answer before its deadline")
"""Of a trial that was cancelled because its items' time was over."""

_EPS = 1e-9
"""Loop times this close are the same."""


class ProviderQueue:
    """Owns the items that wait for this provider and a task per invocation.

    Invariants: invocations in flight, hedges included, stay within the window, and it within `concurrency`; none begins
    while the window waits or the breaker is open; an entry is in at most one call; hedges <= budget * calls.
    Order: groups under isolation, then late calls, then waiting items, first come first served.
    """

    def __init__(
        self,
        owner: ProviderQueueCallbacks,
        index: int,
        spec: FunctionSpec,
        backend: Backend,
        settings: PipelineSpec,
        rng: random.Random,
        *,
        alone: bool,
    ) -> None:
        self._owner = owner
        self.index = index
        self._spec = spec
        self._backend = backend
        self.provider = backend.provider
        self.why = ""
        """The fault by which the breaker opened last."""
        self._settings = settings
        self._rng = rng
        self._alone = alone
        batch = settings.batch
        items = spec.batch.max_items if batch.enabled else 1
        wait_s = spec.batch.max_wait_ms / 1000.0 if batch.enabled else 0.0
        policy = BatchPolicy(items, wait_s, spec.batch.max_bytes)
        self._counts = {stage: owner.count(stage) for stage in OffloadStage}
        self._hedges, self._batches = owner.count(OffloadStage.HEDGE), owner.count(OffloadStage.BATCH)
        self._admissions = owner.count(OffloadStage.ADMISSION)
        self._queue = WaitingItems(policy, by_length=batch.enabled and batch.by_length)
        self._groups: deque[list[PendingItem]] = deque()
        window, breaker = settings.admission.policy(spec.concurrency), settings.breaker.policy()
        self._window = ConcurrencyWindow(window) if window is not None else None
        self.breaker = CircuitBreaker(breaker) if breaker is not None else None
        hedge = settings.hedge.policy()
        self._hedger: Hedger | None = None
        if hedge is not None:
            self._hedger = Hedger(hedge, self._hedges, room=self._room_to_hedge, again=self._try_again)
        self._tries: dict[CallAttempt, None] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    @property
    def waiting(self) -> int:
        return len(self._queue) + sum(map(len, self._groups))

    @property
    def window(self) -> int:
        """Invocations that may be in flight now."""
        return self._window.size if self._window is not None else self._spec.concurrency

    def admits(self, now: float) -> bool:
        """Whether to wait here: the breaker lets a call begin, and the provider does not refuse them all."""
        return (self.breaker is None or self.breaker.admits(now)) and not self._exhausted(now)

    def open_at(self) -> float:
        """When it may admit again, loop seconds; infinite while a trial is out."""
        until = self.breaker.until if self.breaker is not None else 0.0
        return max(until, self._window.ready_at()) if self._window is not None else until

    def enqueue(self, entry: PendingItem) -> None:
        """Last in line. Looks for a due call only if this item can have made one due."""
        if self._queue.add(entry) or self._timer is None:
            self._pump()

    def purge(self) -> None:
        """Forget entries that nobody waits for."""
        self._queue.purge()
        self._groups = deque([e for e in group if not e.done] for group in self._groups)

    def drain(self) -> list[PendingItem]:
        """Give up everything that waits."""
        entries = [e for group in self._groups for e in group if not e.done]
        for entry in entries:
            entry.alone = True
        self._groups.clear()
        return entries + self._queue.drain()

    def close(self) -> None:
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        if self._hedger is not None:
            self._hedger.close()
        self.drain()

    def abandon(self, call: PipelineCall) -> None:
        """One entry of a call left; with the last of them the call goes."""
        call.alive -= 1
        if call.alive == 0:
            self._finish(call)

    def _pump(self) -> None:
        """Start the calls that are due. Runs when an item may have made one due, a call ended, or time has."""
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
        """False where a call's end or the timer set here will look again."""
        if len(self._tries) >= self.window:
            return False
        ready = self._window.ready_at() if self._window is not None else now
        if self.breaker is not None and not self.breaker.admits(now):
            if math.isinf(self.breaker.until):
                return False  # the trial is out
            ready = max(ready, self.breaker.until)
        if ready <= now + _EPS:
            return True
        self._timer = loop.call_at(ready, self._pump)
        return False

    def _begin(self, entries: list[PendingItem], cause: Cause, now: float) -> None:
        limits = [self._owner.limit(entry) for entry in entries]
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
        self._try(call, cause)
        if self._hedger is not None:
            self._hedger.called(call, now)
        if call.tries[0].trial:
            self._owner.shut(self.index)  # nobody else goes here until it ended, and another provider may be sooner

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
        if self._window is not None:
            admission = self._admissions
            admission.entered += items
            admission.waited_s += waited - batching
        if call.cause in CAUSED_BY:
            self._counts[CAUSED_BY[call.cause]].extra_calls += 1

    def _try(self, call: PipelineCall, cause: Cause) -> None:
        now = asyncio.get_running_loop().time()
        trial = self.breaker.begin(now) if self.breaker is not None else False
        one = CallAttempt(
            call, cause, now, trial, self._window.begin(len(self._tries)) if self._window is not None else 0
        )
        call.tries.append(one)
        self._tries[one] = None
        one.task = self._owner.spawn(self._run(one))
        # Not a `finally` of the task: one that is cancelled before its first step runs none of its code.
        one.task.add_done_callback(lambda _: self._ended(one))

    async def _run(self, one: CallAttempt) -> None:
        call = one.call
        left = call.expires - asyncio.get_running_loop().time()
        if call.limit is not None:
            left = min(left, call.limit)
        reply = await self._backend.invoke(self._spec.name, call.event, deadline_s=left, cause=one.cause)
        self._answered(one, reply)

    def _ended(self, one: CallAttempt) -> None:
        self._tries.pop(one, None)
        now = asyncio.get_running_loop().time()
        if not one.reported and self.breaker is not None:
            over = one.trial and now >= one.call.expires - _EPS
            self._judge(self.breaker, one, _UNANSWERED if over else None, now, cancelled=True)
        if self._hedger is not None:
            self._hedger.pump()
        self._pump()

    def _try_again(self, call: PipelineCall) -> None:
        self._try(call, Cause.HEDGE)

    def _room_to_hedge(self) -> bool:
        """A hedge is a luxury: only with a free place, a provider that refuses nothing and a closed breaker."""
        if self._closed or len(self._tries) >= self.window:
            return False
        if self.breaker is not None and self.breaker.state is not BreakerState.CLOSED:
            return False
        return self._window is None or self._window.ready_at() <= asyncio.get_running_loop().time() + _EPS

    def _answered(self, one: CallAttempt, reply: Reply) -> None:
        """A try's reply: the first answer, or the last fault, is the call's."""
        call, now = one.call, asyncio.get_running_loop().time()
        self._note(one, reply, now)
        call.tries.remove(one)
        hedge = self._hedges
        if call.done or (reply.fault is not None and call.tries):
            hedge.extra_billed_s += reply.invocation.billed_s if reply.invocation is not None else 0.0
            return
        for loser in call.tries:
            hedge.extra_billed_s += billed_seconds(now - loser.began)
        hedge.helped += one.cause is Cause.HEDGE and reply.fault is None
        self._finish(call)
        for entry in call.entries:
            entry.call = None
        self._conclude(call, reply, now - one.began)

    def _note(self, one: CallAttempt, reply: Reply, now: float) -> None:
        """What a reply says about the provider."""
        one.reported = True
        del self._tries[one]  # now: replies that come together must not see each other as still out
        seconds, items, others = now - one.began, len(one.call.entries), len(self._tries)
        if reply.invocation is not None:
            self._owner.billed(reply.invocation)
            if one.call.cause in CAUSED_BY:
                self._counts[CAUSED_BY[one.call.cause]].extra_billed_s += reply.invocation.billed_s
        fault = reply.fault
        if fault is None:
            if self._window is not None:
                self._window.answered(now, seconds, items, in_flight=others, number=one.number)
            if self._hedger is not None:
                cold_s = reply.invocation.cold_start_s if reply.invocation is not None else 0.0
                self._hedger.answered(max(0.0, seconds - cold_s), items)
        elif fault.kind is FaultKind.THROTTLED and self._window is not None:
            self._window.throttled(fault, now, one.number, self._rng, in_flight=others)
        if self.breaker is not None:
            self._judge(self.breaker, one, fault, now)

    def _judge(
        self,
        breaker: CircuitBreaker,
        one: CallAttempt,
        fault: InfraFault | None,
        now: float,
        *,
        cancelled: bool = False,
    ) -> None:
        """What a try's end says to the breaker, and what follows for those who wait."""
        failed = is_provider_failure(fault, alone=self._alone) if fault is not None else None if cancelled else False
        if failed and not one.trial and (one.cause is Cause.ISOLATION or self._items_fault(fault)):
            failed = None  # the item's doing, most likely
        elif one.trial and fault is not None and fault.kind is FaultKind.DEADLINE:
            failed = True if breaker.unanswered(now - one.began) else None
        if breaker.ended(now, failed, trial=one.trial):
            self.why = fault.detail if fault is not None else ""
            self._counts[OffloadStage.BREAKER].acted += 1
            self._owner.shut(self.index)
        elif one.trial and breaker.state is BreakerState.CLOSED:
            if self._window is not None:
                self._window.restart()
            self._owner.back(self.index)

    def _exhausted(self, now: float) -> bool:
        window = self._window
        return (
            window is not None
            and window.refused_in_a_row > self._settings.admission.max_throttles
            and now < window.ready_at()
        )

    def _items_fault(self, fault: InfraFault | None) -> bool:
        return fault is not None and fault.kind is FaultKind.TIMEOUT and self._spec.timeout_floor is not None

    def _finish(self, call: PipelineCall) -> None:
        """Nothing of this call is wanted any more: what is out of it is cancelled."""
        call.done = True
        if self._hedger is not None:
            self._hedger.over(call)
        for one in call.tries:
            if one.task is not None:
                one.task.cancel()

    def _conclude(self, call: PipelineCall, reply: Reply, seconds: float) -> None:
        fault, entries = reply.fault, call.entries
        if fault is None:
            read = wire.outcomes(reply.body, call.event, deterministic=self._spec.deterministic)
            for entry, outcome in zip(entries, read, strict=True):
                self._owner.receive(entry, outcome, seconds=seconds)
            return
        if fault.kind is FaultKind.THROTTLED and fault.retryable and self._window is not None:
            self._readmit(call, fault)
            return
        if is_outcome_unknown(fault, reply.invocation):  # it may have been executed: again only if that does no harm
            fault = replace(fault, retryable=self._may_repeat(fault))
        if len(entries) > 1 and self._settings.isolation.enabled and is_divisible(fault, reply.invocation):
            self._isolate(call)
        elif retryable_elsewhere(fault, reply.invocation):
            for entry in entries:
                entry.alone = entry.alone or call.cause is Cause.ISOLATION
                self._owner.provider_failed(self.index, entry, fault)
        else:
            for entry in entries:
                entry.alone = entry.alone or call.cause is Cause.ISOLATION
                self._failed(entry, call, fault, reply.invocation)

    def _may_repeat(self, fault: InfraFault) -> bool:
        return fault.kind is FaultKind.UNAVAILABLE and self._settings.retry.lost and self._spec.deterministic

    def _failed(self, entry: PendingItem, call: PipelineCall, fault: InfraFault, bill: Invocation | None) -> None:
        """A call's fault, as it concerns one item: a time limit that passed while a worker ran it may be its own."""
        if fault.kind is FaultKind.DEADLINE and not entry.done:
            left = entry.expires - asyncio.get_running_loop().time()
            if call.limit is not None and left > _EPS:
                detail = f"no answer in the {call.limit:.3g} s of this prompt's answers"
                fault = InfraFault(FaultKind.TIMEOUT, retryable=True, detail=detail)
                ran_s = bill.t1 - bill.t0 - bill.cold_start_s if bill is not None else 0.0
                bill = bill if ran_s >= 0.9 * call.limit else None
            elif entry.expires > call.expires + _EPS and left > _EPS:
                entry.attempts -= call.counted
                self._owner.again(entry)  # somebody with more time joined after the call had begun
                return
        floor = self._spec.timeout_floor
        if fault.kind is FaultKind.TIMEOUT and floor is not None and bill is not None and bill.items:
            self._owner.receive(entry, ModelFault(floor, fault.detail))
        else:
            self._owner.receive(entry, fault)

    def _readmit(self, call: PipelineCall, fault: InfraFault) -> None:
        """A refused call was not executed: its items go back to the front, without an attempt or a token spent."""
        stage, back = self._admissions, []
        now = asyncio.get_running_loop().time()
        stage.extra_calls += 1
        for entry in call.entries:
            if entry.done:
                continue
            stage.acted += 1
            entry.throttles += 1
            if entry.throttles > self._settings.admission.max_throttles:
                self._owner.provider_failed(self.index, entry, fault)
                continue
            entry.attempts -= call.counted
            entry.since = now
            back.append(entry)
        if fault.retry_after_s:
            asyncio.get_running_loop().call_later(fault.retry_after_s, self._put_back, back, call.cause)
        else:
            self._put_back(back, call.cause)
        if self._exhausted(now):
            self._owner.shut(self.index)

    def _put_back(self, entries: list[PendingItem], cause: Cause) -> None:
        """To the front; elsewhere if this provider has gone meanwhile."""
        if self._closed:
            return
        if not self.admits(asyncio.get_running_loop().time()):
            for entry in entries:
                if not entry.done:
                    self._owner.again(entry)
        elif cause is Cause.ISOLATION:
            self._groups.appendleft(entries)
        else:
            for entry in reversed(entries):
                self._queue.put_back(entry)
        self._pump()

    def _isolate(self, call: PipelineCall) -> None:
        """A shared call failed as a whole: its halves are called, so that in the end only the guilty item fails.

        Bound: 2 * ceil(log2 n) calls for one guilty item of n. It is no retry: it costs no attempt and no budget.
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
