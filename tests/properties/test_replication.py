"""Groups whose members stay together: one engine each, nothing lost, nothing that waits for ever."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Coroutine
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.policy.schedules import FIXED_LAG, SCHEDULES
from rollart.serving.kv_admission import ConcurrencySettings, TrajectoryDispatch
from rollart.settings.rollout import ConcurrencySpec, RedundancySpec, TailBatchingSpec
from rollart.sim import loop
from rollart.strategies.skew_aware import SkewAwareDispatcher
from rollart.testing.run import SimulatedRun, make_simulated_run
from tests.properties.test_filter import died
from tests.properties.test_updating import POLICIES


@st.composite
def worlds(draw: st.DrawFn, *, faults: bool = False) -> SimulatedRun:
    schedule = draw(st.sampled_from(tuple(SCHEDULES)))
    sizes = draw(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 5)), min_size=1, max_size=2))
    policy: dict[str, Any] = {
        "redundancy": RedundancySpec(groups=draw(st.sampled_from([1.0, 1.5])), size=draw(st.sampled_from([1.0, 2])))
    }
    if schedule in ("sync", "sync_plus") and draw(st.booleans()):
        policy = {"tail": TailBatchingSpec(eta_prompts=1.5, eta_responses=1.5)}
    if faults:
        policy["updates"] = POLICIES[draw(st.sampled_from(tuple(POLICIES)))]()
        policy["load_s"] = lambda r: r.expovariate(1.0)
    limit = draw(st.sampled_from([None, 1, 3, 8]))
    if limit is not None:
        aimd = ConcurrencySpec(start=limit, most=limit)
        policy["concurrency"] = ConcurrencySettings(
            aimd, dispatch=draw(st.sampled_from([TrajectoryDispatch, SkewAwareDispatcher]))
        )
    return make_simulated_run(
        quotas={f"d{i}": (groups * size, size) for i, (groups, size) in enumerate(sizes)},
        alpha=FIXED_LAG[schedule] if schedule in FIXED_LAG else draw(st.integers(0, 3)),
        steps=draw(st.integers(1, 4)),
        engines=draw(st.integers(1, 4)),
        turns=draw(st.integers(1, 3)),
        seed=draw(st.integers(0, 10_000)),
        engine_s=lambda r: r.expovariate(1.0),
        env_s=draw(st.sampled_from([None, lambda r: r.lognormvariate(0.0, 1.5)])),
        reward_s=lambda r: r.expovariate(2.0),
        train_s=lambda r: r.expovariate(1.0),
        env_faults=0.05 if faults else 0.0,
        reward_faults=0.05 if faults else 0.0,
        schedule=schedule,
        colocation=True,
        **policy,
    )


def watched(world: SimulatedRun) -> dict[str, set[str]]:
    """The engines that each group's first attempts had a turn on, filled as the world runs. Seats add up
    at every turn."""
    seen: dict[str, set[str]] = defaultdict(set)

    def watch(engine: Any) -> None:
        generate = engine.generate

        async def watching(request: Any) -> Any:
            group, _, member = request.session.rpartition(".")
            if "r" not in member:
                seen[group].add(engine.id)
            seats(world)
            return await generate(request)

        engine.generate = watching

    for engine in world.engines:
        watch(engine)
    return seen


async def bounded(run: Coroutine[Any, Any, None]) -> None:
    """Looks at KV memory go on as long as anybody waits, so a wedge would be no deadlock."""
    async with asyncio.timeout(20_000):
        await run


def seats(world: SimulatedRun) -> None:
    """Reserved slots of engines are those that groups reserved and have not used."""
    turns = world.control.gateway.turns
    assert turns.colocation is not None
    for member in turns.registry.members.values():
        units = [u for u in turns.colocation.units.values() if u.sticky is member]
        assert member.awaited == sum(u.free for u in units)
        assert member.kv.taken - len(member.kv) == member.awaited


def ended(world: SimulatedRun) -> None:
    """Every step was trained, every group ended, and no slot stays reserved."""
    assert len(world.trainer.batches) == world.steps
    assert all(g.state != "live" for g in world.journal.groups.values())  # type: ignore[attr-defined]
    assert sum(world.control.scheduler.admission.slots.outstanding.values()) == 0
    turns = world.control.gateway.turns
    assert turns.colocation is not None
    assert not turns.colocation.units
    assert all(m.awaited == 0 and m.kv.taken == len(m.kv) for m in turns.registry.members.values())


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(worlds(), st.integers(0, 2**32))
def test_every_group_lives_on_one_engine_and_gives_its_seats_back(world: SimulatedRun, fuzz: int) -> None:
    seen = watched(world)
    loop.run(bounded(world.run()), seed=fuzz)
    ended(world)
    assert seen
    assert all(len(engines) == 1 for engines in seen.values())


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(worlds(faults=True), st.integers(0, 2**32), st.lists(st.floats(0.1, 20.0), min_size=1, max_size=3))
def test_engines_that_die_wedge_no_group(world: SimulatedRun, fuzz: int, deaths: list[float]) -> None:
    """One comes back after three seconds; all may be away at once, or have different weights."""
    watched(world)

    async def die() -> None:
        for n, pause in enumerate(deaths):
            await asyncio.sleep(pause)
            engine = world.engines[n % len(world.engines)]
            engine.fail = True
            await asyncio.sleep(0.5)
            engine.fail = False

    async def run() -> None:
        async with asyncio.TaskGroup() as tasks:
            chaos = tasks.create_task(die())
            await world.run()
            chaos.cancel()

    world.max_attempts = 50
    loop.run(bounded(run()), seed=fuzz)
    ended(world)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(worlds(), st.integers(0, 2**32), st.integers(0, 60))
def test_a_resume_holds_what_is_left_of_a_group_together(world: SimulatedRun, fuzz: int, left: int) -> None:
    """The members that a crashed run still owes take seats for themselves alone."""
    journal = died(world, bounded(world.run()), fuzz, left)
    if journal is None:
        return  # it came through, or died before it had anything to resume from
    done = len(journal.versions)

    async def resume() -> SimulatedRun:
        recovered = await journal.recover()
        assert recovered is not None
        second = make_simulated_run(
            quotas={d.name: (d.quota, d.group_size) for d in world.domains},
            alpha=world.alpha,
            schedule=world.schedule,
            steps=world.steps,
            journal=journal,
            recorder=journal,
            version=recovered.version,
            seed=7,
            redundancy=world.redundancy,
            tail=world.tail,
            colocation=True,
            concurrency=world.concurrency,
        )
        watched(second)
        await second.run(recovered)
        return second

    second = None

    async def again() -> None:
        nonlocal second
        second = await resume()

    loop.run(bounded(again()), seed=fuzz + 1)
    assert second is not None
    assert len(second.trainer.batches) == world.steps - done
    second.steps = len(second.trainer.batches)
    ended(second)


def rollout_s(*, colocation: bool, seed: int) -> tuple[float, int]:
    """Seconds of a step of 12 groups of 8 with a heavy tail, and the most that lived on an engine; four engines that
    take 8 each."""
    world = make_simulated_run(
        quotas={"d": (96, 8)},
        alpha=0,
        steps=1,
        engines=4,
        turns=1,
        seed=seed,
        schedule="sync_plus",
        engine_s=lambda r: r.lognormvariate(0.0, 1.2),
        colocation=colocation,
        concurrency=ConcurrencySettings(ConcurrencySpec(start=8, most=8)),
    )
    most = 0

    async def run() -> float:
        await world.run()
        return asyncio.get_running_loop().time()

    def watch(engine: Any) -> None:
        generate = engine.generate

        async def watching(request: Any) -> Any:
            nonlocal most
            most = max(most, *(m.kv.taken for m in world.control.gateway.registry.members.values()))
            return await generate(request)

        engine.generate = watching

    for engine in world.engines:
        watch(engine)
    return loop.run(run()), most


@pytest.mark.slow
def test_replication_shortens_a_rollout_with_a_heavy_tail() -> None:
    """A seat whose response has ended takes the next one, instead of waiting for the longest of its group."""
    apart, whole = ([rollout_s(colocation=t, seed=n) for n in range(5)] for t in (False, True))
    assert all(most == 8 for _, most in apart + whole)
    assert sum(s for s, _ in apart) < 0.8 * sum(s for s, _ in whole)
