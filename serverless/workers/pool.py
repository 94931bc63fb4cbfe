"""Pools of workers: started on demand up to a function's concurrency, kept warm for a while, scaled to zero.

Independent of processes: a `Launcher` starts workers, so local, remote and simulated workers share this code.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from secrets import token_hex
from typing import Any, Protocol, Self

from serverless.deploy.package import Package
from serverless.errors import BackendFailed, UnknownFunction
from serverless.history import OrderedCall
from serverless.meter import LeftProcesses, MeterSink, NullMeter, WorkerSpan, WorkerState, billed_seconds
from serverless.providers.base import Reply, WorkerLoad
from serverless.retries import WORKER_START
from serverless.secrets import SecretMissing, Secrets
from serverless.types import Cause, FaultKind, InfraFault, Invocation, Throttle


@dataclass(frozen=True, slots=True)
class WorkerRequest:
    """One call to a worker. `remaining_s` is the time limit, counted from receipt."""

    id: str
    event: Sequence[dict[str, Any]]
    remaining_s: float


@dataclass(frozen=True, slots=True)
class WorkerReply:
    """A worker's answer. `run_s` is the handler's time as measured by the worker; `keep` is False if the worker ends
    after it; `left` names the processes that the call left behind, which end with the worker."""

    body: object
    run_s: float
    fault: InfraFault | None = None
    keep: bool = True
    left: str = ""


class WorkerFault(Exception):
    """A worker died during its call, or did not start."""

    def __init__(self, fault: InfraFault) -> None:
        super().__init__(fault.detail)
        self.fault = fault


class WorkerLost(WorkerFault):
    """A worker's machine is lost or unreachable. The call need not have caused this, and any later answer is ignored.
    The call is repeated elsewhere."""


class Worker(Protocol):
    """One execution environment. Calls of `call` do not overlap."""

    init_s: float
    """Seconds of the function's own start-up, billed with the first call."""

    @property
    def alive(self) -> bool: ...

    async def call(self, request: WorkerRequest) -> WorkerReply: ...

    def kill(self) -> None:
        """End the worker at once, even during a call. Idempotent."""


class Launcher(Protocol):
    async def start(self, package: Package, slot: int, gone: Callable[[], None]) -> Worker:
        """Start a worker and wait until it is ready. Raises `WorkerFault`. `gone` is called once if the worker ends by
        itself. Cleans up if cancelled."""


