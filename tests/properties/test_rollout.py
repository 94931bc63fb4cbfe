"""Redundancy and tail batching in the product's scheduler: bounds and conservation under random interleavings."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.policy.schedules import FIXED_LAG, SCHEDULES
from rollart.ports import RELAUNCH_MARK
from rollart.settings.rollout import RedundancySpec, TailBatchingSpec
from rollart.sim import loop
from rollart.testing.ledger import MemoryRecorder
from rollart.testing.run import SimulatedRun, make_simulated_run

FACTORS = st.sampled_from([1.0, 1.25, 1.5, 2.0])


@st.composite
def worlds(draw: st.DrawFn, *, tail: bool = False) -> SimulatedRun:
    schedule = draw(st.sampled_from(("sync", "sync_plus") if tail else tuple(SCHEDULES)))
    sizes = draw(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4)), min_size=1, max_size=2))
    scale = draw(st.sampled_from([0.1, 1.0, 5.0]))
    policy: dict[str, Any]
    if tail:
        policy = {"tail": TailBatchingSpec(eta_prompts=draw(FACTORS), eta_responses=draw(FACTORS))}
    else:
        policy = {"redundancy": RedundancySpec(groups=draw(FACTORS), size=draw(FACTORS), health=draw(st.booleans()))}
    return make_simulated_run(
        quotas={f"d{i}": (groups * size, size) for i, (groups, size) in enumerate(sizes)},
        alpha=FIXED_LAG[schedule] if schedule in FIXED_LAG else draw(st.integers(0, 3)),
        steps=draw(st.integers(1, 6)),
        engines=draw(st.integers(1, 3)),
        turns=draw(st.integers(1, 3)),
        tokens=draw(st.integers(1, 3)),
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
        **policy,
    )


def watch(world: SimulatedRun) -> list[tuple[int, int, int, int]]:
    """Per record: groups' slots in use and their bound, trajectories under way and theirs."""
    groups = {d.name: d.quota // d.group_size for d in world.domains}
    factor, size = world.redundancy.groups, world.redundancy.size
    if world.tail is not None:
        factor, size = world.tail.eta_prompts + 1 / min(groups.values()), world.tail.eta_responses
    seen: list[tuple[int, int, int, int]] = []

    class Watched(MemoryRecorder):
        def charge(self, charge: Any) -> None:
            scheduler = world.control.scheduler
            slots = sum(scheduler.admission.slots.outstanding.values())
            bound = sum(
                (world.alpha + 1) * d.quota + int((factor - 1) * groups[d.name] + 1e-9) * d.group_size
                for d in world.domains
            )
            runs = scheduler.groups.runs.values()
            live = sum(len(g.running) for g in runs)
            most = sum(int(g.domain.group_size * size + 1e-9) for g in runs)
            for run in runs:
                assert len(run.samples) + len(run.writing) <= run.domain.group_size, "no more samples than are needed"
            held = sum(len(g.samples) for g in runs) + sum(scheduler.buffer.held.values())
            assert held <= slots, "every sample has a slot"
            seen.append((slots, bound, live, most))
            super().charge(charge)

        async def finish(self, sample: Any, charge: Any) -> None:
            await asyncio.sleep(0.3)  # a publish may come meanwhile
            await super().finish(sample, charge)

    world.journal = world.recorder = Watched()
    return seen


def check(world: SimulatedRun) -> Counter[str]:
    """I1, I3, I6, quotas, and that everything ended. How often each sample was trained."""
    assert len(world.trainer.batches) == world.steps
    trained: Counter[str] = Counter()
    by_domain = {d.name: d for d in world.domains}
    for version, batch in world.trainer.batches:
        for sample in batch:
            trained[sample.id] += 1
            assert version - sample.v0 <= world.alpha or world.schedule == "areal", "I3"
            assert all(sample.versions[i] >= sample.v0 for i, m in enumerate(sample.loss_mask) if m), "I1"
        for group, size in Counter(s.group for s in batch).items():
            assert size == by_domain[group.split("-")[0]].group_size, "I6: whole groups"
        counts, quotas = Counter(s.domain for s in batch), {d.name: d.quota for d in world.domains}
        if world.schedule == "paced":
            assert all(counts[name] >= quota for name, quota in quotas.items()), "and groups whose last chance it is"
        else:
            assert counts == quotas, "quotas are exact"
    assert all(count == 1 for count in trained.values()), "I6: exactly once"
    assert world.published == list(range(1, world.steps + 1))
    rows = Counter(c.trajectory for c in world.journal.charges)
    assert all(count == 1 for count in rows.values()), "a trajectory has one row"
    assert {c.trajectory for c in world.journal.charges if c.outcome == "finished"} >= set(trained)
    assert sum(world.control.scheduler.admission.slots.outstanding.values()) == 0, "every slot came back"
    assert not world.leases.open, "every lease ended"
    assert {i for i, end in world.journal.gone.items() if end == "trained"} == set(trained)
    assert all(g.state != "live" for g in world.journal.groups.values()), "every group ended"
    return trained


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(worlds(), st.integers(0, 2**32))
def test_invariants_hold_with_redundant_environments(world: SimulatedRun, fuzz: int) -> None:
    seen = watch(world)
    loop.run(world.run(), seed=fuzz)
    check(world)
    assert all(slots <= bound for slots, bound, _, _ in seen), "I4: the window, and the extra groups"
    assert all(live <= most for _, _, live, most in seen), "I4: and the extra members of running groups"


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(worlds(tail=True), st.integers(0, 2**32))
def test_tail_batching_trains_every_prompt_once_and_loses_none(world: SimulatedRun, fuzz: int) -> None:
    """An epoch is as many prompts as the run trains: all of them are drawn, and each is trained once, whenever."""
    seen = watch(world)
    loop.run(world.run(), seed=fuzz)
    check(world)
    assert all(slots <= bound for slots, bound, _, _ in seen)
    assert all(live <= most for _, _, live, most in seen)
    prompts = Counter(
        g.partition(RELAUNCH_MARK)[0] for _, batch in world.trainer.batches for g in {s.group for s in batch}
    )
    assert all(count == 1 for count in prompts.values()), "a prompt is trained in one launch of its"
    lost = {g.partition(RELAUNCH_MARK)[0] for g, why in world.journal.dropped.items() if why != "deferred"}
    for domain in world.domains:
        drawn = world.control.scheduler.admission.drawn[domain.name]
        every = {f"{domain.name}-{i}" for i in range(drawn)}
        assert every == {p for p in prompts | dict.fromkeys(lost, 1) if p.startswith(f"{domain.name}-")}
        given_up = len([p for p in lost if p.startswith(f"{domain.name}-")])
        assert drawn - given_up == world.steps * domain.quota // domain.group_size
    for group, state in world.journal.groups.items():
        first = world.journal.groups[group.partition(RELAUNCH_MARK)[0]]
        assert state.seed == first.seed, "a prompt keeps its seed"


def test_a_sample_that_goes_stale_while_it_is_written_has_one_row_that_says_so() -> None:
    world = make_simulated_run(quotas={"d": (1, 1)}, alpha=1, schedule="rollart", steps=4, engines=2)

    class Slow(MemoryRecorder):
        async def finish(self, sample: Any, charge: Any) -> None:
            while sample.id == "d-0.0" and len(world.published) < 2:
                await asyncio.sleep(0.1)
            await super().finish(sample, charge)

    world.journal = world.recorder = Slow()
    loop.run(world.run(), seed=0)
    check(world)
    assert [c.outcome for c in world.journal.charges if c.trajectory == "d-0.0"] == ["stale"]


class Killed(BaseException):
    pass


@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(st.booleans().flatmap(lambda tail: worlds(tail=tail)), st.integers(0, 2**32), st.integers(1, 5))
def test_a_resume_loses_no_prompt_and_trains_none_twice(world: SimulatedRun, fuzz: int, stop_after: int) -> None:
    def stop(done: Any) -> None:
        if done.step + 1 == min(stop_after, world.steps):
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
        redundancy=world.redundancy,
        tail=world.tail,
    )

    async def resume() -> None:
        await second.run(await world.journal.recover())

    loop.run(resume(), seed=fuzz + 1)
    batches = [*world.trainer.batches, *second.trainer.batches]
    assert len(batches) == world.steps
    ids = [s.id for _, b in batches for s in b]
    assert len(ids) == len(set(ids))
    if world.tail is None:
        return
    prompts = Counter(g.partition(RELAUNCH_MARK)[0] for _, b in batches for g in {s.group for s in b})
    assert max(prompts.values()) == 1
    lost = {g.partition(RELAUNCH_MARK)[0] for g, why in world.journal.dropped.items() if why != "deferred"}
    for domain in world.domains:
        drawn = {
            p for p in (g.partition(RELAUNCH_MARK)[0] for g in world.journal.groups) if p.startswith(f"{domain.name}-")
        }
        assert drawn <= {*prompts, *lost}, "none is lost"
        assert drawn == {f"{domain.name}-{i}" for i in range(len(drawn))}, "and none was skipped"
