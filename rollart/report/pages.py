"""Pages of reports: charts over the tables of a run's report, and a simulation's comparisons and timelines, all drawn
from the report's own tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

from rollart.report.charts import (
    SERIES,
    Bar,
    BarGroup,
    BarSegment,
    bar_chart,
    duration,
    legend,
    timeline_chart,
    timeline_legend,
)
from rollart.report.render import Child, MarkupElement, card, document, element, folded, notes, page, table_of
from rollart.report.tables import DOLLARS, PERCENT, PLAIN, Cell, Report, Table, estimate
from rollart.report.timeline import SKETCHES, Timeline

BUSY = (("busy", "busy"), ("not busy", "idle"))
"""Name and class of the two parts of a role's cost."""


def cost_page(report: Report) -> str:
    """The report of `report.cost.cost` with charts of its dollars."""
    charts = cost_charts(report)
    return page(report, [element("div", *charts, class_="cards spaced")] if charts else [])


def cost_charts(report: Report) -> list[MarkupElement]:
    """Charts of a cost report's dollars, as far as there are any."""
    tables = {table.name: table for table in report.tables}
    return [
        *_drawn("Dollars by role", "USD, busy and not", _by_role(tables["by_role"]), legend(BUSY)),
        *_drawn("Idle and waste", "USD by role and cause", _single(tables["waste"], names=2, value=2)),
        *_drawn(
            "Engine time by what became of the trajectory", "USD", _single(tables["trajectories"], names=1, value=3)
        ),
    ]


def timeline_page(report: Report, found: Timeline) -> str:
    """Any report of a run with the run's timeline above it."""
    if not found.bands:
        return page(report)
    # The chart replaces text sketches.
    tables = [
        replace(t, columns=tuple(replace(c, people=c.people and c.name not in SKETCHES) for c in t.columns))
        for t in report.tables
    ]
    report = replace(report, tables=tuple(tables))
    return page(report, [timeline_card(found)])


def timeline_card(found: Timeline) -> MarkupElement:
    """The chart of a timeline with its legend."""
    under = f"{duration(found.seconds)}; height is the share of devices, or trajectories and calls at a time"
    chart = element("div", timeline_chart(found), class_="scroll")
    return card("Who did what when", timeline_legend([found]), chart, under=under)


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
    return [BarGroup(name, (Bar.single(name, usd, "s0"),)) for name, usd in named]


def _number(cell: Cell) -> float:
    return float(cell) if isinstance(cell, int | float) else 0.0


PARTS = (("waited_s", "waiting for samples", "idle"), ("train_s", "training", "busy"), ("publish_s", "publish", "sync"))
"""The parts of a step: figure, name, class."""


def simulation_page(report: Report, timelines: Sequence[Timeline]) -> str:
    """The page of a report of `report.simulation.simulation`, with charts of its figures."""
    tables = {table.name: table for table in report.tables}
    schedules = [c.name for c in tables["figures"].columns[3::2]]
    figures = {
        str(row[0]): {name: _pair(row[3:], n) for n, name in enumerate(schedules)} for row in tables["figures"].rows
    }
    paints = {name: f"s{n % SERIES}" for n, name in enumerate(schedules)}
    waits = tables["waits"]
    # Without unused devices: thousands of idle cores would dominate the chart.
    used = replace(waits, rows=tuple(row for row in waits.rows if not str(row[0]).startswith("unused:")))
    compared = element(
        "div",
        _step(figures),
        _one("Throughput", "trained trajectories per second", figures["trajectories_per_s"], paints),
        _one("Cost", "USD per 1,000 trained trajectories", figures["usd_per_1k"], paints),
        _grouped("Staleness", "share of trained samples, by versions of lag", tables["lags"], paints, "lag ", PERCENT),
        _grouped("Idle and waste by cause", "USD per 1,000 trained trajectories", tables["waste"], paints),
        _grouped("Waiting by cause", "device-hours of what the plan uses", used, paints),
        class_="cards",
    )
    parts = [
        card("Figures", table_of(_merged(tables["figures"])), under="mean ± half of the 95 % interval over seeds"),
        element("h2", "Comparisons"),
        compared,
        *_timelines(timelines),
        element("h2", "Tables"),
        *(folded(_merged(table)) for table in report.tables if table.people and table.name != "figures"),
        *notes(report.notes),
    ]
    return document(f"Simulation of {report.run}", "Schedules beside each other on virtual time.", parts)


