"""Invariants I1-I6 of the control plane under random interleavings, faults and durations, on the virtual loop."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.policy.schedules import FIXED_LAG, SCHEDULES
from rollart.serving.kv_admission import ConcurrencySettings, TrajectoryDispatch
from rollart.settings.rollout import ConcurrencySpec
from rollart.sim import loop
from rollart.strategies.skew_aware import SkewAwareDispatcher
from rollart.testing.ledger import MemoryRecorder
from rollart.testing.run import SimulatedRun as World
from rollart.testing.run import make_simulated_run


@st.composite
def worlds(draw: st.DrawFn, schedules: tuple[str, ...] = tuple(SCHEDULES)) -> World:
    schedule = draw(st.sampled_from(schedules))
    sizes = draw(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 3)), min_size=1, max_size=2))
    scale = draw(st.sampled_from([0.1, 1.0, 5.0]))
    world = make_simulated_run(
        quotas={f"d{i}": (groups * size, size) for i, (groups, size) in enumerate(sizes)},
        alpha=FIXED_LAG[schedule] if schedule in FIXED_LAG else draw(st.integers(0, 3)),
        steps=draw(st.integers(1, 5)),
        engines=draw(st.integers(1, 3)),
        turns=draw(st.integers(1, 4)),
        tokens=draw(st.integers(1, 4)),
        seed=draw(st.integers(0, 10_000)),
        engine_s=lambda r: r.expovariate(1.0),
        env_s=lambda r: r.lognormvariate(0.0, 1.5),
        reward_s=lambda r: r.expovariate(2.0),
        train_s=lambda r: scale * r.expovariate(1.0),
        env_faults=draw(st.sampled_from([0.0, 0.05])),
        reward_faults=draw(st.sampled_from([0.0, 0.05])),
        fail_steps=draw(st.sampled_from([frozenset(), frozenset({1}), frozenset({2, 3})])),
        max_attempts=draw(st.integers(1, 4)),
        schedule=schedule,
    )
    world.trainer.streams = draw(st.booleans())
    world.concurrency = draw(entrances())
    for engine in world.engines:
        engine.kv_tokens = draw(st.sampled_from([None, 16, 64]))
    return world


@st.composite
def entrances(draw: st.DrawFn) -> ConcurrencySettings | None:
    """How many trajectories an engine takes: as many as come, or as its KV memory bears, by a search that moves."""
    if draw(st.booleans()):
        return None
    start, interval = draw(st.integers(1, 4)), draw(st.sampled_from([0.5, 5.0]))
    aimd = ConcurrencySpec(
        start=start, most=8, increase=draw(st.integers(1, 2)), interval_s=interval, settle_s=interval
    )
    return ConcurrencySettings(
        aimd,
        {"d0": 8.0} if draw(st.booleans()) else {},
        dispatch=draw(st.sampled_from([TrajectoryDispatch, SkewAwareDispatcher])),
    )


def watch_outstanding(world: World) -> list[tuple[int, int]]:
    """Check I4 and I2 each time anything is recorded, and at each step."""
    batch = sum(d.quota for d in world.domains)
    seen: list[tuple[int, int]] = []

    class Watched(MemoryRecorder):
        def charge(self, charge: Any) -> None:
            scheduler = world.control.scheduler
            # Counted where they are, not where the slots are kept: under way, waiting for their group, in the buffer.
            groups = scheduler.groups.runs.values()
            outstanding = sum(len(g.running) + len(g.samples) for g in groups) + sum(scheduler.buffer.held.values())
            assert outstanding <= sum(scheduler.admission.slots.outstanding.values())
            seen.append((outstanding, (world.alpha + 1) * batch))
            super().charge(charge)

    world.journal = world.recorder = Watched()
    return seen


@settings(max_examples=20, deadline=None)
@given(worlds(), st.integers(0, 2**32))
def test_invariants_hold_under_any_interleaving(world: World, fuzz: int) -> None:
    seen = watch_outstanding(world)
    loop.run(world.run(), seed=fuzz)
    assert len(world.trainer.batches) == world.steps
    trained: Counter[str] = Counter()
    for version, batch in world.trainer.batches:
        sizes = Counter(s.group for s in batch)
        for sample in batch:
            trained[sample.id] += 1
            assert version - sample.v0 <= world.alpha or world.schedule == "areal", "I3"
            acts = [i for i, m in enumerate(sample.loss_mask) if m]
            assert acts, "a sample has action tokens"
            assert all(sample.versions[i] >= sample.v0 for i in acts), "I1: every action token knows its version"
            assert all(sample.logprobs[i] == -1.0 for i in acts), "I1: and its log-probability"
            assert sample.versions[acts[0]] == sample.v0
        by_domain = {d.name: d for d in world.domains}
        for group, size in sizes.items():
            assert size == by_domain[group.split("-")[0]].group_size, "I6: whole groups"
        assert Counter(s.domain for s in batch) == {d.name: d.quota for d in world.domains}
    assert all(count == 1 for count in trained.values()), "I6: exactly once"
    assert all(outstanding <= bound for outstanding, bound in seen), "I4"
    assert world.published == list(range(1, world.steps + 1))
    assert sum(world.control.scheduler.admission.slots.outstanding.values()) == 0, "every slot came back"
    assert not world.leases.open, "every lease ended"
    assert {i for i, end in world.journal.gone.items() if end == "trained"} == set(trained)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(worlds(schedules=("rollart",)), st.integers(0, 2**32))
def test_no_trajectory_outlives_its_bound(world: World, fuzz: int) -> None:
    """I2: right after a publish, nothing under way is stale, and every abort for staleness was due."""
    late: list[str] = []
    published_at: list[float] = []

    async def main() -> None:
        await world.run()

    original = world.published.append

    class Published(list[int]):
        def append(self, version: int) -> None:
            original(version)
            for run in world.control.scheduler.groups.runs.values():
                late.extend(
                    live.id
                    for live in run.running.values()
                    if live.begun is not None and version - live.begun > world.alpha and live.abort is None
                )
            published_at.append(asyncio.get_running_loop().time())
            super().append(version)

    world.published = Published()
    loop.run(main(), seed=fuzz)
    assert late == []
    for charge in world.recorder.charges:
        if charge.outcome == "stale":
            # The version that was current when it was aborted: one was published at that moment or before.
            current = sum(at <= charge.t1 for at in published_at)
            assert current - charge.v0 > world.alpha, "an abort for staleness was due"
        elif charge.outcome == "finished":
            assert sum(at < charge.t1 for at in published_at) - charge.v0 <= world.alpha


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(worlds(), st.integers(0, 2**32))
def test_same_seed_same_run(world: World, fuzz: int) -> None:
    """Determinism: the whole history is a function of the spec, the seed and the tie-breaking seed."""
    import copy

    twin = copy.deepcopy(world)
    loop.run(world.run(), seed=fuzz)
    loop.run(twin.run(), seed=fuzz)
    assert world.recorder.events == twin.recorder.events
    assert world.recorder.charges == twin.recorder.charges


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(worlds(), st.integers(0, 2**32), st.integers(1, 4))
def test_resume_trains_every_sample_once_and_continues(world: World, fuzz: int, stop_after: int) -> None:
    """A controller killed after any publish continues from the journal: no sample twice, no version skipped."""

    class Killed(BaseException):
        pass

    def stop(done: object) -> None:
        if done.step + 1 == min(stop_after, world.steps):  # type: ignore[attr-defined]
            raise Killed

    world.on_step = stop
    with pytest.raises(BaseExceptionGroup) as caught:
        loop.run(world.run(), seed=fuzz)
    assert caught.value.subgroup(Killed) is not None
    second = make_simulated_run(
        quotas={d.name: (d.quota, d.group_size) for d in world.domains},
        alpha=world.alpha,
        schedule=world.schedule,
        steps=world.steps,
        version=world.journal.versions[-1][0],
        journal=world.journal,
        engine_s=lambda r: r.expovariate(1.0),
        env_s=lambda r: r.lognormvariate(0.0, 1.0),
    )

    async def resume() -> None:
        await second.run(await world.journal.recover())

    loop.run(resume(), seed=fuzz + 1)
    assert len(world.trainer.batches) + len(second.trainer.batches) == world.steps
    ids = [s.id for _, b in [*world.trainer.batches, *second.trainer.batches] for s in b]
    assert len(ids) == len(set(ids))
    assert world.journal.versions[-1][0] == world.steps


@pytest.mark.parametrize("alpha", [0, 1, 2])
def test_intervals_of_every_resource_tile_the_run(alpha: int) -> None:
    world = make_simulated_run(alpha=alpha, steps=4, engine_s=lambda r: r.expovariate(1.0), train_s=lambda r: 2.0)
    loop.run(world.run(), seed=7)
    by_resource: dict[str, list[tuple[float, float]]] = {}
    for interval in world.recorder.intervals:
        by_resource.setdefault(interval.resource, []).append((interval.t0, interval.t1))
    for spans in by_resource.values():
        spans.sort()
        assert all(a[1] == b[0] for a, b in itertools.pairwise(spans))


def test_a_lost_engine_is_replaced_and_nothing_is_lost() -> None:
    world = make_simulated_run(engines=2, steps=4, engine_s=lambda r: 1.0, train_s=lambda r: 0.5)

    async def main() -> None:
        import asyncio

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(world.run())
            await asyncio.sleep(1.5)
            world.engines[0].fail = True

    loop.run(main(), seed=1)
    assert len(world.trainer.batches) == 4
    assert any(i.state == "down" for i in world.recorder.intervals)


def test_a_long_first_turn_is_aborted_at_the_publish_that_makes_it_stale() -> None:
    """I2 for single-turn domains: nothing is decoded to the end only to be thrown away."""
    world = make_simulated_run(
        quotas={"a": (4, 1)},
        steps=12,
        turns=1,
        engine_s=lambda r: 20.0 if r.random() < 0.2 else 0.1,
        train_s=lambda r: 0.5,
    )
    published_at: list[float] = []

    class Published(list[int]):
        def append(self, version: int) -> None:
            published_at.append(asyncio.get_running_loop().time())
            super().append(version)

    world.published = Published()
    loop.run(world.run(), seed=5)
    stale = [c for c in world.recorder.charges if c.outcome == "stale"]
    assert stale
    assert all(c.t1 in published_at for c in stale)
    assert all(c.engine_seconds > 0 for c in stale), "its cost is charged"
