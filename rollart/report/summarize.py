"""Where the money went. Pure: a run's sums in, tables out.

Every dollar is one `CostLine`; all tables are sums of the same lines, so they agree with the total (property test).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rollart.ledger.intervals import State
from rollart.ledger.reader import InvocationSum
from rollart.report.rows import ENGINE_ROLES, Cell, Column, Report, RunRows, Table
from serverless.types import Cause

__all__ = ["CostLine", "FateCost", "cost", "cost_lines", "fates", "waste"]

REWARD = "reward"
"""Role of function calls."""

WARM_START = "warm_start"
"""Busy time with a name of its own, so that imitation and RL are reported apart. It bought something: no waste."""

NOT_WASTE = frozenset({"trained", "evaluated", "waiting", "unattributed"})
"""Fates of trajectories whose engine time bought something, or may still."""


@dataclass(frozen=True, slots=True)
class CostLine:
    """Dollars of one resource in one state for one cause."""

    role: str
    resource: str
    state: str
    cause: str
    seconds: float
    usd: float


@dataclass(frozen=True, slots=True)
class FateCost:
    """Engine time of trajectories by what became of them, and its dollars."""

    fate: str
    trajectories: int
    engine_seconds: float
    usd: float


def cost(rows: RunRows) -> Report:
    """The cost report."""
    lines = cost_lines(rows)
    return Report(
        "cost",
        rows.run,
        (
            _total(rows, lines),
            _by_role(lines),
            _by_resource(lines),
            _fates(rows),
            _waste(rows, lines),
            _functions(rows),
            _savings(rows),
        ),
        tuple(_sources(rows)),
    )


def cost_lines(rows: RunRows) -> list[CostLine]:
    """Every dollar of the run, once: intervals, and function calls at their provider's price."""
    lines = [CostLine(i.role, i.resource, i.state, i.cause, i.seconds, i.usd) for i in rows.intervals]
    for call in rows.invocations:
        usd = rows.prices.function_usd(
            call.provider, billed_s=call.billed_s, memory_mb=call.memory_mb, requests=call.calls
        )
        cause = _why(call)
        lines.append(CostLine(REWARD, f"{call.provider}:{call.function}", State.BUSY, cause, call.billed_s, usd))
    return lines


def _why(call: InvocationSum) -> str:
    """Of calls that a run without faults and stragglers would not have made: those that failed by their failure, the
    others by what made them."""
    if call.status != "ok":
        return f"function {call.status}"
    return "" if call.cause == Cause.CALL else f"function {call.cause}"


def fates(rows: RunRows) -> list[FateCost]:
    """Busy engine dollars by what became of the trajectories; the rest is `unattributed`. Adds up to all of them."""
    engine = [i for i in rows.intervals if i.role in ENGINE_ROLES and i.state == State.BUSY]
    busy_s, busy_usd = math.fsum(i.seconds for i in engine), math.fsum(i.usd for i in engine)
    by_fate: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    for charge in rows.charges:
        by_fate[charge.outcome][0] += charge.trajectories
        by_fate[charge.outcome][1] += charge.engine_seconds
    charged = math.fsum(seconds for _, seconds in by_fate.values())
    whole = max(busy_s, charged)

    def part(seconds: float) -> float:
        return seconds / whole * busy_usd if whole > 0 else 0.0

    found = [FateCost(fate, int(n), seconds, part(seconds)) for fate, (n, seconds) in sorted(by_fate.items())]
    if busy_s > charged:
        found.append(FateCost("unattributed", 0, busy_s - charged, part(busy_s - charged)))
    return found


def waste(rows: RunRows, lines: Sequence[CostLine]) -> dict[tuple[str, str], float]:
    """Dollars that trained nothing, by (role, cause): time that was not busy, engine time of lost trajectories, busy
    time with a cause (failed calls, repeated work)."""
    found: dict[tuple[str, str], float] = defaultdict(float)
    for line in lines:
        if line.state != State.BUSY:
            found[line.role, f"{line.state}: {line.cause}" if line.cause else line.state] += line.usd
        elif line.cause and line.cause != WARM_START:
            found[line.role, line.cause] += line.usd
    for fate in fates(rows):
        if fate.fate not in NOT_WASTE:
            found["engine", f"trajectory {fate.fate}"] += fate.usd
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _total(rows: RunRows, lines: Sequence[CostLine]) -> Table:
    facts, usd = rows.facts, _usd(lines)
    generated = sum(c.trajectories for c in rows.charges if c.purpose != "eval")
    wasted = math.fsum(waste(rows, lines).values())
    values: list[tuple[Cell, ...]] = [
        ("total", "USD", usd),
        ("per hour", "USD", _ratio(usd * 3600, facts.seconds)),
        ("run time", "s", facts.seconds),
        ("versions", "count", len(rows.versions)),
        ("trajectories generated", "count", generated),
        ("trajectories trained", "count", facts.trained_samples),
        ("per trained trajectory", "USD", _ratio(usd, facts.trained_samples)),
        ("trained tokens", "count", facts.trained_tokens),
        ("per million trained tokens", "USD", _ratio(usd * 1e6, facts.trained_tokens)),
        ("warm start", "USD", math.fsum(line.usd for line in lines if line.cause == WARM_START)),
        ("idle and waste", "USD", wasted),
        ("idle and waste", "share", _ratio(wasted, usd)),
    ]
    return Table("total", "Total", (Column("what"), Column("unit"), Column("value", "number")), tuple(values))


