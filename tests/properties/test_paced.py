"""`paced`: nothing that was begun is lost for its length, no batch waits for ever, and the bounds of I3 and I4 hold."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rollart.control.buffer import BatchDeadline
from rollart.control.pacing import PacedGroup, groups_to_wait_for, may_join
from rollart.settings.rollout import RedundancySpec
from rollart.sim import loop
from rollart.testing.run import SimulatedRun, make_simulated_run
from tests.properties.test_invariants import worlds


def losses(world: SimulatedRun) -> Counter[str]:
    return Counter(str(e.fields["reason"]) for e in world.recorder.events if e.kind == "group_dropped")


@settings(max_examples=15, deadline=None)
@given(worlds(schedules=("paced",)), st.integers(0, 2**32))
def test_nothing_begun_is_lost_for_its_length(world: SimulatedRun, fuzz: int) -> None:
    """Heavy-tailed durations, streams, faults of every part: a group is lost to faults only."""
    loop.run(world.run(), seed=fuzz)
    assert len(world.trainer.batches) == world.steps, "no wait is for ever"
    assert "stale" not in {c.outcome for c in world.recorder.charges}
    assert losses(world).keys() <= {"infra_fault"}
    deferred = Counter(e.subject for e in world.recorder.events if e.kind == "admission_deferred")
    assert all(count == 1 for count in deferred.values()), "a prompt is deferred once at most"


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 3),
    st.sampled_from(["tokens", "deadline", "redundancy"]),
    st.booleans(),
    st.integers(0, 2**32),
)
@example(alpha=0, kind="deadline", faults=True, fuzz=33)  # streamed: a prompt started while the batch was given
def test_batches_of_other_sizes_lose_nothing_either(alpha: int, kind: str, faults: bool, fuzz: int) -> None:
    world = make_simulated_run(
        quotas={"a": (6, 2), "b": (2, 1)},
        alpha=alpha,
        steps=5,
        schedule="paced",
        seed=fuzz % 1000,
        engine_s=lambda r: r.lognormvariate(0.0, 1.5),
        env_s=lambda r: r.expovariate(1.0),
        train_s=lambda r: r.expovariate(0.5),
        env_faults=0.05 if faults else 0.0,
        max_attempts=4,
        token_budget=30 if kind == "tokens" else None,
        due=BatchDeadline(3.0, 0.5) if kind == "deadline" else None,
        redundancy=RedundancySpec(groups=1.5) if kind == "redundancy" else RedundancySpec(),
    )
    world.trainer.streams = fuzz % 2 == 1
    loop.run(world.run(), seed=fuzz)
    assert len(world.trainer.batches) == 5
    assert "stale" not in {c.outcome for c in world.recorder.charges}
    assert all(version - s.v0 <= alpha for version, batch in world.trainer.batches for s in batch)


@pytest.mark.parametrize("streams", [False, True])
def test_a_wait_is_bounded_by_its_lease(streams: bool) -> None:
    """One trajectory in thirty takes 1,000 s: the batch goes without it after the lease, and the run goes on."""
    world = make_simulated_run(
        schedule="paced",
        quotas={"a": (4, 2)},
        steps=8,
        turns=1,
        train_s=lambda r: 1.0,
        engine_s=lambda r: 1000.0 if r.random() < 1 / 30 else 1.0,
    )
    world.trainer.streams = streams
    world.pace_s = 50.0
    loop.run(world.run(), seed=3)
    waits = [e.fields for e in world.recorder.events if e.kind == "batch_paced"]
    assert any(w["expired"] for w in waits)
    assert all(float(w["seconds"] or 0) <= 50.0 for w in waits)
    expired = [e for e in world.recorder.events if e.kind == "lease_expired"]
    assert {e.subject for e in expired} == {"training"}
    assert "staleness bound" in str(expired[0].fields["waiting_for"])
    assert losses(world).keys() == {"stale"}


MEMBERS = st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=12)


@given(MEMBERS, st.integers(0, 3), st.integers(1, 4))
def test_a_batch_that_grows_never_takes_the_room_of_a_group_at_its_bound(
    drawn: list[tuple[int, bool]], alpha: int, quota: int
) -> None:
    """Within the window's counts: whichever groups join first, the required ones still fit into the batch."""
    version = 3
    counts: Counter[int] = Counter()
    members: list[tuple[PacedGroup, bool]] = []
    for i, (v0, complete) in enumerate(drawn):
        k = v0 - (version - alpha)
        if k < 0 or any(sum(counts[a] for a in range(b + 1)) >= (b + 1) * quota for b in range(k, alpha + 1)):
            continue  # past its bound, or more than admission lets in
        counts[k] += 1
        members.append((PacedGroup(str(i), v0, 1), complete))
    batch: list[PacedGroup] = []
    for joins in (True, False):  # complete groups first, then the others as they end
        for m, complete in members:
            rest = [other for other, _ in members if other is not m and other not in batch]
            if complete is joins and may_join(m, batch, rest, quota=quota, version=version, alpha=alpha):
                batch.append(m)
    assert len(batch) <= quota
    left = [m for m, _ in members if m not in batch]
    assert not groups_to_wait_for(batch, left, quota=quota, version=version, alpha=alpha)
    assert all(m.v0 > version - alpha for m in left)
