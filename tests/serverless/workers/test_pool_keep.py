"""Workers that are kept without a call: their number and lifetime, and the cost of their starts and failed starts."""

from __future__ import annotations

import asyncio
import itertools
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serverless.errors import UnknownFunction
from serverless.meter import WorkerState
from serverless.providers.base import ScalableBackend, WorkerLoad
from serverless.providers.rehearsal import LAMBDA, RehearsedBackend
from serverless.providers.simulated import Profile, SimulatedBackend
from serverless.types import Cause, FaultKind
from serverless.wire import encode
from tests.serverless.support import Books, Simulated, item, package
from tests.serverless.workers.test_pool import peak

EVENT = [encode(item())]


def run(main: Any, books: Books | None = None, *, seed: int | None = None, one: Any = None, **profile: Any) -> Any:
    """`main(backend)` on virtual time with one function deployed."""
    provider = Simulated(seed, **profile)

    async def whole() -> Any:
        async with provider.open([one or package(concurrency=4, keep_alive_s=5.0)], books) as backend:
            return await main(backend)

    return provider.run(whole())


def test_kept_workers_start_at_once_and_stay_then_go_by_keep_alive() -> None:
    async def main(backend: Any) -> list[WorkerLoad]:
        assert backend.keep("behave", 3) == 3
        seen = [backend.load("behave")]
        await asyncio.sleep(1.5)
        seen.append(backend.load("behave"))
        await asyncio.sleep(1000.0)
        seen.append(backend.load("behave"))
        assert backend.keep("behave", 1) == 1
        await asyncio.sleep(0.1)
        seen.append(backend.load("behave"))
        backend.keep("behave", 0)
        await asyncio.sleep(0.1)
        seen.append(backend.load("behave"))
        return seen

    assert run(main, cold_start_s=1.0) == [WorkerLoad(0, 3), WorkerLoad(3), WorkerLoad(3), WorkerLoad(1), WorkerLoad()]


def test_the_number_stays_within_warm_and_concurrency() -> None:
    async def main(backend: Any) -> list[int]:
        return [backend.keep("behave", n) for n in (-5, 0, 2, 10**6)]

    assert run(main, one=package(warm=1, concurrency=3)) == [1, 1, 2, 3]


def test_the_load_tells_who_runs_and_who_waits() -> None:
    async def main(backend: Any) -> WorkerLoad:
        async with asyncio.TaskGroup() as group:
            for _ in range(7):
                group.create_task(backend.invoke("behave", EVENT, deadline_s=100.0))
            await asyncio.sleep(2.5)
            load: WorkerLoad = backend.load("behave")
        return load

    found = run(main, cold_start_s=2.0, call_s=1.0)
    assert found == WorkerLoad(ready=4, starting=0, busy=4, waiting=3)
    assert (found.workers, found.under_way) == (4, 7)


def test_a_start_ahead_is_billed_by_itself_and_no_call_pays_it() -> None:
    books = Books()

    async def main(backend: Any) -> Any:
        backend.keep("behave", 1)
        await asyncio.sleep(10.0)
        return await backend.invoke("behave", EVENT, deadline_s=5.0)

    reply = run(main, books, cold_start_s=2.0)
    assert reply.invocation.cold_start_s == 0.0
    warm, call = books.invocations
    assert (warm.cause, warm.items, warm.cold_start_s, warm.billed_s, warm.status) == (Cause.WARM, 0, 2.0, 2.0, "ok")
    assert call.cause is Cause.CALL
    assert books.usage["behave"].worker_s[WorkerState.COLD] == 2.0


def test_a_call_that_meets_a_start_ahead_waits_for_the_rest_of_it_and_pays() -> None:
    books = Books()

    async def main(backend: Any) -> Any:
        backend.keep("behave", 1)
        await asyncio.sleep(1.5)
        return await backend.invoke("behave", EVENT, deadline_s=5.0)

    assert run(main, books, cold_start_s=2.0).invocation.cold_start_s == 2.0
    assert [i.cause for i in books.invocations] == [Cause.CALL]


def test_a_shorter_keep_alive_is_for_those_that_idle_now() -> None:
    async def main(backend: Any) -> list[int]:
        await backend.invoke("behave", EVENT, deadline_s=50.0)
        await asyncio.sleep(20.0)
        before = backend.load("behave").workers
        backend.keep("behave", 0, keep_alive_s=30.0)
        await asyncio.sleep(5.0)
        during = backend.load("behave").workers
        await asyncio.sleep(5.5)
        return [before, during, backend.load("behave").workers]

    assert run(main, one=package(keep_alive_s=1000.0)) == [1, 1, 0]


def test_starts_that_fail_are_tried_less_and_less_often() -> None:
    books = Books()

    async def main(backend: Any) -> None:
        for _ in range(1000):  # as a scaler does
            backend.keep("behave", 3)
            await asyncio.sleep(1.0)

    run(main, books, cold_start_s=0.01, failed_start=1.0)
    failed = [i.t0 for i in books.invocations]
    rounds = sorted({round(t, 3) for t in failed})
    assert len(failed) == 3 * len(rounds)
    # 1 + 2 + 4 + 8 + 16 + 32 s, then one a minute.
    assert len(rounds) <= 6 + 1000 / 60 + 1
    assert [b - a for a, b in itertools.pairwise(rounds)][:5] == pytest.approx([1, 2, 4, 8, 16], abs=0.1)


