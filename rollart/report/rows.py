"""Input of reports: a run's sums, read once from its ledger, with estimates of the worker time that providers do not
meter."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from placement.hardware import device_name
from rollart.hosted import ENVIRONMENTS_MADE, PLACES
from rollart.ledger.intervals import (
    CANCELLED_AGAINST_KEPT,
    CONCURRENCY,
    DOMAIN_SHARE,
    ENGINE_DID,
    ENGINE_UPDATED,
    FILTERED_AGAINST_KEPT,
    FUNCTION_HEALTH,
    HANDOFFS,
    OFFLOAD_STAGE,
    IntervalSum,
)
from rollart.ledger.prices import PriceBook
from rollart.ledger.reader import (
    CallRow,
    ChargeSum,
    InvocationSum,
    LedgerReader,
    RunFacts,
    SavingSum,
    VersionRow,
    WorkerSum,
)
from rollart.ports import RunEvent
from rollart.settings.prices import PriceList
from serverless.meter import WorkerState
from serverless.spec import FunctionSpec

ENGINE_ROLES = frozenset({"engine", "prefill", "decode"})
"""Roles whose busy time is charged to trajectories."""

NODES = ("node_joined", "node_leaving", "node_lost")

FOLLOWED = ("rebalanced", "rebalance_rejected", "rebalance_failed", "engine_drained", "engine_given_up")

ESTIMATED = frozenset({"modal"})
"""Providers that bill a container while it waits, but do not report that time to the client."""

KEEP_ALIVE_S = float(FunctionSpec.model_fields["keep_alive_s"].default)

Key = tuple[str, str, int]


@dataclass(frozen=True, slots=True)
class CostLine:
    """Dollars of one resource in one state for one cause."""

    role: str
    resource: str
    state: str
    cause: str
    seconds: float
    usd: float
    billed: bool = True
    """False for the price of the same calls at a provider, which is part of no total."""


@dataclass(frozen=True, slots=True)
class PoolPrice:
    """The hourly price of a pool's device, with its source and date (empty if unknown)."""

    pool: str
    device: str
    usd: float
    source: str
    date: str


@dataclass(frozen=True, slots=True)
class RunRows:
    """The rows of a ledger from which all reports are computed."""

    run: str
    facts: RunFacts
    intervals: Sequence[IntervalSum]
    charges: Sequence[ChargeSum]
    invocations: Sequence[InvocationSum]
    versions: Sequence[VersionRow]
    evaluations: Sequence[RunEvent]
    prices: PriceBook
    savings: Sequence[SavingSum] = ()
    workers: Sequence[WorkerSum] = ()
    stages: Sequence[RunEvent] = ()
    health: Sequence[RunEvent] = ()
    cancelled: Sequence[RunEvent] = ()
    """Trajectories cancelled as redundant against kept ones: an event per figure at each publish."""
    filtered: Sequence[RunEvent] = ()
    """Trajectories of filtered groups against kept ones, in the same way."""
    shares: Sequence[RunEvent] = ()
    """Due and actual shares of domains, at each publish."""
    concurrency: Sequence[RunEvent] = ()
    """Concurrency limits of the engines, and trajectories that waited or were evicted, an event at each publish."""
    handoffs: Sequence[RunEvent] = ()
    """Outcomes of hand-offs between prefill and decode engines, an event at each publish."""
    updates: Sequence[RunEvent] = ()
    """Versions that engines loaded one by one, and the number of versions skipped before."""
    broadcasts: Sequence[RunEvent] = ()
    """For each engine: versions received by broadcast, followed by those missed."""
    making: Sequence[RunEvent] = ()
    """Environments made by environment hosts, in sums by host and domain."""
    places: Sequence[RunEvent] = ()
    """Waits of episodes for a slot on an environment host, in sums by purpose."""
    engines: Sequence[RunEvent] = ()
    """Work of engines by their own counters, an event per engine and interval."""
    nodes: Sequence[RunEvent] = ()
    """Nodes that joined, were about to leave or were lost, and the reactions of the plan, by time."""
    device_hours: Sequence[tuple[float, float]] = ()
    """(dollars per hour, device-hours), by price."""
    pools: Sequence[PoolPrice] = ()
    fault_threshold: float | None = None
    """Share of infrastructure faults above which the run ends."""


