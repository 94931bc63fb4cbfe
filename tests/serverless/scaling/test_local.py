"""Scaling of real worker processes: up before the burst comes, gone after it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Collection, Iterable, Mapping, Sequence

import pytest

from serverless.meter import WorkerState
from serverless.pipeline.offload import Offload
from serverless.providers.base import WorkerLoad
from serverless.scaling.decisions import StatisticsMeter
from serverless.scaling.scaler import DemandSource, Scaler, ScalerContext, ScalingDecision
from serverless.scaling.settings import ScalingSpec
from serverless.spec import FunctionBatchSpec
from serverless.types import Cause, Scored
from serverless.workers.local import LocalBackend
from tests.serverless.support import Books, alive, descendants, item, package, until

pytestmark = pytest.mark.slow  # real processes, real time

CALLS = 6


class Announced(DemandSource):
    """Trajectories that a test begins and ends."""

    def __init__(self) -> None:
        self.began: list[float] = []
        self.asked: list[tuple[str, float]] = []

    def live(self) -> Mapping[str, Sequence[float]]:
        return {"lake": self.began}

    def ended(self) -> Iterable[tuple[str, float]]:
        asked, self.asked = self.asked, []
        return asked

    def kinds(self, function: str) -> Collection[str]:
        return ("lake",)


def test_the_second_burst_finds_its_workers_and_they_are_gone_afterwards() -> None:
    books, demand, decisions = Books(), Announced(), list[ScalingDecision]()
    one = package(
        "behave",
        concurrency=CALLS,
        keep_alive_s=60.0,
        deterministic=False,
        batch=FunctionBatchSpec(max_items=1, max_wait_ms=0),
    )
    settings = ScalingSpec.model_validate(
        {
            "tick_s": 0.05,
            "reactive": {"enabled": False},
            "forecast": {"horizon_s": 1.0, "z": 0.0, "min_seen": CALLS},
            "keep_alive": {"min_s": 0.2, "max_s": 0.2},
        }
    )

    async def burst(offload: Offload, name: str) -> None:
        """Calls that need a worker each, as they all run at once."""
        works = [offload.submit("behave", item(f"{name}{n}", do="sleep", seconds=0.5), 60.0) for n in range(CALLS)]
        outcomes = await asyncio.gather(*works)
        assert all(isinstance(outcome, Scored) for outcome in outcomes), outcomes

    async def main() -> tuple[list[int], float]:
        seen, loop = StatisticsMeter(books), asyncio.get_running_loop()
        async with LocalBackend(meter=seen) as backend, Offload([one], backend, meter=seen) as offload:
            around = ScalerContext(demand, tell=decisions.append)
            async with Scaler(offload.functions, [backend], seen=seen, meter=seen, settings=settings, around=around):
                await burst(offload, "first")
                await until(lambda: backend.load("behave").workers == 0)
                # Trajectories of 1,000 s, all but over: they will ask within the horizon.
                demand.asked = [("lake", 1000.0)] * CALLS
                demand.began = [loop.time() - 999.9] * (2 * CALLS)
                await until(lambda: backend.load("behave") == WorkerLoad(CALLS))
                pids = [pid for zygote in backend.zygote_pids for pid in descendants(zygote)]
                began = loop.time()
                await burst(offload, "second")
                demand.began = []
                await until(lambda: backend.load("behave").workers == 0)
                await until(lambda: not any(map(alive, pids)))
            return pids, began

    pids, began = asyncio.run(main())
    assert len(pids) >= CALLS
    calls = [i for i in books.invocations if i.cause is not Cause.WARM]
    first, second = [i for i in calls if i.t0 < began], [i for i in calls if i.t0 >= began]
    assert sum(i.cold_start_s > 0.0 for i in first) >= 1
    assert len(second) >= CALLS
    assert [i for i in second if i.cold_start_s > 0.0] == []
    assert all(s.t1 <= began for s in books.spans if s.state is WorkerState.COLD), "nothing was started by a call"
    assert sum(i.cause is Cause.WARM for i in books.invocations) >= CALLS
    assert max(change.after for change in decisions) == CALLS
    assert decisions[-1].after == 0


def test_a_function_that_does_not_load_is_not_started_in_a_loop() -> None:
    """A scaler asks again and again; failing starts of real processes stay few."""
    books = Books()
    one = package("broken", concurrency=2)

    async def main() -> float:
        async with LocalBackend(meter=books) as backend:
            await backend.deploy(one)
            loop = asyncio.get_running_loop()
            began = loop.time()
            while loop.time() < began + 2.0 or len(books.invocations) < 2:
                backend.keep("broken", 2)
                await asyncio.sleep(0.01)
            return loop.time() - began

    asked_s = asyncio.run(main())
    failed = [i for i in books.invocations if i.items == 0]
    assert 2 <= len(failed) <= 2 * (1 + math.log2(1.0 + asked_s)), "two at once, at 0, 1, 3, 7 s"
    assert {i.status for i in failed} == {"crash"}
