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
