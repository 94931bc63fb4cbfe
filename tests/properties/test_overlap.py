"""Publishes concurrent with the next step: the current version is complete, a lost one is trained again, once."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.control.training import StepDone
from rollart.model import WeightsRef
from rollart.sim import loop
from rollart.testing.ledger import MemoryRecorder
from rollart.testing.parts import SimulatedTrainer
from rollart.testing.run import SimulatedRun as World
from rollart.testing.run import make_simulated_run
from tests.properties.test_invariants import watch_outstanding, worlds


class Watched(SimulatedTrainer):
    """Notes when each version was complete, and which were trained from while another was on its way."""

    def __init__(self, like: SimulatedTrainer) -> None:
        super().__init__(like.seed, like.seconds, like.fail_steps, streams=like.streams)
        self.complete: list[int] = []
        self.pushing = 0
        self.beside = 0
        self.working = False

    async def publish(self, version: int) -> WeightsRef:
        self.pushing += 1
        self.beside += self.working
        assert self.pushing == 1, "one version is on its way at a time"
        try:
            ref = await super().publish(version)
        finally:
            self.pushing -= 1
        self.complete.append(version)
        return ref

    async def _work(self) -> None:
        self.working = True
        self.beside += self.pushing
        try:
            await super()._work()
        finally:
            self.working = False


@st.composite
def overlapping(
    draw: st.DrawFn, schedules: tuple[str, ...] = ("one_off", "areal", "rollart", "paced", "roll_flash")
) -> World:
    world = draw(worlds(schedules))
    push = draw(st.sampled_from([0.1, 3.0, 20.0]))
    world.trainer = Watched(world.trainer)
    # Below the lease of a publish: an expired lease is one more death of the trainer.
    world.trainer.push_s = lambda r: min(push * r.expovariate(1.0), 100.0)
    pushes = draw(st.sampled_from([frozenset(), frozenset({1}), frozenset({2, 3})]))
    world.trainer.fail_pushes = pushes
    if len(pushes) + len(world.trainer.fail_steps) > 2:
        world.trainer.fail_steps &= {1}  # three deaths in a step end a run
    world.overlap = True
    return world


def lineage(world: World) -> dict[int, tuple[str, ...]]:
    """By the version that it was trained from, the batch that became the next one: the last try."""
    return {version: tuple(s.id for s in batch) for version, batch in world.trainer.batches}


def sound(world: World, last: int) -> None:
    final = lineage(world)
    assert sorted(final) == list(range(last))
    trained = Counter(i for ids in final.values() for i in ids)
    assert all(n == 1 for n in trained.values()), "no sample is in two versions"
    assert {i for i, end in world.journal.gone.items() if end == "trained"} == set(trained)  # type: ignore[attr-defined]
    for version, batch in world.trainer.batches:
        for sample in batch:
            assert version - sample.v0 <= world.alpha or world.schedule == "areal", "I3"
    by_version: dict[int, set[tuple[str, ...]]] = {}
    for version, batch in world.trainer.batches:
        by_version.setdefault(version, set()).add(tuple(sorted(s.id for s in batch)))
    assert all(len(tries) == 1 for tries in by_version.values()) or world.trainer.streams, "the same batch again"


@settings(max_examples=28, deadline=None)
@given(overlapping(), st.integers(0, 2**32))
def test_invariants_hold_with_a_version_on_its_way(world: World, fuzz: int) -> None:
    seen = watch_outstanding(world)
    current: list[int] = []

    class Published(list[int]):
        def append(self, version: int) -> None:
            assert version in world.trainer.complete, "current means complete"  # type: ignore[attr-defined]
            assert world.journal.versions[-1][0] == version, "and committed"  # type: ignore[attr-defined]
            current.append(version)
            super().append(version)

    world.published = Published()
    done: list[StepDone] = []
    world.on_step = done.append
    loop.run(world.run(), seed=fuzz)
    sound(world, world.steps)
    assert current == list(range(1, world.steps + 1)) == [d.version for d in done]
    assert [d.step for d in done] == list(range(world.steps))
    assert all(outstanding <= bound for outstanding, bound in seen), "I4"
    assert sum(world.control.scheduler.admission.slots.outstanding.values()) == 0
    assert not world.leases.open


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(overlapping(), st.integers(0, 2**32), st.floats(0.0, 60.0))
def test_a_controller_killed_at_any_moment_resumes(world: World, fuzz: int, moment: float) -> None:
    """Two batches may have been trained and not committed: their samples are there, and are trained into one version
    each."""
    import asyncio

    async def killed() -> None:
        task = asyncio.get_running_loop().create_task(world.run())
        asyncio.get_running_loop().call_later(moment, task.cancel)
        await asyncio.gather(task, return_exceptions=True)

    world.journal = world.recorder = MemoryRecorder()
    loop.run(killed(), seed=fuzz)
    journal = world.journal
    committed = journal.versions[-1][0] if journal.versions else 0
    second = make_simulated_run(
        quotas={d.name: (d.quota, d.group_size) for d in world.domains},
        alpha=world.alpha,
        schedule=world.schedule,
        steps=world.steps,
        version=committed,
        journal=journal,
        engine_s=lambda r: r.expovariate(1.0),
        env_s=lambda r: r.lognormvariate(0.0, 1.0),
    )
    second.overlap = True
    second.trainer.push_s = lambda r: r.expovariate(0.5)

    async def resume() -> None:
        recovered = await journal.recover()
        if recovered is None and journal.groups:
            return  # nothing was ever committed: such a run starts over
        await second.run(recovered)

    if committed < world.steps:
        loop.run(resume(), seed=fuzz + 1)
        if second.trainer.batches:
            assert journal.versions[-1][0] == world.steps
    kept = {v: ids for v, ids in lineage(world).items() if v < committed}
    ids = [i for batch in [*kept.values(), *lineage(second).values()] for i in batch]
    assert len(ids) == len(set(ids)), "nothing is in two versions"


def test_training_goes_on_beside_a_long_push() -> None:
    """Training of 6 s and a push of 6 s in turn take 12 s a step; beside each other they take 6, where rollout keeps
    up."""
    seconds = {}
    for overlap in (False, True):
        world = make_simulated_run(
            quotas={"a": (8, 2)}, alpha=3, steps=12, engine_s=lambda r: 0.1, train_s=lambda r: 6.0
        )
        world.trainer = Watched(world.trainer)
        world.trainer.push_s = lambda r: 6.0
        world.overlap = overlap
        ended: list[float] = []
        world.on_step = lambda done, ended=ended: ended.append(done.t1)  # type: ignore[misc]
        loop.run(world.run(), seed=1)
        seconds[overlap] = (ended[-1] - ended[3]) / 8
        assert bool(world.trainer.beside) is overlap
    assert seconds[False] == pytest.approx(12.0, rel=0.05)
    assert seconds[True] == pytest.approx(6.0, rel=0.05)


def test_schedules_of_one_batch_at_a_time_still_wait() -> None:
    for schedule in ("sync", "sync_plus"):
        world = make_simulated_run(alpha=0, schedule=schedule, steps=3, train_s=lambda r: 1.0)
        world.trainer = Watched(world.trainer)
        world.trainer.push_s = lambda r: 5.0
        world.overlap = True
        loop.run(world.run(), seed=1)
        assert world.trainer.beside == 0
        assert not world.trainer.staged


def test_the_next_batch_of_one_off_waits_for_the_weights_that_it_begins_with() -> None:
    world = make_simulated_run(
        alpha=1, schedule="one_off", steps=6, engine_s=lambda r: 0.2, train_s=lambda r: random.Random(1).random()
    )
    world.trainer = Watched(world.trainer)
    world.trainer.push_s = lambda r: 4.0
    world.overlap = True
    loop.run(world.run(), seed=1)
    assert world.trainer.beside
    for version, batch in world.trainer.batches:
        assert {version - s.v0 for s in batch} == {min(version, 1)}, "the lag is one, by order"
