"""The decisions of scaling, from values alone."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from serverless.providers.base import WorkerLoad
from serverless.scaling.decisions import (
    CallForecast,
    CallStatistics,
    Decider,
    Hysteresis,
    ScalingObservation,
    StatisticsMeter,
)
from serverless.scaling.forecast import ExpectedCalls, Forecast, workers_for
from serverless.scaling.settings import ScalingSpec
from serverless.spec import FunctionSpec
from serverless.types import Cause, Invocation
from tests.serverless.support import Books

OFF = {"enabled": False}


def decider(*, concurrency: int = 100, keep_alive_s: float = 60.0, **given_settings: object) -> Decider:
    spec = FunctionSpec(name="f", source="f.py", concurrency=concurrency, keep_alive_s=keep_alive_s)
    return Decider(spec, ScalingSpec.model_validate(given_settings))


def expects(mean: float, variance: float = 0.0) -> CallForecast:
    return lambda horizon_s: ExpectedCalls(mean, variance)


def look(
    now: float = 0.0, load: WorkerLoad | None = None, expected_calls: CallForecast = lambda _: None, **rest: object
) -> ScalingObservation:
    statistics = rest.pop("statistics", None) or CallStatistics(service_s=2.0, items=1.0, cold_s=5.0)
    waiting = rest.pop("waiting", 0)
    return ScalingObservation(now, load or WorkerLoad(), statistics, waiting, expected_calls, **rest)  # type: ignore[arg-type]


def call(
    seconds: float, *, t0: float = 0.0, items: int = 1, cold_s: float = 0.0, cause: Cause = Cause.CALL
) -> Invocation:
    return Invocation("f", "local", "w", t0, t0 + seconds, cold_s, seconds, 512, items, "ok", cause)


class TestForecast:
    @settings(max_examples=40)
    @given(
        durations=st.lists(st.integers(1, 60), min_size=1, max_size=40),
        ages=st.lists(st.integers(0, 80), max_size=60),
        horizon=st.integers(1, 40),
    )
    def test_many_at_once_are_what_each_alone_is(self, durations: list[int], ages: list[int], horizon: int) -> None:
        forecast = Forecast()
        for seconds in durations:
            forecast.ended("a", float(seconds))
        alone = forecast.within(float(horizon), [("a", float(age)) for age in ages])
        together = forecast.among("a", sorted(100.0 - age for age in ages), 100.0, float(horizon))
        assert together.mean == pytest.approx(alone.mean)
        assert together.variance == pytest.approx(alone.variance)

    def test_no_more_workers_than_calls(self) -> None:
        assert workers_for(3, 60.0, 5.0) == 3
        assert workers_for(3, 60.0, 5.0, items=2) == 2


class TestDecider:
    def test_the_forecast_asks_for_workers_before_any_call(self) -> None:
        """40 items of 2 s within 1.2 x 5 + 2 x 1 = 8 s: ten workers."""
        found = decider(forecast={"z": 0.0}).decide(look(expected_calls=expects(40.0)))
        assert (found.workers, found.why) == (10, "forecast")

    def test_the_horizon_is_a_little_more_than_a_cold_start_and_two_looks_or_as_set(self) -> None:
        asked: list[float] = []

        def expected_calls(horizon_s: float) -> ExpectedCalls:
            asked.append(horizon_s)
            return ExpectedCalls(0.0, 0.0)

        decider(keep_alive=OFF).decide(look(expected_calls=expected_calls))
        decider(keep_alive=OFF, forecast={"horizon_s": 30.0}).decide(look(expected_calls=expected_calls))
        assert asked == pytest.approx([8.0, 30.0])

    def test_items_share_calls_as_they_did(self) -> None:
        statistics = CallStatistics(service_s=2.0, items=8.0, cold_s=5.0)
        assert (
            decider(forecast={"z": 0.0}).decide(look(expected_calls=expects(64.0), statistics=statistics)).workers == 2
        )

    def test_what_nobody_announced_is_reacted_to(self) -> None:
        one = decider()
        for t in range(4):
            found = one.decide(look(float(t), WorkerLoad(ready=2, busy=2, waiting=12)))
        assert (found.workers, found.why) == (20, "reactive"), "14 calls at 0.7 a worker"
        assert decider(reactive=OFF).decide(look(0.0, WorkerLoad(2, 0, 2, 12))).workers == 0

    def test_calls_shorter_than_a_look_are_seen_by_what_they_ran(self) -> None:
        """80 calls of 50 ms that ended between two looks are four at once, though none runs at a look."""
        one, statistics = decider(forecast=OFF), CallStatistics()
        for n in range(80):
            statistics.note(call(0.05, t0=n / 80.0))
        assert one.decide(look(1.0, WorkerLoad(1), statistics=statistics)).workers == 6

    def test_a_call_longer_than_a_look_counts_for_its_part(self) -> None:
        statistics = CallStatistics()
        assert statistics.take_busy(100.0) == 0.0
        statistics.note(call(30.0, t0=70.5))
        assert statistics.take_busy(101.0) == pytest.approx(0.5)

    def test_nothing_passes_the_concurrency_and_nothing_is_wanted_of_nothing(self) -> None:
        assert decider(concurrency=3).decide(look(expected_calls=expects(1e6))).workers == 3
        idle = decider().decide(look(expected_calls=expects(0.0)))
        assert (idle.workers, idle.why) == (0, "idle")
        assert decider().decide(look(expected_calls=expects(50.0), statistics=CallStatistics())).workers == 0, (
            "no call was seen yet"
        )

    @settings(max_examples=40)
    @given(
        ticks=st.lists(
            st.tuples(st.integers(0, 50), st.integers(0, 500), st.floats(0, 1e4), st.integers(0, 50)), max_size=30
        )
    )
    def test_it_is_always_within_its_bounds(self, ticks: list[tuple[int, int, float, int]]) -> None:
        one = decider(concurrency=50)
        for t, (busy, waiting, mean, starting) in enumerate(ticks):
            found = one.decide(
                look(float(t), WorkerLoad(busy, starting, busy, waiting), expects(mean, mean / 2), idle_usd_per_s=1e-5)
            )
            assert 0 <= found.workers <= 50
            assert (found.why == "idle") == (found.workers == 0)
            assert found.keep_alive_s is not None
            assert 1.0 <= found.keep_alive_s <= 60.0


class TestKeepAlive:
    def rule(
        self,
        expected_calls: CallForecast = lambda _: None,
        *,
        waited: float = 1.0,
        longest: float = 1e6,
        idle: float = 1e-5,
        **keep_alive: object,
    ) -> float | None:
        one = decider(reactive=OFF, forecast=OFF, keep_alive=keep_alive, keep_alive_s=longest)
        statistics = CallStatistics(service_s=2.0, items=1.0, cold_s=5.0, waited=waited)
        return one.decide(
            look(expected_calls=expected_calls, statistics=statistics, idle_usd_per_s=idle, waiting_usd_per_s=9e-5)
        ).keep_alive_s

    def test_idling_may_cost_what_a_cold_start_does_with_who_waits_for_it(self) -> None:
        assert self.rule() == pytest.approx(50.0), "5 s of worker and trajectory, at a tenth of that a second"
        assert self.rule(waited=0.0) == pytest.approx(5.0), "started ahead, nobody waits"

    def test_a_call_that_is_coming_keeps_it_longer_and_none_lets_it_go_sooner(self) -> None:
        assert self.rule(expects(40.0)) == pytest.approx(100.0)
        assert self.rule(expects(0.1)) == pytest.approx(25.0)
        assert self.rule(expects(0.1), trust=1.0) == pytest.approx(50.0)

    def test_it_stays_within_bounds_and_the_functions_own_is_the_longest(self) -> None:
        assert self.rule(longest=20.0) == 20.0
        assert self.rule(longest=20.0, max_s=40.0) == 40.0
        assert self.rule(idle=0.0, longest=30.0) == 30.0, "workers that cost nothing"
        assert self.rule(waited=0.0, min_s=8.0) == 8.0
        assert self.rule(enabled=False) is None


class TestHysteresis:
    def test_it_rises_once_a_minute_and_by_a_fifth(self) -> None:
        one = Hysteresis()
        assert one.next(0.0, 0, 10) == 10
        one.changed = 0.0
        assert one.next(59.0, 10, 50) == 10
        assert one.next(60.0, 10, 50) == 50
        one.changed = 60.0
        assert one.next(500.0, 50, 55) == 50
        assert one.next(500.0, 50, 60) == 60

    def test_it_falls_after_five_minutes_to_the_most_that_was_wanted_in_them(self) -> None:
        one = Hysteresis()
        one.changed = 0.0
        assert one.next(100.0, 50, 20) == 50
        assert one.next(299.0, 50, 5) == 50
        assert one.next(300.0, 50, 0) == 20
        one.changed = 300.0
        assert one.next(599.0, 20, 0) == 20
        assert one.next(600.0, 20, 0) == 0

    @settings(max_examples=60)
    @given(st.lists(st.tuples(st.floats(0.1, 200.0), st.integers(0, 40)), min_size=1, max_size=60))
    def test_changes_are_apart(self, asked: list[tuple[float, int]]) -> None:
        one, now, level, changes = Hysteresis(), 0.0, 0, []
        for pause, wanted in asked:
            now += pause
            to = one.next(now, level, wanted)
            if to != level:
                assert abs(to - level) >= 1
                changes.append((now, to > level))
                one.changed = now
            level = to
        for (before, _), (after, up) in itertools.pairwise(changes):
            assert after - before >= (60.0 if up else 300.0)


class TestSeen:
    def test_it_passes_everything_on_and_learns(self) -> None:
        books = Books()
        seen = StatisticsMeter(books)
        for one in (
            call(2.0, items=4, cold_s=3.0),
            call(2.0, items=4),
            call(0.0, items=0, cold_s=1.0, cause=Cause.WARM),
        ):
            seen.invocation(one)
        statistics = seen.statistics("f", "local")
        assert len(books.invocations) == 3
        assert (statistics.service_s, statistics.items, statistics.scored, statistics.billed_s) == (2.0, 4.0, 8, 4.0)
        assert 2.8 < statistics.cold_s <= 3.0, "near the longest"
        assert statistics.waited == pytest.approx(0.95)
        assert seen.statistics("f", "modal").items == 0.0


@pytest.mark.parametrize(
    "wrong",
    [
        {"tick_s": 0},
        {"forecast": {"horizon_s": "soon"}},
        {"forecast": {"horizon_s": 0}},
        {"reactive": {"max_down": 1}},
        {"keep_alive": {"trust": 0}},
        {"unknown": 1},
        {"provisioned": "perhaps"},
    ],
)
def test_wrong_settings_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        ScalingSpec.model_validate(wrong)
