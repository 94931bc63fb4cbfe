"""The depth of the queue of hand-offs before a decode engine."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollart.policy.pipeline import in_flight
from rollart.serving.handoff import FIRST, MOST_HANDED, SEEN, HandoffDepth

seconds = st.floats(0.001, 100.0)


def seen(prefills: list[float], ends: list[float]) -> HandoffDepth:
    depth = HandoffDepth()
    for s in prefills:
        depth.prefills_s.append(s)
    now = 0.0
    for gap in ends:
        now += gap
        depth.ended(now, idle=False)
    return depth


def test_it_is_the_look_ahead_rule_on_what_was_seen() -> None:
    """A turn ends every 0.5 s, prefills take 2 s: the way there and back is four turns' time, and one decodes."""
    assert seen([2.0] * 5, [0.5] * 6).depth() == 5 == in_flight(0.5, 1.0)
    slow = seen([2.0] * 8 + [6.0] * 2, [0.5] * 6)
    assert slow.depth() == 13, "the 90th percentile of prefills, 6 s"


def test_until_something_was_seen_one_waits() -> None:
    assert HandoffDepth().depth() == seen([2.0], []).depth() == seen([], [1.0, 1.0]).depth() == FIRST
    assert HandoffDepth(7).depth() == 7


def test_time_in_which_nothing_runs_is_no_gap() -> None:
    depth = seen([1.0], [1.0, 1.0])
    depth.ended(3.0, idle=True)
    depth.ended(1000.0, idle=False)
    assert list(depth.gaps_s) == [1.0, 1.0]


@given(st.lists(seconds, max_size=80), st.lists(seconds, max_size=80))
def test_it_is_bounded_and_grows_with_what_a_prefill_takes(prefills: list[float], ends: list[float]) -> None:
    depth = seen(prefills, ends)
    assert 1 <= depth.depth() <= MOST_HANDED
    assert len(depth.prefills_s) <= SEEN
    assert seen([2 * s for s in prefills], ends).depth() >= depth.depth()


def test_a_depth_that_was_too_small_grows_to_what_keeps_the_engine_busy() -> None:
    """Prefills of 4 s, turns that would leave every second: with n ahead the engine ends n + 1 in a prefill's time."""
    n = FIRST
    for _ in range(10):
        n = seen([4.0] * 4, [max(1.0, 4.0 / n)] * 5).depth()
    assert n == pytest.approx(5)
