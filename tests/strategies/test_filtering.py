"""Dynamic filtering, played out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollart.strategies.filtering import DynamicFilter, GroupVerdict

rewards = st.lists(st.sampled_from([0.0, 1.0, None]), min_size=1, max_size=3)


@given(st.integers(1, 6), st.integers(0, 4), st.none() | st.integers(0, 10), st.lists(rewards, max_size=40))
def test_the_filter_stops_at_its_target_and_not_before(
    target: int, extra: int, more: int | None, ends: list[list[float | None]]
) -> None:
    chosen = DynamicFilter(target, extra, None if more is None else target + more)
    live = list(range(chosen.start()))
    launched = len(live)
    stopped = False
    for group in ends:
        if not live:
            break
        decision = chosen.ended(f"g{live.pop(0)}", group)
        assert not (stopped and decision.launch), "nothing is launched after the stop"
        live += range(launched, launched + decision.launch)
        launched += decision.launch
        assert len(live) == chosen.live
        assert launched == chosen.launched
        assert len(chosen.qualified) <= target
        assert decision.stop == (len(chosen.qualified) == target)
        if not decision.stop:
            full = len(live) == target + extra - len(chosen.qualified)
            assert full or launched == chosen.most, "as many run as should"
            assert decision.exhausted == (not live)
        if not stopped and None not in group:
            assert (decision.verdict is GroupVerdict.QUALIFIED) == (len(set(group)) > 1)
        if not stopped and None in group:
            assert decision.verdict is GroupVerdict.FAULTY, "a fault is neither a reward nor a difference"
        stopped = stopped or decision.stop


def test_bad_use_is_said() -> None:
    chosen = DynamicFilter(1)
    with pytest.raises(ValueError, match="was not launched"):
        chosen.ended("a", [1.0])
    assert chosen.start() == 1
    assert chosen.ended("a", [1.0, 0.0]).stop
    with pytest.raises(ValueError, match="group a ended twice"):
        chosen.ended("a", [1.0])
    with pytest.raises(ValueError, match="most 2 at least"):
        DynamicFilter(3, most=2)