class PooledBackend:
    """Implements `Backend` and `ScalableBackend` over the workers of a launcher.

    Owns the current pool of every function, and drained ones until their calls have ended. `async with` belongs to one
    task, which is cancelled if a start ends unexpectedly.
    """

    def __init__(
        self,
        launcher: Launcher,
        provider: str,
        meter: MeterSink | None = None,
        *,
        room: Callable[[], Awaitable[None]] | None = None,
        secrets: Secrets | None = None,
    ) -> None:
        """`room` returns once a machine has room for another worker. That wait does not count as the worker's start.
        `secrets`: values of the functions' secrets; by default those of this process's environment."""
        self.provider = provider
        self.launcher = launcher
        self.room = room
        self.meter = meter or NullMeter()
        self.secrets = secrets or Secrets()
        self._group: asyncio.TaskGroup | None = None
        self._pools: dict[str, WorkerPool] = {}
        self._old: list[WorkerPool] = []
        self._callers: dict[tuple[object, ...], str] = {}
        """Names of the pools for secrets of callers, the least recently used first."""
        self._caller_pools: dict[str, WorkerPool] = {}
        """These pools by name. A name is random and in no error or answer, so that no request can guess it."""
        self._callers_seen = 0

    async def __aenter__(self) -> Self:
        self._group = asyncio.TaskGroup()
        await self._group.__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        for pool in (*self._pools.values(), *self._caller_pools.values(), *self._old):
            pool.close()
        self._pools.clear()
        self._callers.clear()
        self._caller_pools.clear()
        self._old.clear()
        if self._group is not None:
            group, self._group = self._group, None
            await group.__aexit__(None, None, None)

    async def deploy(self, package: Package) -> None:
        """See `Backend`. A new version of a function starts from its own settings again. Raises `SecretMissing`."""
        self.secrets.require(package.spec)
        if self._group is None:
            raise BackendFailed(f"the {self.provider} backend is not open", remedy="use `async with`")
        current = self._pools.get(package.spec.name)
        if current is not None and current.package.version == package.version and current.package.spec == package.spec:
            return
        self._old = [pool for pool in self._old if pool.load().workers]
        if current is not None:
            current.close(drain=True)
            self._old.append(current)
        pool = self._pools[package.spec.name] = WorkerPool(package, self, self._group)
        pool.warm_up()

    async def invoke(
        self, function: str, event: Sequence[dict[str, Any]], *, deadline_s: float, cause: Cause = Cause.CALL
    ) -> Reply:
        return await self.pool(function).invoke(event, deadline_s, cause)

    @contextlib.asynccontextmanager
    async def one_worker(self, package: Package, cause: Cause) -> AsyncIterator[OrderedCall]:
        """Calls in one worker of its own, beside those of the function's pool, which ends with the context."""
        if self._group is None:
            raise BackendFailed(f"the {self.provider} backend is not open", remedy="use `async with`")
        spec = package.spec.model_copy(update={"concurrency": 1, "warm": 0})
        pool = WorkerPool(replace(package, spec=spec), self, self._group, first_slot=package.spec.concurrency)
        try:
            yield lambda event, deadline_s: pool.invoke(event, deadline_s, cause)
        finally:
            pool.close()

    def pool(self, function: str) -> WorkerPool:
        pool = self._pools.get(function) or self._caller_pools.get(function)
        if pool is None:
            known = ", ".join(self._pools) or "none"
            raise UnknownFunction(f"no function {function!r} is deployed", remedy=f"deployed: {known}")
        return pool

    def given(self, function: str, secrets: Mapping[str, str]) -> str:
        """See `SecretsBackend`. Each set of values has workers of its own, for the last `_CALLERS` sets."""
        current = self.pool(function)
        spec = current.package.spec
        chosen = {name: secrets[name] for name in spec.secrets if secrets.get(name)}
        if not chosen or self._group is None:
            return function
        key = (function, current.package.version, tuple(chosen.items()))
        name = self._callers.pop(key, "")
        if not name:
            self._callers_seen += 1
            name, first = f"{function}~{token_hex(16)}", self._callers_seen * _SLOTS
            self._caller_pools[name] = WorkerPool(current.package, self, self._group, given=chosen, first_slot=first)
        self._callers[key] = name
        if len(self._callers) > _CALLERS:
            oldest = self._caller_pools.pop(self._callers.pop(next(iter(self._callers))))
            oldest.close(drain=True)
            self._old.append(oldest)
        return name

    def load(self, function: str) -> WorkerLoad:
        return self.pool(function).load()

    def keep(self, function: str, workers: int, *, keep_alive_s: float | None = None) -> int:
        """See `ScalableBackend`."""
        return self.pool(function).keep(workers, keep_alive_s)


_CALLERS = 16
"""Sets of secrets from callers whose workers are kept."""

_SLOTS = 10_000
"""Slot numbers of a pool: its workers share no directory with those of another."""

_MOVES = 2
"""Maximum repetitions of a call whose worker's machine was lost. A call to which this happens three times in a row may
itself be the cause."""


