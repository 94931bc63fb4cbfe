"""The scaler on virtual time: over the real pipeline and pool, and over a provider whose level is slow to change."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import pathlib
import random
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import pytest

from rollart.sim import loop as virtual
from serverless.errors import BackendFailed
from serverless.meter import WorkerState
from serverless.pipeline.offload import Offload
from serverless.providers.base import WorkerLoad
from serverless.providers.simulated import Profile, SimulatedBackend
from serverless.scaling.decisions import StatisticsMeter
from serverless.scaling.scaler import DemandSource, Scaler, ScalerContext, ScalingDecision
from serverless.scaling.settings import ScalingSpec
from serverless.spec import FunctionBatchSpec
from serverless.types import Scored
from tests.serverless.modelled import Modelled, takes
from tests.serverless.support import Books, item, package

OFF = {"enabled": False}
COLD_S, WORK_S, BATCH = 5.0, 2.0, 24


class Rollouts(DemandSource):
    """`DemandSource` of one domain."""

    def __init__(self) -> None:
        self.began: dict[str, float] = {}
        self.asked: list[tuple[str, float]] = []

    def live(self) -> Mapping[str, Sequence[float]]:
        return {"math": list(self.began.values())}

    def ended(self) -> Iterable[tuple[str, float]]:
        asked, self.asked = self.asked, []
        return asked

    def kinds(self, function: str) -> Collection[str]:
        return ("math",)


class Bursts:
    """Steps in which trajectories begin at once, end one by one, each asking for its reward, and nothing happens for
    20 s. `waits` are the calls' in each step."""

    def __init__(self, steps: int, *, batch: int = BATCH, **settings: Any) -> None:
        self.steps = steps
        self.batch = batch
        self.settings = ScalingSpec.model_validate(settings)
        self.books, self.decisions, self.rollouts = Books(), list[ScalingDecision](), Rollouts()
        self.waits: list[list[float]] = []
        self.ends: list[float] = []
        self.left = WorkerLoad()

    async def run(self) -> Bursts:
        one = package(
            name="judge",
            concurrency=self.batch,
            keep_alive_s=5.0,
            deterministic=False,
            batch=FunctionBatchSpec(max_items=1, max_wait_ms=0.0),
        )
        seen, profile = StatisticsMeter(self.books), Profile(cold_start_s=COLD_S, call_s=WORK_S, item_s=0.0)
        around, rng, loop = (
            ScalerContext(self.rollouts, tell=self.decisions.append),
            random.Random(0),
            asyncio.get_running_loop(),
        )
        async with (
            SimulatedBackend({"judge": lambda sample: 1.0}, meter=seen, profiles={"judge": profile}) as backend,
            Offload([one], backend, meter=seen) as offload,
        ):
            async with Scaler(
                offload.functions, [backend], seen=seen, meter=seen, settings=self.settings, around=around
            ):
                for step in range(self.steps):
                    self.waits.append([])
                    async with asyncio.TaskGroup() as group:
                        for n in range(self.batch):
                            seconds = 30.0 * rng.lognormvariate(0.0, 0.5)
                            group.create_task(self.trajectory(offload, f"{step}/{n}", seconds))
                    self.ends.append(loop.time())
                    await asyncio.sleep(20.0)
            await asyncio.sleep(10.0)
            self.left = backend.load("judge")
        return self

    async def trajectory(self, offload: Offload, key: str, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        self.rollouts.began[key] = loop.time()
        await asyncio.sleep(seconds)
        self.rollouts.asked.append(("math", loop.time() - self.rollouts.began.pop(key)))
        asked = loop.time()
        assert await offload.submit("judge", item(key), 600.0) == Scored(1.0)
        self.waits[-1].append(loop.time() - asked - WORK_S)

    def p99(self) -> float:
        """After the first step, in which nothing is known yet."""
        waits = sorted(wait for step in self.waits[1:] for wait in step)
        return waits[int(0.99 * len(waits))]

    def mean(self) -> float:
        waits = [wait for step in self.waits[1:] for wait in step]
        return sum(waits) / len(waits)

    @property
    def worker_s(self) -> float:
        return self.books.usage["judge"].total_worker_s


def bursts(steps: int = 8, *, batch: int = BATCH, **settings: Any) -> Bursts:
    return virtual.run(Bursts(steps, batch=batch, keep_alive=OFF, **settings).run())


@pytest.mark.slow  # a thousand calls: a p99 of fewer says little
def test_a_forecast_waits_less_than_a_reaction_for_no_more_worker_seconds_and_both_less_than_on_demand() -> None:
    ways = {"on demand": {"enabled": False}, "reactive": {"forecast": OFF}, "both": {}}
    on_demand, reactive, both = (bursts(16, batch=64, **way) for way in ways.values())
    assert both.p99() < 0.6 * reactive.p99()
    assert both.worker_s <= reactive.worker_s
    assert both.mean() < 0.5 * reactive.mean()
    assert reactive.mean() < on_demand.mean()
    assert on_demand.decisions == []


def test_workers_are_there_before_the_burst_and_none_is_left_at_the_end() -> None:
    found = bursts()
    assert found.left == WorkerLoad()
    first_call = {step: waits[0] for step, waits in enumerate(found.waits)}
    assert first_call[0] == pytest.approx(COLD_S), "nothing is known in the first step"
    assert sum(wait < 1e-6 for wait in list(first_call.values())[1:]) >= 6
    assert {change.why for change in found.decisions} >= {"forecast", "idle"}
    for before, after in zip(found.decisions, found.decisions[1:], strict=False):
        assert before.after == after.before, "every change was told"
    assert max(change.after for change in found.decisions) <= BATCH


@pytest.mark.parametrize("seed", [1, 2])
def test_the_order_of_what_is_ready_at_once_does_not_matter(seed: int) -> None:
    found = virtual.run(Bursts(3).run(), seed=seed)
    assert found.left == WorkerLoad()
    assert sum(map(len, found.waits)) == 3 * BATCH


def test_at_the_end_a_function_has_its_own_settings_again() -> None:
    async def main() -> list[Any]:
        one, seen = package(name="judge", keep_alive_s=7.0, warm=1), StatisticsMeter(Books())
        async with SimulatedBackend({"judge": lambda sample: 1.0}, meter=seen) as backend:
            await backend.deploy(one)
            settings = ScalingSpec.model_validate({"keep_alive": {"min_s": 3.0, "max_s": 3.0}})
            async with Scaler({"judge": one.spec}, [backend], seen=seen, meter=seen, settings=settings) as scaler:
                await asyncio.gather(*(backend.invoke("judge", [], deadline_s=9.0) for _ in range(3)))
                scaler.tick()
                sizes = [backend.load("judge").workers]
                await asyncio.sleep(5.0)
                sizes.append(backend.load("judge").workers)
                await asyncio.gather(*(backend.invoke("judge", [], deadline_s=9.0) for _ in range(3)))
            await asyncio.sleep(5.0)
            sizes.append(backend.load("judge").workers)
            await asyncio.sleep(3.0)
            return [*sizes, backend.load("judge")]

    assert virtual.run(main()) == [3, 1, 3, WorkerLoad(1)]


def test_a_second_provider_gets_the_forecast_only_when_the_first_is_left_alone() -> None:
    async def main() -> list[tuple[int, int]]:
        one, seen, rollouts, on = package(name="judge"), StatisticsMeter(Books()), Rollouts(), ["simulated"]
        one = package(name="judge", concurrency=8, keep_alive_s=1.0)
        async with contextlib.AsyncExitStack() as stack:
            chain = []
            for provider in ("simulated", "other"):
                backend = SimulatedBackend({"judge": lambda sample: 1.0}, meter=seen)
                backend.provider = provider
                await stack.enter_async_context(backend)
                await backend.deploy(one)
                await backend.invoke("judge", [{"id": "a", "messages": []}], deadline_s=9.0)
                chain.append(backend)
            rollouts.asked = [("math", 10.0)] * 20
            rollouts.began = {str(n): -9.0 for n in range(1000)}
            around = ScalerContext(rollouts, route=lambda function: on[0])
            settings = ScalingSpec.model_validate({"reactive": OFF})
            scaler = Scaler({"judge": one.spec}, chain, seen=seen, meter=seen, settings=settings, around=around)
            found = []
            for provider in ("simulated", "other"):
                on[0] = provider
                scaler.tick()
                await asyncio.sleep(5.0)
                found.append((chain[0].load("judge").workers, chain[1].load("judge").workers))
            return found

    first, second = virtual.run(main())
    assert first[0] > 1 >= first[1]
    assert second[1] > 1 >= second[0]


class Slow(Modelled):
    """`ProvisionedBackend` on virtual time: a change takes `takes_s`; it may fail, or hang."""

    calls_included = False

    def __init__(self, level: int = 0, *, takes_s: float = 90.0) -> None:
        super().__init__(takes(1.0), provider="slow")
        self.level = level
        self.takes_s = takes_s
        self.asked: list[tuple[float, int]] = []
        self.fails: list[Exception] = []
        self.hangs = False

    def load(self, function: str) -> WorkerLoad:
        return WorkerLoad(busy=self.running)

    async def provisioned(self, function: str) -> int:
        return self.level

    async def provision(self, function: str, workers: int) -> None:
        self.asked.append((asyncio.get_running_loop().time(), workers))
        if self.fails:
            raise self.fails.pop(0)
        if self.hangs:
            await asyncio.Event().wait()
        if workers > self.level:
            await asyncio.sleep(self.takes_s)
        self.level = workers


class Paid:
    """A scaler over `Slow` while `body` runs."""

    def __init__(self, backend: Slow, remember: pathlib.Path | None = None, **settings: Any) -> None:
        self.backend = backend
        self.books, self.decisions = Books(), list[ScalingDecision]()
        self.seen = StatisticsMeter(self.books)
        self.one = package(name="judge", concurrency=10, memory_mb=1024)
        wanted = {"provisioned": True, "forecast": OFF, **settings}
        self.scaler = Scaler(
            {"judge": self.one.spec},
            [backend],
            seen=self.seen,
            meter=self.seen,
            settings=ScalingSpec.model_validate(wanted),
            around=ScalerContext(tell=self.decisions.append, remember=remember),
        )

    async def busy(self, calls: int, seconds: float) -> None:
        """So many calls at once for so long."""
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds

        async def caller() -> None:
            while loop.time() < end - 1e-6:
                reply = await self.backend.invoke("judge", [{"id": "a", "metadata": {}}], deadline_s=60.0)
                assert reply.fault is None

        await asyncio.gather(*(caller() for _ in range(calls)))

    def levels(self) -> list[tuple[int, int]]:
        return [(change.before, change.after) for change in self.decisions if not change.failed]


def test_a_paid_level_follows_rarely_and_is_set_back_and_billed() -> None:
    async def main() -> Any:
        paid = Paid(Slow(level=1, takes_s=20.0))
        async with paid.scaler:
            await paid.busy(3, 200.0)
            high = paid.backend.level
            await asyncio.sleep(700.0)
            low = paid.backend.level
        return paid, high, low

    paid, high, low = virtual.run(main())
    assert (high, low, paid.backend.level) == (5, 1, 1)
    assert paid.levels() == [(1, 3), (3, 5), (5, 1)], "three calls at 0.7 a worker"
    times = [t for t, _ in paid.backend.asked]
    assert times[0] < 5.0, "the first need is no wait"
    assert all(b - a >= 60.0 for a, b in itertools.pairwise(times) if b < 900.0)
    spans = [s for s in paid.books.spans if s.worker == "provisioned"]
    assert {(s.state, s.provider) for s in spans} == {(WorkerState.IDLE, "slow")}
    assert all(a.t1 == b.t0 for a, b in itertools.pairwise(spans)), "every second once"
    assert max(s.t1 - s.t0 for s in spans) < 160.0, "reported as it stands, but while a change is under way"
    billed = sum((s.t1 - s.t0) * s.memory_mb for s in spans) / 1024.0
    steps = [(0.0, 1), *paid.backend.asked, (900.0, 0)]
    due = sum((b[0] - a[0]) * a[1] for a, b in itertools.pairwise(steps))
    assert billed == pytest.approx(due, rel=1e-3), "each level from when it was asked for"


def test_where_calls_are_billed_for_the_same_seconds_only_the_rest_is() -> None:
    async def main() -> Paid:
        backend = Slow(level=2, takes_s=0.0)
        backend.calls_included = True
        paid = Paid(backend, reactive={"utilisation": 1.0})
        async with paid.scaler:
            for _ in range(100):
                await paid.busy(1, 1.0)
                paid.seen.invocation(backend.calls[-1])
        return paid

    paid = virtual.run(main())
    spans = [s for s in paid.books.spans if s.worker == "provisioned"]
    assert sum((s.t1 - s.t0) * s.memory_mb for s in spans) / 1024.0 == pytest.approx(100.0, rel=0.05), "200 - 100 busy"


def test_a_refusal_is_told_and_tried_again_a_minute_later_and_is_no_fault() -> None:
    async def main() -> Paid:
        backend = Slow(takes_s=1.0)
        backend.fails = [BackendFailed("no quota", remedy="ask for it"), RuntimeError("odd")]
        paid = Paid(backend)
        async with paid.scaler:
            await paid.busy(2, 150.0)
        return paid

    paid = virtual.run(main())
    assert [c.failed for c in paid.decisions][:2] == ["BackendFailed: no quota (ask for it)", "RuntimeError: odd"]
    times = [t for t, _ in paid.backend.asked]
    assert [b - a for a, b in itertools.pairwise(times[:3])] == pytest.approx([60.0, 60.0], abs=2.0)
    assert paid.levels() == [(0, 3), (3, 0)]
    assert paid.backend.level == 0


def test_a_provider_that_never_answers_holds_up_neither_calls_nor_the_end() -> None:
    async def main() -> tuple[float, list[str]]:
        backend = Slow()
        backend.hangs = True
        paid, loop = Paid(backend), asyncio.get_running_loop()
        async with paid.scaler:
            await paid.busy(2, 20.0)
            ended = loop.time()
        return loop.time() - ended, [c.failed for c in paid.decisions]

    seconds, failures = virtual.run(main())
    assert seconds <= 31.0
    assert failures == ["TimeoutError: "]


@pytest.mark.parametrize("cancels", [1, 3])
def test_a_cancelled_owner_sets_back_all_the_same(cancels: int) -> None:
    async def owner(paid: Paid) -> None:
        async with paid.scaler:
            await paid.busy(2, 1000.0)

    async def main() -> int:
        paid = Paid(Slow(level=1, takes_s=5.0))
        async with asyncio.TaskGroup() as group:
            task = group.create_task(owner(paid))
            await asyncio.sleep(100.0)
            assert paid.backend.level == 3
            paid.backend.takes_s = 5.0
            for _ in range(cancels):
                task.cancel()
                await asyncio.sleep(0.0)
        assert task.cancelled()
        return paid.backend.level

    assert virtual.run(main()) == 1


def test_what_a_killed_life_left_is_not_taken_for_the_users(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "provisioned.json"

    async def killed() -> Slow:
        paid = Paid(Slow(level=1, takes_s=1.0), file)
        await paid.scaler.__aenter__()
        await paid.busy(3, 30.0)
        return paid.backend  # and nothing is ever closed

    left = virtual.run(killed())
    assert left.level == 3
    assert json.loads(file.read_text()) == {"slow/judge": 1}

    async def resumed() -> list[tuple[int, int]]:
        left.asked.clear()
        paid = Paid(left, file)
        async with paid.scaler:
            await asyncio.sleep(5.0)
        return paid.levels()

    assert virtual.run(resumed()) == [(3, 1)]
    assert left.level == 1
    assert json.loads(file.read_text()) == {}


def test_it_is_set_back_even_if_the_next_life_does_not_pay_for_any(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "provisioned.json"
    file.write_text('{"slow/judge": 2}')

    async def main() -> int:
        paid = Paid(Slow(level=9), file, provisioned=False)
        async with paid.scaler:
            await asyncio.sleep(1.0)
            return paid.backend.level

    assert virtual.run(main()) == 2


@pytest.mark.parametrize("settings", [{"provisioned": False}, {"enabled": False}])
def test_nothing_is_paid_for_unless_it_is_asked_for(settings: dict[str, bool]) -> None:
    async def main() -> Paid:
        paid = Paid(Slow(), **settings)
        async with paid.scaler:
            await paid.busy(2, 30.0)
        return paid

    paid = virtual.run(main())
    assert (paid.backend.asked, paid.decisions, paid.books.spans) == ([], [], [])


def test_a_file_that_is_none_is_left_alone(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "provisioned.json"
    file.write_text("[1")

    async def main() -> None:
        async with Paid(Slow(), file).scaler:
            await asyncio.sleep(1.0)

    virtual.run(main())
    assert "is not read" in caplog.text
