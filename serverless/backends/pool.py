"""The workers of one function: started on demand up to the concurrency, kept warm a while, scaled to zero.

Knows nothing of processes: a `Launcher` starts workers, so the local and the simulated backend share this code.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from serverless.backends.base import Reply, WorkerLoad
from serverless.backends.seat import METERED_STATES, WorkerSlot, WorkerSlotState
from serverless.backends.worker import (
    Launcher,
    StartFailures,
    Worker,
    WorkerFault,
    WorkerLost,
    WorkerReply,
    WorkerRequest,
)
from serverless.deploy.package import Package
from serverless.meter import MeterSink, WorkerSpan, billed_seconds
from serverless.types import Cause, FaultKind, InfraFault, Invocation, Throttle

__all__ = ["WorkerReply", "Launcher", "WorkerPool", "WorkerRequest", "Worker", "WorkerFault"]

_MOVES = 2
"""How often a call is made again because its worker's machine was lost: one that it happens to three times in a row may
be why."""


class WorkerPool:
    """Owns the workers of one function version.

    `invoke` may be called by any number of tasks: each waits for a worker, in order of arrival, and is unblocked by
    a free or a newly started worker, its deadline, or `close`. A worker serves one call at a time.
    `keep` says how many workers should exist whether called or not. While starts fail, or workers die before they
    served a call, the missing ones are started less and less often (1 s, doubling up to 60 s); calls start their own.
    Invariants: at most `concurrency` seats; at most `queue` waiters; a waiter and an idle worker never coexist
    after a change; every second of a seat's life is in exactly one reported span; `warm <= kept <= concurrency`.
    Tie-break: the worker used last is used next, so that the others reach their keep-alive and go.
    """

    def __init__(
        self,
        package: Package,
        *,
        launcher: Launcher,
        meter: MeterSink,
        provider: str,
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        room: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """`room` returns once there is a machine for another worker: that wait is none of the worker's start."""
        self.package = package
        self._spec = package.spec
        self._launcher = launcher
        self._meter = meter
        self._provider = provider
        self._spawn = spawn
        self._room = room
        self._seats: dict[int, WorkerSlot] = {}
        self._idle: list[WorkerSlot] = []
        self._starting = 0
        self._waiters: deque[asyncio.Future[WorkerSlot | InfraFault]] = deque()
        self._reaper: asyncio.TimerHandle | None = None
        self._calls = 0
        self._closed = False
        self._kept = package.spec.warm
        self._keep_alive_s = package.spec.keep_alive_s
        self._failures = StartFailures()
        self._refill: asyncio.TimerHandle | None = None

    @property
    def size(self) -> int:
        """Workers that exist now, starting ones included."""
        return len(self._seats)

    def load(self) -> WorkerLoad:
        """A snapshot. O(1)."""
        ready = len(self._seats) - self._starting
        return WorkerLoad(ready, self._starting, ready - len(self._idle), len(self._waiters))

    def keep(self, workers: int) -> int:
        """So many workers should exist from now on, within `warm` and `concurrency`: that number is returned. Missing
        ones start now; idle ones above it end by keep-alive. Nothing on a closed pool."""
        self._kept = max(self._spec.warm, min(workers, self._spec.concurrency))
        self.warm_up()
        self._schedule_reaper()
        return self._kept

    def keep_alive(self, seconds: float) -> None:
        """How long a worker above the kept ones may idle, those that idle now included."""
        if seconds != self._keep_alive_s:
            self._keep_alive_s = seconds
            if self._reaper is not None:
                self._reaper.cancel()
                self._reaper = None
            self._schedule_reaper()

    def warm_up(self) -> None:
        """Start the workers that are missing; while starts fail, after a pause. Returns at once."""
        if self._closed or len(self._seats) >= self._kept:
            return
        loop = asyncio.get_running_loop()
        if pause_s := self._failures.pause_s(loop.time()):
            self._refill = self._refill or loop.call_later(pause_s, self._refilled)
            return
        while len(self._seats) < self._kept:
            self._start_one(ahead=True)

    def _refilled(self) -> None:
        self._refill = None
        self.warm_up()

    async def invoke(self, event: Sequence[dict[str, Any]], deadline_s: float, cause: Cause = Cause.CALL) -> Reply:
        now = asyncio.get_running_loop().time
        asked = now()
        expires = asked + deadline_s
        for moves in range(_MOVES + 1):
            seat = await self._acquire(expires - asked)
            if isinstance(seat, InfraFault):
                return Reply(fault=seat)
            began = now()
            seat.queued_s = began - asked
            reply, lost = await self._serve(seat, event, expires - began, cause)
            asked = now()
            if not lost or asked >= expires or moves == _MOVES:
                break
            cause = Cause.RETRY
        return reply

    def close(self, *, drain: bool = False) -> None:
        """End the idle workers and the starts; with `drain`, calls in flight finish first. Waiters are told."""
        self._closed = True
        for timer in (self._reaper, self._refill):
            if timer is not None:
                timer.cancel()
        gone = InfraFault(FaultKind.UNAVAILABLE, retryable=True, detail=f"{self._spec.name} was replaced or closed")
        self._tell_waiters(gone)
        for seat in list(self._seats.values()):
            if seat.task is not None:
                seat.task.cancel()
            if seat.state is not WorkerSlotState.BUSY or not drain:
                self._retire(seat)

    async def _acquire(self, deadline_s: float) -> WorkerSlot | InfraFault:
        name = self._spec.name
        if self._closed:
            return InfraFault(FaultKind.UNAVAILABLE, retryable=True, detail=f"{name} is closed")
        if self._idle and not self._waiters:
            return self._take(self._idle.pop())
        if len(self._waiters) >= self._spec.queue:
            return InfraFault(
                FaultKind.THROTTLED,
                retryable=True,
                detail=f"{self._spec.queue} calls wait for {name}",
                throttle=Throttle.QUEUE,
            )
        loop = asyncio.get_running_loop()
        future: asyncio.Future[WorkerSlot | InfraFault] = loop.create_future()
        self._waiters.append(future)
        self._pump()
        timer = loop.call_later(deadline_s, self._give_up, future, deadline_s)
        try:
            return await future
        except asyncio.CancelledError:
            self._forget(future)
            raise
        finally:
            timer.cancel()

    def _give_up(self, future: asyncio.Future[WorkerSlot | InfraFault], deadline_s: float) -> None:
        if not future.done():
            self._waiters.remove(future)
            detail = f"no worker of {self._spec.name} in {deadline_s:.3f} s"
            future.set_result(InfraFault(FaultKind.DEADLINE, retryable=False, detail=detail))

    def _forget(self, future: asyncio.Future[WorkerSlot | InfraFault]) -> None:
        """A waiter left; if it had just been given a worker, that goes to the next."""
        if future.done() and not future.cancelled() and isinstance(seat := future.result(), WorkerSlot):
            self._release(seat)
        else:
            with contextlib.suppress(ValueError):
                self._waiters.remove(future)

    async def _serve(
        self, seat: WorkerSlot, event: Sequence[dict[str, Any]], remaining_s: float, cause: Cause
    ) -> tuple[Reply, bool]:
        """The answer or fault, and whether the worker's machine was lost under the call."""
        now = asyncio.get_running_loop().time
        t0 = now()
        limit = min(self._spec.timeout_s, remaining_s)
        self._calls += 1
        request = WorkerRequest(f"{self.package.version[:8]}-{self._calls:012d}", event, limit)
        worker = seat.worker
        assert worker is not None
        answer: WorkerReply | None = None
        fault: InfraFault | None = None
        status, lost = "cancelled", False
        try:
            try:
                with seat.limit.of(limit):
                    answer = await worker.call(request)
                fault = answer.fault
            except TimeoutError:
                fault = self._overrun(limit)
            except WorkerFault as error:
                fault, lost = error.fault, isinstance(error, WorkerLost)
            status = str(fault.kind) if fault else "ok"
        finally:
            t1 = now()
            run_s = answer.run_s if answer else t1 - t0
            bill = self._bill(seat, t0, t1, run_s, len(event), status, cause, request.id)
            if answer is None or not answer.keep:
                self._retire(seat)
                self._pump()
                self.warm_up()
            else:
                self._failures.rounds = 0
                self._release(seat)
        return Reply(answer.body if answer and fault is None else None, fault, bill), lost

    def _overrun(self, limit: float) -> InfraFault:
        if limit < self._spec.timeout_s:
            detail = f"no answer in the {limit:.3f} s that were left"
            return InfraFault(FaultKind.DEADLINE, retryable=False, detail=detail)
        return InfraFault(FaultKind.TIMEOUT, retryable=True, detail=f"no answer in {limit:g} s (timeout_s)")

    def _bill(
        self,
        seat: WorkerSlot,
        t0: float,
        t1: float,
        run_s: float,
        items: int,
        status: str,
        cause: Cause = Cause.CALL,
        request: str = "",
    ) -> Invocation:
        bill = Invocation(
            function=self._spec.name,
            provider=self._provider,
            worker=seat.name,
            t0=t0,
            t1=t1,
            cold_start_s=seat.cold_s,
            billed_s=billed_seconds(seat.init_s + run_s),
            memory_mb=self._spec.memory_mb,
            items=items,
            status=status,
            cause=cause,
            provider_id=request,
            queued_s=seat.queued_s,
            cold_billed_s=seat.init_s,
        )
        seat.cold_s = seat.init_s = 0.0
        self._meter.invocation(bill)
        return bill

    def _pump(self) -> None:
        """Give idle workers to waiters; start as many as are still missing and allowed."""
        while self._waiters and self._idle:
            future = self._waiters.popleft()
            if not future.done():
                future.set_result(self._take(self._idle.pop()))
        while len(self._waiters) > self._starting and len(self._seats) < self._spec.concurrency and not self._closed:
            self._start_one()

    def _start_one(self, *, ahead: bool = False) -> None:
        slot = next(n for n in range(len(self._seats) + 1) if n not in self._seats)
        name = f"{self._provider}/{self._spec.name}/{slot}"
        seat = WorkerSlot(slot, name, asyncio.get_running_loop().time(), ahead=ahead)
        self._seats[slot] = seat
        self._starting += 1
        seat.task = self._spawn(self._start(seat))

    async def _start(self, seat: WorkerSlot) -> None:
        fault: InfraFault | None = None
        lost = False
        try:
            if self._room is not None:
                await self._found(seat, self._room)
            async with asyncio.timeout(self._spec.init_timeout_s):
                seat.worker = await self._launcher.start(self.package, seat.name, seat.slot, lambda: self._gone(seat))
        except TimeoutError:
            limit = self._spec.init_timeout_s
            fault = InfraFault(FaultKind.TIMEOUT, retryable=False, detail=f"not ready in {limit:g} s (init_timeout_s)")
        except WorkerFault as error:
            fault, lost = error.fault, isinstance(error, WorkerLost)
        except asyncio.CancelledError:
            self._starting -= 1
            self._retire(seat)
            raise
        seat.task = None
        self._starting -= 1
        if lost:  # nobody's fault who waits
            self._retire(seat)
            self._pump()
            self.warm_up()
            return
        if seat.worker is None or not seat.worker.alive or self._closed:
            self._failed_start(seat, fault)
            return
        began, now = seat.since, asyncio.get_running_loop().time()
        seat.cold_s = now - began
        seat.init_s = seat.worker.init_s
        self._turn(seat, WorkerSlotState.IDLE)
        self._idle.append(seat)
        self._pump()
        if seat.ahead and seat.state is WorkerSlotState.IDLE:
            self._bill(seat, began, now, 0.0, 0, "ok", Cause.WARM)
        self._schedule_reaper()

    async def _found(self, seat: WorkerSlot, room: Callable[[], Awaitable[None]]) -> None:
        """Wait for a machine: the seat's life begins with it."""
        try:
            await room()
        finally:
            seat.since = asyncio.get_running_loop().time()

    def _failed_start(self, seat: WorkerSlot, fault: InfraFault | None) -> None:
        """A start that would fail again fails all who wait; any other fails the first, and the rest go on."""
        fault = fault or InfraFault(FaultKind.CRASH, retryable=True, detail="the worker died as it became ready")
        now = asyncio.get_running_loop().time()
        seat.init_s = now - seat.since
        self._bill(seat, seat.since, now, 0.0, 0, str(fault.kind))
        self._retire(seat)
        if not fault.retryable:
            self._tell_waiters(fault)
        elif self._waiters and not (first := self._waiters.popleft()).done():
            first.set_result(fault)
        self._failures.another(now)
        self._pump()
        self.warm_up()

    def _tell_waiters(self, fault: InfraFault) -> None:
        waiters, self._waiters = self._waiters, deque()
        for future in waiters:
            if not future.done():
                future.set_result(fault)

    def _take(self, seat: WorkerSlot) -> WorkerSlot:
        self._turn(seat, WorkerSlotState.BUSY)
        return seat

    def _release(self, seat: WorkerSlot) -> None:
        if seat.state is not WorkerSlotState.BUSY:
            return
        if self._closed or seat.worker is None or not seat.worker.alive:
            self._retire(seat)
            self._pump()
            self.warm_up()
            return
        self._turn(seat, WorkerSlotState.IDLE)
        self._idle.append(seat)
        self._schedule_reaper()
        self._pump()

    def _gone(self, seat: WorkerSlot) -> None:
        """A worker ended by itself: an idle one is dropped, a busy one's call is already being told."""
        if seat.state is WorkerSlotState.IDLE:
            self._failures.another(asyncio.get_running_loop().time())
            self._retire(seat)
            self._pump()
            self.warm_up()

    def _retire(self, seat: WorkerSlot) -> None:
        if seat.worker is not None:
            seat.worker.kill()
        seat.limit.close()
        if seat.state is WorkerSlotState.GONE:
            return
        if seat.state is WorkerSlotState.IDLE:
            self._idle.remove(seat)
        self._turn(seat, WorkerSlotState.GONE)
        del self._seats[seat.slot]

    def _turn(self, seat: WorkerSlot, state: WorkerSlotState) -> None:
        """Change a seat's state and report the span that ends."""
        now = asyncio.get_running_loop().time()
        span = WorkerSpan(
            function=self._spec.name,
            provider=self._provider,
            worker=seat.name,
            t0=seat.since,
            t1=now,
            state=METERED_STATES[seat.state],
            memory_mb=self._spec.memory_mb,
        )
        seat.state, seat.since = state, now
        if span.t1 > span.t0:
            self._meter.worker(span)

    def _schedule_reaper(self) -> None:
        """One timer for all: idle seats are in the order in which they became idle."""
        if self._reaper is None and self._idle and len(self._seats) > self._kept and not self._closed:
            due = self._idle[0].since + self._keep_alive_s
            self._reaper = asyncio.get_running_loop().call_at(due, self._reap)

    def _reap(self) -> None:
        self._reaper = None
        now = asyncio.get_running_loop().time()
        while self._idle and len(self._seats) > self._kept:
            if self._idle[0].since + self._keep_alive_s > now + 1e-9:
                self._schedule_reaper()
                return
            self._retire(self._idle[0])
