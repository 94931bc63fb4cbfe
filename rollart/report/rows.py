"""What reports are made of: a run's sums, read once, and tables as values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from rollart.ledger.intervals import IntervalSum
from rollart.ledger.prices import PriceBook
from rollart.ledger.reader import ChargeSum, InvocationSum, Reader, RunFacts, SavingSum, VersionRow
from rollart.ports import RunEvent
from rollart.spec.prices import PriceList

__all__ = ["ENGINE_ROLES", "Cell", "Column", "Report", "RunRows", "Table", "collect"]

ENGINE_ROLES = frozenset({"engine", "prefill", "decode"})
"""Roles whose busy time is charged to trajectories."""

Cell: TypeAlias = str | int | float | None


@dataclass(frozen=True, slots=True)
class Column:
    """A column's name and how people read it: text, count, seconds, usd, share (of 1), number. Without `people` it is
    for machines only."""

    name: str
    kind: str = "text"
    people: bool = True


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under named columns."""

    name: str
    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]


@dataclass(frozen=True, slots=True)
class Report:
    """Tables about one run, and notes for its foot."""

    kind: str
    run: str
    tables: tuple[Table, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RunRows:
    """Everything reports are computed from."""

    run: str
    facts: RunFacts
    intervals: Sequence[IntervalSum]
    charges: Sequence[ChargeSum]
    invocations: Sequence[InvocationSum]
    versions: Sequence[VersionRow]
    evaluations: Sequence[RunEvent]
    prices: PriceBook
    savings: Sequence[SavingSum] = ()


def collect(reader: Reader, run: str) -> RunRows:
    """Read a run's sums. Prices are the ones that it started with."""
    prices = reader.config().get("prices")
    return RunRows(
        run=run,
        facts=reader.facts(),
        intervals=reader.interval_sums(),
        charges=reader.charge_sums(),
        invocations=reader.invocation_sums(),
        versions=reader.versions(),
        evaluations=reader.events("evaluation"),
        prices=PriceBook(PriceList.model_validate(prices)) if prices else PriceBook.load(),
        savings=reader.saving_sums(),
    )
