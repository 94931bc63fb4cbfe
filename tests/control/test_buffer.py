"""What a step trains of the complete groups: by deadline, by tokens; and who else may read them."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.control.buffer import BatchDeadline, SampleBuffer
from rollart.control.training import StepDone
from rollart.model import Group, GroupId, TrainSample, TrajectoryId
from rollart.policy.sample_table import Fifo
from rollart.policy.staleness import StalenessBound
from rollart.sim import loop
from rollart.strategies.token_budget import BatchTruncation
from rollart.testing.run import SimulatedRun, make_simulated_run


def tailed(**more: object) -> SimulatedRun:
    """Most steps of an environment take a second at most, some 25."""
    return make_simulated_run(
        quotas={"a": (8, 2), "b": (4, 1)},
        alpha=2,
        steps=8,
        engine_s=lambda r: r.expovariate(1.0),
        env_s=lambda r: 25.0 if r.random() < 0.05 else r.random(),
        train_s=lambda r: 0.5,
        **more,
    )  # type: ignore[arg-type]


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 1000), st.floats(0.1, 20.0), st.sampled_from([0.25, 0.5, 1.0]))
def test_a_batch_by_deadline_has_its_share_of_every_domain(seed: int, seconds: float, least: float) -> None:
    run = tailed(seed=seed)
    run.due = BatchDeadline(seconds, least)
    loop.run(run.run(), seed=seed)
    assert len(run.trainer.batches) == 8
    trained = [s.id for _, batch in run.trainer.batches for s in batch]
    assert len(set(trained)) == len(trained), "exactly once"
    for version, batch in run.trainer.batches:
        sizes = Counter(s.domain for s in batch)
        for domain in run.domains:
            assert math.ceil(least * domain.quota) <= sizes[domain.name] <= domain.quota
        assert all(n == 2 for g, n in Counter(s.group for s in batch).items() if g.startswith("a-")), "groups whole"
        assert all(version - s.v0 <= 2 for s in batch), "I3"
    assert not run.leases.open


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 1000), st.sampled_from([0.25, 0.7, 1.0]))
def test_older_samples_weigh_less_and_a_domain_as_much_as_before(seed: int, decay: float) -> None:
    run = tailed(seed=seed)
    run.due = BatchDeadline(2.0, 0.25, decay)
    loop.run(run.run(), seed=seed)
    for version, batch in run.trainer.batches:
        for domain in run.domains:
            mine = [s for s in batch if s.domain == domain.name]
            assert sum(s.weight for s in mine) == pytest.approx(len(mine)), "a mean of 1"
            first = min(mine, key=lambda s: version - s.v0)
            for sample in mine:
                assert sample.weight == pytest.approx(first.weight * decay ** (first.v0 - sample.v0))


def test_a_deadline_bounds_the_wait_for_stragglers() -> None:
    waited = {}
    for due in (None, BatchDeadline(2.0, 0.25)):
        run = tailed(seed=5)
        run.due = due
        done: list[StepDone] = []
        run.on_step = done.append
        loop.run(run.run(), seed=5)
        waited[due is not None] = [d.waited_s for d in done]
    assert max(waited[False]) > 15
    assert sum(waited[True]) < 0.5 * sum(waited[False])


def sample(name: str, group: str, length: int, paid: float = 1.0) -> TrainSample:
    return TrainSample(
        TrajectoryId(name),
        GroupId(group),
        "a",
        0,
        tuple(range(length)),
        (False, *[True] * (length - 1)),
        (0.0, *[-1.0] * (length - 1)),
        (-1, *[0] * (length - 1)),
        (-1, *[0] * (length - 1)),
        (*[0.0] * (length - 1), paid),
        paid,
        None,
    )


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(2, 30), min_size=2, max_size=16), st.integers(1, 200), st.integers(0, 5))
def test_a_budget_is_kept_to_the_token_and_returns_stay(lengths: list[int], budget: int, step: int) -> None:
    samples = [sample(f"s{i}", f"g{i // 2}", n, float(i)) for i, n in enumerate(lengths)]
    groups = [Group(GroupId(f"g{i}"), "a", tuple(samples[2 * i : 2 * i + 2])) for i in range((len(samples) + 1) // 2)]
    cut = BatchTruncation(budget)(groups, step)
    total = sum(len(s.token_ids) for s in cut)
    assert total <= budget or total == sum(lengths) <= budget
    assert total >= min(budget, sum(lengths)) - 1, "all of it, but for an edge that has no sampled token"
    by_id = {s.id: s for s in samples}
    assert len({s.id for s in cut}) == len(cut)
    for s in cut:
        whole = by_id[s.id]
        assert s.token_ids == whole.token_ids[: len(s.token_ids)]
        assert sum(s.rewards) == sum(whole.rewards), "its return is what it was"
        assert sum(1 for a, b in zip(s.rewards, whole.rewards, strict=False) if a != b) <= 1
    assert sum(len(s.token_ids) < len(by_id[s.id].token_ids) for s in cut) <= 1, "one at the edge"
    assert BatchTruncation(budget)(groups, step) == cut


def test_which_samples_are_left_out_does_not_depend_on_their_length() -> None:
    groups = [Group(GroupId(f"g{i}"), "a", (sample(f"s{i}", f"g{i}", 4 if i % 2 else 40),)) for i in range(20)]
    kept: Counter[bool] = Counter()
    for step in range(200):
        kept.update(len(s.token_ids) <= 4 for s in BatchTruncation(220)(groups, step) if len(s.token_ids) in (4, 40))
    assert kept[True] / kept[False] == pytest.approx(1.0, abs=0.1)


def test_every_step_trains_the_same_tokens_and_consumes_its_whole_batch() -> None:
    run = make_simulated_run(quotas={"a": (8, 2)}, alpha=1, steps=6, turns=4, tokens=5, train_s=lambda r: 0.5)
    run.cut_tokens = 100
    loop.run(run.run(), seed=2)
    sizes = {sum(len(s.token_ids) for s in batch) for _, batch in run.trainer.batches}
    assert sizes <= {99, 100}
    assert len(run.journal.gone) == 6 * 8  # type: ignore[attr-defined]
    assert set(run.journal.gone.values()) == {"trained"}  # type: ignore[attr-defined]


def test_another_task_reads_the_rows_that_training_takes_each_once_at_its_own_speed() -> None:
    buffer = SampleBuffer({"a": 4}, bound=StalenessBound(1))
    buffer.table.declare("audit", ["trajectory"])

    async def main() -> list[str]:
        seen: list[str] = []
        for i in range(6):
            buffer.add(Group(GroupId(f"g{i}"), "a", tuple(sample(f"g{i}.{m}", f"g{i}", 5) for m in range(2))))
            if i % 2:
                assert [g.id for g in await buffer.take(0)] == [f"g{i - 1}", f"g{i}"]
            if i % 3 == 2:
                taken = buffer.table.take("audit", Fifo(5))
                assert taken is not None
                seen += taken.consumed
        taken = buffer.table.take("audit", Fifo(5, at_least=1))
        assert taken is not None
        return [*seen, *taken.consumed]

    seen = loop.run(main())
    assert seen == [f"g{i}.{m}" for i in range(6) for m in range(2)]
    assert len(buffer.table) == 0, "what every task has had is gone"
