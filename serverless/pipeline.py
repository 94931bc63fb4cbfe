"""`Offload.submit(function, item, deadline_s) -> Outcome`: the one way by which a reward leaves the process.

validate -> gather into a batch -> call under the deadline -> read each item's answer -> retry what is worth it.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from serverless import wire
from serverless.backends.base import Backend, Reply
from serverless.deploy.package import Package
from serverless.errors import BackendFailed, UnknownFunction
from serverless.policy.batch import BatchPolicy, Wait
from serverless.policy.retry import RetryBudget, RetryPolicy
from serverless.spec import FunctionSpec
from serverless.types import FaultKind, InfraFault, Item, ModelFault, Outcome

__all__ = ["Offload"]

_NOT_THE_ITEMS = frozenset({FaultKind.THROTTLED, FaultKind.UNAVAILABLE, FaultKind.DEADLINE})
"""Faults of a call that no item of it can have caused: there is nothing to isolate."""


class Offload:
    """Scores items through a backend. Use `async with`: entering deploys the functions (`Package.spec.name`).

    Owns the waiting items of every function and a task per call in flight. Any number of tasks may call `submit`;
    each waits for its own outcome and is unblocked by it, by its deadline or by its cancellation. A call that nobody
    waits for any more is cancelled.
    Invariants: at most `concurrency` calls in flight and `queue` items waiting per function; every submit gets
    exactly one outcome; an item is called at most `max_attempts` times, plus once if it shared a call that failed.
    """

    def __init__(
        self, packages: Sequence[Package], backend: Backend, *, seed: int = 0, retry: RetryPolicy | None = None
    ) -> None:
        self._packages = tuple(packages)
        self._backend = backend
        policy = retry or RetryPolicy()
        self._lines = {
            p.spec.name: _Line(self, p.spec, backend, policy, random.Random(f"{seed}/{p.spec.name}"))
            for p in self._packages
        }
        self._group: asyncio.TaskGroup | None = None

    @property
    def functions(self) -> Mapping[str, FunctionSpec]:
        """The deployed functions by name, with their decorators' settings."""
        return {p.spec.name: p.spec for p in self._packages}

    @property
    def waiting(self) -> int:
        """Items that wait for a call."""
        return sum(line.waiting for line in self._lines.values())

    async def submit(self, function: str, item: Item, deadline_s: float) -> Outcome:
        """Score one item within `deadline_s` seconds from now. A failure is a value, whatever it is.

        `UnknownFunction` and `BackendFailed` (not open) are the caller's mistakes.
        """
        line = self._lines.get(function)
        if line is None:
            raise UnknownFunction(f"no function {function!r}", remedy=f"functions: {', '.join(self._lines) or 'none'}")
        if self._group is None:
            raise BackendFailed("the offload is not open", remedy="use `async with`")
        return await line.submit(item, deadline_s)

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """For the lines of this offload."""
        assert self._group is not None
        return self._group.create_task(work)

    async def __aenter__(self) -> Offload:
        for package in self._packages:
            await self._backend.deploy(package)
        self._group = asyncio.TaskGroup()
        await self._group.__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        group, self._group = self._group, None
        for line in self._lines.values():
            line.close()
        if group is not None:
            await group.__aexit__(None, None, None)


@dataclass(slots=True, eq=False)
class _Entry:
    """One submitted item: its wire form, its size, when it expires, and how often it was called."""

    wire: wire.WireItem
    size: int
    outcome: asyncio.Future[Outcome]
    expires: float
    since: float
    attempts: int = 0
    alone: bool = False
    call: _Call | None = None
    timer: asyncio.TimerHandle | None = None
    retry: asyncio.TimerHandle | None = None


@dataclass(slots=True, eq=False)
class _Call:
    """A call in flight and how many still wait for it."""

    entries: list[_Entry]
    alive: int
    task: asyncio.Task[None] | None = None


