"""Profiles estimated from trajectories: exact where nothing varies, and within what was seen."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from placement.estimate import ObservedTrajectory, estimate_profiles
from placement.problem import RewardCost

LAKE = ObservedTrajectory("lake", turns=5, first_tokens=30, new_tokens=40, output_tokens=5, wait_s=0.5)

numbers = st.floats(0.1, 1e6)


@st.composite
def observed(draw: st.DrawFn) -> ObservedTrajectory:
    turns = draw(st.integers(1, 50))
    return ObservedTrajectory(
        domain=draw(st.sampled_from(["a", "b", "c"])),
        turns=turns,
        first_tokens=draw(numbers),
        new_tokens=draw(st.just(0.0) | numbers) if turns > 1 else 0.0,
        output_tokens=draw(st.floats(turns, 1e6)),
        wait_s=draw(st.floats(0.0, 100.0)),
        reward_s=draw(st.none() | st.floats(0.0, 10.0)),
    )


works = observed()
streams = st.lists(works, min_size=1, max_size=60)


@given(st.integers(1, 400))
def test_a_constant_stream_gives_its_own_figures(n: int) -> None:
    (p,) = estimate_profiles([replace(LAKE, reward_s=0.2)] * n)
    for quantity, value in ((p.turns, 5), (p.prompt, 30), (p.new_tokens, 10), (p.output_tokens, 1)):
        assert quantity.mean == pytest.approx(value)
        assert (quantity.p50, quantity.p90) == (value, value)
    assert p.environment.wait_s == pytest.approx(0.1)
    assert p.reward is not None
    assert p.reward.seconds == pytest.approx(0.2)
    assert (p.weight, p.source) == (1.0, f"measured, n={n}")
    assert p.total_tokens == pytest.approx(75)


def test_all_count_alike() -> None:
    (p,) = estimate_profiles([replace(LAKE, turns=n, new_tokens=n - 1, output_tokens=n) for n in range(1, 101)])
    assert p.turns.mean == pytest.approx(50.5)
    assert (p.turns.p50, p.turns.p90) == (50, 90)


def test_the_median_of_a_long_run_is_that_of_a_sample() -> None:
    (p,) = estimate_profiles([replace(LAKE, turns=n, new_tokens=n - 1, output_tokens=n) for n in range(1, 5001)])
    assert p.turns.p50 == pytest.approx(2500, rel=0.1)
    assert p.turns.mean == pytest.approx(2500.5)


@pytest.mark.slow
@given(streams)
def test_quantiles_lie_within_what_was_seen_and_in_order(stream: list[ObservedTrajectory]) -> None:
    for p in estimate_profiles(stream):
        own = [s for s in stream if s.domain == p.name]
        for quantity, seen in (
            (p.turns, [s.turns for s in own]),
            (p.prompt, [s.first_tokens for s in own]),
            (p.new_tokens, [s.new_tokens / (s.turns - 1) for s in own if s.turns > 1]),
            (p.output_tokens, [s.output_tokens / s.turns for s in own]),
        ):
            if not seen:
                assert (quantity.mean, quantity.p50) == (0, None)
                continue
            assert quantity.p50 is not None
            assert quantity.p90 is not None
            assert min(seen) <= quantity.p50 <= quantity.p90 <= max(seen)
            assert min(seen) * (1 - 1e-9) <= quantity.mean <= max(seen) * (1 + 1e-9)


@pytest.mark.slow
@given(streams)
def test_shares_of_the_mix_add_up_and_the_same_stream_gives_the_same(stream: list[ObservedTrajectory]) -> None:
    profiles = estimate_profiles(stream)
    assert [p.name for p in profiles] == sorted({s.domain for s in stream})
    assert sum(p.weight for p in profiles) == pytest.approx(1)
    assert estimate_profiles(stream) == profiles


@pytest.mark.slow
@given(st.lists(works.map(lambda s: replace(s, domain="a")), min_size=1, max_size=40))
def test_the_mean_length_is_exact(stream: list[ObservedTrajectory]) -> None:
    mean = sum(s.first_tokens + s.new_tokens + s.output_tokens for s in stream) / len(stream)
    assert estimate_profiles(stream)[0].total_tokens == pytest.approx(mean)


def test_how_a_domain_is_scored_is_kept_and_its_seconds_are_measured() -> None:
    rewards = {"lake": RewardCost(9.0, cores=2.0, memory_gb=1.5)}
    assert estimate_profiles([LAKE], rewards)[0].reward is None
    scored = [LAKE, replace(LAKE, reward_s=0.25)]
    assert estimate_profiles(scored, rewards)[0].reward == RewardCost(0.25, cores=2.0, memory_gb=1.5)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("turns", 0),
        ("first_tokens", 0),
        ("output_tokens", 4),
        ("wait_s", math.nan),
        ("reward_s", -1.0),
        ("new_tokens", -1.0),
    ],
)
def test_nonsense_is_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=field):
        replace(LAKE, **{field: value})  # type: ignore[arg-type]
