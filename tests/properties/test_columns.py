"""Columns that are filled while the batch is rolled out: each row once per task, whole groups, nothing lost or trained
twice, whatever dies."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.control.buffer import MAX_ROWS_PER_CALL, BatchDeadline, SampleColumn
from rollart.control.training import StepDone
from rollart.errors import TrainerError
from rollart.policy.schedules import FIXED_LAG, SCHEDULES
from rollart.settings.rollout import FilterSpec, RedundancySpec, TailBatchingSpec
from rollart.sim import loop
from rollart.sim.trainers import group_mean_advantages
from rollart.testing.ledger import MemoryRecorder
from rollart.testing.run import SimulatedRun, make_simulated_run


@st.composite
def worlds(draw: st.DrawFn, *, faults: bool = True) -> SimulatedRun:
    schedule = draw(st.sampled_from(tuple(SCHEDULES)))
    sizes = draw(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4)), min_size=1, max_size=2))
    policy: dict[str, Any] = {}
    kind = draw(st.sampled_from(["none", "redundancy", "tail", "filter", "due"]))
    if kind == "redundancy":
        policy = {"redundancy": RedundancySpec(groups=1.5, size=1.5)}
    elif kind == "tail" and schedule in ("sync", "sync_plus"):
        policy = {"tail": TailBatchingSpec(eta_prompts=1.5, eta_responses=1.5)}
    elif kind == "filter":
        policy = {
            "filter": FilterSpec(
                zero_variance=True, max_additional_running_prompts=2, max_refills=5.0, exhausted="keep"
            )
        }
        policy["reward_of"] = lambda r: float(r.getrandbits(1))
    elif kind == "due" and schedule not in FIXED_LAG:
        policy = {"due": BatchDeadline(2.0)}
    world = make_simulated_run(
        quotas={f"d{i}": (groups * size, size) for i, (groups, size) in enumerate(sizes)},
        alpha=FIXED_LAG[schedule] if schedule in FIXED_LAG else draw(st.integers(0, 3)),
        steps=draw(st.integers(1, 5)),
        engines=draw(st.integers(1, 3)),
        turns=draw(st.integers(1, 3)),
        seed=draw(st.integers(0, 10_000)),
        engine_s=lambda r: r.expovariate(1.0),
        env_s=lambda r: r.lognormvariate(0.0, 1.5),
        reward_s=lambda r: r.expovariate(2.0),
        train_s=lambda r: r.expovariate(1.0),
        env_faults=draw(st.sampled_from([0.0, 0.05])) if faults else 0.0,
        max_attempts=draw(st.integers(1, 4)),
        schedule=schedule,
        columns=draw(st.sampled_from([tuple(SampleColumn), (SampleColumn.REFERENCE,), (SampleColumn.ADVANTAGE,)])),
        overlap=draw(st.booleans()),
        **policy,
    )
    world.trainer.streams = kind in ("none", "redundancy") and draw(st.booleans())
    scale = draw(st.sampled_from([0.05, 1.0, 5.0]))
    world.trainer.column_s = lambda r: scale * r.expovariate(1.0)
    if faults:  # three deaths in a step end a run
        dies = draw(st.lists(st.tuples(st.booleans(), st.integers(1, 12)), max_size=2))
        world.trainer.fail_columns = frozenset(call for column, call in dies if column)
        world.trainer.fail_steps = frozenset(call for column, call in dies if not column)
    return world


def trained(world: SimulatedRun) -> Counter[str]:
    """Every row had its columns, of the right bits, when it was trained; groups were whole."""
    sizes = {d.name: d.group_size for d in world.domains}
    found: Counter[str] = Counter()
    for batch in dict(world.trainer.batches).values():  # of a step that was lost with the trainer, the last try
        found.update(s.id for s in batch)
        for group, size in Counter(s.group for s in batch).items():
            assert size == sizes[group.split("-")[0]], "I6: whole groups"
        for sample, credit in zip(batch, group_mean_advantages(batch), strict=True):
            if SampleColumn.REFERENCE in world.columns:
                pairs = zip(sample.logprobs, sample.loss_mask, strict=True)
                assert sample.reference == tuple(p - 0.25 if m else 0.0 for p, m in pairs)
            else:
                assert not sample.reference
            assert sample.advantage == (credit if SampleColumn.ADVANTAGE in world.columns else ())
    assert all(count == 1 for count in found.values()), "trained once"
    return found


def asked(world: SimulatedRun, column: SampleColumn) -> list[tuple[str, ...]]:
    return [ids for name, ids in world.trainer.asked if name == column]


@pytest.mark.slow
@settings(max_examples=600, deadline=None)
@given(worlds(), st.integers(0, 2**32))
def test_every_row_is_filled_once_per_task_and_trained_with_all_of_them(world: SimulatedRun, fuzz: int) -> None:
    loop.run(world.run(), seed=fuzz)
    found = trained(world)
    assert sorted(dict(world.trainer.batches)) == list(range(world.steps))
    for column in world.columns:
        calls = asked(world, column)
        filled = Counter(row for ids in calls for row in ids)
        assert all(count == 1 for count in filled.values()), "exactly once per task"
        assert set(found) <= set(filled), "nothing is trained that was not filled"
    assert all(len(ids) <= MAX_ROWS_PER_CALL for ids in asked(world, SampleColumn.REFERENCE))
    sizes = {d.name: d.group_size for d in world.domains}
    for ids in asked(world, SampleColumn.ADVANTAGE):
        groups = Counter(row.rpartition(".")[0] for row in ids)
        assert all(count == sizes[group.split("-")[0]] for group, count in groups.items()), "group-atomic"
    if world.due is None:
        assert sum(world.control.scheduler.admission.slots.outstanding.values()) == 0, "every slot came back"
    assert not world.leases.open, "every lease ended"
    buffer = world.control.scheduler.buffer
    assert set(buffer.filled) == {s.id for g in buffer.groups.values() for s in g.samples} | {
        s.id for r in world.control.scheduler.groups.runs.values() for s in r.samples.values()
    }, "nothing is kept of dropped samples"


@settings(max_examples=39, deadline=None)
@given(worlds(), st.integers(0, 2**32), st.floats(0.0, 40.0))
def test_a_run_killed_at_any_moment_fills_again_and_trains_nothing_twice(
    world: SimulatedRun, fuzz: int, moment: float
) -> None:
    async def killed() -> None:
        task = asyncio.get_running_loop().create_task(world.run())
        asyncio.get_running_loop().call_later(moment, task.cancel)
        await asyncio.gather(task, return_exceptions=True)

    journal = world.journal = world.recorder = MemoryRecorder()
    loop.run(killed(), seed=fuzz)
    trained(world)
    committed = journal.versions[-1][0] if journal.versions else 0
    second = make_simulated_run(
        quotas={d.name: (d.quota, d.group_size) for d in world.domains},
        alpha=world.alpha,
        schedule=world.schedule,
        steps=world.steps,
        version=committed,
        journal=journal,
        engine_s=lambda r: r.expovariate(1.0),
        columns=world.columns,
        redundancy=world.redundancy,
        tail=world.tail,
    )
    second.trainer.column_s = world.trainer.column_s

    async def resume() -> None:
        recovered = await journal.recover()
        if recovered is not None or not journal.groups:  # else nothing was ever committed: such a run starts over
            await second.run(recovered)

    if committed < world.steps:
        loop.run(resume(), seed=fuzz + 1)
        again = trained(second)
        for column in second.columns:
            filled = Counter(row for ids in asked(second, column) for row in ids)
            assert all(count == 1 for count in filled.values())
            assert set(again) <= set(filled)
        kept = Counter(s.id for v, b in dict(world.trainer.batches).items() if v < committed for s in b)
        assert not set(kept) & set(again), "committed samples are not trained again"
        if second.trainer.batches:
            assert journal.versions[-1][0] == world.steps


def test_references_are_computed_while_the_rest_is_rolled_out() -> None:
    """2 s for each sample's reference, in turn, hide behind the slowest trajectory, except for the last samples."""
    exposed = {}
    for columns in ((), (SampleColumn.REFERENCE,)):
        world = make_simulated_run(
            quotas={"a": (8, 2)},
            alpha=0,
            steps=4,
            engines=8,
            engine_s=lambda r: r.expovariate(1.0),
            env_s=lambda r: r.lognormvariate(2.0, 1.0),
            train_s=lambda r: 1.0,
            columns=columns,
        )
        world.trainer.column_s = lambda r: 2.0
        done: list[StepDone] = []
        world.on_step = done.append
        loop.run(world.run(), seed=3)
        exposed[columns] = done[-1].t1
    assert exposed[()] < exposed[(SampleColumn.REFERENCE,)] <= exposed[()] + 4 * 2 * 2.0, (
        "one call under way, and one more"
    )


def test_a_trainer_that_fails_every_time_ends_the_run_with_what_it_says() -> None:
    world = make_simulated_run(quotas={"a": (4, 2)}, columns=(SampleColumn.REFERENCE,))
    world.trainer.fail_columns = frozenset(range(1, 100))
    with pytest.raises(BaseExceptionGroup) as caught:
        loop.run(world.run(), seed=1)
    assert caught.value.subgroup(TrainerError) is not None
    assert not world.trainer.batches
