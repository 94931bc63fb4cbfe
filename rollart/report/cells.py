"""Text of a table's cells for people."""

from __future__ import annotations

from rollart.report.rows import Cell, Table, TableColumn

__all__ = ["cell_text", "for_people", "rows_for_people"]


def for_people(table: Table) -> Table:
    """The table without the columns for machines."""
    kept = [n for n, column in enumerate(table.columns) if column.people]
    rows = tuple(tuple(row[n] for n in kept) for row in table.rows)
    return Table(table.name, table.title, tuple(table.columns[n] for n in kept), rows)


NO_TIME_MS = 1e-3
"""Milliseconds below this are the rounding of a difference of clock readings."""


def rows_for_people(table: Table) -> list[list[str]]:
    """Every row of the table, its cells as text: a report never drops a row."""
    return [[cell_text(cell, column) for cell, column in zip(row, table.columns, strict=True)] for row in table.rows]


def cell_text(value: Cell, column: TableColumn) -> str:
    """A cell as text, by its column's kind."""
    if value is None:
        return "-"
    if isinstance(value, str):
        return value
    match column.kind:
        case "usd":
            return f"{value:,.6f}" if abs(value) < 1 else f"{value:,.2f}"
        case "share":
            return f"{value:.1%}"
        case "seconds":
            return f"{value:,.1f}"
        case "ms" if abs(value) < NO_TIME_MS:
            return "0"
        case "count":
            return f"{value:,d}" if isinstance(value, int) else f"{value:,.0f}"
        case _:
            return (
                f"{value:,d}" if isinstance(value, int) else f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
            )
