"""Many direct callers of one pool, who come, are cancelled and give up at any moment: bounds and books hold.

The time limit of a pool's calls, against asyncio.timeout, on virtual time. The secrets of a pool's workers.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.sim import loop as virtual
from serverless.deploy.package import Package
from serverless.errors import UnknownFunction
from serverless.secrets import Secrets
from serverless.spec import FunctionSpec
from serverless.types import FaultKind
from serverless.wire import encode
from serverless.workers.pool import PooledBackend, ReusableTimeout, WorkerReply, WorkerRequest
from tests.serverless.support import Books, Simulated, item, package

EVENT = [encode(item())]


def peak(books: Books) -> int:
    level = highest = 0
    for _, change in sorted([(s.t0, 1) for s in books.spans] + [(s.t1, -1) for s in books.spans]):
        level += change
        highest = max(highest, level)
    return highest


def test_workers_never_exceed_the_concurrency_however_many_call() -> None:
    books, provider = Books(), Simulated(call_s=0.5)

    async def main() -> list[Any]:
        async with provider.open([package(concurrency=3)], books) as backend:
            async with asyncio.TaskGroup() as group:
                calls = [group.create_task(backend.invoke("behave", EVENT, deadline_s=100.0)) for _ in range(10)]
            return [call.result().fault for call in calls]

    assert provider.run(main()) == [None] * 10
    assert peak(books) == 3


def test_a_waiter_that_is_cancelled_as_it_gets_a_worker_passes_it_on() -> None:
    books, provider = Books(), Simulated(cold_start_s=1.0)

    async def main() -> Any:
        async with provider.open([package(concurrency=1, keep_alive_s=1e9)], books) as backend:
            loop = asyncio.get_running_loop()
            async with asyncio.TaskGroup() as group:
                first = group.create_task(backend.invoke("behave", EVENT, deadline_s=50.0))
                second = group.create_task(backend.invoke("behave", EVENT, deadline_s=50.0))
                await asyncio.sleep(0.5)
                # After the start's own timer of the same instant has given the worker to the first waiter.
                loop.call_at(1.0, lambda: loop.call_soon(first.cancel))
            return second.result().fault

    assert provider.run(main()) is None
    assert books.usage["behave"].cold_starts == 1


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    callers=st.integers(1, 30),
    concurrency=st.integers(1, 3),
    queue=st.integers(1, 20),
    seed=st.integers(0, 2**16),
    keep_alive_s=st.sampled_from([0.0, 0.05, 10.0]),
    failed_start=st.sampled_from([0.0, 0.4]),
    warm=st.integers(0, 1),
)
def test_under_cancellation_no_worker_is_lost(
    callers: int, concurrency: int, queue: int, seed: int, keep_alive_s: float, failed_start: float, warm: int
) -> None:
    books, provider, rng = Books(), Simulated(seed, call_s=0.05, failed_start=failed_start), random.Random(seed)

    async def caller(backend: Any) -> None:
        await asyncio.sleep(rng.uniform(0.0, 0.3))
        try:
            async with asyncio.timeout(rng.choice([0.0, 0.02, 0.1, 0.15, 10.0])):
                await backend.invoke("behave", EVENT, deadline_s=rng.choice([0.01, 0.1, 10.0]))
        except TimeoutError:
            pass

    async def main() -> None:
        one = package(concurrency=concurrency, queue=queue, keep_alive_s=keep_alive_s, warm=warm)
        async with provider.open([one], books) as backend:
            async with asyncio.TaskGroup() as group:
                for _ in range(callers):
                    group.create_task(caller(backend))
            # Every place still works: as many calls as it allows run at once, and end.
            async with asyncio.TaskGroup() as group:
                final = [backend.invoke("behave", EVENT, deadline_s=60.0) for _ in range(concurrency)]
                calls = [group.create_task(call) for call in final]
            for call in calls:
                fault = call.result().fault
                assert fault is None or fault.kind in (FaultKind.UNAVAILABLE, FaultKind.THROTTLED)
            assert failed_start or concurrency > queue or all(call.result().fault is None for call in calls)

    provider.run(main())
    assert peak(books) <= concurrency
    for worker in {s.worker for s in books.spans}:
        mine = [s for s in books.spans if s.worker == worker]
        assert all(a.t1 <= b.t0 for a, b in itertools.pairwise(mine))


def test_it_ends_what_takes_longer_again_and_again_and_nothing_else() -> None:
    async def main() -> list[float]:
        loop, limit, ended = asyncio.get_running_loop(), ReusableTimeout(), []
        for limit_s, work_s in ((1.0, 0.5), (1.0, 2.0), (0.1, 3.0), (5.0, 4.0), (0.25, 9.0)):
            began = loop.time()
            try:
                with limit.of(limit_s):
                    await asyncio.sleep(work_s)
            except TimeoutError:
                ended.append(-(loop.time() - began))
            else:
                ended.append(loop.time() - began)
        limit.close()
        return ended

    assert virtual.run(main()) == pytest.approx([0.5, -1.0, -0.1, 4.0, -0.25])


def test_a_timer_of_an_ended_block_disturbs_nobody() -> None:
    async def main() -> float:
        limit = ReusableTimeout()
        with limit.of(1.0):
            pass
        await asyncio.sleep(2.0)
        limit.close()
        return asyncio.get_running_loop().time()

    assert virtual.run(main()) == pytest.approx(2.0)


def test_a_cancellation_from_outside_stays_one_even_at_the_same_instant() -> None:
    async def work(limit: ReusableTimeout) -> None:
        with limit.of(1.0):
            await asyncio.sleep(9.0)

    async def main(cancel_at: float) -> str:
        limit = ReusableTimeout()
        async with asyncio.TaskGroup() as group:
            task = group.create_task(work(limit))
            asyncio.get_running_loop().call_at(cancel_at, task.cancel)
        return "cancelled" if task.cancelled() else "other"

    for cancel_at in (0.5, 1.0):
        assert virtual.run(main(cancel_at)) == "cancelled"


def test_an_error_in_the_block_is_that_error() -> None:
    async def main() -> None:
        with ReusableTimeout().of(1.0):
            raise KeyError("x")

    with pytest.raises(KeyError):
        virtual.run(main())


class EnvironmentWorker:
    """Answers each call with the variables that it was started with."""

    init_s = 0.0

    def __init__(self, variables: Mapping[str, str]) -> None:
        self._variables = variables
        self.alive = True

    async def call(self, request: WorkerRequest) -> WorkerReply:
        await asyncio.sleep(1.0)
        return WorkerReply(dict(self._variables), 1.0)

    def kill(self) -> None:
        self.alive = False


class EnvironmentLauncher:
    async def start(self, package: Package, slot: int, gone: Callable[[], None]) -> EnvironmentWorker:
        return EnvironmentWorker(package.variables)


class CountedSecrets(Secrets):
    reads = 0

    def variables(self, spec: FunctionSpec, given: Mapping[str, str] | None = None) -> dict[str, str]:
        self.reads += 1
        return super().variables(spec, given)


def test_workers_with_the_secrets_of_a_caller_have_no_name_that_a_request_can_give(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KEY", "the machine's")

    async def main() -> None:
        async with PooledBackend(EnvironmentLauncher(), "fake") as backend:
            await backend.deploy(package(secrets=["KEY"]))
            name = backend.given("behave", {"KEY": "a caller's"})
            assert (await backend.invoke(name, EVENT, deadline_s=9.0)).body == {"KEY": "a caller's"}
            assert backend.given("behave", {"KEY": "a caller's"}) == name
            assert backend.given("behave", {"KEY": "another's"}) != name
            for number in range(9):
                with pytest.raises(UnknownFunction) as refused:
                    await backend.invoke(f"behave~{number}", EVENT, deadline_s=9.0)
                assert refused.value.remedy == "deployed: behave"
            assert (await backend.invoke("behave", EVENT, deadline_s=9.0)).body == {"KEY": "the machine's"}

    virtual.run(main())


def test_a_call_reads_the_secrets_as_often_whatever_the_number_of_idle_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY", "first")
    secrets = CountedSecrets()

    async def main() -> None:
        async with PooledBackend(EnvironmentLauncher(), "fake", secrets=secrets) as backend:
            await backend.deploy(package(secrets=["KEY"], concurrency=20))
            await backend.deploy(package(name="plain"))

            async def call(function: str = "behave") -> Any:
                return (await backend.invoke(function, EVENT, deadline_s=9.0)).body

            await asyncio.gather(*(call() for _ in range(20)))
            assert backend.load("behave").ready == 20
            secrets.reads = 0
            assert await call() == {"KEY": "first"}
            assert secrets.reads == 2, "one as it takes the worker, one as it gives it back"
            monkeypatch.setenv("KEY", "second")
            assert await call() == {"KEY": "second"}
            assert backend.load("behave").ready == 1, "the others had the value before"
            secrets.reads = 0
            assert await call("plain") == {}
            assert secrets.reads == 0

    virtual.run(main())