def test_a_start_that_fails_once_is_made_again_without_being_asked() -> None:
    books = Books()

    async def main(backend: Any) -> int:
        backend.keep("behave", 4)
        await asyncio.sleep(100.0)
        return int(backend.load("behave").ready)

    assert run(main, books, seed=1, failed_start=0.7) == 4
    assert any(i.status == FaultKind.UNAVAILABLE for i in books.invocations)


def test_an_idle_worker_that_dies_is_replaced_after_a_pause() -> None:
    """Workers that end by themselves as soon as they are up must not be started in a loop."""
    began: list[float] = []

    class Dying(SimulatedBackend):
        async def start(self, package: Any, slot: int, gone: Any) -> Any:
            made = await super().start(package, slot, gone)
            loop = asyncio.get_running_loop()
            began.append(loop.time())

            def die() -> None:
                made.alive = False
                gone()

            loop.call_later(0.01, die)
            return made

    async def main() -> None:
        async with Dying({"behave": lambda sample: 1.0}) as backend:
            await backend.deploy(package(concurrency=2))
            backend.keep("behave", 2)
            await asyncio.sleep(600.0)

    Simulated().run(main())
    assert 4 <= len(began) <= 2 * (6 + 600 / 60 + 1)


def test_a_new_version_starts_from_its_own_settings() -> None:
    async def main(backend: Any) -> list[int]:
        backend.keep("behave", 3)
        await asyncio.sleep(1.0)
        await backend.deploy(package(concurrency=4, memory_mb=256, warm=1))
        await asyncio.sleep(1.0)
        found = [backend.load("behave").workers]
        with pytest.raises(UnknownFunction):
            backend.keep("another", 1)
        return found

    assert run(main) == [1]


def test_a_rehearsed_backend_passes_it_on() -> None:
    async def main() -> Any:
        inner = SimulatedBackend({"behave": lambda sample: 1.0}, profiles={"behave": Profile()})
        async with RehearsedBackend(inner, LAMBDA) as backend:
            assert isinstance(backend, ScalableBackend)
            await backend.deploy(package())
            kept = backend.keep("behave", 2)
            await asyncio.sleep(1.0)
            return kept, backend.load("behave")

    assert Simulated().run(main()) == (2, WorkerLoad(2))


@settings(max_examples=15, deadline=None)
@given(
    orders=st.lists(
        st.tuples(st.integers(0, 8), st.sampled_from([None, 0.0, 0.05, 3.0]), st.floats(0.0, 1.0)), max_size=12
    ),
    callers=st.integers(0, 20),
    concurrency=st.integers(1, 5),
    warm=st.integers(0, 1),
    failed_start=st.sampled_from([0.0, 0.3]),
    crashes=st.sampled_from([0.0, 0.2]),
    seed=st.integers(0, 2**16),
)
def test_whatever_is_kept_no_worker_is_lost_and_none_is_left(
    orders: list[tuple[int, float | None, float]],
    callers: int,
    concurrency: int,
    warm: int,
    failed_start: float,
    crashes: float,
    seed: int,
) -> None:
    books, rng = Books(), random.Random(seed)
    wanted = {"call_s": 0.05, "failed_start": failed_start, "faults": {FaultKind.CRASH: crashes}}
    provider = Simulated(seed, **wanted)

    async def caller(backend: Any) -> None:
        await asyncio.sleep(rng.uniform(0.0, 2.0))
        try:
            async with asyncio.timeout(rng.choice([0.02, 0.1, 10.0])):
                await backend.invoke("behave", EVENT, deadline_s=rng.choice([0.1, 10.0]))
        except TimeoutError:
            pass

    async def main() -> None:
        one = package(concurrency=concurrency, warm=warm, keep_alive_s=0.5)
        async with provider.open([one], books) as backend:
            async with asyncio.TaskGroup() as group:
                for _ in range(callers):
                    group.create_task(caller(backend))
                for workers, keep_alive_s, pause_s in orders:
                    kept = backend.keep("behave", workers, keep_alive_s=keep_alive_s)  # type: ignore[attr-defined]
                    assert kept == max(warm, min(workers, concurrency))
                    load = backend.load("behave")  # type: ignore[attr-defined]
                    assert load.busy <= load.ready <= load.workers <= concurrency
                    await asyncio.sleep(pause_s)
            backend.keep("behave", concurrency)  # type: ignore[attr-defined]
            await asyncio.sleep(600.0)
            assert backend.load("behave") == WorkerLoad(concurrency)  # type: ignore[attr-defined]
            backend.keep("behave", 0, keep_alive_s=1.0)  # type: ignore[attr-defined]
            await asyncio.sleep(600.0)
            assert backend.load("behave") == WorkerLoad(warm)  # type: ignore[attr-defined]

    provider.run(main())
    assert peak(books) <= concurrency
    for worker in {s.worker for s in books.spans}:
        mine = [s for s in books.spans if s.worker == worker]
        assert all(a.t1 <= b.t0 for a, b in itertools.pairwise(mine))
    # Each successful start is billed once, whichever call waited for it.
    starts = sum(s.state is WorkerState.COLD for s in books.spans)
    assert starts >= sum(i.cold_start_s > 0.0 for i in books.invocations)
