"""The rate that a window sustains: maxima of groups against samples, and the arithmetic of slots."""

from __future__ import annotations

import math
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from placement.problem import DomainProfile, Quantity, log_normal
from placement.window import mean_longest_ratio


def domain(*, p90: float | None = None, turns: Quantity | None = None) -> DomainProfile:
    return DomainProfile(
        name="d",
        turns=turns or Quantity(1.0),
        new_tokens=Quantity(1.0),
        output_tokens=Quantity(1000.0, p90=p90),
        first_tokens=Quantity(1.0),
    )


@pytest.mark.parametrize(("p90", "members", "context"), [(1900.0, 8, 1e9), (1900.0, 4, 3000.0), (2200.0, 8, 4000.0)])
def test_the_longest_of_a_group_is_that_of_samples(p90: float, members: int, context: float) -> None:
    found = domain(p90=p90)
    median, sigma = log_normal(found.output_tokens)
    rng, share = Random(0), math.sqrt(0.5)
    longest = mean = 0.0
    for _ in range(4_000):
        ours = rng.gauss(0.0, 1.0)
        group = [min(median * math.exp(sigma * share * (ours + rng.gauss(0.0, 1.0))), context) for _ in range(members)]
        longest += max(group)
        mean += sum(group) / members
    assert mean_longest_ratio(found, members, context) == pytest.approx(longest / mean, rel=0.05)


def test_nothing_is_longer_where_nothing_varies_or_nobody_waits() -> None:
    assert mean_longest_ratio(domain(), 8, 1e9) == 1.0
    assert mean_longest_ratio(domain(p90=2000.0), 1, 1e9) == 1.0


@settings(max_examples=10)
@given(st.floats(1001.0, 3000.0), st.integers(1, 32), st.floats(500.0, 1e6))
def test_a_larger_group_waits_longer(p90: float, members: int, context: float) -> None:
    found = domain(p90=p90)
    a, b = mean_longest_ratio(found, members, context), mean_longest_ratio(found, members + 1, context)
    assert 1.0 <= a <= b + 1e-12


def test_turns_are_the_members_own() -> None:
    by_turns = domain(turns=Quantity(20.0, p90=40.0))
    assert mean_longest_ratio(by_turns, 8, 1e9) > 1.5
