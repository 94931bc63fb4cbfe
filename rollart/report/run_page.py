"""Pages of a run: its timeline over the tables of a report."""

from __future__ import annotations

from dataclasses import replace

from rollart.report.markup import element
from rollart.report.page import card, page
from rollart.report.rows import Report, Table
from rollart.report.timeline import SKETCHES, Timeline
from rollart.report.timeline_chart import duration, timeline_chart, timeline_legend

__all__ = ["timeline_page"]


def timeline_page(report: Report, found: Timeline) -> str:
    """Any report of a run with who did what when above it."""
    if not found.bands:
        return page(report)
    report = replace(report, tables=tuple(_drawn(table) for table in report.tables))
    chart = element("div", timeline_chart(found), class_="scroll")
    under = f"{duration(found.seconds)}; height is the share of devices, or trajectories and calls at a time"
    return page(report, [card("Who did what when", timeline_legend([found]), chart, under=under)])


def _drawn(table: Table) -> Table:
    """Without the sketches in letters, which the picture is better than."""
    columns = tuple(replace(c, people=c.people and c.name not in SKETCHES) for c in table.columns)
    return replace(table, columns=columns)
