"""Shares of domains in the trained trajectories: due and actual. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rollart.ports import RunEvent
from rollart.report.rows import RunRows
from rollart.report.tables import Table, TableColumn


@dataclass(frozen=True, slots=True)
class DomainShareSummary:
    """One domain at the end of a run. `drift` is the number of groups trained minus those due, `worst` its largest
    absolute value during the run."""

    floor: float
    cap: float
    wanted: float
    trained: float
    drift: float
    worst: float


def domain_shares(events: Sequence[RunEvent]) -> dict[str, DomainShareSummary]:
    """The last event of each domain; none for a run with quotas."""
    last = {event.subject: event.fields for event in events}

    def number(name: str, field: str) -> float:
        return float(last[name][field] or 0.0)

    return {
        n: DomainShareSummary(
            number(n, "floor"),
            number(n, "cap"),
            number(n, "wanted"),
            number(n, "share"),
            number(n, "served") - number(n, "due"),
            number(n, "worst"),
        )
        for n in last
    }


def shares(rows: RunRows) -> Table:
    """The shares of one run."""
    columns = (
        TableColumn("domain"),
        TableColumn("floor", "share"),
        TableColumn("cap", "share"),
        TableColumn("wanted", "share"),
        TableColumn("trained", "share"),
        TableColumn("drift_groups", "number"),
        TableColumn("worst_drift_groups", "number"),
    )
    found = tuple(
        (name, s.floor, s.cap, s.wanted, s.trained, s.drift, s.worst) for name, s in domain_shares(rows.shares).items()
    )
    return Table("shares", "Shares of domains in what was trained", columns, found, people=bool(found))


def compared_shares(by: Mapping[str, Sequence[Mapping[str, DomainShareSummary]]]) -> Table:
    """The shares of simulations, by schedule: means over seeds, and the worst drift of any seed."""
    columns = [TableColumn("domain")]
    for name in by:
        columns += [
            TableColumn(f"{name} wanted", "share"),
            TableColumn(f"{name} trained", "share"),
            TableColumn(f"{name} worst drift", "number"),
        ]
    names = dict.fromkeys(n for own in by.values() for one in own for n in one)
    rows = []
    for name in names:
        row: list[str | float | None] = [name]
        for own in by.values():
            seen = [one[name] for one in own if name in one]
            count = len(seen) or 1
            row += [
                sum(s.wanted for s in seen) / count,
                sum(s.trained for s in seen) / count,
                max((s.worst for s in seen), default=None),
            ]
        rows.append(tuple(row))
    return Table("shares", "Shares of domains in what was trained; drift in groups", tuple(columns), tuple(rows))
