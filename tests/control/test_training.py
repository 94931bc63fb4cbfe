"""A batch that the trainer refuses is given up with its reason; it costs neither the run nor its resume."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from rollart.control.buffer import BatchDeadline
from rollart.control.training import MAX_REFUSED_BATCHES
from rollart.errors import TrainerRefused
from rollart.ledger.events import STEP_FAILED
from rollart.model import TrainReport, TrainSample
from rollart.settings.rollout import RedundancySpec
from rollart.sim import loop
from rollart.testing.ledger import MemoryRecorder
from rollart.testing.parts import SimulatedTrainer
from rollart.testing.run import SimulatedRun, make_simulated_run


def refusing(*calls: int) -> SimulatedRun:
    run = make_simulated_run(
        quotas={"a": (4, 2)}, steps=3, engine_s=lambda r: r.expovariate(1.0), train_s=lambda r: 0.5
    )
    run.trainer.refuse_steps = frozenset(calls)
    return run


def test_a_refused_batch_is_dropped_and_the_run_goes_on() -> None:
    run = refusing(2)
    loop.run(run.run(), seed=1)
    assert len(run.trainer.batches) == 3
    assert run.journal.dropped == dict.fromkeys(run.journal.dropped, "refused")  # type: ignore[attr-defined]
    assert len(run.journal.dropped) == 2  # type: ignore[attr-defined]
    assert sum(run.control.scheduler.admission.slots.outstanding.values()) == 0
    trained = [s.id for _, batch in run.trainer.batches for s in batch]
    assert len(trained) == len(set(trained)) == 12


class Choosy(SimulatedTrainer):
    """Refuses one sample of the batches that it is given first, by name."""

    left = 1

    def choose(self, samples: Sequence[TrainSample]) -> None:
        if samples and self.left:
            self.left -= 1
            raise TrainerRefused("a log-probability is not finite", samples=(samples[-1].id,))

    async def train(self, samples: Sequence[TrainSample], version: int) -> TrainReport:
        self.choose(samples)
        return await super().train(samples, version)

    async def accumulate(self, samples: Sequence[TrainSample]) -> None:
        self.choose(samples)
        await super().accumulate(samples)


def choosy(**more: object) -> SimulatedRun:
    run = make_simulated_run(quotas={"a": (4, 2), "b": (4, 2)}, steps=3, engine_s=lambda r: r.expovariate(1.0), **more)  # type: ignore[arg-type]
    run.trainer = Choosy(0, lambda r: 0.5)
    return run


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("schedule", ["rollart", "sync", "one_off"])
def test_only_the_group_of_a_sample_that_is_named_is_dropped(schedule: str, streams: bool) -> None:
    run = choosy(schedule=schedule, alpha=0 if schedule == "sync" else 1)
    run.trainer.streams = streams and schedule == "rollart"
    loop.run(run.run(), seed=1)
    assert list(run.journal.dropped.values()).count("refused") == 1  # type: ignore[attr-defined]
    batches = [samples for _, samples in run.trainer.batches]
    assert [len(b) for b in batches] == [8, 8, 8], "another group takes its place"
    trained = [s.id for b in batches for s in b]
    assert len(set(trained)) == 24
    assert not {s.group for b in batches for s in b} & set(run.journal.dropped)  # type: ignore[attr-defined]


def test_a_batch_that_comes_in_one_piece_goes_without_the_group() -> None:
    run = choosy(due=BatchDeadline(60.0))
    loop.run(run.run(), seed=1)
    assert list(run.journal.dropped.values()).count("refused") == 1  # type: ignore[attr-defined]
    assert [len(samples) for _, samples in run.trainer.batches] == [6, 8, 8]


def test_refusals_in_a_row_end_the_run_with_the_trainers_words() -> None:
    run = refusing(*range(2, 2 + MAX_REFUSED_BATCHES))
    with pytest.raises(BaseExceptionGroup) as caught:
        loop.run(run.run(), seed=1)
    refused = caught.value.subgroup(TrainerRefused)
    assert refused is not None
    assert "will not have it" in str(refused.exceptions[0].args or refused.exceptions[0])


class SlowToDrop(MemoryRecorder):
    """A journal whose disk is slow."""

    async def drop(self, group: str, reason: str) -> None:
        await asyncio.sleep(0.5)
        await super().drop(group, reason)


@pytest.mark.parametrize("schedule", ["rollart", "sync_plus"])
def test_a_close_during_the_schedulers_own_await_ends_it(schedule: str) -> None:
    """Training ends while the scheduler writes down which redundant groups it dropped: the wake-up that this sends
    must not be lost before the scheduler sleeps."""
    for seed in range(5):
        journal = SlowToDrop()
        run = make_simulated_run(
            steps=2,
            schedule=schedule,
            alpha=int(schedule == "rollart"),
            redundancy=RedundancySpec(groups=2.0),
            engine_s=lambda r: r.expovariate(1.0),
            journal=journal,
            recorder=journal,
        )
        loop.run(run.run(), seed=seed)
        assert len(run.trainer.batches) == 2


@pytest.mark.parametrize(("streams", "fails_from"), [(False, 2), (True, 4)])
def test_a_step_that_ends_the_run_leaves_the_names_of_its_samples(streams: bool, fails_from: int) -> None:
    """For `rollart bundle`: step 1 is trained, each attempt at step 2 fails."""
    memory = MemoryRecorder()
    run = make_simulated_run(steps=3, fail_steps=frozenset(range(fails_from, 40)), journal=memory, recorder=memory)
    run.trainer.streams = streams
    with pytest.raises(BaseExceptionGroup):
        loop.run(run.run(), seed=1)
    (failed,) = [event.fields for event in memory.events if event.kind == STEP_FAILED]
    ids = str(failed["samples"]).split()
    assert (failed["step"], failed["version"], bool(failed["why"])) == (2, 1, True)
    assert len(set(ids)) == len(ids) > 0
    assert not {sample.id for _, batch in run.trainer.batches for sample in batch} & set(ids)
    if not streams:
        assert len(ids) == 4, "the whole batch"
