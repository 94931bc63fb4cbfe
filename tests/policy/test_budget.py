"""The forecast of a run's dollars, and the alarms of its budget."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import stdtrit

from rollart.policy.budget import LEAST_STEPS, BudgetAlarm, BudgetAlarms, SpendMeter, students_t

COSTS = st.lists(st.floats(0.01, 10), min_size=6, max_size=25)


def test_the_quantile_is_that_of_student() -> None:
    for freedom in range(3, 60):
        assert students_t(freedom) == pytest.approx(stdtrit(freedom, 0.975), rel=0.01)


@settings(max_examples=40)
@given(COSTS, st.floats(0, 100))
def test_a_forecast_holds_what_is_spent_and_narrows_to_the_bill(costs: list[float], before: float) -> None:
    meter, spent = SpendMeter(len(costs)), before
    for step, usd in enumerate(costs, start=1):
        spent += usd
        found = meter.step(step, spent)
        assert (found is None) == (step <= LEAST_STEPS)
        if found is not None:
            assert found.usd >= spent
            assert found.half >= 0
    assert found is not None
    assert (found.usd, found.half) == (spent, 0.0), "the last step's forecast is the bill"


def test_steps_of_one_price_are_forecast_exactly() -> None:
    meter = SpendMeter(100)
    found = [meter.step(step, 5.0 + 2.0 * step) for step in range(1, 11)][-1]
    assert found is not None
    assert (found.usd, found.half) == (pytest.approx(205.0), pytest.approx(0.0, abs=1e-9))


@settings(max_examples=60)
@given(COSTS, st.floats(0.1, 1.2), st.floats(0.1, 1))
def test_each_alarm_is_given_once_and_none_without_its_cause(costs: list[float], share: float, warn_at: float) -> None:
    budget = share * math.fsum(costs)
    meter, alarms, spent, given_at = (
        SpendMeter(len(costs)),
        BudgetAlarms(budget, warn_at),
        0.0,
        dict[BudgetAlarm, float](),
    )
    for step, usd in enumerate(costs, start=1):
        spent += usd
        forecast = meter.step(step, spent)
        for alarm in alarms.due(spent, forecast):
            assert alarm not in given_at
            given_at[alarm] = spent
            if alarm is BudgetAlarm.FORECAST:
                assert forecast is not None
                assert forecast.usd - forecast.half > budget >= spent
        if spent > budget:
            break
    assert (BudgetAlarm.EXCEEDED in given_at) == (spent > budget)
    assert all(given_at[alarm] >= warn_at * budget for alarm in given_at if alarm is BudgetAlarm.WARN_AT)
    if spent <= budget and spent >= warn_at * budget:
        assert BudgetAlarm.WARN_AT in given_at


@settings(max_examples=40)
@given(st.floats(0.01, 10), st.integers(20, 100), st.floats(0.3, 0.9))
def test_the_forecast_warns_of_even_steps_long_before_the_break(usd: float, steps: int, share: float) -> None:
    meter, alarms = SpendMeter(steps), BudgetAlarms(share * usd * steps, 1.0)
    for step in range(1, LEAST_STEPS + 2):
        due = list(alarms.due(step * usd, meter.step(step, step * usd)))
    assert due == [BudgetAlarm.FORECAST]
