"""Dynamic filtering in the scheduler: no prompt is lost, none is trained that teaches nothing, nothing wedges."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Coroutine
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.errors import RunFailed
from rollart.policy.schedules import FIXED_LAG, SCHEDULES
from rollart.ports import RELAUNCH_MARK
from rollart.settings.rollout import FilterSpec, RedundancySpec, TailBatchingSpec
from rollart.sim import loop
from rollart.testing.ledger import MemoryRecorder
from rollart.testing.run import SimulatedRun, make_simulated_run
from tests.properties.test_rollout import Killed


def coin(rng: Any) -> float:
    return float(rng.random() < 0.3)


@st.composite
def worlds(draw: st.DrawFn, *, tail: bool = False, keep: bool | None = None) -> SimulatedRun:
    schedule = draw(st.sampled_from(("sync", "sync_plus") if tail else tuple(SCHEDULES)))
    sizes = draw(st.lists(st.tuples(st.integers(1, 4), st.integers(2, 4)), min_size=1, max_size=2))
    policy: dict[str, Any] = (
        {"tail": TailBatchingSpec(eta_prompts=1.5, eta_responses=draw(st.sampled_from([1.0, 1.5])))} if tail else {}
    )
    if not tail:
        policy["redundancy"] = RedundancySpec(
            groups=draw(st.sampled_from([1.0, 1.5])), size=draw(st.sampled_from([1.0, 1.5]))
        )
    return make_simulated_run(
        quotas={f"d{i}": (groups * size, size) for i, (groups, size) in enumerate(sizes)},
        alpha=FIXED_LAG[schedule] if schedule in FIXED_LAG else draw(st.integers(0, 3)),
        steps=draw(st.integers(1, 5)),
        engines=draw(st.integers(1, 2)),
        turns=draw(st.integers(1, 2)),
        seed=draw(st.integers(0, 10_000)),
        engine_s=lambda r: r.expovariate(1.0),
        env_s=lambda r: r.lognormvariate(0.0, 1.5),
        reward_s=lambda r: r.expovariate(2.0),
        train_s=lambda r: r.expovariate(1.0),
        reward_of=coin,
        env_faults=draw(st.sampled_from([0.0, 0.05])),
        max_attempts=draw(st.integers(1, 4)),
        schedule=schedule,
        filter=FilterSpec(
            zero_variance=True,
            max_additional_running_prompts=0 if tail else draw(st.integers(0, 6)),
            max_refills=draw(st.sampled_from([0.0, 1.0, 100.0])),
            exhausted="keep" if (draw(st.booleans()) if keep is None else keep) else "fail",
        ),
        **policy,
    )


def alike(batch: Any) -> set[str]:
    """Groups of a batch whose rewards are all the same."""
    rewards: dict[str, set[float]] = {}
    for sample in batch:
        rewards.setdefault(sample.group, set()).add(sample.score)
    return {group for group, values in rewards.items() if len(values) == 1}


def conserved(world: SimulatedRun, batches: Any) -> None:
    """Every prompt that was admitted is trained, filtered, or dropped with another reason; none is two of them."""
    trained = Counter(g.partition(RELAUNCH_MARK)[0] for _, batch in batches for g in {s.group for s in batch})
    assert all(count == 1 for count in trained.values())
    ends: Counter[str] = Counter(trained)
    for group, why in world.journal.dropped.items():
        if why != "deferred":
            ends[group.partition(RELAUNCH_MARK)[0]] += 1
    admitted = {g.partition(RELAUNCH_MARK)[0] for g in world.journal.groups}
    assert ends == dict.fromkeys(admitted, 1)
    assert all(g.state != "live" for g in world.journal.groups.values())


def first(group: BaseExceptionGroup[BaseException]) -> RunFailed:
    """The product's own error among the errors that ended a run."""
    ours = group.subgroup(RunFailed)
    error: BaseException | None = ours
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, RunFailed), group
    return error


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(st.booleans().flatmap(lambda tail: worlds(tail=tail)), st.integers(0, 2**32))
def test_every_prompt_is_trained_filtered_or_dropped_and_nothing_wedges(world: SimulatedRun, fuzz: int) -> None:
    limit = {d.name: int(world.filter.max_refills * d.quota / d.group_size) for d in world.domains}
    failed: BaseExceptionGroup[BaseException] | None = None
    try:
        loop.run(world.run(), seed=fuzz)
    except BaseExceptionGroup as group:
        failed = group
    if failed is not None:
        assert world.filter.exhausted == "fail"
        assert "had members of the same reward" in first(failed).message
        return
    assert len(world.trainer.batches) == world.steps
    conserved(world, world.trainer.batches)
    for _, batch in world.trainer.batches:
        counts, quotas = Counter(s.domain for s in batch), {d.name: d.quota for d in world.domains}
        if world.schedule == "paced":
            assert all(counts[name] >= quota for name, quota in quotas.items()), "and groups whose last chance it is"
        else:
            assert counts == quotas
    if world.filter.exhausted == "fail":
        assert not any(alike(batch) for _, batch in world.trainer.batches), "none of them teaches nothing"
    filtered = Counter(g.split("-")[0] for g, why in world.journal.dropped.items() if why == "filtered")
    assert all(filtered[d] <= n * (world.steps + 1) for d, n in limit.items()), "bounded per step"
    assert sum(world.control.scheduler.admission.slots.outstanding.values()) == 0
    by_outcome = Counter(c.outcome for c in world.recorder.charges)
    assert by_outcome["finished"] >= sum(len(b) for _, b in world.trainer.batches)


