"""Pages of a run: pictures over the tables of a report, drawn from those tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from rollart.report.charts import Bar, BarGroup, BarSegment, bar_chart, legend
from rollart.report.markup import MarkupElement, element
from rollart.report.page import card, page
from rollart.report.tables import DOLLARS, Cell, Report, Table
from rollart.report.timeline import SKETCHES, Timeline
from rollart.report.timeline_chart import duration, timeline_chart, timeline_legend

BUSY = (("busy", "busy"), ("not busy", "idle"))
"""Name and class of the two parts of a role's cost."""


def cost_page(report: Report) -> str:
    """The report of `report.summarize.cost` with charts of its dollars."""
    tables = {table.name: table for table in report.tables}
    charts = [
        *_drawn("Dollars by role", "USD, busy and not", _by_role(tables["by_role"]), legend(BUSY)),
        *_drawn("Idle and waste", "USD by role and cause", _single(tables["waste"], names=2, value=2)),
        *_drawn(
            "Engine time by what became of the trajectory", "USD", _single(tables["trajectories"], names=1, value=3)
        ),
    ]
    return page(report, [element("div", *charts, class_="cards spaced")] if charts else [])


def timeline_page(report: Report, found: Timeline) -> str:
    """Any report of a run with the run's timeline above it."""
    if not found.bands:
        return page(report)
    report = replace(report, tables=tuple(_without_sketches(table) for table in report.tables))
    chart = element("div", timeline_chart(found), class_="scroll")
    under = f"{duration(found.seconds)}; height is the share of devices, or trajectories and calls at a time"
    return page(report, [card("Who did what when", timeline_legend([found]), chart, under=under)])


def _drawn(
    title: str, unit: str, groups: Sequence[BarGroup], keys: MarkupElement | None = None
) -> Iterable[MarkupElement]:
    """A chart; nothing if all values are 0."""
    if any(bar.total > 0 for group in groups for bar in group.bars):
        yield card(title, keys, bar_chart(title, groups, unit=DOLLARS), under=unit)


def _by_role(table: Table) -> list[BarGroup]:
    at = {column.name: n for n, column in enumerate(table.columns)}
    groups = []
    for row in table.rows:
        name = str(row[at["role"]])
        parts = (row[at["busy_usd"]], row[at["not_busy_usd"]])
        segments = tuple(BarSegment(part, _number(usd), paint) for (part, paint), usd in zip(BUSY, parts, strict=True))
        groups.append(BarGroup(name, (Bar(name, segments),)))
    return groups


def _single(table: Table, *, names: int, value: int) -> list[BarGroup]:
    """One bar a row, the largest first: named by its first columns."""
    rows = sorted(table.rows, key=lambda row: -_number(row[value]))
    named = [(": ".join(str(cell).replace("_", " ") for cell in row[:names]), _number(row[value])) for row in rows]
    return [BarGroup(name, (Bar(name, (BarSegment(name, usd, "s0"),)),)) for name, usd in named]


def _without_sketches(table: Table) -> Table:
    """The table without text sketches, which the chart replaces."""
    columns = tuple(replace(c, people=c.people and c.name not in SKETCHES) for c in table.columns)
    return replace(table, columns=columns)


def _number(cell: Cell) -> float:
    return float(cell) if isinstance(cell, int | float) else 0.0