def _by_role(lines: Sequence[CostLine]) -> Table:
    return _grouped("by_role", "By role", "role", [(line.role, line) for line in lines])


def _by_resource(lines: Sequence[CostLine]) -> Table:
    return _grouped("by_resource", "By resource", "resource", [(line.resource, line) for line in lines])


def _grouped(name: str, title: str, key: str, keyed: Sequence[tuple[str, CostLine]]) -> Table:
    groups: dict[str, list[CostLine]] = defaultdict(list)
    for group, line in keyed:
        groups[group].append(line)
    total = _usd(line for _, line in keyed)
    rows: list[tuple[str, float, float | None, float, float]] = [
        (group, _usd(own), _ratio(_usd(own), total), _usd(x for x in own if x.state == State.BUSY),
         _usd(x for x in own if x.state != State.BUSY))
        for group, own in groups.items()
    ]  # fmt: skip
    rows.sort(key=lambda row: -row[1])
    columns = (Column(key), Column("usd", "usd"), Column("share", "share"), Column("busy_usd", "usd"),
               Column("not_busy_usd", "usd"))  # fmt: skip
    return Table(name, title, columns, tuple(rows))


def _fates(rows: RunRows) -> Table:
    columns = (
        Column("fate"),
        Column("trajectories", "count"),
        Column("engine_seconds", "seconds"),
        Column("usd", "usd"),
    )
    found = [(f.fate, f.trajectories, f.engine_seconds, f.usd) for f in fates(rows)]
    return Table("trajectories", "Engine time by what became of the trajectory", columns, tuple(found))


def _waste(rows: RunRows, lines: Sequence[CostLine]) -> Table:
    total = _usd(lines)
    columns = (Column("role"), Column("cause"), Column("usd", "usd"), Column("share", "share"))
    found = [(role, cause, usd, _ratio(usd, total)) for (role, cause), usd in waste(rows, lines).items()]
    return Table("waste", "Idle and waste by cause", columns, tuple(found))


def _functions(rows: RunRows) -> Table:
    columns = (
        Column("function"), Column("provider"), Column("status"), Column("cause"), Column("calls", "count"),
        Column("items", "count"), Column("cold_starts", "count"), Column("cold_s", "seconds", people=False),
        Column("billed_s", "seconds"), Column("gb_s", "number", people=False), Column("usd", "usd"),
        Column("usd_per_1000_items", "usd", people=False),
    )  # fmt: skip
    found: list[tuple[Cell, ...]] = []
    for call in rows.invocations:
        gb_s = call.billed_s * call.memory_mb / 1024
        usd = rows.prices.function_usd(
            call.provider, billed_s=call.billed_s, memory_mb=call.memory_mb, requests=call.calls
        )
        found.append(
            (call.function, call.provider, call.status, call.cause, call.calls, call.items, call.cold_starts,
             call.cold_start_s, call.billed_s, gb_s, usd, _ratio(usd * 1000, call.items))
        )  # fmt: skip
    return Table("functions", "Function calls", columns, tuple(found))


def _savings(rows: RunRows) -> Table:
    """Calls that the cache and calls under way made needless, at the price of the function's own calls."""
    columns = (Column("function"), Column("stage"), Column("items", "count"), Column("billed_s", "seconds"),
               Column("usd", "usd"))  # fmt: skip
    provider = {call.function: call.provider for call in reversed(rows.invocations)}
    found: list[tuple[Cell, ...]] = [
        (s.function, s.stage, s.items, s.billed_s, rows.prices.function_usd(
            provider.get(s.function, ""), billed_s=s.billed_s, memory_mb=s.memory_mb, requests=0))
        for s in rows.savings
    ]  # fmt: skip
    return Table("savings", "Saved by the cache and by calls under way", columns, tuple(found))


def _sources(rows: RunRows) -> Iterable[str]:
    for provider in sorted({call.provider for call in rows.invocations}):
        for price in rows.prices.sources(provider):
            yield f"{provider}: ${price.usd:g} per {price.unit} ({price.source}, {price.date})"


def _usd(lines: Iterable[CostLine]) -> float:
    return math.fsum(line.usd for line in lines)


def _ratio(a: float, b: float) -> float | None:
    return a / b if b else None
