"""Redundancy follows health, cancels only surplus trajectories, and reports the bias of the data."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollart.control.groups import TrajectorySnapshot
from rollart.strategies.redundancy import (
    HealthMeter,
    RedundancySettings,
    RedundantLaunch,
    TrajectoryEnding,
    bias_report,
    redundant_launch,
)

BY_GROUPS = RedundancySettings(cap=1.0)
BY_SIZE = RedundancySettings(by_groups=False, by_size=True, cap=1.0)


@given(st.integers(1, 40), st.integers(1, 16), st.floats(0, 0.5), st.booleans(), st.booleans(), st.floats(0, 1))
def test_extra_stays_under_its_cap_and_grows_with_risk(
    groups: int, size: int, bad: float, by_groups: bool, by_size: bool, cap: float
) -> None:
    settings_ = RedundancySettings(by_groups=by_groups, by_size=by_size, cap=cap)
    extra = redundant_launch(groups, size, bad=bad, seen=100, settings=settings_)
    launched = (groups + extra.groups) * (size + extra.members)
    assert launched <= groups * size * (1 + cap) + 1e-6
    assert extra.groups == 0 or by_groups
    assert extra.members == 0 or by_size
    if by_groups != by_size:
        worse = redundant_launch(groups, size, bad=min(bad + 0.1, 0.6), seen=100, settings=settings_)
        assert (worse.groups, worse.members) >= (extra.groups, extra.members)


@pytest.mark.parametrize(("settings_", "bad"), [(BY_GROUPS, 0.02), (BY_SIZE, 0.05), (BY_GROUPS, 0.005)])
def test_what_is_launched_suffices_as_often_as_promised(settings_: RedundancySettings, bad: float) -> None:
    """Drawn, not computed: 32 groups of 8; by groups the whole batch is sure to 95 %, by size each group is."""
    rng = random.Random(7)
    extra = redundant_launch(32, 8, bad=bad, seen=1000, settings=settings_)
    assert not extra.capped

    def whole() -> bool:
        return sum(rng.random() >= bad for _ in range(8 + extra.members)) >= 8

    if settings_.by_groups:
        good = sum(sum(whole() for _ in range(32 + extra.groups)) >= 32 for _ in range(600)) / 600
    else:
        good = sum(whole() for _ in range(6000)) / 6000
    assert good >= 0.95 - 0.03


def test_nothing_is_launched_while_all_is_well_or_unknown() -> None:
    assert redundant_launch(32, 8, bad=0.0, seen=1000, settings=BY_GROUPS) == RedundantLaunch(0, 0, 0.0)
    assert redundant_launch(32, 8, bad=0.5, seen=10, settings=BY_GROUPS) == RedundantLaunch(0, 0, 0.0)
    unsure = redundant_launch(32, 8, bad=0.0, seen=10, settings=RedundancySettings(prior=0.02, cap=1.0))
    assert unsure.groups > 0, "the prior determines launches until enough ends were seen"
    capped = redundant_launch(32, 8, bad=0.3, seen=1000, settings=RedundancySettings(cap=0.25))
    assert capped == RedundantLaunch(8, 0, 0.3, capped=True)


def test_health_is_per_domain_and_host_and_follows_what_happens() -> None:
    meter = HealthMeter(memory=50)
    for i in range(200):
        meter.add("swe", "good", TrajectoryEnding.GOOD)
        meter.add(
            "swe",
            "bad",
            TrajectoryEnding.FAILED if i % 2 else TrajectoryEnding.STRAGGLED if i % 4 == 0 else TrajectoryEnding.GOOD,
        )
        meter.add("math", "good", TrajectoryEnding.GOOD)
    assert meter.rate("math")[0] == 0.0
    assert meter.rate("nothing") == (0.0, 0.0)
    assert meter.rate("swe", {"good": 1.0})[0] == 0.0
    assert meter.rate("swe", {"bad": 2.0})[0] == pytest.approx(0.75, abs=0.03)
    assert meter.rate("swe", {"good": 3.0, "bad": 1.0})[0] == pytest.approx(0.75 / 4, abs=0.02)
    assert meter.rate("swe", {"new": 1.0})[0] == pytest.approx(0.375, abs=0.02), "a new host is as the others are"
    for _ in range(200):
        meter.add("swe", "bad", TrajectoryEnding.GOOD)
    assert meter.rate("swe", {"bad": 1.0})[0] < 0.03, "old ends are forgotten"


def tail(rng: random.Random, count: int, low: float) -> list[TrajectorySnapshot]:
    return [
        TrajectorySnapshot(
            str(i), int(rng.lognormvariate(low, 1.0)), rng.random(), rng.randrange(5), rng.random(), None
        )
        for i in range(count)
    ]


def test_the_report_sees_a_length_bias_and_nothing_else() -> None:
    rng = random.Random(3)
    report = bias_report(tail(rng, 300, 6.0), tail(rng, 80, 7.5))
    named = {f.name: f for f in report.features}
    assert set(named) == {"tokens", "age_s", "turns", "difficulty"}, "rewards are unknown: not compared"
    assert named["tokens"].delta > 0.6
    assert [n for n, f in named.items() if f.notable()] == ["tokens"]
    (line,) = report.warnings()
    assert line.startswith("cancelled trajectories have more tokens than kept ones")
    assert bias_report(tail(rng, 300, 6.0), tail(rng, 80, 6.0)).warnings() == ()
    assert bias_report(tail(rng, 300, 6.0), tail(rng, 5, 9.0)).warnings() == (), "five are no evidence"
    assert bias_report([], tail(rng, 5, 9.0)).features == ()


@given(st.lists(st.integers(0, 9), min_size=1, max_size=12), st.lists(st.integers(0, 9), min_size=1, max_size=12))
def test_effect_size_is_cliffs_delta(kept: list[int], gone: list[int]) -> None:
    def make(turns: list[int]) -> list[TrajectorySnapshot]:
        return [TrajectorySnapshot("t", 1, 0.0, n) for n in turns]

    delta = next(f.delta for f in bias_report(make(kept), make(gone)).features if f.name == "turns")
    pairs = sum((g > k) - (g < k) for g in gone for k in kept)
    assert delta == pytest.approx(pairs / (len(kept) * len(gone)))


def test_settings_that_mean_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="confidence 1"):
        RedundancySettings(confidence=1.0)
    with pytest.raises(ValueError, match="groups 0"):
        redundant_launch(0, 8, bad=0.1, seen=100, settings=BY_GROUPS)
