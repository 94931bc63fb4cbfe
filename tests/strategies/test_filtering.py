"""The verdict on a group of rewards."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rollart.strategies.filtering import GroupVerdict, classify_rewards


@given(st.lists(st.sampled_from([0.0, 1.0, None]), min_size=1, max_size=3))
def test_a_group_qualifies_if_its_rewards_differ(group: list[float | None]) -> None:
    verdict = classify_rewards(group)
    if None in group:
        assert verdict is GroupVerdict.FAULTY, "a fault is neither a reward nor a difference"
    else:
        assert (verdict is GroupVerdict.QUALIFIED) == (len(set(group)) > 1)
