"""Shares of domains: what each was to have of what was trained, and what it had. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rollart.ports import RunEvent
from rollart.report.rows import Column, RunRows, Table

__all__ = ["ShareSeen", "compared", "shares", "shares_seen"]


@dataclass(frozen=True, slots=True)
class ShareSeen:
    """One domain at the end. `drift` = groups trained beyond those due (negative: fewer), `worst` its largest size."""

    floor: float
    cap: float
    wanted: float
    trained: float
    drift: float
    worst: float


def shares_seen(events: Sequence[RunEvent]) -> dict[str, ShareSeen]:
    """The last event of each domain; none for a run with quotas."""
    last = {event.subject: event.fields for event in events}

    def number(name: str, field: str) -> float:
        return float(last[name][field] or 0.0)

    return {
        n: ShareSeen(
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
    """Of one run."""
    columns = (
        Column("domain"),
        Column("floor", "share"),
        Column("cap", "share"),
        Column("wanted", "share"),
        Column("trained", "share"),
        Column("drift_groups", "number"),
        Column("worst_drift_groups", "number"),
    )
    found = tuple(
        (name, s.floor, s.cap, s.wanted, s.trained, s.drift, s.worst) for name, s in shares_seen(rows.shares).items()
    )
    return Table("shares", "Shares of domains in what was trained", columns, found, people=bool(found))


def compared(by: Mapping[str, Sequence[Mapping[str, ShareSeen]]]) -> Table:
    """Of simulations, by schedule: means over seeds, and the worst drift of any."""
    columns = [Column("domain")]
    for name in by:
        columns += [
            Column(f"{name} wanted", "share"),
            Column(f"{name} trained", "share"),
            Column(f"{name} worst drift", "number"),
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
