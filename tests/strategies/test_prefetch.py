"""How many environments are reset ahead: the look-ahead rule in whole batches."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rollart.strategies.prefetch import MOST_AHEAD, PrefetchDepth, environments_to_prefetch


def test_nothing_is_known_before_a_reset_was_seen_and_a_batch_after_it() -> None:
    rule = PrefetchDepth("auto", quota=64)
    assert rule.wanted() == 0
    rule.resets_s.append(10.0)
    assert rule.wanted() == 64


def test_as_many_batches_as_a_reset_outlasts_the_time_between_admissions() -> None:
    rule = PrefetchDepth("auto", quota=8)
    rule.resets_s.append(25.0)
    for now in (0.0, 100.0, 200.0):
        rule.published(now)
    assert rule.wanted() == 8
    for n in range(20):
        rule.published(200.0 + 10.0 * (n + 1))
    assert rule.wanted() == 8 * 3, "25 s of reset, 10 s from batch to batch"


def test_a_number_is_a_number() -> None:
    rule = PrefetchDepth(5, quota=64)
    rule.resets_s.append(1e6)
    assert rule.wanted() == 5


@given(st.integers(1, 100), st.floats(0.1, 1e4), st.lists(st.just(0.0) | st.floats(0.01, 1e4), max_size=80))
def test_bounded_and_whole_batches(quota: int, period: float, resets: list[float]) -> None:
    found = environments_to_prefetch(quota, period, resets)
    assert 0 <= found <= MOST_AHEAD * quota
    assert found % quota == 0
    assert (found >= quota) is any(resets)
