"""The look-ahead rule against a hop that really runs: the depth found keeps the consumer busy, one less does not."""

from __future__ import annotations

import heapq
import random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rollart.policy.pipeline import in_flight, weight_buckets_in_flight

ITEMS = 40


def idle(depth: int, work_s: float, there: list[float], back: list[float]) -> float:
    """Seconds that the consumer waits between the first item and the last of a run: requests go out as items are done,
    each item comes when its own way there and back is over, and items are worked on as they come."""
    arrivals = [there[n] + back[n] for n in range(depth)]
    heapq.heapify(arrivals)
    asked, now, waited = depth, 0.0, 0.0
    for n in range(len(there)):
        came = heapq.heappop(arrivals)
        if n:
            waited += max(came - now, 0.0)
        now = max(now, came) + work_s
        if asked < len(there):
            heapq.heappush(arrivals, now + there[asked] + back[asked])
            asked += 1
    return waited


@given(st.integers(1, 50), st.integers(0, 200))
@example(1, 1)
@example(10, 15)
def test_the_depth_is_the_smallest_that_keeps_the_consumer_busy(work: int, delay: int) -> None:
    depth = in_flight(work, delay)
    items = 3 * depth + ITEMS
    assert idle(depth, work, [delay] * items, [delay] * items) == 0
    if depth > 1:
        assert idle(depth - 1, work, [delay] * items, [delay] * items) > 0


@given(st.floats(0.01, 10), st.floats(0, 20), st.floats(0, 5), st.integers(0, 1000))
def test_jitter_is_covered(work: float, delay: float, jitter: float, seed: int) -> None:
    rng = random.Random(seed)
    depth = in_flight(work, delay, jitter_s=jitter)
    items = 2 * depth + ITEMS
    there, back = ([delay + rng.uniform(0, jitter) for _ in range(items)] for _ in "ab")
    # The first item is not the slowest: until the rounds are in step, one jitter each way is waited for.
    assert idle(depth, work, there, back) <= 2 * jitter + 1e-6 * items * (work + delay)


@given(st.floats(1e-6, 1e3), st.floats(0, 1e3), st.integers(1, 64))
def test_bounds(work: float, delay: float, most: int) -> None:
    free = in_flight(work, delay)
    assert free >= 1
    assert in_flight(work, delay, most=most) == min(free, most)
    assert in_flight(work, delay + 1.0) >= free, "no less for a longer delay"


def test_rounding_does_not_add_one() -> None:
    assert in_flight(0.1, 0.1) == 3
    assert in_flight(0.3, 0.1 + 0.2) == 3
    assert in_flight(10, 10) == 3
    assert in_flight(10, 10.001) == 4


def test_no_delay_needs_nothing_ahead_and_no_work_needs_a_bound() -> None:
    assert in_flight(0.0, 0.0) == 1
    assert in_flight(0.0, 1.0, most=8) == 8
    for work in (0.0, 5e-324):
        with pytest.raises(ValueError, match="most"):
            in_flight(work, 1.0)


@pytest.mark.parametrize(
    "bad", [{"work_s": -1}, {"delay_s": -1}, {"delay_s": float("inf")}, {"jitter_s": float("nan")}]
)
def test_times_are_finite(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="finite and not negative"):
        in_flight(**{"work_s": 1.0, "delay_s": 1.0, **bad})


def test_weight_buckets_stay_within_memory() -> None:
    gb = 2**30
    assert weight_buckets_in_flight(0.1, 0.45, bucket_bytes=gb, memory_bytes=64 * gb) == 10
    assert weight_buckets_in_flight(0.1, 0.45, bucket_bytes=gb, memory_bytes=4.5 * gb) == 4
    with pytest.raises(ValueError, match="smaller buckets"):
        weight_buckets_in_flight(0.1, 0.4, bucket_bytes=gb, memory_bytes=gb / 2)


def test_the_hand_off_queue_is_as_deep_as_the_rule_says() -> None:
    assert in_flight(0.05, 0.1) == 5
    assert in_flight(0.05, 0.1, most=3) == 3


@given(st.integers(1, 60), st.integers(0, 300))
def test_prefetched_environments_keep_a_slot_busy(episode: int, reset: int) -> None:
    """A slot with `ahead` environments reset or being reset, one in use: the next reset begins as one is used up."""
    ahead = in_flight(episode, reset / 2) - 1
    items = 3 * ahead + ITEMS
    none = [0.0] * items
    assert idle(ahead + 1, episode, none, [float(reset)] * items) == 0
    if ahead:
        assert idle(ahead, episode, none, [float(reset)] * items) > 0
