"""The number of weight buckets on their way."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollart.policy.pipeline import FIRST_BUCKETS, MOST_BUCKETS, BucketDepth, weight_buckets_in_flight

GB = 1e9
seconds = st.floats(0.001, 100.0)


def seen(alone: list[float], applied: list[float], *, memory: float = 1000 * GB) -> BucketDepth:
    depth = BucketDepth(memory_bytes=memory)
    for s in alone:
        depth.alone_s.append(s)
    for s in applied:
        depth.applied_s.append(s)
    return depth


def test_it_is_the_look_ahead_rule_on_what_was_seen() -> None:
    assert seen([1.0] * 3, [0.25] * 5).depth(1, GB) == 5
    assert weight_buckets_in_flight(0.25, 0.5, bucket_bytes=GB, memory_bytes=1000 * GB) == 5
    assert seen([1.0, 1.0, 1.0, 3.0], [0.25] * 5).depth(1, GB) == 13, "the slowest of the last versions"


def test_the_first_bucket_of_a_version_moves_alone() -> None:
    assert seen([1.0], [0.1]).depth(0, GB) == 1
    assert BucketDepth(7).depth(0, GB) == 7, "a number asks for no measurement"


def test_until_both_were_seen_one_is_ahead() -> None:
    for depth in (BucketDepth(), seen([2.0], []), seen([], [2.0])):
        assert depth.depth(1, 1.0) == FIRST_BUCKETS
    assert seen([2.0], [], memory=GB).depth(1, GB) == 1, "within the memory"


def test_a_bucket_that_takes_no_time_to_apply_is_bounded() -> None:
    assert seen([1.0], [0.0], memory=10 * GB).depth(1, GB) == 10
    assert seen([1.0], [0.0], memory=10 * GB).depth(1, 20 * GB) == 1, "one at least, whatever the memory"
    assert seen([0.0], [0.0]).depth(1, GB) == 1


@pytest.mark.parametrize("number", [0, -3])
def test_none_in_flight_is_refused(number: int) -> None:
    with pytest.raises(ValueError, match=f"{number} weight buckets in flight"):
        BucketDepth(number)


@given(
    st.lists(seconds, max_size=20),
    st.lists(seconds, max_size=100),
    st.floats(1.0, 1e12),
    st.floats(1.0, 1e12),
    st.integers(1, 1000),
)
def test_bounds(alone: list[float], applied: list[float], memory: float, size: float, moved: int) -> None:
    depth = seen(alone, applied, memory=memory).depth(moved, size)
    assert 1 <= depth <= MOST_BUCKETS
    assert depth == 1 or depth * size <= memory
    assert seen([2 * s for s in alone], applied, memory=memory).depth(moved, size) >= depth
    assert seen(alone, [2 * s for s in applied], memory=memory).depth(moved, size) <= depth
