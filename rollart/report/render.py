"""Reports as text: tables and pages for people, JSON and CSV for machines."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from typing import Any

from rollart.report.page import page
from rollart.report.tables import Report, TableColumn, for_people, rows_for_people

FORMATS = ("table", "json", "csv", "html")

SCHEMA_VERSION = 2
"""Version of the JSON: grows when a key is removed or changes its meaning, not when a key is added."""


def render(report: Report, form: str, *, width: int = 110, colour: bool = False) -> str:
    """The report in one of `FORMATS`, ending in a newline. `width` and `colour` are for tables."""
    match form:
        case "json":
            return json.dumps(_json(report), indent=2, ensure_ascii=False) + "\n"
        case "csv":
            return _csv(report)
        case "table":
            return _text(report, width, colour)
        case "html":
            return page(report)
        case _:
            raise ValueError(f"format {form!r} (rule: one of {', '.join(FORMATS)})")


def _json(report: Report) -> dict[str, Any]:
    return {
        "schema_version": SCHEMA_VERSION,
        "report": report.kind,
        "run": report.run,
        "tables": {
            table.name: [
                {column.name: cell for column, cell in zip(table.columns, row, strict=True)} for row in table.rows
            ]
            for table in report.tables
        },
        "notes": list(report.notes),
    }


def _csv(report: Report) -> str:
    """Long form, one cell a line, so that tables of different columns fit in one file."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["run", "report", "table", "row", "column", "value"])
    for table in report.tables:
        for n, row in enumerate(table.rows):
            for column, cell in zip(table.columns, row, strict=True):
                writer.writerow([report.run, report.kind, table.name, n, column.name, "" if cell is None else cell])
    return out.getvalue()


def _text(report: Report, width: int, colour: bool) -> str:
    from rich import box
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=colour, no_color=not colour, highlight=False)
    console.print(Text(f"{report.kind} of {report.run}", style="bold"))
    for table in filter(lambda t: t.people, report.tables):
        console.print()
        console.print(Text(table.title, style="bold"))
        if not table.rows:
            console.print("  nothing yet")
            continue
        shown = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
        table = for_people(table)
        cells = rows_for_people(table)
        needed = [_needed(column, [row[n] for row in cells]) for n, column in enumerate(table.columns)]
        tight = sum(needed) + GAP * (len(needed) - 1) > width
        for column, least in zip(table.columns, needed, strict=True):
            text = column.kind == "text"
            shown.add_column(
                Text(column.name.replace("_", " ")),
                justify="left" if text else "right",
                overflow="fold",
                min_width=None if text else least,
                no_wrap=text and not column.wrap and not tight,
            )
        for row in cells:
            shown.add_row(*(Text(cell) for cell in row))
        console.print(shown)
    for note in report.notes:
        console.print(Text(note, style="dim"))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


GAP = 3
"""Columns between two cells."""


def _needed(column: TableColumn, cells: Sequence[str]) -> int:
    """Least width of a column: headings may break between words, numbers never, texts only if the whole table is too
    wide."""
    heading = max(map(len, column.name.split("_")))
    return heading if column.wrap else max(heading, *map(len, cells))
