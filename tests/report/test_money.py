"""Dollars for people: units, the forecast of a plan, the plan beside the bill, and tables over time and by tag."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.cli.main import run
from rollart.ledger.reader import RunFacts
from rollart.money import dollars, dollars_between, unit_price
from rollart.report.focus import DEVICES, FUNCTIONS, FocusCharge
from rollart.report.money.planned import SimulatedCost, forecast_lines, forecast_table, plan_table, planned_cost
from rollart.report.money.spend import KEYS, MOST_HOURS, FleetSums, RunCharge, by_tag, fleet, over_time, spend_sums
from rollart.report.tables import Table, TableColumn, rows_for_people
from rollart.settings.base import FIELDS_OF_CHARGES
from tests.report.test_focus import CONFIG, SAMPLE, record

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


CHARGES = st.lists(
    st.builds(
        lambda hour, service, role, state, price, amount, tags: FocusCharge(
            hour, service, "", role, f"{role}-0", state, "", "H20", "device-hour", price, amount, tags=tags
        ),
        st.integers(490_000, 490_200),
        st.sampled_from([DEVICES, FUNCTIONS]),
        st.sampled_from(["engine", "trainer"]),
        st.sampled_from(["busy", "idle"]),
        st.floats(0, 10),
        st.floats(0, 100),
        st.sampled_from([{}, {"team": "a"}, {"team": "b", "owner": "x"}]),
    ),
    min_size=1,
    max_size=20,
)


@settings(max_examples=25)
@given(CHARGES, st.lists(st.sampled_from(["team", *KEYS]), min_size=1, max_size=3, unique=True))
def test_every_table_adds_up_to_the_charges(charges: list[FocusCharge], keys: list[str]) -> None:
    total = math.fsum(charge.usd for charge in charges)
    sums = spend_sums(charges)
    periods = values(over_time(sums))
    assert len(periods) <= MOST_HOURS
    assert math.fsum(row["usd"] for row in periods) == pytest.approx(total)
    assert periods[-1]["so_far_usd"] == pytest.approx(total)
    for row in periods:
        parts = ("devices_usd", "functions_usd", "language_models_usd")
        assert math.fsum(row[part] for part in parts) == pytest.approx(row["usd"])
    for tag in {name for charge in charges for name in charge.tags}:
        own = [row["usd"] for row in values(by_tag(sums)) if row["tag"] == tag]
        assert math.fsum(own) == pytest.approx(total, abs=1e-6)
    several = FleetSums([key for key in keys if key != "team" or any("team" in c.tags for c in charges)] or ["run"])
    for n, charge in enumerate(charges):
        several.add(RunCharge(f"run-{n % 3}", "lab", charge))
    grouped, whole = fleet("runs", several).tables
    assert math.fsum(row["usd"] for row in values(grouped)) == pytest.approx(total)
    assert values(whole) == [{"runs": len(several.runs), "usd": pytest.approx(total)}]


def test_a_fleet_is_grouped_by_tags_and_months(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tuple(KEYS) == FIELDS_OF_CHARGES
    spent = {}
    for name, team in (("a", "search"), ("deep/b", "agents")):
        record(tmp_path / name, SAMPLE, config={**CONFIG, "run": {"tags": {"team": team}}})
        (tmp_path / name / "resolved.yaml").write_text("")
        assert run(["report", "cost", str(tmp_path / name), "--json"]) == 0
        tables = json.loads(capsys.readouterr().out)["tables"]
        spent[name] = tables["total"][0]["value"]
        (tagged,) = tables["by_tag"]
        assert (tagged["tag"], tagged["value"], tagged["usd"]) == ("team", team, pytest.approx(spent[name]))
        assert math.fsum(row["usd"] for row in tables["over_time"]) == pytest.approx(spent[name])
    record(tmp_path / "kept", SAMPLE, config={**CONFIG, "simulated": {}})
    (tmp_path / "kept" / "resolved.yaml").write_text("")
    (tmp_path / "broken").mkdir()
    for name in ("resolved.yaml", "ledger.sqlite"):
        (tmp_path / "broken" / name).write_text("not a ledger")
    assert run(["report", "fleet", "--runs", str(tmp_path), "--by", "team,month", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    tables, (broken, simulated) = report["tables"], report["notes"]
    assert broken.startswith("left out: broken: ")
    assert simulated == "left out: kept: a simulation"
    found: dict[str, float] = {}
    for row in tables["fleet"]:
        assert row["month"] in ("2026-12", "2027-01")
        found[row["team"]] = found.get(row["team"], 0.0) + row["usd"]
    assert found == pytest.approx({"search": spent["a"], "agents": spent["deep/b"]})
    assert tables["total"] == [{"runs": 2, "usd": pytest.approx(math.fsum(spent.values()))}]
    assert run(["report", "fleet", "--runs", str(tmp_path), "--by", "tam"]) == 2
    assert "did you mean 'team'?" in capsys.readouterr().err
