"""Samplers: bounds of the balancing, exact and unbiased token budgets, deadlines and priorities."""

from __future__ import annotations

import itertools
import statistics
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.policy.sample_table import (
    Balanced,
    Deadline,
    Fifo,
    ReadyRows,
    SampleRow,
    TokenBudget,
    WholeGroups,
    age_weights,
)
from rollart.shares import balanced_portions

groups_of_rows = st.lists(st.lists(st.integers(1, 60), min_size=1, max_size=4), max_size=6)


def ready(groups: list[list[int]], versions: list[int] | None = None) -> ReadyRows:
    """Rows g<i>.<j> with these token counts, all ready, in order."""
    rows = {
        f"g{i}.{j}": SampleRow(f"g{i}.{j}", f"g{i}", len(group), tokens, 0 if versions is None else versions[i])
        for i, group in enumerate(groups)
        for j, tokens in enumerate(group)
    }
    return rows


@given(st.lists(st.integers(0, 100), max_size=30), st.integers(1, 6))
def test_every_row_goes_to_one_consumer_and_none_has_much_more(sizes: list[int], parts: int) -> None:
    found = balanced_portions(sizes, parts)
    assert len(found) == parts
    assert sorted(i for part in found for i in part) == list(range(len(sizes)))
    loads = [sum(sizes[i] for i in part) for part in found]
    assert max(loads) <= sum(sizes) / parts + max(sizes, default=0)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=7), st.integers(1, 3))
def test_longest_first_keeps_grahams_bound(sizes: list[int], parts: int) -> None:
    best = min(
        max(sum(s for s, p in zip(sizes, places, strict=True) if p == part) for part in range(parts))
        for places in itertools.product(range(parts), repeat=len(sizes))
    )
    load = max(sum(sizes[i] for i in part) for part in balanced_portions(sizes, parts))
    assert best <= load <= (4 / 3 - 1 / (3 * parts)) * best + 1e-9


@settings(max_examples=40, deadline=None)
@given(groups_of_rows, st.integers(1, 12))
def test_first_come_first_served(groups: list[list[int]], count: int) -> None:
    view = ready(groups)
    got = Fifo(count)(view)
    if len(view) < count:
        assert got is None
        assert Fifo(count, at_least=len(view) or 1)(view) is None or view
    else:
        assert got is not None
        assert list(got.consumed) == [*view][:count]


def test_whole_groups_skip_the_incomplete_one() -> None:
    view = ready([[1, 1], [1, 1], [1]])
    partial = {k: v for k, v in view.items() if k != "g0.1"}
    got = WholeGroups(2)(partial)
    assert got is not None
    assert got.consumed == ("g1.0", "g1.1", "g2.0")
    assert WholeGroups(3)(partial) is None


@settings(max_examples=40, deadline=None)
@given(groups_of_rows.filter(bool), st.integers(1, 4))
def test_balanced_spreads_exactly_what_was_chosen(groups: list[list[int]], consumers: int) -> None:
    view = ready(groups)
    got = Balanced(Fifo(len(view)), consumers)(view)
    assert got is not None
    assert len(got.batches) == consumers
    assert Counter(p.row.id for batch in got.batches for p in batch) == Counter([*view])
    assert Balanced(Fifo(len(view) + 1), consumers)(view) is None


@settings(max_examples=40, deadline=None)
@given(groups_of_rows, st.integers(1, 200), st.text(max_size=3))
def test_the_token_budget_is_met_exactly_and_little_is_lost(groups: list[list[int]], budget: int, salt: str) -> None:
    view = ready(groups)
    got = TokenBudget(budget, salt)(view)
    if sum(map(sum, groups)) < budget:
        assert got is None
        return
    assert got is not None
    assert sum(p.tokens for p in got.batches[0]) == budget, "constant tokens per step"
    assert all(0 < p.tokens <= p.row.tokens for p in got.batches[0])
    assert sum(p.tokens < p.row.tokens for p in got.batches[0]) <= 1, "only the row at the edge is cut"
    used = {view[r].group for r in got.consumed}
    assert len(got.consumed) == sum(view[f"{g}.0"].group_size for g in used), "groups are used up whole"
    lost = sum(view[r].tokens for r in got.consumed) - budget
    assert lost < max(sum(groups[int(g[1:])]) for g in used), "less than a group"


def test_the_cut_favours_nobody() -> None:
    """Over many salts every row keeps the same share of its tokens, long or short (Ring-lite: random selection)."""
    lengths = [10, 200, 30, 120, 60, 80, 150, 50]
    view = ready([lengths])
    kept = Counter[str]()
    rounds = 3000
    for salt in range(rounds):
        got = TokenBudget(500, str(salt))(view)
        assert got is not None
        kept.update({p.row.id: p.tokens for p in got.batches[0]})
    shares = [kept[f"g0.{j}"] / rounds / n for j, n in enumerate(lengths)]
    assert max(shares) - min(shares) < 0.06
    assert statistics.fmean(shares) == pytest.approx(500 / 700, abs=0.02)
    assert TokenBudget(500, "a")(view) == TokenBudget(500, "a")(view), "the same salt draws the same"


rows_with_age = st.lists(st.integers(0, 5), min_size=1, max_size=20)


@given(rows_with_age, st.integers(1, 10), st.integers(1, 10), st.booleans())
def test_a_deadline_takes_what_is_there_oldest_first(ages: list[int], target: int, least: int, due: bool) -> None:
    target, least = max(target, least), min(target, least)
    rows = {f"r{i}": SampleRow(f"r{i}", f"g{i}", 1, 1, v) for i, v in enumerate(ages)}
    got = Deadline(target, least, version=5, due=due, gamma=0.5)(rows)
    if len(rows) < target and not (due and len(rows) >= least):
        assert got is None
        return
    assert got is not None
    order = sorted(rows, key=lambda r: rows[r].version)
    assert list(got.consumed) == order[:target]
    weights = [p.weight for p in got.batches[0]]
    assert sum(weights) == pytest.approx(len(weights)), "the mean weight is 1"
    assert weights == sorted(weights), "older first, so lighter first"


def test_a_deadline_keeps_groups_whole() -> None:
    view = ready([[1, 1], [1, 1, 1], [1]], versions=[2, 1, 1])
    got = Deadline(5, 1, version=2)(view)
    assert got is not None
    assert got.consumed == ("g1.0", "g1.1", "g1.2", "g2.0"), "g0 does not fit any more: it waits whole"
    assert Deadline(7, 2, version=2)(view) is None, "not due, not full"
    assert len(Deadline(7, 2, version=2, due=True)(view).consumed) == 6  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="group g1 of 3 rows fits into no batch of 2"):
        Deadline(2, 1, version=2)(view)
    with pytest.raises(ValueError, match="least 3"):
        Deadline(2, 3, version=2)


def test_age_weights() -> None:
    assert age_weights([5, 5], 5, 0.5) == (1.0, 1.0)
    assert age_weights([4, 5], 5, 0.5) == pytest.approx((2 / 3, 4 / 3))
    assert age_weights([0, 3, 5], 5, 1.0) == (1.0, 1.0, 1.0), "gamma 1 is the default: no weighting"
    assert age_weights([0, 1], 10_000, 0.5) == pytest.approx((2 / 3, 4 / 3)), "great ages do not vanish"
    with pytest.raises(ValueError, match="gamma 0"):
        age_weights([1], 1, 0.0)
