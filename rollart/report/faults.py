"""The cost of a simulation's faults. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rollart.ledger.intervals import ResourceState
from rollart.ports import RunEvent
from rollart.report.rows import RunRows
from rollart.report.tables import Cell, Table, TableColumn

INFRA_FAULT = "infra_fault"
"""Outcome of trajectories that an infrastructure fault ended, and the event that records the fault."""


@dataclass(frozen=True, slots=True)
class ObservedFaults:
    """Outages and their seconds by kind of part, added up over parts; tokens of answers and of KV that engines had in
    memory when they died."""

    outages: Mapping[str, int]
    down_s: Mapping[str, float]
    lost_tokens: int
    lost_kv_tokens: int


@dataclass(frozen=True, slots=True)
class FaultCost:
    """Cost of faults: device-seconds and dollars of devices that were known to be down, aborted trajectories by cause,
    the engine-seconds and sampled tokens lost with them, failed function calls by kind."""

    observed: ObservedFaults
    down_device_s: float = 0.0
    down_usd: float = 0.0
    aborted: Mapping[str, int] = field(default_factory=dict)
    aborted_engine_s: float = 0.0
    aborted_tokens: int = 0
    failed_calls: Mapping[str, int] = field(default_factory=dict)


def fault_cost(rows: RunRows, events: Sequence[RunEvent], observed: ObservedFaults) -> FaultCost:
    """From a simulation's ledger; `events` are the events of infrastructure faults."""
    down = [i for i in rows.intervals if i.state == ResourceState.DOWN]
    lost = [c for c in rows.charges if c.outcome == INFRA_FAULT]
    calls: Counter[str] = Counter()
    for call in rows.invocations:
        if call.status not in ("ok", "cancelled"):
            calls[call.status] += call.calls
    return FaultCost(
        observed,
        math.fsum(i.unit_seconds for i in down),
        math.fsum(i.usd for i in down),
        dict(Counter(_cause(str(e.fields.get("detail", ""))) for e in events).most_common()),
        math.fsum(c.engine_seconds for c in lost),
        sum(c.action_tokens for c in lost),
        dict(calls.most_common()),
    )


def faults_table(by: Mapping[str, Sequence[FaultCost]]) -> Table:
    """One column per schedule, means over seeds."""
    rows: list[tuple[Cell, ...]] = []

    def add(label: str, unit: str, values: Mapping[str, Sequence[float]]) -> None:
        rows.append((label, unit, *(math.fsum(own) / len(own) for own in values.values())))

    def each(of: str, unit: str, parts: Mapping[str, Sequence[Mapping[str, float]]], scale: float = 1.0) -> None:
        for key in _keys(part for own in parts.values() for part in own):
            add(of.format(key), unit, {n: [p.get(key, 0.0) * scale for p in own] for n, own in parts.items()})

    each("{} outages", "count", {n: [c.observed.outages for c in own] for n, own in by.items()})
    each("{} down", "part-hours", {n: [c.observed.down_s for c in own] for n, own in by.items()}, 1 / 3600)
    add("devices known to be down", "device-hours", {n: [c.down_device_s / 3600 for c in own] for n, own in by.items()})
    add("and paid", "USD", {n: [c.down_usd for c in own] for n, own in by.items()})
    add("answers lost with engines", "tokens", {n: [c.observed.lost_tokens for c in own] for n, own in by.items()})
    add("KV lost with engines", "tokens", {n: [c.observed.lost_kv_tokens for c in own] for n, own in by.items()})
    each("aborted: {}", "trajectories", {n: [c.aborted for c in own] for n, own in by.items()})
    add("sampled for the aborted", "tokens", {n: [c.aborted_tokens for c in own] for n, own in by.items()})
    add(
        "engines for the aborted",
        "engine-hours",
        {n: [c.aborted_engine_s / 3600 for c in own] for n, own in by.items()},
    )
    each("calls failed: {}", "count", {n: [c.failed_calls for c in own] for n, own in by.items()})
    columns = (TableColumn("what"), TableColumn("unit"), *(TableColumn(name, "number") for name in by))
    return Table("faults", "What faults cost", columns, tuple(rows))


def _keys(parts: Iterable[Mapping[str, float]]) -> list[str]:
    return list(dict.fromkeys(key for part in parts for key in part))


def _cause(detail: str) -> str:
    """The cause without the names and numbers of a single case: `environment step`, `reward throttled`, else the first
    words."""
    words = detail.replace(":", "").split()
    if not words:
        return "unknown"
    if words[0] in ("environment", "reward"):
        return " ".join(words[:2])
    return " ".join(w for w in words[:6] if not any(c.isdigit() for c in w))