class _Line:
    """The items of one function on their way."""

    def __init__(
        self, owner: Offload, spec: FunctionSpec, backend: Backend, retry: RetryPolicy, rng: random.Random
    ) -> None:
        self._owner = owner
        self._spec = spec
        self._backend = backend
        self._retry = retry
        self._budget = RetryBudget(retry)
        self._rng = rng
        self._batch = BatchPolicy(spec.batch.max_items, spec.batch.max_wait_ms / 1000.0, spec.batch.max_bytes)
        self._live: dict[_Entry, None] = {}
        self._waiting: deque[_Entry] = deque()
        self._waiting_bytes = 0
        self._calls: dict[int, _Call] = {}
        self._numbered = 0
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    async def submit(self, item: Item, deadline_s: float) -> Outcome:
        loop = asyncio.get_running_loop()
        encoded = wire.encode(item)
        try:
            size = wire.size(encoded)
        except (TypeError, ValueError, OverflowError) as error:
            detail = f"item {item.id} has no wire form: {error}"
            return InfraFault(FaultKind.ENVIRONMENT, retryable=False, detail=detail)
        if deadline_s <= 0.0:
            return InfraFault(FaultKind.DEADLINE, retryable=False, detail="the deadline had passed at submission")
        if len(self._waiting) >= self._spec.queue and not self._purge():
            detail = f"{self._spec.queue} items wait for {self._spec.name}"
            return InfraFault(FaultKind.THROTTLED, retryable=True, detail=detail)
        now = loop.time()
        entry = _Entry(encoded, size, loop.create_future(), now + deadline_s, now)
        entry.timer = loop.call_at(entry.expires, self._expire, entry, deadline_s)
        self._live[entry] = None
        self._budget.earn()
        self._enqueue(entry)
        try:
            return await entry.outcome
        finally:
            self._leave(entry)

    def close(self) -> None:
        """Everyone who waits is told; calls in flight are cancelled."""
        self._closed = True
        fault = InfraFault(FaultKind.UNAVAILABLE, retryable=False, detail="the offload was closed")
        if self._timer is not None:
            self._timer.cancel()
        for entry in list(self._live):
            _settle(entry, fault)
            self._leave(entry)
        self._waiting.clear()

    def _enqueue(self, entry: _Entry) -> None:
        """Last in line. Looks for a due call only if this item can have made one due."""
        self._waiting.append(entry)
        self._waiting_bytes += entry.size
        batch = self._batch
        if self._timer is None or len(self._waiting) >= batch.max_items or self._waiting_bytes >= batch.max_bytes:
            self._pump()

    def _dequeue(self) -> _Entry:
        entry = self._waiting.popleft()
        self._waiting_bytes -= entry.size
        return entry

    def _purge(self) -> bool:
        """Forget entries that nobody waits for; True if that made room."""
        kept = [e for e in self._waiting if not e.outcome.done()]
        self._waiting = deque(kept)
        self._waiting_bytes = sum(e.size for e in kept)
        return len(kept) < self._spec.queue

    def _expire(self, entry: _Entry, deadline_s: float) -> None:
        detail = f"no outcome of {self._spec.name} in {deadline_s:g} s"
        _settle(entry, InfraFault(FaultKind.DEADLINE, retryable=False, detail=detail))
        self._leave(entry)

    def _leave(self, entry: _Entry) -> None:
        """Nobody waits for this entry any more. Idempotent."""
        self._live.pop(entry, None)
        for timer in (entry.timer, entry.retry):
            if timer is not None:
                timer.cancel()
        entry.timer = entry.retry = None
        if not entry.outcome.done():
            entry.outcome.cancel()
        call, entry.call = entry.call, None
        if call is not None:
            call.alive -= 1
            if call.alive == 0 and call.task is not None:
                call.task.cancel()

    def _pump(self) -> None:
        """Start the calls that are due. Runs when an item may have made one due, a call ended, or time has."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        loop = asyncio.get_running_loop()
        while self._waiting and not self._closed:
            head = self._waiting[0]
            if head.outcome.done():
                self._dequeue()
            elif len(self._calls) >= self._spec.concurrency:
                return
            elif head.alone:
                self._begin([self._dequeue()])
            else:
                sizes = [e.size for e in islice(self._waiting, self._batch.max_items)]
                decision = self._batch.decide(sizes, loop.time() - head.since)
                if isinstance(decision, Wait):
                    self._timer = loop.call_later(decision.seconds, self._pump)
                    return
                self._begin(self._gather(decision.count))

    def _gather(self, count: int) -> list[_Entry]:
        """The next entries of a shared call: those still wanted, up to the first that must go alone."""
        batch: list[_Entry] = []
        while self._waiting and len(batch) < count and not self._waiting[0].alone:
            entry = self._dequeue()
            if not entry.outcome.done():
                batch.append(entry)
        return batch

    def _begin(self, entries: list[_Entry]) -> None:
        call = _Call(entries, len(entries))
        for entry in entries:
            entry.call = call
            entry.attempts += 1
        self._numbered += 1
        number = self._numbered
        self._calls[number] = call
        call.task = self._owner.spawn(self._run(call))
        # Not a `finally` of the task: one that is cancelled before its first step runs none of its code.
        call.task.add_done_callback(lambda _: self._ended(number))

    def _ended(self, number: int) -> None:
        del self._calls[number]
        self._pump()

    async def _run(self, call: _Call) -> None:
        event = wire.events([entry.wire for entry in call.entries])
        left = max(entry.expires for entry in call.entries) - asyncio.get_running_loop().time()
        reply = await self._backend.invoke(self._spec.name, event, deadline_s=left)
        for entry in call.entries:
            entry.call = None
        self._conclude(call.entries, event, reply)

    def _conclude(self, entries: list[_Entry], event: list[wire.WireItem], reply: Reply) -> None:
        if reply.fault is None:
            read = wire.outcomes(reply.body, event, deterministic=self._spec.deterministic)
            for entry, outcome in zip(entries, read, strict=True):
                self._receive(entry, outcome)
        elif len(entries) > 1 and reply.fault.kind not in _NOT_THE_ITEMS:
            self._isolate(entries)
        else:
            for entry in entries:
                self._receive(entry, reply.fault)

    def _isolate(self, entries: list[_Entry]) -> None:
        """A shared call failed as a whole: each item is called by itself, so that only the guilty one fails.

        Not a retry: it costs no attempt and no budget, and happens to an entry once, since it stays alone.
        """
        for entry in reversed(entries):
            if not entry.outcome.done():
                entry.alone = True
                entry.attempts -= 1
                self._waiting.appendleft(entry)
                self._waiting_bytes += entry.size

    def _receive(self, entry: _Entry, outcome: Outcome) -> None:
        if entry.outcome.done():
            return
        if isinstance(outcome, InfraFault):
            floor = self._spec.timeout_floor
            if outcome.kind is FaultKind.TIMEOUT and floor is not None:
                outcome = ModelFault(floor, outcome.detail)
            elif self._again(entry, outcome):
                return
        _settle(entry, outcome)

    def _again(self, entry: _Entry, fault: InfraFault) -> bool:
        """Schedule another attempt, if the policy and the budget allow one."""
        loop = asyncio.get_running_loop()
        wait = self._retry.delay(fault, entry.attempts, entry.expires - loop.time(), self._rng)
        if wait is None or not self._budget.take():
            return False
        entry.retry = loop.call_later(wait, self._requeue, entry)
        return True

    def _requeue(self, entry: _Entry) -> None:
        entry.retry = None
        if not entry.outcome.done():
            entry.since = asyncio.get_running_loop().time()
            self._enqueue(entry)


def _settle(entry: _Entry, outcome: Outcome) -> None:
    if not entry.outcome.done():
        entry.outcome.set_result(outcome)
