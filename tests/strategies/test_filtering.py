"""The groups whose rewards carry no signal."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rollart.strategies.filtering import rewards_alike


@given(st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=3))
def test_a_group_qualifies_if_its_rewards_differ(group: list[float]) -> None:
    assert rewards_alike(group) == (len(set(group)) == 1)
