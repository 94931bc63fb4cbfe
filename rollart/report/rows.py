"""Input of reports: a run's sums, read once from its ledger, with estimates of the worker time that providers do not
meter."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollart.ledger import events
from rollart.ledger.intervals import IntervalSum
from rollart.ledger.reader import (
    ChargeSum,
    InvocationSum,
    LedgerReader,
    RunFacts,
    TokenSum,
    VersionRow,
    WorkerSum,
)
from rollart.ports import RunEvent
from rollart.settings.prices import PriceKind, PriceList, function_gpus
from serverless.meter import Saving, WorkerState
from serverless.spec import FunctionSpec
from serverless.types import Invocation

ENGINE_ROLES = frozenset({"engine", "prefill", "decode"})
"""Roles whose busy time is charged to trajectories."""

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
    """The hourly price of a pool's device, with its source and date (empty if unknown), and its kind. `list_usd`: the
    price on demand, None where the list has none, or it is the price."""

    pool: str
    device: str
    usd: float
    source: str
    date: str
    kind: PriceKind = "on_demand"
    list_usd: float | None = None


@dataclass(frozen=True, slots=True)
class RunRows:
    """The rows of a ledger from which all reports are computed."""

    run: str
    facts: RunFacts
    intervals: Sequence[IntervalSum]
    charges: Sequence[ChargeSum]
    invocations: Sequence[InvocationSum]
    versions: Sequence[VersionRow]
    prices: PriceList
    savings: Sequence[Saving] = ()
    workers: Sequence[WorkerSum] = ()
    tokens: Sequence[TokenSum] = ()
    events: Mapping[str, Sequence[RunEvent]] = field(default_factory=dict)
    """Events by their kind, those of `ledger.events.REPORTED`."""
    device_hours: Sequence[tuple[float, float]] = ()
    """(dollars per hour, device-hours), by price."""
    pools: Sequence[PoolPrice] = ()
    gpus: Mapping[str, str] = field(default_factory=dict)
    """GPUs of functions by name."""
    placed: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    """Pool and number of devices of each part of the plan."""
    epochs: int = 1
    """Passes of the trainer over each batch."""
    fault_threshold: float | None = None
    """Share of infrastructure faults above which the run ends."""

    def events_of(self, *kinds: str) -> list[RunEvent]:
        return [event for kind in kinds for event in self.events.get(kind, ())]


def collect(reader: LedgerReader, run: str) -> RunRows:
    """Read a run's sums. Prices are those of the run's start."""
    config = reader.config()
    assignments = config.get("plan", {}).get("assignments", ())
    return RunRows(
        run=run,
        facts=reader.facts(),
        intervals=reader.interval_sums(),
        charges=reader.charge_sums(),
        invocations=reader.invocation_sums(),
        versions=reader.versions(),
        prices=price_list(config),
        savings=reader.saving_sums(),
        workers=[*reader.worker_sums(), *estimated_workers(*unmetered_calls(reader, config))],
        tokens=reader.token_sums(),
        events={kind: reader.events(kind) for kind in events.REPORTED},
        device_hours=reader.device_hours(),
        pools=list(pool_prices(config)),
        gpus=function_gpus(config),
        placed={a["part"]: (a["pool"], len(a.get("devices", ()))) for a in assignments},
        epochs=config.get("run", {}).get("training", {}).get("epochs", 1),
        fault_threshold=config.get("run", {}).get("faults", {}).get("max_rate"),
    )


def unmetered_calls(reader: LedgerReader, config: Mapping[str, Any]) -> tuple[list[Invocation], dict[str, float]]:
    """Calls of providers that do not meter idle workers, and seconds of keep-alive by function where known."""
    settings = config.get("functions", {})
    keep_s = {name: float(given["keep_alive_s"]) for name, given in settings.items() if "keep_alive_s" in given}
    return [call for provider in sorted(ESTIMATED) for call in reader.calls(provider)], keep_s


def price_list(config: Mapping[str, Any]) -> PriceList:
    """The prices of a run's configuration; the shipped ones of a run without."""
    if prices := config.get("prices"):
        return PriceList.model_validate(prices)
    from rollart.settings.load import builtin, load_prices  # late: imports the schemas of all specs

    return load_prices(builtin("prices.yaml"))


def pool_prices(config: Mapping[str, Any]) -> Iterator[PoolPrice]:
    """Prices of the pools of a run's configuration (`Resolved.to_dict`), those of its own cluster spec included."""
    hourly = config.get("usd_per_device_hour", {})
    prices = price_list(config) if config.get("prices") else None
    for pool in config.get("cluster", {}).get("pools", ()):
        name, device = pool["name"], pool["device"]
        if name not in hourly:
            continue
        kind: PriceKind = pool.get("commitment") or ("spot" if pool.get("spot") else "on_demand")
        standard = None if prices is None else prices.device_price(device)
        price = standard if prices is None or kind == "on_demand" else prices.device_price(device, kind) or standard
        list_usd = None if standard is None or kind == "on_demand" else standard.usd
        if pool.get("price") is not None:
            source = f"the cluster spec: price of pool '{name}'"
            yield PoolPrice(name, device, hourly[name], source, "", kind, list_usd)
        elif price is not None:
            yield PoolPrice(name, device, hourly[name], price.source, str(price.date), kind, list_usd)


def estimated_workers(calls: Iterable[Invocation], keep_s: Mapping[str, float]) -> list[WorkerSum]:
    """Worker-seconds by (function, provider, memory, state) of providers that report only calls to the client.

    A container waits between two of its calls, and after its last one, but no longer than the function's keep-alive
    (`keep_s`; the default of functions where it is unknown): then it scales down, so longer waits are not counted even
    if a minimum of containers kept it. Start-up and work are as billed. Calls of an unknown container (`worker` is
    empty) have no idle time. At most calls x keep-alive seconds are idle.
    """
    seconds: dict[Key, dict[WorkerState, float]] = defaultdict(lambda: dict.fromkeys(WorkerState, 0.0))
    calls = list(calls)
    for call in calls:
        states = seconds[call.function, call.provider, call.memory_mb]
        states[WorkerState.COLD] += call.start_billed_s
        states[WorkerState.BUSY] += call.billed_s - call.start_billed_s
    for key, t0, t1 in idle_stretches(calls, keep_s):
        seconds[key][WorkerState.IDLE] += t1 - t0
    return [
        WorkerSum(*key, str(state), total, True)
        for key, states in sorted(seconds.items())
        for state, total in states.items()
        if total > 0
    ]


def idle_stretches(calls: Iterable[Invocation], keep_s: Mapping[str, float]) -> Iterator[tuple[Key, float, float]]:
    """The stretches in which containers are estimated to wait (see `estimated_workers`), in seconds of the run."""
    until: dict[tuple[Key, str], float] = {}
    for call in sorted(calls, key=lambda c: c.t0):
        if not call.worker:
            continue
        key = (call.function, call.provider, call.memory_mb)
        before = until.get((key, call.worker))
        if before is not None:
            idle_s = min(max(0.0, call.t0 - before), keep_s.get(call.function, KEEP_ALIVE_S))
            yield key, before, before + idle_s
        until[key, call.worker] = max(call.t1, before or 0.0)
    for (key, _), t in until.items():
        yield key, t, t + keep_s.get(key[0], KEEP_ALIVE_S)
