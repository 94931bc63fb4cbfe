"""The prices behind a report's dollars: each with its amount, source and date. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from rollart.report.functions import BILLED, ELSEWHERE
from rollart.report.rows import PoolPrice, RunRows
from rollart.report.tables import Cell, Table, TableColumn
from rollart.spec.prices import PriceEntry
from serverless.meter import WorkerState


def prices_table(rows: RunRows) -> Table:
    """The billed rows add up to the total, the others to the cost elsewhere (property test)."""
    columns = (
        TableColumn("price"),
        TableColumn("unit"),
        TableColumn("usd_per_unit", "number"),
        TableColumn("amount", "number"),
        TableColumn("usd", "usd"),
        TableColumn("cost"),
        TableColumn("date"),
        TableColumn("source", wrap=True),
    )
    found: list[tuple[Cell, ...]] = []
    for usd, hours in rows.device_hours:
        same = [pool for pool in rows.pools if pool.usd == usd]
        found.append(
            (
                _names(same),
                "device-hour",
                usd,
                hours,
                usd * hours,
                BILLED,
                ", ".join(dict.fromkeys(pool.date or "-" for pool in same)) or "-",
                "; ".join(dict.fromkeys(pool.source for pool in same))
                or "recorded by the run from an earlier price list",
            )
        )
    amounts: dict[tuple[str, str], float] = defaultdict(float)
    prices: dict[tuple[str, str], PriceEntry] = {}
    for price, amount in _function_items(rows):
        amounts[price.name, price.unit] += amount
        prices[price.name, price.unit] = price
    for key, amount in sorted(amounts.items()):
        price = prices[key]
        found.append(
            (
                price.name,
                price.unit,
                price.usd,
                amount,
                price.usd * amount,
                BILLED if rows.prices.billed(price.name) else ELSEWHERE,
                str(price.date),
                price.source,
            )
        )
    return Table("prices", "Prices, with their sources", columns, tuple(found))


def _function_items(rows: RunRows) -> Iterator[tuple[PriceEntry, float]]:
    book = rows.prices
    for call in rows.invocations:
        yield from book.function_items(
            call.provider, billed_s=call.billed_s, memory_mb=call.memory_mb, requests=call.calls
        )
    for worker in rows.workers:
        if worker.state == WorkerState.IDLE:
            yield from book.idle_items(worker.provider, seconds=worker.seconds, memory_mb=worker.memory_mb)


def _names(pools: Sequence[PoolPrice]) -> str:
    """Devices with their pools, e.g. `H20 (a, b)`."""
    by_device: dict[str, list[str]] = defaultdict(list)
    for pool in pools:
        by_device[pool.device].append(pool.pool)
    named: Iterable[str] = (f"{device} ({', '.join(names)})" for device, names in by_device.items())
    return ", ".join(named) or "device"