class WorkerPool:
    """Owns the workers of one function version.

    `invoke` may be called by any number of tasks. Each waits for a worker in order of arrival and is unblocked by a
    free or newly started worker, by its deadline, or by `close`. A worker serves one call at a time. `keep` sets the
    number of workers that exist independently of calls. While starts fail, or workers die before serving a call,
    missing workers are restarted with a back-off (1 s, doubling up to 60 s); calls still start workers. Invariants: at
    most `concurrency` slots; at most `queue` waiters; a waiter and an idle worker never coexist after a change; every
    second of a slot's life is in exactly one reported span; `warm <= kept <= concurrency`; no call begins in a worker
    that started with other values of its secrets than the present ones. Tie-break: the most recently
    used worker is used next, so that the others reach their keep-alive and stop.
    """

    def __init__(
        self,
        package: Package,
        backend: PooledBackend,
        group: asyncio.TaskGroup,
        *,
        given: Mapping[str, str] | None = None,
        first_slot: int = 0,
    ) -> None:
        """`given`: secrets that the caller of this pool sent; `first_slot`: the lowest number of a slot, by which
        workers have their logs and scratch directories."""
        self.package = package
        self._given = given
        self._first_slot = first_slot
        self._spec = package.spec
        self._backend = backend
        self._meter = backend.meter
        self._group = group
        self._slots: dict[int, WorkerSlot] = {}
        self._idle: list[WorkerSlot] = []
        self._starting = 0
        self._waiters: deque[asyncio.Future[WorkerSlot | InfraFault]] = deque()
        self._reaper: asyncio.TimerHandle | None = None
        self._calls = 0
        self._closed = False
        self._kept = self._spec.warm
        self._keep_alive_s = self._spec.keep_alive_s
        self._failed_rounds = 0
        """Rounds of failed starts and of ends of idle workers since the last answered call."""
        self._starts_at = 0.0
        """The loop time of the next start without a waiting call."""
        self._refill: asyncio.TimerHandle | None = None

    def load(self) -> WorkerLoad:
        """A snapshot. O(1)."""
        ready = len(self._slots) - self._starting
        return WorkerLoad(ready, self._starting, ready - len(self._idle), len(self._waiters))

    def keep(self, workers: int, keep_alive_s: float | None) -> int:
        """Set the number of workers to keep; it is clamped to `warm`..`concurrency` and returned. Missing workers start
        now, idle ones above the number end by keep-alive, which `keep_alive_s` changes for currently idle ones too. Has
        no effect on a closed pool."""
        if keep_alive_s is not None and keep_alive_s != self._keep_alive_s:
            self._keep_alive_s = keep_alive_s
            if self._reaper is not None:
                self._reaper.cancel()
                self._reaper = None
        self._kept = max(self._spec.warm, min(workers, self._spec.concurrency))
        self.warm_up()
        self._schedule_reaper()
        return self._kept

    def warm_up(self) -> None:
        """Start missing workers, after a pause while starts fail. Returns at once."""
        if self._closed or len(self._slots) >= self._kept:
            return
        loop = asyncio.get_running_loop()
        if (pause_s := self._starts_at - loop.time()) > 0.0:
            self._refill = self._refill or loop.call_later(pause_s, self._refilled)
            return
        while len(self._slots) < self._kept:
            self._start_one(ahead=True)

    def _refilled(self) -> None:
        self._refill = None
        self.warm_up()

    async def invoke(self, event: Sequence[dict[str, Any]], deadline_s: float, cause: Cause = Cause.CALL) -> Reply:
        now = asyncio.get_running_loop().time
        asked = now()
        expires = asked + deadline_s
        for moves in range(_MOVES + 1):
            slot = await self._acquire(expires - asked)
            if isinstance(slot, InfraFault):
                return Reply(fault=slot)
            began = now()
            slot.queued_s = began - asked
            reply, lost = await self._serve(slot, event, expires - began, cause)
            asked = now()
            if not lost or asked >= expires or moves == _MOVES:
                break
            cause = Cause.RETRY
        return reply

    def close(self, *, drain: bool = False) -> None:
        """End idle workers and starts; with `drain`, calls in flight finish first. Waiters receive a fault."""
        self._closed = True
        for timer in (self._reaper, self._refill):
            if timer is not None:
                timer.cancel()
        gone = InfraFault(FaultKind.UNAVAILABLE, retryable=True, detail=f"{self._spec.name} was replaced or closed")
        self._fail_waiters(gone)
        for slot in list(self._slots.values()):
            if slot.task is not None:
                slot.task.cancel()
            if slot.state is not WorkerState.BUSY or not drain:
                self._retire(slot)

    async def _acquire(self, deadline_s: float) -> WorkerSlot | InfraFault:
        name = self._spec.name
        if self._closed:
            return InfraFault(FaultKind.UNAVAILABLE, retryable=True, detail=f"{name} is closed")
        if self._spec.secrets and self._idle:
            self._retire_outdated()
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
            # Release the worker that the leaving waiter had just been given.
            if future.done() and not future.cancelled() and isinstance(slot := future.result(), WorkerSlot):
                self._release(slot)
            else:
                with contextlib.suppress(ValueError):
                    self._waiters.remove(future)
            raise
        finally:
            timer.cancel()

    def _give_up(self, future: asyncio.Future[WorkerSlot | InfraFault], deadline_s: float) -> None:
        if not future.done():
            self._waiters.remove(future)
            detail = f"no worker of {self._spec.name} in {deadline_s:.3f} s"
            future.set_result(InfraFault(FaultKind.DEADLINE, retryable=False, detail=detail))

    async def _serve(
        self, slot: WorkerSlot, event: Sequence[dict[str, Any]], remaining_s: float, cause: Cause
    ) -> tuple[Reply, bool]:
        """Run a call. Returns the reply, and True if the worker's machine was lost during the call."""
        now = asyncio.get_running_loop().time
        t0 = now()
        limit = min(self._spec.timeout_s, remaining_s)
        self._calls += 1
        request = WorkerRequest(f"{self.package.version[:8]}-{self._calls:012d}", event, limit)
        worker = slot.worker
        assert worker is not None
        answer: WorkerReply | None = None
        fault: InfraFault | None = None
        status, lost = "cancelled", False
        try:
            try:
                with slot.limit.of(limit):
                    answer = await worker.call(request)
                fault = answer.fault
            except TimeoutError:
                fault = InfraFault(FaultKind.TIMEOUT, retryable=True, detail=f"no answer in {limit:g} s (timeout_s)")
                if limit < self._spec.timeout_s:
                    detail = f"no answer in the {limit:.3f} s that were left"
                    fault = InfraFault(FaultKind.DEADLINE, retryable=False, detail=detail)
            except WorkerFault as error:
                fault, lost = error.fault, isinstance(error, WorkerLost)
            status = str(fault.kind) if fault else "ok"
        finally:
            t1 = now()
            run_s = answer.run_s if answer else t1 - t0
            bill = self._bill(slot, t0, t1, run_s, len(event), status, cause, request.id)
            if answer is None or not answer.keep:
                if answer is not None and answer.left:
                    self._meter.left(LeftProcesses(self._spec.name, slot.name, t1, answer.left))
                self._replace(slot)
            else:
                self._failed_rounds = 0
                self._release(slot)
        return Reply(answer.body if answer and fault is None else None, fault, bill), lost

    def _bill(
        self,
        slot: WorkerSlot,
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
            provider=self._backend.provider,
            worker=slot.name,
            t0=t0,
            t1=t1,
            cold_start_s=slot.cold_s,
            billed_s=billed_seconds(slot.init_s + run_s),
            memory_mb=self._spec.memory_mb,
            items=items,
            status=status,
            cause=cause,
            provider_id=request,
            queued_s=slot.queued_s,
            cold_billed_s=slot.init_s,
        )
        slot.cold_s = slot.init_s = 0.0
        self._meter.invocation(bill)
        return bill

    def _pump(self) -> None:
        """Give idle workers to waiters and start the missing ones up to the limit."""
        while self._waiters and self._idle:
            future = self._waiters.popleft()
            if not future.done():
                future.set_result(self._take(self._idle.pop()))
        while len(self._waiters) > self._starting and len(self._slots) < self._spec.concurrency and not self._closed:
            self._start_one()

    def _start_one(self, *, ahead: bool = False) -> None:
        number = next(n for n in itertools.count(self._first_slot) if n not in self._slots)
        name = f"{self._backend.provider}/{self._spec.name}/{number}"
        slot = WorkerSlot(number, name, asyncio.get_running_loop().time(), ahead=ahead)
        self._slots[number] = slot
        self._starting += 1
        slot.task = self._group.create_task(self._start(slot))

    async def _start(self, slot: WorkerSlot) -> None:
        fault: InfraFault | None = None
        lost = False
        try:
            if self._backend.room is not None:
                try:
                    await self._backend.room()
                finally:  # the slot's life begins once there is a machine
                    slot.since = asyncio.get_running_loop().time()
            package = self.package
            if self._spec.env or self._spec.secrets:
                slot.variables = self._backend.secrets.variables(self._spec, self._given)
                package = replace(package, variables=slot.variables)
            async with asyncio.timeout(self._spec.init_timeout_s):
                slot.worker = await self._backend.launcher.start(package, slot.slot, lambda: self._gone(slot))
        except TimeoutError:
            limit = self._spec.init_timeout_s
            fault = InfraFault(FaultKind.TIMEOUT, retryable=False, detail=f"not ready in {limit:g} s (init_timeout_s)")
        except WorkerFault as error:
            fault, lost = error.fault, isinstance(error, WorkerLost)
        except SecretMissing as error:
            fault = InfraFault(FaultKind.UNAVAILABLE, retryable=False, detail=error.message)
        except asyncio.CancelledError:
            self._starting -= 1
            self._retire(slot)
            raise
        slot.task = None
        self._starting -= 1
        if lost:  # the waiters are not at fault
            self._replace(slot)
            return
        if slot.worker is None or not slot.worker.alive or self._closed:
            self._failed_start(slot, fault)
            return
        if self._outdated(slot):
            self._replace(slot)
            return
        began, now = slot.since, asyncio.get_running_loop().time()
        slot.cold_s = now - began
        slot.init_s = slot.worker.init_s
        self._set_state(slot, WorkerState.IDLE)
        self._idle.append(slot)
        self._pump()
        if slot.ahead and slot.state is WorkerState.IDLE:
            self._bill(slot, began, now, 0.0, 0, "ok", Cause.WARM)
        self._schedule_reaper()

    def _failed_start(self, slot: WorkerSlot, fault: InfraFault | None) -> None:
        """Handle a failed start: a permanent fault fails all waiters, any other fault fails only the first."""
        fault = fault or InfraFault(FaultKind.CRASH, retryable=True, detail="the worker died as it became ready")
        now = asyncio.get_running_loop().time()
        slot.init_s = now - slot.since
        self._bill(slot, slot.since, now, 0.0, 0, str(fault.kind))
        self._retire(slot)
        if not fault.retryable:
            self._fail_waiters(fault)
        elif self._waiters and not (first := self._waiters.popleft()).done():
            first.set_result(fault)
        self._pause_starts(now)
        self._pump()
        self.warm_up()

    def _pause_starts(self, now: float) -> None:
        """A start failed, or an idle worker ended. Failures within one pause count as one round."""
        if now >= self._starts_at:
            self._failed_rounds += 1
            self._starts_at = now + WORKER_START.pause_s(self._failed_rounds)

    def _fail_waiters(self, fault: InfraFault) -> None:
        waiters, self._waiters = self._waiters, deque()
        for future in waiters:
            if not future.done():
                future.set_result(fault)

    def _take(self, slot: WorkerSlot) -> WorkerSlot:
        self._set_state(slot, WorkerState.BUSY)
        return slot

    def _release(self, slot: WorkerSlot) -> None:
        if slot.state is not WorkerState.BUSY:
            return
        if self._closed or slot.worker is None or not slot.worker.alive or self._outdated(slot):
            self._replace(slot)
            return
        self._set_state(slot, WorkerState.IDLE)
        self._idle.append(slot)
        self._schedule_reaper()
        self._pump()

    def _outdated(self, slot: WorkerSlot) -> bool:
        """True if a secret has another value than when the worker started."""
        present = self._present_variables() if self._spec.secrets else None
        return present is not None and slot.variables != present

    def _retire_outdated(self) -> None:
        """End the idle workers that started with other values of the secrets."""
        present = self._present_variables()
        outdated = [] if present is None else [slot for slot in self._idle if slot.variables != present]
        for slot in outdated:
            self._retire(slot)
        if outdated:
            self.warm_up()

    def _present_variables(self) -> Mapping[str, str] | None:
        """The variables of a worker that starts now. None if a secret has no value any more: the values before stay in
        use."""
        try:
            return self._backend.secrets.variables(self._spec, self._given)
        except SecretMissing:
            return None

    def _gone(self, slot: WorkerSlot) -> None:
        """Handle the end of a worker: drop an idle one; a busy one's call already receives the fault."""
        if slot.state is WorkerState.IDLE:
            self._pause_starts(asyncio.get_running_loop().time())
            self._replace(slot)

    def _replace(self, slot: WorkerSlot) -> None:
        """End a worker, and start others for the waiters and the kept number."""
        self._retire(slot)
        self._pump()
        self.warm_up()

    def _retire(self, slot: WorkerSlot) -> None:
        if slot.worker is not None:
            slot.worker.kill()
        slot.limit.close()
        if slot.state is None:
            return
        if slot.state is WorkerState.IDLE:
            self._idle.remove(slot)
        self._set_state(slot, None)
        del self._slots[slot.slot]

    def _set_state(self, slot: WorkerSlot, state: WorkerState | None) -> None:
        """Change a slot's state and report the span that ends."""
        now = asyncio.get_running_loop().time()
        before, since = slot.state, slot.since
        slot.state, slot.since = state, now
        if before is not None and now > since:
            spec, provider = self._spec, self._backend.provider
            self._meter.worker(WorkerSpan(spec.name, provider, slot.name, since, now, before, spec.memory_mb))

    def _schedule_reaper(self) -> None:
        """Schedule the next keep-alive check. One timer suffices, since idle slots are ordered by the start of their
        idle time."""
        if self._reaper is None and self._idle and len(self._slots) > self._kept and not self._closed:
            due = self._idle[0].since + self._keep_alive_s
            self._reaper = asyncio.get_running_loop().call_at(due, self._reap)

    def _reap(self) -> None:
        self._reaper = None
        now = asyncio.get_running_loop().time()
        while self._idle and len(self._slots) > self._kept:
            if self._idle[0].since + self._keep_alive_s > now + 1e-9:
                self._schedule_reaper()
                return
            self._retire(self._idle[0])


