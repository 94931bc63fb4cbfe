"""A pool whose workers live on machines that come and go: calls are made again elsewhere, and the books stay whole."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.sim import loop as virtual
from serverless.deploy.package import Package
from serverless.providers.simulated import Profile, SimulatedBackend, SimulatedMachines
from serverless.types import Cause, FaultKind, InfraFault
from serverless.wire import encode
from serverless.workers.pool import PooledBackend, WorkerFault, WorkerLost, WorkerReply, WorkerRequest
from tests.serverless.support import Books, item, package

EVENT = [encode(item())]
LOST = InfraFault(FaultKind.CRASH, retryable=True, detail="the machine is gone")


class Machine:
    """Holds workers until it is lost, which every call there learns."""

    def __init__(self) -> None:
        self.workers: list[Worker] = []
        self.up = True

    def lose(self) -> None:
        self.up = False
        for worker in list(self.workers):
            worker.end()


class Worker:
    """Implements `worker.Worker`: a call takes `call_s`."""

    init_s = 0.1

    def __init__(self, machine: Machine, gone: Callable[[], None], call_s: float, dies: bool) -> None:
        self._machine, self._gone, self._call_s, self._dies = machine, gone, call_s, dies
        self._over = asyncio.Event()
        self.alive = True
        machine.workers.append(self)

    async def call(self, request: WorkerRequest) -> WorkerReply:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._call_s):
                await self._over.wait()
        if self._dies:
            self.end()
            raise WorkerFault(LOST)
        if not self.alive:
            raise WorkerLost(LOST)
        return WorkerReply([{"id": "a", "aggregate_reward_score": 1.0}], self._call_s)

    def end(self) -> None:
        self.kill()
        self._gone()

    def kill(self) -> None:
        self.alive = False
        self._over.set()
        if self in self._machine.workers:
            self._machine.workers.remove(self)


class Machines:
    """Implements `Launcher` over machines; `kills` of the calls lose their machine in the middle."""

    def __init__(self, *, call_s: float = 1.0, dies: bool = False) -> None:
        self.there: list[Machine] = []
        self.changed = asyncio.Event()
        self._call_s, self._dies = call_s, dies

    def add(self) -> Machine:
        machine = Machine()
        self.there.append(machine)
        self.changed.set()
        return machine

    def lose(self, machine: Machine) -> None:
        self.there.remove(machine)
        machine.lose()

    async def room(self) -> None:
        while not self.there:
            self.changed.clear()
            await self.changed.wait()

    async def start(self, package: Package, slot: int, gone: Callable[[], None]) -> Worker:
        if not self.there:
            raise WorkerLost(LOST)
        machine = min(self.there, key=lambda one: len(one.workers))
        made = Worker(machine, gone, self._call_s, self._dies)
        await asyncio.sleep(0.1)
        if not machine.up:
            raise WorkerLost(LOST)
        return made


@contextlib.asynccontextmanager
async def opened(machines: Machines, books: Books, **spec: Any) -> Any:
    async with PooledBackend(machines, "local", books, room=machines.room) as backend:
        await backend.deploy(package(**{"timeout_s": 1000.0, "keep_alive_s": 1e9, **spec}))
        yield backend.pool("behave")


def test_a_call_whose_machine_is_lost_is_made_again_on_another() -> None:
    books, machines = Books(), Machines()

    async def main() -> None:
        first = machines.add()
        async with opened(machines, books, concurrency=2) as pool, asyncio.TaskGroup() as tasks:
            call = tasks.create_task(pool.invoke(EVENT, 100.0))
            await asyncio.sleep(0.5)
            machines.add()
            machines.lose(first)
            reply = await call
            assert (reply.fault, reply.invocation.cause, reply.invocation.status) == (None, Cause.RETRY, "ok")
            assert reply.invocation.t1 == pytest.approx(0.5 + 0.1 + 1.0)

    virtual.run(main())
    assert [(i.status, i.cause) for i in books.invocations] == [("crash", Cause.CALL), ("ok", Cause.RETRY)]


def test_without_a_machine_calls_wait_for_one_and_no_worker_is_paid_meanwhile() -> None:
    books, machines = Books(), Machines()

    async def main() -> None:
        async with opened(machines, books, concurrency=1, init_timeout_s=1.0) as pool, asyncio.TaskGroup() as tasks:
            call = tasks.create_task(pool.invoke(EVENT, 100.0))
            late = await pool.invoke(EVENT, 5.0)
            assert late.fault.kind is FaultKind.DEADLINE, "its own time is bounded"
            await asyncio.sleep(20.0)
            machines.add()
            assert (await call).fault is None

    virtual.run(main())
    assert min(span.t0 for span in books.spans) == 25.0
    assert books.usage["behave"].worker_s["cold"] == pytest.approx(0.1)


def test_a_call_that_loses_three_machines_in_a_row_fails() -> None:
    books, machines = Books(), Machines()

    async def main() -> None:
        async with opened(machines, books) as pool, asyncio.TaskGroup() as tasks:
            call = tasks.create_task(pool.invoke(EVENT, 100.0))
            for _ in range(3):
                machine = machines.add()
                await asyncio.sleep(0.5)
                machines.lose(machine)
            assert (await call).fault == LOST

    virtual.run(main())
    assert [i.status for i in books.invocations] == ["crash"] * 3


def test_a_worker_that_dies_alone_fails_its_call_at_once() -> None:
    books, machines = Books(), Machines(dies=True)

    async def main() -> None:
        machines.add()
        async with opened(machines, books) as pool:
            assert (await pool.invoke(EVENT, 100.0)).fault == LOST

    virtual.run(main())
    assert [(i.status, i.cause) for i in books.invocations] == [("crash", Cause.CALL)]


@settings(max_examples=22, deadline=None)
@given(
    arrivals=st.lists(st.floats(0.0, 20.0), min_size=1, max_size=12),
    changes=st.lists(st.tuples(st.floats(0.0, 20.0), st.booleans()), max_size=8),
    concurrency=st.integers(1, 4),
    seed=st.integers(0, 2**16),
)
def test_whatever_machines_do_every_call_ends_once_and_workers_are_bounded(
    arrivals: list[float], changes: list[tuple[float, bool]], concurrency: int, seed: int
) -> None:
    books, machines = Books(), Machines()
    replies = []

    async def call(pool: Any, at: float) -> None:
        await asyncio.sleep(at)
        replies.append(await pool.invoke(EVENT, 60.0))

    async def change(at: float, comes: bool) -> None:
        await asyncio.sleep(at)
        if comes or not machines.there:
            machines.add()
        else:
            machines.lose(machines.there[-1])

    async def main() -> None:
        machines.add()
        async with opened(machines, books, concurrency=concurrency) as pool:
            async with asyncio.TaskGroup() as tasks:
                for at in arrivals:
                    tasks.create_task(call(pool, at))
                for at, comes in changes:
                    tasks.create_task(change(at, comes))
                tasks.create_task(change(21.0, True))
            assert pool.load().workers == sum(len(machine.workers) for machine in machines.there) <= concurrency

    virtual.run(main(), seed=seed)
    assert len(replies) == len(arrivals)
    answered = [i for i in books.invocations if i.status == "ok" and i.items]
    assert len(answered) == sum(reply.fault is None for reply in replies)
    assert {i.status for i in books.invocations} <= {"ok", "crash"}
    lives = sorted((s.t0, s.t1) for s in books.spans)
    assert all(t0 < t1 for t0, t1 in lives)
    by_worker: dict[str, float] = {}
    for span in sorted(books.spans, key=lambda one: one.t0):
        assert span.t0 >= by_worker.get(span.worker, 0.0) - 1e-9, "a worker is in one state at a time"
        by_worker[span.worker] = span.t1


def test_modelled_machines_take_their_workers_along() -> None:
    books = Books()
    machines = SimulatedMachines(["one", "two"])
    profiles = {"behave": Profile(cold_start_s=0.5, call_s=1.0, item_s=0.0)}
    source = package(timeout_s=1000.0, keep_alive_s=1e9, concurrency=4)
    backend = SimulatedBackend({"behave": lambda _: 1.0}, meter=books, profiles=profiles, machines=machines)

    async def main() -> None:
        async with backend:
            await backend.deploy(source)
            async with asyncio.TaskGroup() as tasks:
                calls = [tasks.create_task(backend.invoke("behave", EVENT, deadline_s=100.0)) for _ in range(4)]
                await asyncio.sleep(1.0)
                machines.turn("one", up=False)
            assert [call.result().fault for call in calls] == [None] * 4
            machines.turn("two", up=False)
            assert backend.load("behave").workers == 0
            late = await backend.invoke("behave", EVENT, deadline_s=10.0)
            assert late.fault is not None
            assert late.fault.kind is FaultKind.DEADLINE
            machines.turn("one", up=True)
            assert (await backend.invoke("behave", EVENT, deadline_s=10.0)).fault is None

    virtual.run(main())
    assert [i.cause for i in books.invocations if i.status == "crash"] == [Cause.CALL] * 2
    assert [i.cause for i in books.invocations if i.status == "ok"].count(Cause.RETRY) == 2
