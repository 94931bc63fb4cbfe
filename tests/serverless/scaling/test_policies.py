"""Scaling: Knative's rules, forecasts from live trajectories, ski rental, and each applied to a recorded load."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serverless.scaling.autoscaler import KNATIVE, Autoscaler
from serverless.scaling.decisions import break_even_s, keep_alive_s
from serverless.scaling.forecast import Forecast, workers_for
from serverless.scaling.replay import (
    ForecastScaling,
    ReactiveScaling,
    ReplayedCall,
    ScalingRule,
    min_dedicated_workers,
    replay_dedicated,
    replay_elastic,
)
from serverless.scaling.settings import ReactiveSpec


def knative(**changes: float) -> ReactiveSpec:
    return KNATIVE.model_copy(update=changes)


def steady(scaler: Autoscaler, concurrency: float, seconds: int, *, ready: int, start: int = 0) -> list[int]:
    wanted = []
    for t in range(start, start + seconds):
        scaler.observe(t, concurrency)
        ready = scaler.wanted(t, ready)
        wanted.append(ready)
    return wanted


class TestAutoscaler:
    def test_a_steady_load_gets_its_workers_at_the_target_utilisation(self) -> None:
        assert steady(Autoscaler(), 7.0, 120, ready=10)[-1] == 10

    def test_a_burst_panics_within_the_short_window_and_then_only_grows(self) -> None:
        scaler = Autoscaler()
        steady(scaler, 0.7, 120, ready=1)
        burst = steady(scaler, 14.0, 6, ready=1, start=120)
        assert scaler.panicking
        assert burst[-1] >= 17, "six seconds of 14 calls, at 0.7 a worker"
        quiet = steady(scaler, 0.7, 50, ready=burst[-1], start=126)
        assert min(quiet) >= burst[-1], "no worker goes while it panics"
        assert steady(scaler, 0.7, 200, ready=quiet[-1], start=176)[-1] == 1

    def test_it_falls_by_half_at_most_at_each_look_and_then_to_zero_after_the_grace(self) -> None:
        scaler = Autoscaler(knative(stable_s=10))
        steady(scaler, 7.0, 30, ready=10)
        falls = steady(scaler, 0.0, 60, ready=10, start=30)
        for before, after in zip([10, *falls], falls, strict=False):
            assert after >= math.floor(before / 2)
        assert falls[-1] == 0
        assert falls[28] >= 1, "the last worker stays for the grace"
        assert falls[45] == 0

    def test_the_delay_keeps_the_largest_number_of_its_time(self) -> None:
        scaler = Autoscaler(knative(stable_s=5, down_delay_s=20, grace_s=0))
        steady(scaler, 7.0, 20, ready=10)
        falls = steady(scaler, 0.0, 120, ready=10, start=20)
        assert falls[15] == 10
        assert falls[-1] == 0

    def test_time_does_not_go_back(self) -> None:
        scaler = Autoscaler()
        scaler.observe(1.0, 1.0)
        with pytest.raises(ValueError, match="time went back"):
            scaler.observe(0.5, 1.0)

    @pytest.mark.parametrize("wrong", [{"utilisation": 0.0}, {"max_down": 1.0}, {"panic_share": 1.5}, {"stable_s": 0}])
    def test_nonsense_is_refused(self, wrong: dict[str, float]) -> None:
        with pytest.raises(ValueError, match=r"greater than|less than"):
            ReactiveSpec.model_validate(wrong)


class TestForecast:
    def test_the_chance_is_that_of_the_durations_that_were_seen(self) -> None:
        forecast = Forecast()
        for seconds in range(1, 101):
            forecast.ended("a", float(seconds))
        assert forecast.chance("a", 0.0, 10.0) == pytest.approx(0.1)
        assert forecast.chance("a", 50.0, 25.0) == pytest.approx(0.5)
        assert forecast.chance("a", 99.5, 1.0) == 1.0
        assert forecast.chance("a", 500.0, 1.0) == 1.0, "overdue"
        assert forecast.chance("b", 0.0, 1e9) == 0.0, "never seen"
        expected = forecast.within(25.0, [("a", 50.0)] * 8)
        assert expected.mean == pytest.approx(4.0)
        assert expected.upper(2.0) == pytest.approx(4.0 + 2.0 * math.sqrt(2.0))

    def test_old_durations_are_forgotten(self) -> None:
        forecast = Forecast(kept=10)
        for seconds in [1.0] * 50 + [100.0] * 10:
            forecast.ended("a", seconds)
        assert forecast.chance("a", 0.0, 50.0) == 0.0

    def test_workers_follow_littles_law(self) -> None:
        assert workers_for(10, 2.0, 5.0) == 4
        assert workers_for(10, 2.0, 5.0, items=8) == 1
        assert workers_for(0.0, 2.0, 5.0) == 0
        assert workers_for(0.01, 2.0, 5.0) == 1


def cost(idle: float, cold: float, gap_s: float, kept_s: float) -> float:
    """Dollars of a gap between two calls if the worker is kept for `kept_s`."""
    return min(gap_s, kept_s) * idle + (cold if gap_s > kept_s else 0.0)


class TestKeepAlive:
    @given(gap=st.floats(0, 1e4), idle=st.floats(1e-6, 1), cold=st.floats(0, 10))
    def test_never_more_than_twice_the_optimum(self, gap: float, idle: float, cold: float) -> None:
        kept_s = keep_alive_s(break_even_s(idle, cold), 0.5)
        assert cost(idle, cold, gap, kept_s) <= 2 * min(gap * idle, cold) + 1e-9

    @given(gap=st.floats(0, 1e4), forecast=st.floats(0, 1e4), trust=st.floats(0.05, 1))
    def test_a_wrong_forecast_costs_a_bounded_factor(self, gap: float, forecast: float, trust: float) -> None:
        best = min(gap * 0.01, 1.0)
        assert cost(0.01, 1.0, gap, keep_alive_s(100.0, trust, forecast)) <= (1 + 1 / trust) * best + 1e-9

    @given(gap=st.floats(0, 1e4), trust=st.floats(0.05, 1))
    def test_a_right_forecast_pays(self, gap: float, trust: float) -> None:
        assert cost(0.01, 1.0, gap, keep_alive_s(100.0, trust, gap)) <= (1 + trust) * min(gap * 0.01, 1.0) + 1e-9

    def test_workers_that_cost_nothing_stay(self) -> None:
        assert keep_alive_s(break_even_s(0.0, 1.0), 0.5, 5.0) == math.inf


def bursts(steps: int = 40, batch: int = 64, seed: int = 0) -> list[ReplayedCall]:
    """Reward calls of synchronous steps: a batch of trajectories begins at once, log-normal durations around 30 s, and
    nothing happens for 20 s while the model trains (facts of RollArt's R3: reward load comes in bursts)."""
    rng, t, calls = random.Random(seed), 0.0, []
    for _ in range(steps):
        lasts = [30.0 * rng.lognormvariate(0.0, 0.5) for _ in range(batch)]
        calls += [ReplayedCall(t + d, 2.0 * rng.lognormvariate(0.0, 0.3), t, "math") for d in lasts]
        t += max(lasts) + 20.0
    return calls


class TestReplay:
    def test_dedicated_workers_are_a_queue(self) -> None:
        """By hand: two workers, four calls of 2 s at 0, 0, 1 and 1 s."""
        found = replay_dedicated([ReplayedCall(0, 2), ReplayedCall(0, 2), ReplayedCall(1, 2), ReplayedCall(1, 2)], 2)
        assert found.waits == pytest.approx((0, 0, 1, 1))
        assert [found.span_s, found.worker_s, found.busy_s, found.utilisation] == pytest.approx([4, 8, 8, 1])
        assert replay_dedicated([], 3).worker_s == 0

    @given(
        st.lists(st.tuples(st.integers(0, 40), st.integers(1, 10)), min_size=1, max_size=25),
        st.sampled_from([0.0, 1.0, 4.0]),
        st.sampled_from([0.5, 0.99, 1.0]),
    )
    def test_the_fewest_workers_are_enough_and_one_less_is_not(
        self, rows: list[tuple[int, int]], wait_s: float, quantile: float
    ) -> None:
        """Against trying every number in turn; with all calls at once none waits."""
        calls = [ReplayedCall(t / 2, s / 2) for t, s in rows]
        every = [k for k in range(1, len(calls) + 1) if replay_dedicated(calls, k).wait(quantile) <= wait_s]
        assert min_dedicated_workers(calls, wait_s, quantile=quantile) == every[0]
        assert min_dedicated_workers([], wait_s) == 1

    def test_functions_start_for_a_call_and_end_idle(self) -> None:
        """By hand: 1 s of cold start, kept for 3 s. The call at 5 s finds a worker that has been idle since 3 s, the
        one at 20 s none."""
        found = replay_elastic([ReplayedCall(0, 2), ReplayedCall(5, 2), ReplayedCall(20, 2)], cold_s=1, keep_s=3)
        assert found.waits == pytest.approx((1, 0, 1))
        assert [found.cold_starts, found.peak] == [2, 1]
        assert found.worker_s == pytest.approx((7 + 3) + 3)

    @given(st.lists(st.tuples(st.floats(0, 100), st.floats(0.01, 10)), min_size=1, max_size=40), st.integers(1, 8))
    def test_every_call_is_served_once_and_every_second_counted(
        self, rows: list[tuple[float, float]], most: int
    ) -> None:
        calls = [ReplayedCall(t, s, max(0.0, t - 5)) for t, s in rows]
        for scaling in (ScalingRule(), ReactiveScaling(), ForecastScaling(3.0)):
            found = replay_elastic(calls, cold_s=0.5, keep_s=2.0, scaling=scaling, most=most)
            assert len(found.waits) == len(calls)
            assert min(found.waits) >= -1e-9
            assert found.peak <= most
            assert found.busy_s == pytest.approx(sum(c.seconds for c in calls))
            assert found.worker_s >= found.busy_s - 1e-6

    def test_unbounded_functions_wait_no_longer_than_a_cold_start(self) -> None:
        found = replay_elastic(bursts(5), cold_s=5.0, keep_s=5.0)
        assert max(found.waits) <= 5.0 + 1e-9

    def test_a_forecast_beats_a_reaction_at_equal_cost(self) -> None:
        """p99 of the wait less than half of Knative's, for no more worker-seconds."""
        calls = bursts()
        ahead = replay_elastic(calls, cold_s=5.0, keep_s=5.0, scaling=ForecastScaling(8.0))
        for utilisation in (0.9, 0.7, 0.5):
            reactive = replay_elastic(
                calls, cold_s=5.0, keep_s=5.0, scaling=ReactiveScaling(knative(utilisation=utilisation))
            )
            assert ahead.worker_s <= reactive.worker_s
            assert ahead.wait(0.99) < 0.5 * reactive.wait(0.99)

    def test_nobody_looks_ahead_further_than_the_live_trajectories_tell(self) -> None:
        """Without trajectories in flight the forecast is silent, and calls start workers on demand."""
        blind = [ReplayedCall(c.t, c.seconds) for c in bursts(5)]
        ahead = replay_elastic(blind, cold_s=5.0, keep_s=5.0, scaling=ForecastScaling(8.0))
        assert ahead.wait(0.99) == pytest.approx(5.0, abs=0.5)