Means: TypeAlias = Mapping[str, tuple[float, float | None]]
"""Means and half of their intervals, by schedule."""


def _step(figures: Mapping[str, Means]) -> MarkupElement:
    groups = []
    for schedule, (step, half) in figures["step_s"].items():
        parts = [(name, paint, *figures[key][schedule]) for key, name, paint in PARTS]
        segments = tuple(BarSegment(name, value, paint, half) for name, paint, value, half in parts)
        groups.append(BarGroup(schedule, (Bar(schedule, segments, half, step),)))
    keys = legend((name, paint) for _, name, paint in PARTS)
    return card("Step time", keys, bar_chart("Step time", groups), under="seconds per training step")


def _one(title: str, unit: str, figures: Means, paints: Mapping[str, str]) -> MarkupElement:
    groups = [
        BarGroup(schedule, (Bar.single(schedule, value, paints[schedule], half),))
        for schedule, (value, half) in figures.items()
    ]
    return card(title, bar_chart(title, groups), under=unit)


def _grouped(
    title: str, unit: str, table: Table, paints: Mapping[str, str], prefix: str = "", kind: str = PLAIN
) -> MarkupElement:
    """One group for each row, named by its first cell, and one bar for each schedule."""
    groups = []
    for row in table.rows:
        own = []
        for n, (schedule, paint) in enumerate(paints.items()):
            value, half = _pair(row[1:], n)
            own.append(Bar.single(schedule, value, paint, half))
        groups.append(BarGroup(prefix + str(row[0]).replace("_", " "), tuple(own)))
    if not groups:
        return card(title, element("p", "nothing", class_="muted"), under=unit)
    shown: list[Child] = [legend(paints.items()) if len(paints) > 1 else None, bar_chart(title, groups, unit=kind)]
    return card(title, *shown, under=unit)


def _timelines(found: Sequence[Timeline]) -> Sequence[MarkupElement]:
    drawn = [one for one in found if one.bands]
    if not drawn:
        return ()
    until = max(one.seconds for one in drawn)
    cards = [
        card(
            one.label,
            element("div", timeline_chart(one, until=until), class_="scroll"),
            under="virtual time; height is the share of devices, or trajectories and calls at a time",
        )
        for one in drawn
    ]
    return [element("h2", "Who did what when"), timeline_legend(drawn), *cards]


def _merged(table: Table) -> Table:
    """Means and their intervals in one column, for people."""
    columns, places = [], []
    for n, column in enumerate(table.columns):
        if not column.name.endswith(" ±"):
            with_half = n + 1 < len(table.columns) and table.columns[n + 1].name == f"{column.name} ±"
            columns.append(column)
            places.append((n, with_half))
    rows = tuple(tuple(_with_interval(row, n, half, table) for n, half in places) for row in table.rows)
    return Table(table.name, table.title, tuple(columns), rows)


def _with_interval(row: Sequence[Cell], n: int, half: bool, table: Table) -> Cell:
    value = row[n]
    if isinstance(value, str) or value is None or not half:
        return value
    spread = row[n + 1]
    unit = PERCENT if table.columns[n].kind == "share" or "share" in row else PLAIN
    return estimate(value, spread if isinstance(spread, int | float) else None, unit)


def _pair(cells: Sequence[Cell], n: int) -> tuple[float, float | None]:
    value, half = cells[2 * n], cells[2 * n + 1]
    return float(value or 0.0), None if half is None else float(half)
