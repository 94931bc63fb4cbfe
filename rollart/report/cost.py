"""The cost report, with the prices behind its dollars. Pure: a run's sums in, tables out.

Every dollar is one `CostLine`; all tables are sums of the same lines, so they agree with the total (property test).
Totals are billed dollars. The price elsewhere of function workers on the run's own cores is shown beside them.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rollart.ledger.intervals import ResourceState
from rollart.report import functions
from rollart.report.money.planned import PlannedCost, plan_table
from rollart.report.money.spend import SpendSums, by_tag, over_time
from rollart.report.rows import ENGINE_ROLES, CostLine, PoolPrice, RunRows
from rollart.report.tables import (
    Report,
    Row,
    Table,
    as_count,
    as_number,
    as_price,
    as_seconds,
    as_share,
    as_text,
    as_usd,
    as_value,
    ratio,
    table,
)
from rollart.settings.prices import PriceEntry, PriceKind
from serverless.meter import WorkerState

WARM_START = "warm_start"
"""Cause of busy time in the warm start, so that imitation and RL are reported separately. It is not waste."""

ON_DEMAND: PriceKind = "on_demand"

NOT_WASTE = frozenset({"trained", "evaluated", "waiting", "unattributed"})
"""Outcomes of trajectories whose engine time was useful, or may still be."""


@dataclass(frozen=True, slots=True)
class FateCost:
    """Engine time of trajectories with one outcome, and its dollars."""

    fate: str
    trajectories: int
    engine_seconds: float
    usd: float


def cost(rows: RunRows, *, planned: PlannedCost | None = None, spend: SpendSums | None = None) -> Report:
    """The cost report, in the order of its readers' questions: what the run cost, when and for whom, beside its plan;
    what was wasted; what would have been cheaper. `planned`: the plan's figures; `spend`: the sums of its charges."""
    lines, sums = cost_lines(rows), spend or SpendSums()
    return Report(
        "cost",
        rows.run,
        (
            _total(rows, lines),
            plan_table(planned, rows.facts, _usd(lines)),
            over_time(sums),
            by_tag(sums),
            Table.of("by_role", "By role", _grouped("role", lines)),
            Table.of("by_resource", "By resource", _grouped("resource", lines)),
            _fates(rows),
            _waste(rows, lines),
            functions.calls(rows),
            functions.tokens(rows),
            functions.workers(rows),
            functions.stages(rows),
            functions.refused(rows),
            functions.savings(rows),
            _elsewhere(rows),
            _prices(rows),
        ),
        tuple(functions.notes(rows)),
    )


def cost_lines(rows: RunRows) -> list[CostLine]:
    """Every dollar that is billed, once: intervals, functions at their provider's price, and their tokens."""
    found = [CostLine(i.role, i.resource, i.state, i.cause, i.seconds, i.usd) for i in rows.intervals]
    return [*found, *(line for line in functions.lines(rows) if line.billed), *functions.token_lines(rows)]


def fates(rows: RunRows) -> list[FateCost]:
    """Busy engine dollars by the outcome of trajectories; the rest is `unattributed`. They add up to all busy
    dollars."""
    engine = [i for i in rows.intervals if i.role in ENGINE_ROLES and i.state == ResourceState.BUSY]
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
        if line.role == functions.REWARD:
            if line.cause:
                found[line.role, line.cause] += line.usd
        elif line.state != ResourceState.BUSY:
            found[line.role, f"{line.state}: {line.cause}" if line.cause else line.state] += line.usd
        elif line.cause and line.cause != WARM_START:
            found[line.role, line.cause] += line.usd
    for fate in fates(rows):
        if fate.fate not in NOT_WASTE:
            found["engine", f"trajectory {fate.fate}"] += fate.usd
    return dict(sorted(found.items(), key=lambda item: -item[1]))


@table("total", "Total of what is billed")
def _total(rows: RunRows, lines: Sequence[CostLine]) -> Iterator[Row]:
    facts, usd = rows.facts, _usd(lines)
    generated = sum(c.trajectories for c in rows.charges if c.purpose != "eval")
    wasted = math.fsum(waste(rows, lines).values())
    values = (
        ("total", "USD", usd),
        ("would cost elsewhere", "USD", _usd(line for line in functions.lines(rows) if not line.billed)),
        ("per hour", "USD", ratio(usd * 3600, facts.seconds)),
        ("run time", "s", facts.seconds),
        ("versions", "count", len(rows.versions)),
        ("trajectories generated", "count", generated),
        ("trajectories trained", "count", facts.trained_samples),
        ("per 1,000 trained trajectories", "USD", ratio(usd * 1e3, facts.trained_samples)),
        ("trained tokens", "count", facts.trained_tokens),
        ("per million trained tokens", "USD", ratio(usd * 1e6, facts.trained_tokens)),
        ("warm start", "USD", math.fsum(line.usd for line in lines if line.cause == WARM_START)),
        ("idle and waste", "USD", wasted),
        ("idle and waste", "share", ratio(wasted, usd)),
    )
    for what, unit, value in values:
        yield {"what": what, "unit": unit, "value": as_value(value)}


