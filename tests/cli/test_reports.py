"""`rollart report` as a user meets it: on the ledger of a run, by the command."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollart.ledger.store import Ledger
from rollart.ports import Interval, RunEvent
from rollart.settings.load import builtin, load_prices
from serverless.types import Invocation

Call = Callable[..., Any]

POINTS = 122


@pytest.fixture
def long_run(rollart: Call) -> Path:
    """A run with more evaluations, resources and causes than fit on a screen."""
    directory = Path("runs/long")
    with Ledger(directory, clock=lambda: 0.0, config={}, inline=True) as ledger:
        for n in range(POINTS):
            fields = {"version": n, "episodes": 1000, "successes": n}
            ledger.event(RunEvent(float(n), "evaluation", "lake", fields))
            ledger.interval(Interval("engine", f"engine-{n}", 0, 10, "idle", f"cause-{n}", 1, 2.0 + n))
    (directory / "resolved.yaml").write_text("")
    return directory


def test_no_format_of_a_report_drops_a_row(rollart: Call, long_run: Path) -> None:
    points = [f"{n / 1000:.1%}" for n in range(POINTS)]
    for form in ("table", "html"):
        found = set(re.findall(r"\d+\.\d%", rollart("report", "curve", "-o", form).out))
        assert found.issuperset(points), form
    assert len(json.loads(rollart("report", "curve", "-o", "json").out)["tables"]["points"]) == POINTS
    rows = csv.DictReader(io.StringIO(rollart("report", "curve", "-o", "csv").out))
    assert len({row["row"] for row in rows if row["table"] == "points"}) == POINTS


def test_samples_of_held_out_prompts_are_in_the_curve_report(rollart: Call, long_run: Path) -> None:
    assert "several samples" not in rollart("report", "curve").out
    fields = {"version": 7, "temperature": 0.5, "prompts": 64, "avg@8": 0.25, "pass@8": 0.75, "pass@16": None}
    with Ledger(long_run, clock=lambda: 0.0, config={}, inline=True) as ledger:
        ledger.event(RunEvent(1.0, "evaluation_sampled", "lake", fields))
    rows = json.loads(rollart("report", "curve", "--json").out)["tables"]["sampled"]
    shown = [(row["domain"], row["version"], row["temperature"], row["metric"], row["success"]) for row in rows]
    assert shown == [("lake", 7, 0.5, f"{k}", v) for k, v in (("avg@8", 0.25), ("pass@8", 0.75), ("pass@16", None))]
    assert "several samples" in rollart("report", "curve").out


@pytest.mark.parametrize(("report", "kinds"), [("cost", ("engine", "cause")), ("utilization", ("engine",))])
def test_tables_and_charts_of_many_resources_and_causes_are_whole(
    rollart: Call, long_run: Path, report: str, kinds: tuple[str, ...]
) -> None:
    pages = {form: rollart("report", report, "-o", form).out for form in ("table", "html")}
    for form, out in pages.items():
        for kind in kinds:
            assert {int(n) for n in re.findall(rf"{kind}-(\d+)", out)} == set(range(POINTS)), (form, kind)
    if report == "cost":
        charts = re.findall(r"<svg.*?</svg>", pages["html"], re.DOTALL)
        assert any({int(n) for n in re.findall(r"cause-(\d+)", chart)} == set(range(POINTS)) for chart in charts)


def test_the_total_is_what_is_billed_and_each_price_has_its_source(rollart: Call) -> None:
    """Local workers run on cores that are billed whole: at Lambda's prices, their calls are in no total."""
    directory = Path("runs/priced")
    config = {
        "cluster": {"pools": [{"name": "here", "device": "cpu"}, {"name": "own", "device": "H20", "price": 1.5}]},
        "usd_per_device_hour": {"here": 0.0472, "own": 1.5},
        "prices": load_prices(builtin("prices.yaml")).model_dump(mode="json"),
    }
    with Ledger(directory, clock=lambda: 0.0, config=config, inline=True) as ledger:
        ledger.interval(Interval("engine", "engine-0", 0, 3600, "busy", "", 2, 0.0472))
        ledger.interval(Interval("trainer", "trainer-0", 0, 3600, "busy", "", 1, 1.5))
        for provider in ("local", "aws_lambda", "http"):
            ledger.invocation(Invocation("judge", provider, "w", 0, 1, 0, 3600.0, 1024, 1, "ok"))
    (directory / "resolved.yaml").write_text("")
    tables = json.loads(rollart("report", "cost", "-o", "json").out)["tables"]
    total = {row["what"]: row["value"] for row in tables["total"]}
    assert total["total"] == pytest.approx(0.0944 + 1.5 + LAMBDA_HOUR)
    assert total["would cost elsewhere"] == pytest.approx(LAMBDA_HOUR)
    status = {row["what"]: row["value"] for row in json.loads(rollart("status", "--json").out)["tables"]["status"]}
    assert status["usd"] == pytest.approx(total["total"])
    priced = tables["prices"]
    assert sum(row["usd"] for row in priced if row["cost"] == "billed") == pytest.approx(total["total"])
    assert {(row["price"], row["date"]) for row in priced if row["unit"] == "device-hour"} == {
        ("cpu (here)", "2026-07-01"),
        ("H20 (own)", "-"),
    }
    assert all(row["source"] for row in priced)
    assert "http: no price is known" in rollart("report", "cost").out


LAMBDA_HOUR = 3600 * 0.0000166667 + 0.2e-6
"""Dollars of one call of an hour with 1 GB."""


def test_a_run_beside_itself_has_no_difference(rollart: Call, long_run: Path) -> None:
    for form in ("table", "html", "csv", "json"):
        done = rollart("diff", "long", "long", "-o", form)
        assert done.code == 0
        assert form == "csv" or "no difference" in done.out
    assert rollart("diff", "long", "short").code == 2
