"""Profiles estimated online: exact where nothing varies, and recent where it changes."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from placement.estimate import ObservedTrajectory, ProfileEstimator
from placement.problem import RewardCost

LAKE = ObservedTrajectory(
    "lake", 0.0, turns=5, first_tokens=30, new_tokens=40, output_tokens=5, wait_s=0.5, core_s=0.05
)

numbers = st.floats(0.1, 1e6)


@st.composite
def observed(draw: st.DrawFn) -> ObservedTrajectory:
    turns = draw(st.integers(1, 50))
    return ObservedTrajectory(
        domain=draw(st.sampled_from(["a", "b", "c"])),
        t=draw(st.floats(0.0, 1e4)),
        turns=turns,
        first_tokens=draw(numbers),
        new_tokens=draw(st.just(0.0) | numbers) if turns > 1 else 0.0,
        output_tokens=draw(st.floats(turns, 1e6)),
        wait_s=draw(st.floats(0.0, 100.0)),
        reward_s=draw(st.none() | st.floats(0.0, 10.0)),
    )


works = observed()
streams = st.lists(works, min_size=1, max_size=60)
lives = st.sampled_from([{}, {"half_life_s": 10.0}, {"half_life": 3.0}])


def fed(stream: list[ObservedTrajectory], **life: float) -> ProfileEstimator:
    estimator = ProfileEstimator(**life)  # type: ignore[arg-type]
    for seen in stream:
        estimator.add(seen)
    return estimator


@given(st.integers(1, 400), lives)
def test_a_constant_stream_gives_its_own_figures(n: int, life: dict[str, float]) -> None:
    p = fed([replace(LAKE, t=float(i), reward_s=0.2) for i in range(n)], **life).profile("lake")
    for quantity, value in ((p.turns, 5), (p.prompt, 30), (p.new_tokens, 10), (p.output_tokens, 1)):
        assert quantity.mean == pytest.approx(value)
        assert (quantity.p50, quantity.p90) == (value, value)
    assert p.environment.wait_s == pytest.approx(0.1)
    assert p.environment.core_s == pytest.approx(0.01)
    assert p.reward is not None
    assert p.reward.seconds == pytest.approx(0.2)
    assert (p.weight, p.source) == (1.0, f"measured, n={n}")
    assert p.total_tokens == pytest.approx(75)


@pytest.mark.parametrize("life", [{"half_life_s": 8.0}, {"half_life": 8.0}])
def test_a_step_is_followed_with_the_half_life(life: dict[str, float]) -> None:
    before = [replace(LAKE, t=float(i), turns=1, new_tokens=0) for i in range(1000)]
    estimator = fed(before, **life)
    for halves in range(1, 8):
        for i in range(8):
            estimator.add(replace(LAKE, t=1000.0 + 8 * (halves - 1) + i, turns=5))
        assert estimator.profile("lake").turns.mean == pytest.approx(5 - 4 * 0.5**halves, abs=1e-6)
    for i in range(400):
        estimator.add(replace(LAKE, t=1056.0 + i, turns=5))
    assert estimator.profile("lake").turns.p50 == 5, "the sample follows as well"


def test_without_a_half_life_all_count_alike() -> None:
    p = fed([replace(LAKE, turns=n, t=float(n), new_tokens=n - 1, output_tokens=n) for n in range(1, 101)]).profile(
        "lake"
    )
    assert p.turns.mean == pytest.approx(50.5)
    assert (p.turns.p50, p.turns.p90) == (50, 90)


@given(streams, lives)
def test_quantiles_lie_within_what_was_seen_and_in_order(
    stream: list[ObservedTrajectory], life: dict[str, float]
) -> None:
    for p in fed(stream, **life).profiles():
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


@given(streams, lives)
def test_shares_of_the_mix_add_up_and_the_same_stream_gives_the_same(
    stream: list[ObservedTrajectory], life: dict[str, float]
) -> None:
    profiles = fed(stream, **life).profiles()
    assert [p.name for p in profiles] == sorted({s.domain for s in stream})
    assert sum(p.weight for p in profiles) == pytest.approx(1)
    assert fed(stream, **life).profiles() == profiles


@given(st.lists(works.map(lambda s: replace(s, domain="a")), min_size=1, max_size=40))
def test_the_mean_length_is_exact(stream: list[ObservedTrajectory]) -> None:
    mean = sum(s.first_tokens + s.new_tokens + s.output_tokens for s in stream) / len(stream)
    assert fed(stream).profile("a").total_tokens == pytest.approx(mean)


def test_a_late_trajectory_counts_with_the_weight_of_its_time() -> None:
    now, late = replace(LAKE, t=10.0, turns=1, new_tokens=0), replace(LAKE, t=0.0, turns=5)
    for stream in ([now, late], [late, now]):
        turns = fed(stream, half_life_s=10.0).profile("lake").turns.mean
        assert turns == pytest.approx((1 * 1 + 5 * 0.5) / 1.5)


def test_the_mix_follows_what_comes_in() -> None:
    estimator = fed([replace(LAKE, t=float(i)) for i in range(100)], half_life_s=5.0)
    for i in range(100):
        estimator.add(replace(LAKE, domain="math", t=100.0 + i))
    assert estimator.profile("math").weight > 0.999
    assert estimator.count("lake") == 100


def test_how_a_domain_is_scored_is_kept_and_its_seconds_are_measured() -> None:
    estimator = ProfileEstimator(rewards={"lake": RewardCost(9.0, cores=2.0, memory_gb=1.5)})
    estimator.add(LAKE)
    assert estimator.profile("lake").reward is None
    estimator.add(replace(LAKE, reward_s=0.25))
    assert estimator.profile("lake").reward == RewardCost(0.25, cores=2.0, memory_gb=1.5)


def test_a_prefix_that_was_cached_is_the_shared_one() -> None:
    assert fed([replace(LAKE, cached_tokens=12)]).profile("lake").shared_prefix == pytest.approx(0.4)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("turns", 0),
        ("first_tokens", 0),
        ("output_tokens", 4),
        ("wait_s", math.nan),
        ("cached_tokens", 30),
        ("reward_s", -1.0),
        ("t", math.inf),
        ("new_tokens", -1.0),
    ],
)
def test_nonsense_is_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=field):
        replace(LAKE, **{field: value})  # type: ignore[arg-type]


def test_settings_that_mean_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="both"):
        ProfileEstimator(half_life_s=1.0, half_life=1.0)
    with pytest.raises(ValueError, match="half_life_s is 0"):
        ProfileEstimator(half_life_s=0.0)
    with pytest.raises(ValueError, match="domain lake"):
        ProfileEstimator().profile("lake")
