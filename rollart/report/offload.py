"""Functions against dedicated workers: the billed calls of a run, and replays of the same calls on other deployments.

Pure except for `read_trace`: the replays are those of `serverless.scaling.replay`. A call is replayed with its seconds
of work. Only calls that any deployment would have to serve are replayed, without hedges, calls to a second provider,
starts without a call, and trials of a deployment.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rollart.ledger.reader import LedgerReader
from rollart.report import functions
from rollart.report.rows import RunRows
from rollart.report.tables import Report, Row, as_count, as_ms, as_seconds, as_share, as_usd, ratio, table
from serverless.meter import WorkerState
from serverless.scaling.replay import (
    CallReplay,
    ForecastScaling,
    ReactiveScaling,
    ReplayedCall,
    ScalingRule,
    min_dedicated_workers,
    replay_dedicated,
    replay_elastic,
)
from serverless.spec import FunctionSpec
from serverless.types import Cause, Invocation

SERVED = frozenset({Cause.CALL, Cause.RETRY, Cause.ISOLATION})

MATCH_S = 5.0
"""Longest time from a call to the end of its trajectory, in seconds. A trajectory ends once its reward has arrived and
its sample is on disk; a trajectory that ended later did not wait for this call."""

MOST = 100_000
"""Largest number of calls of a function that are replayed, the last ones: half a minute of computing."""

MIB_GB = 2**20 / 1e9

ALL = "(all)"

Life = tuple[str, float, float]


@dataclass(frozen=True, slots=True)
class CallTrace:
    """A run's calls by start, its trajectories (domain, begin, end) by end, and settings: `domains` by function,
    `specs` of functions, price of a core-hour and memory of a core (GB; 0: unknown)."""

    calls: Sequence[Invocation]
    lives: Sequence[Life]
    domains: Mapping[str, frozenset[str]]
    specs: Mapping[str, FunctionSpec]
    core_usd_hour: float
    core_gb: float = 0.0
    core_source: str = ""


def read_trace(reader: LedgerReader) -> CallTrace:
    """Read a run's calls. The price of a core is that of the cluster's first pool of `cpu` devices; without such a
    pool, the price list's."""
    config = reader.config()
    domains: dict[str, set[str]] = defaultdict(set)
    for domain in config.get("run", {}).get("domains", ()):
        for reward in domain.get("rewards", ()):
            domains[reward["function"]].add(domain["name"])
    by_function = {name: frozenset(own) for name, own in domains.items()}
    return CallTrace(reader.calls(), reader.lives(), by_function, _specs(config), *_core(config))


def _core(config: Mapping[str, Any]) -> tuple[float, float, str]:
    """Price of a core-hour, its memory and the source of the price."""
    hourly = config.get("usd_per_device_hour", {})
    for pool in config.get("cluster", {}).get("pools", ()):
        if pool.get("device") == "cpu" and pool["name"] in hourly:
            return float(hourly[pool["name"]]), (pool.get("memory_gb") or 0.0) / pool["count"], f"pool '{pool['name']}'"
    for price in config.get("prices", {}).get("prices", ()):
        if (price["name"], price["unit"]) == ("cpu", "device-hour"):
            return float(price["usd"]), 0.0, "the price list"
    return 0.0, 0.0, ""


def _specs(config: Mapping[str, Any]) -> dict[str, FunctionSpec]:
    """Effective settings of functions, as far as they were recorded and are still known keys."""
    known = FunctionSpec.model_fields.keys()
    written = {entry["name"]: entry for entry in config.get("run", {}).get("functions", ())}
    return {
        name: FunctionSpec.model_construct(
            **{k: v for k, v in {**written.get(name, {}), **given}.items() if k in known and v is not None}
        )
        for name, given in {**{name: {} for name in written}, **config.get("functions", {})}.items()
    }


def offload(rows: RunRows, trace: CallTrace, *, wait_s: float = 0.25) -> Report:
    """The report. `wait_s` is the largest p99 of the wait for a dedicated worker."""
    by_function: dict[str, list[Invocation]] = defaultdict(list)
    for row in trace.calls:
        if row.items and row.cause in SERVED:
            by_function[row.function].append(row)
    cases = []
    found_of, calls_of = 0, 0
    for name, recorded in sorted(by_function.items()):
        recorded = recorded[-MOST:]
        calls, found = matched_calls(recorded, trace.lives, trace.domains.get(name, frozenset()))
        found_of, calls_of = found_of + found, calls_of + len(recorded)
        cases.append(_OffloadCase(rows, trace, name, recorded, calls, wait_s))
    if len(cases) > 1:
        all_calls = sorted((c for case in cases for c in case.calls), key=lambda c: c.t)
        all_recorded = sorted((row for case in cases for row in case.recorded), key=lambda row: row.t0)
        cases.append(_OffloadCase(rows, trace, ALL, all_recorded, all_calls, wait_s))
    notes = list(_notes(rows, trace, cases, found_of, calls_of, wait_s))
    return Report("offload", rows.run, (_summary(cases), _serving_options(cases)), tuple(notes))