def _grouped(key: str, lines: Sequence[CostLine]) -> Iterator[Row]:
    """Dollars by the field `key` of the lines."""
    groups: dict[str, list[CostLine]] = defaultdict(list)
    for line in lines:
        groups[getattr(line, key)].append(line)
    total = _usd(lines)
    for group, own in sorted(groups.items(), key=lambda item: -_usd(item[1])):
        yield {
            key: group,
            "usd": as_usd(_usd(own)),
            "share": as_share(ratio(_usd(own), total)),
            "busy_usd": as_usd(_usd(x for x in own if x.state == ResourceState.BUSY)),
            "not_busy_usd": as_usd(_usd(x for x in own if x.state != ResourceState.BUSY)),
        }


@table(
    "elsewhere",
    "Would cost elsewhere (workers on cores that are paid already: in no total, and in no budget)",
    optional=True,
)
def _elsewhere(rows: RunRows) -> Iterator[Row]:
    """By function: dollars of workers on the run's own cores at the list prices of a provider of functions."""
    usd: dict[str, float] = defaultdict(float)
    seconds: dict[str, float] = defaultdict(float)
    for line in functions.lines(rows):
        if not line.billed:
            usd[line.resource] += line.usd
            seconds[line.resource] += line.seconds
    for name in sorted(usd, key=lambda name: -usd[name]):
        yield {"resource": name, "billed_s": as_seconds(seconds[name]), "usd": as_usd(usd[name])}


@table("prices", "Prices, with their sources")
def _prices(rows: RunRows) -> Iterator[Row]:
    """The billed rows add up to the total, the others to the cost elsewhere (property test)."""
    for usd, hours in rows.device_hours:
        same = [pool for pool in rows.pools if pool.usd == usd]
        dates = ", ".join(dict.fromkeys(pool.date or "-" for pool in same)) or "-"
        sources = "; ".join(dict.fromkeys(pool.source for pool in same))
        sources = sources or "recorded by the run from an earlier price list"
        kinds = ", ".join(dict.fromkeys(pool.kind for pool in same)) or ON_DEMAND
        yield _priced(_names(same), "device-hour", kinds, usd, hours, functions.BILLED, dates, sources)
    amounts: dict[tuple[str, str], float] = defaultdict(float)
    prices: dict[tuple[str, str], PriceEntry] = {}
    for price, amount in _function_items(rows):
        amounts[price.name, price.unit] += amount
        prices[price.name, price.unit] = price
    for key, amount in sorted(amounts.items()):
        price = prices[key]
        cost = functions.BILLED if rows.prices.billed(price.name) else functions.ELSEWHERE
        yield _priced(price.name, price.unit, price.kind, price.usd, amount, cost, str(price.date), price.source)


def _priced(price: str, unit: str, kind: str, usd: float, amount: float, cost: str, date: str, source: str) -> Row:
    return {
        "price": price if kind == ON_DEMAND else f"{price}, {kind}",
        "unit": unit,
        "kind": as_text(kind, people=False),
        "usd_per_unit": as_price(usd),
        "amount": as_number(amount),
        "usd": as_usd(usd * amount),
        "cost": cost,
        "date": date,
        "source": as_text(source, wrap=True),
    }


def _function_items(rows: RunRows) -> Iterator[tuple[PriceEntry, float]]:
    book = rows.prices
    for call in rows.invocations:
        gpu = rows.gpus.get(call.function, "")
        yield from book.items(call.provider, call.billed_s, call.memory_mb, call.calls, gpu)
    for tokens in rows.tokens:
        yield from book.token_items(tokens.usage)
    for worker in rows.workers:
        if worker.state == WorkerState.IDLE:
            gpu = rows.gpus.get(worker.function, "")
            yield from book.items(worker.provider, worker.seconds, worker.memory_mb, None, gpu)


def _names(pools: Sequence[PoolPrice]) -> str:
    """Devices with their pools, e.g. `H20 (a, b)`."""
    by_device: dict[str, list[str]] = defaultdict(list)
    for pool in pools:
        by_device[pool.device].append(pool.pool)
    named: Iterable[str] = (f"{device} ({', '.join(names)})" for device, names in by_device.items())
    return ", ".join(named) or "device"


@table("trajectories", "Engine time by what became of the trajectory")
def _fates(rows: RunRows) -> Iterator[Row]:
    for f in fates(rows):
        yield {
            "fate": f.fate,
            "trajectories": as_count(f.trajectories),
            "engine_seconds": as_seconds(f.engine_seconds),
            "usd": as_usd(f.usd),
        }


@table("waste", "Idle and waste by cause")
def _waste(rows: RunRows, lines: Sequence[CostLine]) -> Iterator[Row]:
    total = _usd(lines)
    for (role, cause), usd in waste(rows, lines).items():
        yield {"role": role, "cause": cause, "usd": as_usd(usd), "share": as_share(ratio(usd, total))}


def _usd(lines: Iterable[CostLine]) -> float:
    return math.fsum(line.usd for line in lines)
