"""Dollars for people: units, the forecast of a plan, and the plan beside the bill."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.ledger.reader import RunFacts
from rollart.money import dollars, dollars_between, unit_price
from rollart.report.money.planned import SimulatedCost, forecast_lines, forecast_table, plan_table, planned_cost
from rollart.report.tables import Table, TableColumn, rows_for_people
from tests.report.test_focus import CONFIG

PLANNED = {
    **CONFIG,
    "run": {"steps": 500, "batch": {"trajectories": 64}},
    "plan": {"placement": {"rate": 0.5, "band": 0.15, "usd_per_hour_all": 60.0}},
}
FACTS = RunFacts(7200.0, 50, 50, 10_000, 3000, 0, 0, 0)


def values(table: Table) -> list[dict[str, Any]]:
    return [{c.name: cell for c, cell in zip(table.columns, row, strict=True)} for row in table.rows]


def test_dollars_have_a_unit_that_fits() -> None:
    shown = [dollars(usd) for usd in (0, 1240.5, 12.4, 0.5, 0.1234, 0.0411, 0.00411, 4.11e-5, 4.11e-9, -0.5, -3e-9)]
    assert shown == [
        *("$0", "$1,240.50", "$12.40", "$0.50", "$0.123", "$0.0411", "0.411 ¢", "0.00411 ¢"),
        *("< 0.0001 ¢", "-$0.50", "> -0.0001 ¢"),
    ]
    prices = [unit_price(usd) for usd in (0, 1.85, 5.28, 0.0472, 1.64e-4, 1.66667e-5, 2e-7, 1234.5)]
    assert prices == [
        *("$0.00", "$1.85", "$5.28", "$0.0472", "$0.164 / 1k", "$16.6667 / 1M", "$0.20 / 1M", "$1,234.50"),
    ]
    assert dollars_between(1240.2, 181.3) == "$1,240 ± 181"
    assert dollars_between(0.0000411, 0.000002) == "0.00411 ¢ ± 0.00020"


@settings(max_examples=60)
@given(st.floats(1e-9, 1e9))
def test_no_dollar_has_an_exponent(usd: float) -> None:
    for shown in (dollars(usd), unit_price(usd), dollars_between(usd, usd / 3)):
        assert "e" not in shown
    if usd >= 1e-6:
        text = dollars(usd)
        number = float(text.strip("$¢ ").replace(",", "")) / (100.0 if "¢" in text else 1.0)
        assert number == pytest.approx(usd, rel=0.006)


def test_values_are_shown_by_the_unit_of_their_row() -> None:
    columns = (TableColumn("unit"), TableColumn("value", "value"))
    rows: tuple[tuple[str, float], ...] = (("USD", 4.11e-5), ("share", 0.25), ("count", 12.0), ("s", 0.5))
    shown = [row[1] for row in rows_for_people(Table("t", "T", columns, rows))]
    assert shown == ["0.00411 ¢", "25.0%", "12", "0.5"]


def test_a_plan_tells_the_dollars_to_the_last_step() -> None:
    found = planned_cost(PLANNED)
    assert found is not None
    assert found.usd == pytest.approx(500 * 64 / 0.5 / 3600 * 60)
    assert found.text == "$1,067 ± 160 to step 500, in 17 h 46 min"
    assert found.basis.startswith("the plan's rate of 0.5 trajectories/s ± 15%, device prices of 2026-")
    assert list(forecast_lines(PLANNED)) == [f"forecast: {found.text} ({found.basis})"]
    (_, warning) = forecast_lines({**PLANNED, "run": {**PLANNED["run"], "budget": {"usd": 900.0}}})
    assert warning == "warning: budget.usd is $900.00: by the forecast the run stops before its last step"
    by_plan, simulated = values(forecast_table(found, SimulatedCost(30.0, 2.0, "simulation")))
    assert (by_plan["to_step"], by_plan["±"]) == (500, pytest.approx(160.0))
    assert (simulated["usd"], simulated["±"]) == (pytest.approx(960.0), pytest.approx(64.0))


@pytest.mark.parametrize("changed", [{"rate": 0.0}, {"usd_per_hour_all": 0.0}])
def test_a_plan_without_a_rate_or_a_price_has_no_forecast(changed: dict[str, float]) -> None:
    placement = {**PLANNED["plan"]["placement"], **changed}  # type: ignore[dict-item]
    assert planned_cost({**PLANNED, "plan": {"placement": placement}}) is None
    assert planned_cost({**PLANNED, "plan": {"placement": None}}) is None
    assert not list(forecast_lines({**PLANNED, "plan": {"placement": placement}}))
    assert not forecast_table(None).rows
    assert not plan_table(None, FACTS, 10.0).rows


def test_the_plan_stands_beside_the_bill_up_to_the_step_that_was_reached() -> None:
    found = {row["what"]: row for row in values(plan_table(planned_cost(PLANNED), FACTS, 132.0))}
    reached = found["to step 50"]
    assert (reached["plan"], reached["actual"]) == (pytest.approx(106.67, abs=0.01), 132.0)
    assert reached["ratio"] == pytest.approx(132.0 / 106.67, rel=1e-3)
    assert found["per hour"]["actual"] == pytest.approx(66.0)
    assert found["per 1,000 trained trajectories"]["actual"] == pytest.approx(44.0)
    assert found["trajectories trained"]["ratio"] == pytest.approx(3000 / 7200 / 0.5)