def matched_calls(
    recorded: Sequence[Invocation], lives: Sequence[Life], domains: frozenset[str]
) -> tuple[list[ReplayedCall], int]:
    """The calls of one function, and the number of calls that were matched with a trajectory.

    A call is matched with the first trajectory of the function's domains that ended after it, within `MATCH_S`, and
    began before the call was requested. A call of n items uses up n trajectories. Each trajectory is used once.
    """
    candidates = [life for life in lives if life[0] in domains]
    n, found, calls = 0, 0, {}
    for at in sorted(range(len(recorded)), key=lambda i: recorded[i].t1):
        row = recorded[at]
        asked = row.t0 - row.queued_s
        call = ReplayedCall(asked, max(0.0, min(row.t1 - row.t0, row.billed_s - row.start_billed_s)), job=row.function)
        while n < len(candidates) and candidates[n][2] < row.t1:
            n += 1
        took = 0
        while n < len(candidates) and took < row.items and candidates[n][2] <= row.t1 + MATCH_S:
            domain, began, _ = candidates[n]
            if took == 0 and began <= asked:
                call, found = replace(call, since=began, kind=domain), found + 1
            n, took = n + 1, took + 1
        calls[at] = call
    return [calls[at] for at in range(len(recorded))], found


class _OffloadCase:
    """One function (or all), with its calls and the cost of each way of serving them."""

    def __init__(
        self,
        rows: RunRows,
        trace: CallTrace,
        name: str,
        recorded: Sequence[Invocation],
        calls: Sequence[ReplayedCall],
        wait_s: float,
    ) -> None:
        self.name, self.recorded, self.calls = name, recorded, calls
        self._rows = rows
        names = {row.function for row in recorded}
        self.memory_mb = max(row.memory_mb for row in recorded)
        self.provider = max(
            sorted({r.provider for r in recorded}), key=lambda p: sum(r.provider == p for r in recorded)
        )
        self.work_s = sum(call.seconds for call in calls)
        self._specs = [trace.specs[n] for n in sorted(names) if n in trace.specs]
        self._seconds = rows.facts.seconds
        cores = max([1.0, *(getattr(s, "cpu", 0.0) or 0.0 for s in self._specs)])
        if trace.core_gb:
            cores = max(cores, self.memory_mb * MIB_GB / trace.core_gb)
        self.worker_usd_s = cores * trace.core_usd_hour / 3600.0
        self.functions_usd = sum(line.usd for line in functions.lines(rows) if line.resource.partition(":")[2] in names)
        self._names = names
        self.fewest = min_dedicated_workers(calls, wait_s)
        self.peak = min_dedicated_workers(calls, 0.0, quantile=1.0)

    def dedicated(self, workers: int) -> tuple[CallReplay, float, float]:
        """Workers that are kept for the whole run: the replay, their seconds and dollars."""
        found = replay_dedicated(self.calls, workers)
        worker_s = max(found.span_s, self._seconds) * workers
        return found, worker_s, worker_s * self.worker_usd_s

    def elastic(self, scaling: ScalingRule | None) -> tuple[CallReplay, float]:
        """Functions that scale, with the observed cold start and the function's keep-alive; and their bill."""
        found = replay_elastic(
            self.calls,
            cold_s=self.cold_s,
            keep_s=self.keep_s,
            scaling=scaling,
            tick_s=TICK_S,
            most=max([1, *(getattr(s, "concurrency", 1) for s in self._specs)]) if self._specs else 10_000,
        )
        prices, idle_s = self._rows.prices, max(0.0, found.worker_s - found.busy_s - found.cold_s)
        started = sum(row.start_billed_s > 0 for row in self.recorded)
        start_s = sum(row.start_billed_s for row in self.recorded) / started if started else 0.0
        billed_s = sum(row.billed_s - row.start_billed_s for row in self.recorded) + found.cold_starts * start_s
        usd = prices.function_usd(
            self.provider, billed_s=billed_s, memory_mb=self.memory_mb, requests=len(self.recorded)
        ) + prices.idle_usd(self.provider, seconds=idle_s, memory_mb=self.memory_mb)
        return found, usd

    @property
    def cold_s(self) -> float:
        """Mean cold start of the calls that had one."""
        observed = [row.cold_start_s for row in self.recorded if row.cold_start_s > 0]
        return sum(observed) / len(observed) if observed else 0.0

    @property
    def keep_s(self) -> float:
        default = float(FunctionSpec.model_fields["keep_alive_s"].default)
        return max([getattr(s, "keep_alive_s", default) for s in self._specs], default=default)

    def metered(self) -> tuple[float | None, float | None]:
        """Metered seconds of the workers, and their busy share; None if they were not metered."""
        states: dict[str, float] = defaultdict(float)
        for worker in self._rows.workers:
            if worker.function in self._names:
                states[worker.state] += worker.seconds
        life = sum(states.values())
        return (life, states[WorkerState.BUSY] / life) if life else (None, None)