_EARLY_S = 0.0005
"""Seconds that a loop with timers of 1 ms may fire early."""


class ReusableTimeout:
    """A reusable `asyncio.timeout`, entered repeatedly by one task at a time, in one loop.

        with limit.of(seconds):      # TimeoutError when they have passed
            await ...

    Its timer keeps running when a block ends, and checks on firing whether the current block is overdue. So calls that
    end in time, which are nearly all, neither make nor cancel a timer. `close` stops it.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[object] | None = None
        self._expires = 0.0
        self._expired = False
        self._cancelling = 0

    def of(self, seconds: float) -> ReusableTimeout:
        self._expires = self._loop.time() + seconds
        return self

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def __enter__(self) -> None:
        self._task = asyncio.current_task()
        assert self._task is not None
        self._expired = False
        self._cancelling = self._task.cancelling()
        if self._timer is None or self._timer.when() > self._expires:
            self.close()
            self._timer = self._loop.call_at(self._expires, self._fire)

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        task, self._task = self._task, None
        if not self._expired or task is None:
            return
        # This timeout was one of the task's cancellations; if it was the only one, it becomes a `TimeoutError` here.
        if task.uncancel() <= self._cancelling and kind is not None and issubclass(kind, asyncio.CancelledError):
            raise TimeoutError from None

    def _fire(self) -> None:
        self._timer = None
        if self._task is None:
            return
        if self._expires - self._loop.time() > _EARLY_S:
            self._timer = self._loop.call_at(self._expires, self._fire)
            return
        self._expired = True
        self._task.cancel()


@dataclass(slots=True, eq=False)
class WorkerSlot:
    """A worker and its clock: `since` is the start of its present state, `cold_s` its start-up time until a call pays
    it."""

    slot: int
    name: str
    since: float
    state: WorkerState | None = WorkerState.COLD
    """None once it has ended."""
    worker: Worker | None = None
    cold_s: float = 0.0
    init_s: float = 0.0
    task: asyncio.Task[None] | None = None
    limit: ReusableTimeout = field(default_factory=ReusableTimeout)
    queued_s: float = 0.0
    """Seconds that the call it serves waited for it."""
    variables: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Environment variables that it started with, secrets included."""
    ahead: bool = False
    """Started before any call requested it: its start is billed separately, as no call has waited for it."""
