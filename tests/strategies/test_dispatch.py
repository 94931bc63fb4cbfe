"""Dispatch by length: Graham's bound against every assignment, and the split against every division."""

from __future__ import annotations

import itertools
import math
import random
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.papers.bounds import lpt, lpt_order, makespan
from rollart.strategies.skew_aware import DispatchGroup, split_instances

Lengths = st.lists(st.integers(1, 60), max_size=30)


def best_makespan(lengths: list[int], workers: int) -> int:
    """Over every assignment, workers being alike."""

    @cache
    def best(n: int, loads: tuple[int, ...]) -> int:
        if n == len(lengths):
            return max(loads)
        options = {tuple(sorted((*loads[:w], loads[w] + lengths[n], *loads[w + 1 :]))) for w in range(workers)}
        return min(best(n + 1, x) for x in options)

    return best(0, (0,) * workers)


@settings(max_examples=40)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=7), st.integers(1, 3))
def test_lpt_is_within_grahams_bound(lengths: list[int], workers: int) -> None:
    longest_load = max(sum(lengths[n] for n in taken) for taken in lpt(lengths, workers))
    optimum = best_makespan(lengths, workers)
    assert optimum <= longest_load <= optimum * (4 / 3 - 1 / (3 * workers)) + 1e-9


@pytest.mark.parametrize("m", [2, 3])
def test_grahams_worst_case_reaches_it(m: int) -> None:
    lengths = [2 * m - 1 - n // 2 for n in range(2 * m)] + [m]
    load = max(sum(lengths[n] for n in taken) for taken in lpt(lengths, m))
    assert load == 4 * m - 1
    assert best_makespan(lengths, m) == 3 * m


@given(Lengths, st.integers(1, 6))
def test_everything_is_taken_once_and_longest_first(lengths: list[int], workers: int) -> None:
    taken = lpt(lengths, workers)
    assert sorted(n for w in taken for n in w) == list(range(len(lengths)))
    for one in taken:
        assert [lengths[n] for n in one] == sorted((lengths[n] for n in one), reverse=True)
    load = max((sum(lengths[n] for n in w) for w in taken), default=0)
    assert load == makespan([lengths[n] for n in lpt_order(lengths)], workers), "both are the same rule"


@given(Lengths, st.integers(1, 6))
def test_list_scheduling_is_work_conserving(lengths: list[int], workers: int) -> None:
    end = makespan(lengths, workers)
    assert max(sum(lengths) / workers, max(lengths, default=0)) <= end <= sum(lengths)


def token_s(batch: int) -> float:
    """Seconds per token: flat while decoding waits for memory, then in proportion."""
    return 0.02 + 0.0005 * batch


def every_split(instances: int, long: DispatchGroup, rest: DispatchGroup) -> float:
    def seconds(group: DispatchGroup, n: int, bs: int) -> float:
        return token_s(bs) * group.tokens * math.ceil(math.ceil(group.trajectories / n) / bs)

    times = []
    for n in range(1, instances):
        for a, b in itertools.product(range(1, long.most_batch + 1), range(1, rest.most_batch + 1)):
            times.append(max(seconds(long, n, a), seconds(rest, instances - n, b)))
    return min(times)


@given(
    st.integers(2, 8),
    st.integers(1, 40),
    st.integers(1, 160),
    st.integers(1, 32_000),
    st.integers(1, 2_000),
    st.integers(1, 12),
)
@settings(max_examples=40)
def test_the_split_is_the_best_of_all(
    instances: int, m_long: int, m_rest: int, l_long: int, l_rest: int, most: int
) -> None:
    long, rest = DispatchGroup(m_long, l_long, most), DispatchGroup(m_rest, l_rest, 2 * most)
    found = split_instances(instances, long, rest, token_s)
    assert found.long_instances + found.rest_instances == instances
    assert found.seconds == pytest.approx(every_split(instances, long, rest))
    assert 1 <= found.long_batch <= most
    assert 1 <= found.rest_batch <= 2 * most


def test_long_ones_get_smaller_batches() -> None:
    """StreamRL's point: 20 % of the trajectories, 16 times as long, on 16 instances."""
    found = split_instances(16, DispatchGroup(102, 16_000, 64), DispatchGroup(410, 1_000, 64), token_s)
    assert found.long_batch < found.rest_batch
    mixed = token_s(32) * 16_000 * math.ceil(32 / 32)
    assert found.seconds < mixed, "every instance with its share of both takes as long as its longest at a full batch"


def test_lpt_needs_a_worker() -> None:
    with pytest.raises(ValueError, match="at least one"):
        lpt([1], 0)


def test_lpt_shortens_a_heavy_tail() -> None:
    rng = random.Random(4)
    gains = []
    for _ in range(20):
        lengths = [rng.lognormvariate(6.3, 1.0) for _ in range(256)]
        gains.append(makespan(lengths, 32) / makespan([lengths[n] for n in lpt_order(lengths)], 32))
    assert min(gains) > 0.99
    assert sum(gains) / len(gains) > 1.1