TICK_S = 1.0
"""Interval of the replayed autoscalers' decisions, in seconds (Knative: 2)."""


@table("ways", "The same calls served in other ways")
def _serving_options(cases: Iterable[_OffloadCase]) -> Iterator[Row]:
    for case in cases:
        life, used = case.metered()
        starts = sum(row.cold_start_s > 0 for row in case.recorded)
        billed = CallReplay(tuple(row.queued_s for row in case.recorded), 0, 0, 0, starts, 0, 0)
        yield _served(case, "as billed", billed, None, life, used, case.functions_usd)
        # One, the fewest that are fast enough, and the fewest without any wait.
        chosen = {case.peak: "dedicated, no wait", case.fewest: "dedicated, enough"}
        if case.fewest > 1:
            chosen[1] = "dedicated, one"
        for workers, why in sorted(chosen.items()):
            one, worker_s, usd = case.dedicated(workers)
            yield _served(case, why, one, workers, worker_s, ratio(one.busy_s, worker_s), usd)
        if case.name == ALL:
            continue
        scalings: tuple[tuple[str, ScalingRule | None], ...] = (
            ("on demand", None),
            ("Knative", ReactiveScaling()),
            ("forecast", ForecastScaling(case.cold_s + TICK_S)),
        )
        for label, scaling in scalings:
            one, usd = case.elastic(scaling)
            yield _served(case, label, one, one.peak, one.worker_s, one.utilisation, usd)


def _served(
    case: _OffloadCase,
    by: str,
    one: CallReplay,
    workers: int | None,
    worker_s: float | None,
    used: float | None,
    usd: float,
) -> Row:
    return {
        "function": case.name,
        "served_by": by,
        "workers": as_count(workers),
        "worker_s": as_seconds(worker_s),
        "used": as_share(used),
        "wait_p50_ms": as_ms(1e3 * one.wait(0.5)),
        "wait_p99_ms": as_ms(1e3 * one.wait(0.99)),
        "cold_starts": as_count(one.cold_starts, people=False),
        "usd": as_usd(usd),
    }


@table("summary", "Functions as billed against the fewest dedicated workers that are quick enough")
def _summary(cases: Iterable[_OffloadCase]) -> Iterator[Row]:
    for case in cases:
        one, worker_s, usd = case.dedicated(case.fewest)
        per_s = case.functions_usd / case.work_s if case.work_s else 0.0
        yield {
            "function": case.name,
            "calls": as_count(len(case.calls)),
            "work_s": as_seconds(case.work_s),
            "functions_usd": as_usd(case.functions_usd),
            "dedicated": as_count(case.fewest),
            "dedicated_usd": as_usd(usd),
            "dedicated_used": as_share(ratio(one.busy_s, worker_s)),
            "dedicated_wins_above": as_share(ratio(case.worker_usd_s, per_s)),
        }


def _notes(
    rows: RunRows, trace: CallTrace, cases: Sequence[_OffloadCase], found: int, calls: int, wait_s: float
) -> Iterable[str]:
    if not cases:
        return
    yield f"enough: the fewest workers whose p99 wait is at most {wait_s:g} s; they are paid for the whole run"
    yield (
        f"a worker holds a core, or more where its memory or `cpu` wants it: ${trace.core_usd_hour:g} per core-hour "
        f"({trace.core_source or 'no price'})"
    )
    yield (
        f"forecast: {found} of {calls} calls matched with the trajectory of their domains that ended first after them "
        f"(within {MATCH_S:g} s)"
    )
    if not any(row.queued_s for case in cases for row in case.recorded):
        yield "no call is known to have waited for a worker: calls are replayed as they were begun"
    if any(len(case.calls) == MOST for case in cases if case.name != ALL):
        yield f"only the last {MOST:,} calls of a function are replayed"
    unbilled = [case.provider for case in cases if case.name != ALL and not rows.prices.billed(case.provider)]
    for provider in sorted(set(unbilled)):
        yield f"{provider}: workers on the run's own cores: dollars of its calls are what they would cost elsewhere"
    for provider in sorted({case.provider for case in cases if case.name != ALL}):
        for price in rows.prices.sources(provider):
            yield f"{provider}: ${price.usd:g} per {price.unit} ({price.source}, {price.date})"
    yield from functions.notes(rows)