def collect(reader: LedgerReader, run: str) -> RunRows:
    """Read a run's sums. Prices are those of the run's start."""
    config = reader.config()
    return RunRows(
        run=run,
        facts=reader.facts(),
        intervals=reader.interval_sums(),
        charges=reader.charge_sums(),
        invocations=reader.invocation_sums(),
        versions=reader.versions(),
        evaluations=reader.events("evaluation"),
        prices=_price_book(config),
        savings=reader.saving_sums(),
        workers=[*reader.worker_sums(), *_unmetered(reader, config)],
        stages=reader.events(OFFLOAD_STAGE),
        health=reader.events(FUNCTION_HEALTH),
        cancelled=reader.events(CANCELLED_AGAINST_KEPT),
        filtered=reader.events(FILTERED_AGAINST_KEPT),
        shares=reader.events(DOMAIN_SHARE),
        concurrency=reader.events(CONCURRENCY),
        handoffs=reader.events(HANDOFFS),
        updates=reader.events(ENGINE_UPDATED),
        broadcasts=[*reader.events("weights_received"), *reader.events("weights_not_received")],
        making=reader.events(ENVIRONMENTS_MADE),
        places=reader.events(PLACES),
        engines=reader.events(ENGINE_DID),
        nodes=_nodes(reader),
        device_hours=reader.device_hours(),
        pools=pool_prices(config),
        fault_threshold=config.get("run", {}).get("faults", {}).get("max_rate"),
    )


def _price_book(config: Mapping[str, Any]) -> PriceBook:
    if prices := config.get("prices"):
        return PriceBook(PriceList.model_validate(prices))
    from rollart.settings.load import builtin, load_prices  # late: imports the schemas of all specs

    return PriceBook(load_prices(builtin("prices.yaml")))


def pool_prices(config: Mapping[str, Any]) -> list[PoolPrice]:
    """Prices of the pools of a run's configuration (`Resolved.to_dict`), those of its own cluster spec included."""
    hourly = config.get("usd_per_device_hour", {})
    listed = {p["name"]: p for p in config.get("prices", {}).get("prices", ()) if p["unit"] == "device-hour"}
    listed = {device_name(name): price for name, price in listed.items()} | listed
    found = []
    for pool in config.get("cluster", {}).get("pools", ()):
        name, device = pool["name"], pool["device"]
        if name not in hourly:
            continue
        if pool.get("price") is not None:
            found.append(PoolPrice(name, device, hourly[name], f"the cluster spec: price of pool '{name}'", ""))
        elif (price := listed.get(device) or listed.get(device_name(device))) is not None:
            found.append(PoolPrice(name, device, hourly[name], price["source"], str(price["date"])))
    return found


def _nodes(reader: LedgerReader) -> list[RunEvent]:
    """Events from the first node change after the engines started; empty without such a change."""
    serving = min((event.t for event in reader.events("engine_started")), default=math.inf)
    changes = [event for kind in NODES for event in reader.events(kind) if event.t > serving]
    first = min((event.t for event in changes), default=math.inf)
    changes += [event for kind in FOLLOWED for event in reader.events(kind) if event.t >= first]
    return sorted(changes, key=lambda event: event.t)


def _unmetered(reader: LedgerReader, config: Mapping[str, Any]) -> list[WorkerSum]:
    """Estimated worker time of providers that report only calls to the client."""
    calls = [call for provider in sorted(ESTIMATED) for call in reader.calls(provider)]
    settings = config.get("functions", {})
    keep_s = {name: float(given["keep_alive_s"]) for name, given in settings.items() if "keep_alive_s" in given}
    return estimated_workers(calls, keep_s)


def estimated_workers(calls: Iterable[CallRow], keep_s: Mapping[str, float]) -> list[WorkerSum]:
    """Worker-seconds by (function, provider, memory, state).

    A container waits between two of its calls, and after its last one, but no longer than the function's keep-alive
    (`keep_s`; the default of functions where it is unknown): then it scales down, so longer waits are not counted even
    if a minimum of containers kept it. Start-up and work are as billed. Calls of an unknown container (`worker` is
    empty) have no idle time. At most calls x keep-alive seconds are idle.
    """
    seconds: dict[Key, dict[WorkerState, float]] = defaultdict(lambda: dict.fromkeys(WorkerState, 0.0))
    until: dict[tuple[Key, str], float] = {}
    for call in sorted(calls, key=lambda c: c.t0):
        key = (call.function, call.provider, call.memory_mb)
        states = seconds[key]
        states[WorkerState.COLD] += call.cold_billed_s
        states[WorkerState.BUSY] += call.billed_s - call.cold_billed_s
        if not call.worker:
            continue
        before = until.get((key, call.worker))
        if before is not None:
            states[WorkerState.IDLE] += min(max(0.0, call.t0 - before), _keep(keep_s, key))
        until[key, call.worker] = max(call.t1, before or 0.0)
    for key, _ in until:
        seconds[key][WorkerState.IDLE] += _keep(keep_s, key)
    return [
        WorkerSum(*key, str(state), total, True)
        for key, states in sorted(seconds.items())
        for state, total in states.items()
        if total > 0
    ]


def _keep(keep_s: Mapping[str, float], key: Key) -> float:
    return keep_s.get(key[0], KEEP_ALIVE_S)