class Dying(MemoryRecorder):
    """A journal whose process dies instead of making its `left`-th record of a sample or a drop."""

    left: int | None = None

    async def finish(self, sample: Any, charge: Any) -> None:
        self._live_on()
        await super().finish(sample, charge)

    async def drop(self, group: str, reason: str) -> None:
        self._live_on()
        await super().drop(group, reason)

    def _live_on(self) -> None:
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                raise Killed


def died(world: SimulatedRun, main: Coroutine[Any, Any, None], fuzz: int, left: int) -> Dying | None:
    """The journal that `main`, which runs the world, left behind when it died after `left` writes; None if there is
    nothing to resume."""
    journal = Dying()
    journal.left = left
    world.journal = world.recorder = journal
    with contextlib.suppress(BaseExceptionGroup):
        loop.run(main, seed=fuzz)
        journal.left = None
    if journal.left is None or not journal.versions:
        return None
    journal.left = None
    return journal


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(st.booleans().flatmap(lambda tail: worlds(tail=tail, keep=True)), st.integers(0, 2**32), st.integers(0, 200))
def test_a_resume_trains_no_filtered_group_and_doubles_none(world: SimulatedRun, fuzz: int, left: int) -> None:
    """Filtered groups stay filtered; complete groups without a recorded verdict are judged again."""
    journal = died(world, world.run(), fuzz, left)
    if journal is None:
        return  # it came through, or died before it had anything to resume from
    before = {g for g, why in journal.dropped.items() if why == "filtered"}
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
            reward_of=coin,
            seed=7,
            redundancy=world.redundancy,
            tail=world.tail,
            filter=world.filter,
        )
        await second.run(recovered)
        return second

    second = loop.run(resume(), seed=fuzz + 1)
    assert not before & {s.group for _, batch in second.trainer.batches for s in batch}
    assert len(second.trainer.batches) == world.steps - done
    world.journal = journal
    conserved(world, [*world.trainer.batches[:done], *second.trainer.batches])


def test_a_domain_that_always_earns_the_same_ends_the_run_and_says_so() -> None:
    world = make_simulated_run(
        quotas={"sums": (8, 4), "lake": (4, 2)}, steps=3, filter=FilterSpec(zero_variance=True, max_refills=5.0)
    )
    with pytest.raises(BaseExceptionGroup) as caught:
        loop.run(world.run(), seed=1)
    error = first(caught.value)
    assert "all 10 groups of domain" in error.message
    assert "had members of the same reward, and were filtered (limit 10)" in error.message
    assert "rollout.filter.exhausted=keep" in error.remedy
