"""Tables as values, and the text of their cells and of the figures on pages, for people."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial, wraps
from typing import ParamSpec, TypeAlias

from rollart.money import decimals, dollars, dollars_between, unit_price

P = ParamSpec("P")

PLAIN, PERCENT, DOLLARS = "", "%", "$"
"""Units of a figure; `%` is for shares of 1."""

NEGLIGIBLE = 1e-6
"""An interval below this share of its mean is rounding error."""

NO_TIME_MS = 1e-3
"""Milliseconds below this are the rounding of a difference of clock readings."""

Cell: TypeAlias = str | int | float | None


@dataclass(frozen=True, slots=True)
class FormattedCell:
    """A cell with the format of its column."""

    value: Cell
    kind: str = "text"
    people: bool = True
    wrap: bool = False


as_text = FormattedCell
as_count = partial(FormattedCell, kind="count")
as_seconds = partial(FormattedCell, kind="seconds")
as_ms = partial(FormattedCell, kind="ms")
as_usd = partial(FormattedCell, kind="usd")
as_price = partial(FormattedCell, kind="price")
as_share = partial(FormattedCell, kind="share")
as_number = partial(FormattedCell, kind="number")
as_value = partial(FormattedCell, kind="value")
"""A number whose format follows the row's cell in the column `unit`."""

BY_UNIT = {"USD": "usd", "share": "share", "count": "count"}
"""Formats by the unit of a row."""

Row: TypeAlias = Mapping[str, Cell | FormattedCell]
"""A table's row: cells by the names of their columns; a cell without a format is text."""


@dataclass(frozen=True, slots=True)
class TableColumn:
    """A column's name and format: text, count, seconds, ms, usd, price (of one unit), share (of 1), number, value (by
    the row's unit). Without `people` it is for machines only; with `wrap` a text may take several lines."""

    name: str
    kind: str = "text"
    people: bool = True
    wrap: bool = False


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under named columns. Without `people` it is for machines only."""

    name: str
    title: str
    columns: tuple[TableColumn, ...]
    rows: tuple[tuple[Cell, ...], ...]
    people: bool = True

    @classmethod
    def of(cls, name: str, title: str, rows: Iterable[Row], *, people: bool = True, optional: bool = False) -> Table:
        """A table of rows that give each cell under its column's name, all in the same order. An `optional` table is
        for people only if it has rows."""
        rows = list(rows)
        cells = [[c if isinstance(c, FormattedCell) else FormattedCell(c) for c in row.values()] for row in rows]
        columns = [
            TableColumn(key, cell.kind, cell.people, cell.wrap)
            for key, cell in zip(rows[0] if rows else (), cells[0] if rows else (), strict=True)
        ]
        if any(list(row) != [column.name for column in columns] for row in rows):
            raise ValueError(f"table '{name}': rows differ in their columns")
        values = tuple(tuple(cell.value for cell in row) for row in cells)
        return cls(name, title, tuple(columns), values, people and bool(rows or not optional))


def table(
    name: str, title: str, *, people: bool = True, optional: bool = False
) -> Callable[[Callable[P, Iterable[Row]]], Callable[P, Table]]:
    """Make a function that yields rows return them as a table (see `Table.of`)."""

    def declare(rows_of: Callable[P, Iterable[Row]]) -> Callable[P, Table]:
        @wraps(rows_of)
        def of(*args: P.args, **kwargs: P.kwargs) -> Table:
            return Table.of(name, title, rows_of(*args, **kwargs), people=people, optional=optional)

        return of

    return declare


@dataclass(frozen=True, slots=True)
class Report:
    """Tables about one run, and notes for its foot."""

    kind: str
    run: str
    tables: tuple[Table, ...]
    notes: tuple[str, ...] = ()


def ratio(a: float, b: float) -> float | None:
    """A cell that is empty where `b` is 0."""
    return a / b if b else None


def for_people(table: Table) -> Table:
    """The table without the columns for machines."""
    kept = [n for n, column in enumerate(table.columns) if column.people]
    rows = tuple(tuple(row[n] for n in kept) for row in table.rows)
    return Table(table.name, table.title, tuple(table.columns[n] for n in kept), rows)


def rows_for_people(table: Table) -> list[list[str]]:
    """Every row of the table, its cells as text: a report never drops a row."""
    at = next((n for n, column in enumerate(table.columns) if column.name == "unit"), None)
    return [
        [
            cell_text(cell, column, "" if at is None else str(row[at]))
            for cell, column in zip(row, table.columns, strict=True)
        ]
        for row in table.rows
    ]


def cell_text(value: Cell, column: TableColumn, unit: str = "") -> str:
    """A cell as text, by its column's kind, and for the kind `value` by the row's unit."""
    if value is None:
        return "-"
    if isinstance(value, str):
        return value
    match BY_UNIT.get(unit, "number") if column.kind == "value" else column.kind:
        case "usd":
            return dollars(value)
        case "price":
            return unit_price(value)
        case "share":
            return f"{value:.1%}"
        case "seconds":
            return f"{value:,.1f}"
        case "ms" if abs(value) < NO_TIME_MS:
            return "0"
        case "count":
            return f"{value:,d}" if isinstance(value, int) else f"{value:,.0f}"
        case _ if isinstance(value, int):
            return f"{value:,d}"
        case _:
            return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"


def figure(value: float, unit: str = PLAIN) -> str:
    """`0.583`, `1,284`, `12.5%`, `$3.20`."""
    if unit == PERCENT:
        return f"{_digits(100.0 * value)}%"
    if unit == DOLLARS:
        return f"${value:,.0f}" if abs(value) >= 100 else dollars(value)
    return _digits(value)


def estimate(value: float, half: float | None, unit: str = PLAIN) -> str:
    """A mean and half of its interval with the same decimals: two digits of the interval, at least three of the mean.
    The mean alone without an interval, or if both are 0."""
    if half is None or value == half == 0:
        return figure(value, unit)
    if half <= NEGLIGIBLE * abs(value):
        return f"{figure(value, unit)} ± 0"
    if unit == DOLLARS:
        return dollars_between(value, half)
    scale = 100.0 if unit == PERCENT else 1.0
    shown = max(decimals(half * scale, 2), decimals(value * scale, 3))
    after = "%" if unit == PERCENT else ""
    return " ± ".join(f"{given * scale:,.{shown}f}{after}" for given in (value, half))


def _digits(value: float) -> str:
    if abs(value) < 1e-9:
        return "0"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
