"""Batches on a clock: late ones are smaller, and no group starts for the samples that they went without."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.control.buffer import BatchDeadline
from rollart.model import TrainReport, TrainSample
from rollart.sim import loop
from rollart.testing.ledger import MemoryRecorder
from rollart.testing.parts import SimulatedTrainer
from rollart.testing.run import SimulatedRun, make_simulated_run
from tests.properties.test_invariants import worlds


class Given(SimulatedTrainer):
    """Notes each batch as it is given, trained or not."""

    def __init__(self, like: SimulatedTrainer) -> None:
        super().__init__(like.seed, like.seconds, like.fail_steps, like.refuse_steps, push_s=like.push_s)
        self.given: dict[frozenset[str], bool] = {}
        """Its groups, and whether the trainer refused it."""

    async def train(self, samples: Sequence[TrainSample], version: int) -> TrainReport:
        groups = frozenset(s.group for s in samples)
        self.given[groups] = False
        try:
            return await super().train(samples, version)
        except Exception as error:
            self.given[groups] = type(error).__name__ == "TrainerRefused"
            raise


@st.composite
def late(draw: st.DrawFn) -> SimulatedRun:
    world = draw(worlds(("areal", "rollart", "roll_flash")))
    world.due = BatchDeadline(draw(st.sampled_from([0.2, 1.0, 5.0])), draw(st.sampled_from([0.1, 0.5])))
    world.trainer.streams = False
    world.overlap = draw(st.booleans())
    world.trainer.refuse_steps = draw(st.sampled_from([frozenset(), frozenset({1})])) - world.trainer.fail_steps
    push = draw(st.sampled_from([0.1, 3.0]))
    world.trainer.push_s = lambda r: push * r.expovariate(1.0)
    world.trainer = Given(world.trainer)
    return world


def watch(world: SimulatedRun, *, done: int, journal: MemoryRecorder) -> None:
    """At every admission: no more groups run or wait for batches to come than these will take."""
    trainer = world.trainer
    assert isinstance(trainer, Given)

    class Watched(MemoryRecorder):
        async def admit(self, group: str, domain: str, seed: int) -> None:
            await super().admit(group, domain, seed)
            taken = [groups for groups, refused in trainer.given.items() if not refused]
            left = world.steps - done - len(taken)
            ahead: Counter[str] = Counter()
            for held, (name, samples) in world.control.scheduler.admission.slots.held.items():
                if not any(held in groups for groups in taken):
                    ahead[name] += samples
            for d in world.domains:
                assert d.name != domain or ahead[d.name] <= left * d.quota, "it would never be trained"

    watched = Watched()
    for name in MemoryRecorder.__slots__:
        setattr(watched, name, getattr(journal, name))
    world.journal = world.recorder = watched


@settings(max_examples=21, deadline=None)
@given(late(), st.integers(0, 2**32))
def test_no_group_starts_that_no_batch_can_take(world: SimulatedRun, fuzz: int) -> None:
    watch(world, done=0, journal=MemoryRecorder())
    loop.run(world.run(), seed=fuzz)
    assert world.published == list(range(1, world.steps + 1))
    assert sum(world.control.scheduler.admission.slots.outstanding.values()) == 0
    assert all(g.state != "live" for g in world.journal.groups.values()), "every group ended"  # type: ignore[attr-defined]


@settings(max_examples=40, deadline=None)
@given(late(), st.integers(0, 2**32), st.floats(0.5, 30.0))
def test_a_resume_counts_what_late_batches_went_without(world: SimulatedRun, fuzz: int, moment: float) -> None:
    async def killed() -> None:
        task = asyncio.get_running_loop().create_task(world.run())
        asyncio.get_running_loop().call_later(moment, task.cancel)
        await asyncio.gather(task, return_exceptions=True)

    journal = MemoryRecorder()
    watch(world, done=0, journal=journal)
    loop.run(killed(), seed=fuzz)
    if not journal.versions or (done := journal.versions[-1][1]) == world.steps:
        return
    second = make_simulated_run(
        quotas={d.name: (d.quota, d.group_size) for d in world.domains},
        alpha=world.alpha,
        schedule=world.schedule,
        steps=world.steps,
        version=done,
        engine_s=lambda r: r.expovariate(1.0),
        due=world.due,
    )
    second.trainer = Given(second.trainer)
    watch(second, done=done, journal=journal)

    async def resume() -> None:
        await second.run(await second.journal.recover())

    loop.run(resume(), seed=fuzz + 1)
    assert journal.versions[-1][0] == world.steps
    assert all(g.state != "live" for g in journal.groups.values()), "every group ended"
