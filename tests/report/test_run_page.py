"""Pages of a run's reports: their tables, drawn."""

from __future__ import annotations

from typing import Any

import pytest

from rollart.ledger.intervals import IntervalSum
from rollart.ledger.reader import RunFacts
from rollart.report.cost import cost
from rollart.report.curve import curve
from rollart.report.pages import cost_page, timeline_page
from rollart.report.render import render
from rollart.report.timeline import timeline_of
from rollart.report.utilization import utilization
from tests.report.test_report import rows
from tests.report.test_simulation_page import EVIL, closed, parsed, texts


def test_dollars_are_drawn_as_the_tables_have_them() -> None:
    report = cost(rows())
    text = cost_page(report)
    closed(text)
    root = parsed(text)
    assert texts(root, "h3")[:3] == [
        "Dollars by role",
        "Idle and waste",
        "Engine time by what became of the trajectory",
    ]
    titles = texts(root, "title")
    assert "trainer: $20.00\nbusy: $20.00\nnot busy: $0" in titles
    assert "engine: $10.00\nbusy: $6.00\nnot busy: $4.00" in titles
    by_role = next(table for table in report.tables if table.name == "by_role")
    assert len([t for t in titles if "\nnot busy: " in t]) == len(by_role.rows)
    assert any(t.startswith("engine: idle: starved: $3.00") for t in titles)


def test_utilization_stands_under_the_timeline() -> None:
    found = timeline_of(100.0, [("engine", "engine-0", 0.0, 60.0, "busy", 1.0)], bins=10)
    text = timeline_page(utilization(rows()), found)
    closed(text)
    assert texts(parsed(text), "h3")[:2] == ["Who did what when", "Resources"]
    assert texts(parsed(text), "h1") == ["Utilization of quick"]


@pytest.mark.parametrize("make", [cost, utilization, curve])
def test_every_report_is_a_page_whatever_names_hold(make: Any) -> None:
    run = rows(run=EVIL, intervals=[IntervalSum(EVIL, EVIL, EVIL, EVIL, 1, 1, 1.0, 0, 1)])
    closed(render(make(run), "html"))
    closed(cost_page(cost(run)))


def test_a_run_that_has_done_nothing_has_tables_only() -> None:
    empty = rows(
        facts=RunFacts(0.0, None, None, 0, 0, 0, 0, 0),
        intervals=[],
        charges=[],
        invocations=[],
        versions=[],
        events=(),
    )
    text = cost_page(cost(empty))
    closed(text)
    assert not list(parsed(text).iter("svg"))
    assert "nothing yet" in texts(parsed(text), "p")
