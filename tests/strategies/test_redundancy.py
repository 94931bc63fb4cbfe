"""Redundancy follows health, cancels only surplus trajectories, and reports the bias of the data."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollart.control.groups import TrajectorySnapshot
from rollart.settings.rollout import RedundancySpec
from rollart.strategies.redundancy import HealthMeter, RedundantLaunch, bias_report, redundant_launch

BY_GROUPS = RedundancySpec(groups=2.0, health=True)
BY_SIZE = RedundancySpec(size=2.0, health=True)


@given(st.integers(1, 40), st.integers(1, 16), st.floats(0, 0.5), st.floats(1, 2), st.floats(1, 2))
def test_extra_stays_under_its_factors_and_grows_with_risk(
    groups: int, size: int, bad: float, by_groups: float, by_size: float
) -> None:
    wanted = RedundancySpec(groups=by_groups, size=by_size, health=True)
    extra = redundant_launch(wanted, groups, size, bad=bad, seen=100)
    launched = (groups + extra.groups) * (size + extra.members)
    assert launched <= groups * size * by_groups * by_size + 1e-6
    assert groups + extra.groups <= groups * by_groups + 1e-6
    assert size + extra.members <= size * by_size + 1e-6
    if (by_groups > 1) != (by_size > 1):
        worse = redundant_launch(wanted, groups, size, bad=min(bad + 0.1, 0.6), seen=100)
        assert (worse.groups, worse.members) >= (extra.groups, extra.members)


@pytest.mark.parametrize(("wanted", "bad"), [(BY_GROUPS, 0.02), (BY_SIZE, 0.05), (BY_GROUPS, 0.005)])
def test_what_is_launched_suffices_as_often_as_promised(wanted: RedundancySpec, bad: float) -> None:
    """Drawn, not computed: 32 groups of 8; by groups the whole batch is sure to 95 %, by size each group is."""
    rng = random.Random(7)
    extra = redundant_launch(wanted, 32, 8, bad=bad, seen=1000)

    def whole() -> bool:
        return sum(rng.random() >= bad for _ in range(8 + extra.members)) >= 8

    if wanted.groups > 1:
        good = sum(sum(whole() for _ in range(32 + extra.groups)) >= 32 for _ in range(600)) / 600
    else:
        good = sum(whole() for _ in range(6000)) / 6000
    assert good >= 0.95 - 0.03


def test_nothing_is_launched_while_all_is_well_or_unknown() -> None:
    assert redundant_launch(BY_GROUPS, 32, 8, bad=0.0, seen=1000) == RedundantLaunch(0, 0)
    assert redundant_launch(BY_GROUPS, 32, 8, bad=0.5, seen=10) == RedundantLaunch(0, 0)
    assert redundant_launch(RedundancySpec(groups=1.25, health=True), 32, 8, bad=0.3, seen=1000) == RedundantLaunch(
        8, 0
    )


def test_health_is_per_domain_and_follows_what_happens() -> None:
    meter = HealthMeter(memory=50)
    for i in range(200):
        meter.add("swe", bad=i % 4 != 0)
        meter.add("math", bad=False)
    assert meter.rate("math")[0] == 0.0
    assert meter.rate("nothing") == (0.0, 0.0)
    assert meter.rate("swe")[0] == pytest.approx(0.75, abs=0.03)
    for _ in range(200):
        meter.add("swe", bad=False)
    assert meter.rate("swe")[0] < 0.03, "old ends are forgotten"


def tail(rng: random.Random, count: int, low: float) -> list[TrajectorySnapshot]:
    return [
        TrajectorySnapshot(
            str(i), int(rng.lognormvariate(low, 1.0)), rng.random(), rng.randrange(5), rng.random(), None
        )
        for i in range(count)
    ]


def test_the_report_sees_a_length_bias_and_nothing_else() -> None:
    rng = random.Random(3)
    named = {f.name: f for f in bias_report(tail(rng, 300, 6.0), tail(rng, 80, 7.5))}
    assert set(named) == {"tokens", "age_s", "turns", "difficulty"}, "rewards are unknown: not compared"
    assert named["tokens"].delta > 0.6
    assert [n for n, f in named.items() if f.notable] == ["tokens"]
    assert not any(f.notable for f in bias_report(tail(rng, 300, 6.0), tail(rng, 80, 6.0)))
    assert not any(f.notable for f in bias_report(tail(rng, 300, 6.0), tail(rng, 5, 9.0))), "five are no evidence"
    assert bias_report([], tail(rng, 5, 9.0)) == []


@given(st.lists(st.integers(0, 9), min_size=1, max_size=12), st.lists(st.integers(0, 9), min_size=1, max_size=12))
def test_effect_size_is_cliffs_delta(kept: list[int], gone: list[int]) -> None:
    def make(turns: list[int]) -> list[TrajectorySnapshot]:
        return [TrajectorySnapshot("t", 1, 0.0, n) for n in turns]

    delta = next(f.delta for f in bias_report(make(kept), make(gone)) if f.name == "turns")
    pairs = sum((g > k) - (g < k) for g in gone for k in kept)
    assert delta == pytest.approx(pairs / (len(kept) * len(gone)))
