"""Functions against dedicated workers: the billed calls of a run, and replays of the same calls on other deployments.

Pure except for `read_trace`: the replays are those of `serverless.scaling.replay`. A call is replayed with its seconds
of work. Only calls that any deployment would have to serve are replayed, without hedges, calls to a second provider,
starts without a call, and trials of a deployment.

Of every deployment the report shows three costs: dollars, use of its workers, and exposed seconds, by which the run is
longer than with a function that takes no time (`exposure`). A trajectory waits for the slowest of its functions, so the
seconds saved by one end where the next slowest begins.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from rollart.ledger.reader import LedgerReader
from rollart.money import unit_price
from rollart.policy.schedules import SCHEDULES, Admission, InFlightHandling
from rollart.report import functions
from rollart.report.exposure import TRAINER, RunTiming, Span, TrajectoryLife
from rollart.report.rows import RunRows, price_list
from rollart.report.tables import (
    Cell,
    FormattedCell,
    Report,
    Row,
    as_count,
    as_ms,
    as_number,
    as_seconds,
    as_share,
    as_usd,
    ratio,
    table,
)
from rollart.settings.prices import PriceEntry
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

ANSWERED = frozenset({"ok", "cancelled"})
"""Statuses of calls whose items had an answer when they ended: a cancelled call's came from its hedge."""

MATCH_S = 5.0
"""Longest time from a call to the end of its trajectory, in seconds. A trajectory ends once its reward has arrived and
its sample is on disk; a trajectory that ended later did not wait for this call."""

MOST = 100_000
"""Largest number of calls of a function that are replayed, the last ones: half a minute of computing."""

MIB_GB = 2**20 / 1e9

ALL = "(all)"

AS_BILLED, DEDICATED, INLINE = COMPARED = ("as billed", "dedicated, enough", "inline")
"""Deployments whose totals are compared."""


@dataclass(frozen=True, slots=True)
class CallTrace:
    """A run's calls by start, its trajectories by end, and settings: `domains` by function, `specs` of functions, price
    of a core-hour and memory of a core (GB; 0: unknown)."""

    calls: Sequence[Invocation]
    lives: Sequence[TrajectoryLife]
    domains: Mapping[str, frozenset[str]]
    specs: Mapping[str, FunctionSpec]
    core_usd_hour: float
    core_gb: float = 0.0
    core_source: str = ""
    spans: Sequence[Span] = ()
    """Intervals of the trainer."""
    drained: bool = False
    """True if the schedule publishes only when no trajectory runs."""
    next_batch: bool = False
    """True if it admits groups when a batch is taken."""


def read_trace(reader: LedgerReader) -> CallTrace:
    """Read a run's calls. The price of a core is that of the cluster's first pool of `cpu` devices; without such a
    pool, the price list's."""
    config = reader.config()
    domains: dict[str, set[str]] = defaultdict(set)
    for domain in config.get("run", {}).get("domains", ()):
        for reward in domain.get("rewards", ()):
            domains[reward["function"]].add(domain["name"])
    simulated = config.get("simulated", {})
    by_function = {name: frozenset(own) for name, own in {**domains, **simulated.get("functions", {})}.items()}
    schedule = SCHEDULES.get(simulated.get("schedule") or config.get("run", {}).get("schedule"), {})
    return CallTrace(
        reader.calls(),
        [TrajectoryLife(*row) for row in reader.lives()],
        by_function,
        _specs(config),
        *_core(config),
        spans=[Span(*row[:5]) for row in reader.spans() if row[0] == TRAINER],
        drained=schedule.get("in_flight") is InFlightHandling.DRAINED,
        next_batch=schedule.get("admission") is Admission.NEXT_BATCH,
    )


def _core(config: Mapping[str, Any]) -> tuple[float, float, str]:
    """Price of a core-hour, its memory and the source of the price."""
    hourly = config.get("usd_per_device_hour", {})
    for pool in config.get("cluster", {}).get("pools", ()):
        if pool.get("device") == "cpu" and pool["name"] in hourly:
            return float(hourly[pool["name"]]), (pool.get("memory_gb") or 0.0) / pool["count"], f"pool '{pool['name']}'"
    price = price_list(config).device_price("cpu") if config.get("prices") else None
    return (0.0, 0.0, "") if price is None else (price.usd, 0.0, "the price list")


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


def offload(
    rows: RunRows, trace: CallTrace, *, wait_s: float = 0.25, counterfactual_s: Mapping[str, float] | None = None
) -> Report:
    """The report. `wait_s` is the largest p99 of the wait for a dedicated worker; `counterfactual_s`: by function the
    seconds that the run is shorter in a simulation with the function at 0 s."""
    by_function: dict[str, list[Invocation]] = defaultdict(list)
    for row in trace.calls:
        if row.items and row.cause in SERVED:
            by_function[row.function].append(row)
    recorded = {name: calls[-MOST:] for name, calls in sorted(by_function.items())}
    matched = {
        name: matched_calls(calls, trace.lives, trace.domains.get(name, frozenset()))
        for name, calls in recorded.items()
    }
    timing = RunTiming(trace.spans, trace.lives, drained=trace.drained, next_batch=trace.next_batch)
    waits = _RewardWaits(timing, trace.lives, recorded, matched)
    cases = [_OffloadCase(rows, trace, name, (name,), recorded, matched, waits, wait_s) for name in recorded]
    if len(cases) > 1:
        cases.append(_OffloadCase(rows, trace, ALL, tuple(recorded), recorded, matched, waits, wait_s))
    notes = list(_notes(rows, trace, cases, wait_s))
    found = [(case, list(_deployments(case))) for case in cases]
    tables = (_exposed(cases, counterfactual_s), _summary(found), _serving_options(found))
    return Report("offload", rows.run, tables, tuple(notes))


@dataclass(frozen=True, slots=True)
class MatchedCalls:
    """The calls of one function in the order of the ledger, and the trajectories (positions in the run's) whose rewards
    each of them gave."""

    calls: Sequence[ReplayedCall]
    trajectories: Sequence[tuple[int, ...]]

    @property
    def found(self) -> int:
        """Calls that were matched with a trajectory."""
        return sum(map(bool, self.trajectories))


def matched_calls(
    recorded: Sequence[Invocation], lives: Sequence[TrajectoryLife], domains: frozenset[str]
) -> MatchedCalls:
    """The calls of one function, matched with trajectories.

    A call that was answered is matched with the first trajectories of the function's domains that ended after it,
    within `MATCH_S`, and began before the call was requested. A call of n items uses up n trajectories. Each trajectory
    is used once. The call is requested when the last of them asked for its reward, if that is known: items wait in the
    pipeline before they are a call.
    """
    candidates = [index for index, life in enumerate(lives) if life.domain in domains]
    n, calls = 0, []
    matched: list[tuple[int, ...]] = [()] * len(recorded)
    for row in recorded:
        work_s = max(0.0, min(row.t1 - row.t0, row.billed_s - row.start_billed_s))
        calls.append(ReplayedCall(row.t0 - row.queued_s, work_s, job=row.function))
    for at in sorted(range(len(recorded)), key=lambda i: recorded[i].t1):
        row = recorded[at]
        if row.status not in ANSWERED:
            continue
        while n < len(candidates) and lives[candidates[n]].ended < row.t1:
            n += 1
        last = n
        while last < len(candidates) and last - n < row.items and lives[candidates[last]].ended <= row.t1 + MATCH_S:
            last += 1
        if n < last and lives[candidates[n]].began <= calls[at].t:
            first = lives[candidates[n]]
            matched[at] = tuple(index for index in candidates[n:last] if lives[index].began <= calls[at].t)
            asked = [life.ended - life.reward_s for i in matched[at] if (life := lives[i]).reward_s is not None]
            t = min(calls[at].t, max(asked, default=calls[at].t))
            calls[at] = replace(calls[at], t=t, since=first.began, kind=first.domain)
        n = last
    return MatchedCalls(calls, matched)


class _RewardWaits:
    """Seconds that each trajectory waited for each function, and for the slowest of its functions."""

    def __init__(
        self,
        timing: RunTiming,
        lives: Sequence[TrajectoryLife],
        recorded: Mapping[str, Sequence[Invocation]],
        matched: Mapping[str, MatchedCalls],
    ) -> None:
        self._timing = timing
        self._of: dict[str, dict[int, float]] = {}
        for name, one in matched.items():
            seconds = [row.t1 - call.t for row, call in zip(recorded[name], one.calls, strict=True)]
            self._of[name] = _by_trajectory(one.trajectories, seconds)
        self._longest = _longest(self._of.values())
        # The rest of a trajectory's wait, in the pipeline and for calls that failed, is that of its slowest function.
        for index, known_s in self._longest.items():
            if (whole := lives[index].reward_s) is not None and whole > known_s:
                slowest = max(self._of.values(), key=lambda own: own.get(index, 0.0))
                slowest[index] = self._longest[index] = whole

    def exposed_s(self, names: Sequence[str], instead: Mapping[int, float]) -> float:
        """Seconds of the run that are saved if, in place of these functions, trajectories wait `instead` (0 s for
        those not in it)."""
        rest = _longest([own for name, own in self._of.items() if name not in names])
        saved = {}
        for name in names:
            for index in self._of[name]:
                saved[index] = self._longest[index] - max(rest.get(index, 0.0), instead.get(index, 0.0))
        return self._timing.exposed_s(saved)


def _by_trajectory(trajectories: Sequence[tuple[int, ...]], seconds: Sequence[float]) -> dict[int, float]:
    return _longest([{index: s} for own, s in zip(trajectories, seconds, strict=True) for index in own])


def _longest(waits: Iterable[Mapping[int, float]]) -> dict[int, float]:
    """The longest wait of each trajectory."""
    found: dict[int, float] = {}
    for own in waits:
        for index, seconds in own.items():
            found[index] = max(found.get(index, 0.0), seconds)
    return found


class _OffloadCase:
    """One function (or all), with its calls and the cost of each deployment of it."""

    def __init__(
        self,
        rows: RunRows,
        trace: CallTrace,
        name: str,
        names: Sequence[str],
        recorded: Mapping[str, Sequence[Invocation]],
        matched: Mapping[str, MatchedCalls],
        waits: _RewardWaits,
        wait_s: float,
    ) -> None:
        self.name, self._names = name, names
        self.recorded = [row for own in names for row in recorded[own]]
        self.found = sum(matched[own].found for own in names)
        pairs = [pair for own in names for pair in zip(matched[own].calls, matched[own].trajectories, strict=True)]
        pairs.sort(key=lambda pair: pair[0].t)  # as replays report their waits
        self.calls = [call for call, _ in pairs]
        self._trajectories = [own for _, own in pairs]
        self._rows, self._waits = rows, waits
        self.memory_mb = max(row.memory_mb for row in self.recorded)
        self.provider = max(
            sorted({r.provider for r in self.recorded}), key=lambda p: sum(r.provider == p for r in self.recorded)
        )
        self.work_s = sum(call.seconds for call in self.calls)
        self._specs = [trace.specs[n] for n in sorted(names) if n in trace.specs]
        self.seconds = rows.facts.seconds
        self.gpu = next((spec.gpu for spec in self._specs if getattr(spec, "gpu", "")), "")
        cores = max([1.0, *(getattr(s, "cpu", 0.0) or 0.0 for s in self._specs)])
        if trace.core_gb:
            cores = max(cores, self.memory_mb * MIB_GB / trace.core_gb)
        self.gpu_price, gpus = _gpu_price(rows, self.gpu)
        hourly = cores * trace.core_usd_hour + (0.0 if self.gpu_price is None else gpus * self.gpu_price.usd)
        self.worker_usd_s = hourly / 3600.0
        self.functions_usd = sum(line.usd for line in functions.lines(rows) if line.resource.partition(":")[2] in names)
        self.fewest = min_dedicated_workers(self.calls, wait_s)
        self.peak = min_dedicated_workers(self.calls, 0.0, quantile=1.0)
        self.device_usd_s = sum(usd * hours for usd, hours in rows.device_hours) / self.seconds if self.seconds else 0.0

    @cached_property
    def exposed_s(self) -> float:
        """Seconds that the run is longer than with the functions at 0 s."""
        return self._waits.exposed_s(self._names, {})

    def exposed_by(self, replayed: CallReplay) -> float:
        """The same for a replay: trajectories wait for a worker, and for the work."""
        seconds = [wait + call.seconds for wait, call in zip(replayed.waits, self.calls, strict=True)]
        waits = _by_trajectory(self._trajectories, seconds)
        return self.exposed_s - self._waits.exposed_s(self._names, waits)

    def break_even(self) -> float | None:
        """Calls per second above which the fewest dedicated workers that are quick enough cost less than functions, at
        the run's dollars per call; None if they could not serve so many."""
        usd_per_call = self.functions_usd / len(self.calls)
        if not (usd_per_call and self.work_s):
            return None
        rate = self.fewest * self.worker_usd_s / usd_per_call
        return rate if rate * self.work_s / len(self.calls) <= self.fewest else None

    def dedicated(self, workers: int) -> tuple[CallReplay, float, float]:
        """Workers that are kept for the whole run: the replay, their seconds and dollars."""
        found = replay_dedicated(self.calls, workers)
        worker_s = max(found.span_s, self.seconds) * workers
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
            self.provider, billed_s=billed_s, memory_mb=self.memory_mb, requests=len(self.recorded), gpu=self.gpu
        ) + prices.idle_usd(self.provider, seconds=idle_s, memory_mb=self.memory_mb, gpu=self.gpu)
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


def _gpu_price(rows: RunRows, gpu: str) -> tuple[PriceEntry | None, int]:
    """The hourly price of a GPU that a function names ("H100:2"), and the number of GPUs."""
    name, _, count = gpu.partition(":")
    prices = rows.prices.sources(name.rstrip("!")) if name else ()
    return next((price for price in prices if price.unit == "device-hour"), None), int(count or 1)


TICK_S = 1.0
"""Interval of the replayed autoscalers' decisions, in seconds (Knative: 2)."""


@dataclass(frozen=True, slots=True)
class _Deployment:
    """One deployment of a function's calls: waits for a worker, workers (None: not known), their seconds and busy
    share, dollars, and seconds that the run is longer for it."""

    served_by: str
    replayed: CallReplay
    workers: int | None
    worker_s: float | None
    used: float | None
    usd: float
    exposed_s: float


def _deployments(case: _OffloadCase) -> Iterator[_Deployment]:
    """First the deployments that are compared (`COMPARED`), then others."""
    life, used = case.metered()
    starts = sum(row.cold_start_s > 0 for row in case.recorded)
    billed = CallReplay(tuple(row.queued_s for row in case.recorded), 0, 0, 0, starts, 0, 0)
    yield _Deployment(AS_BILLED, billed, None, life, used, case.functions_usd, case.exposed_s)
    # One, the fewest that are fast enough, and the fewest without any wait.
    chosen = {case.peak: "dedicated, no wait", case.fewest: DEDICATED}
    if case.fewest > 1:
        chosen[1] = "dedicated, one"
    for workers, why in sorted(chosen.items()):
        one, worker_s, usd = case.dedicated(workers)
        yield _Deployment(why, one, workers, worker_s, ratio(one.busy_s, worker_s), usd, case.exposed_by(one))
    if not case.gpu:  # the controller's host has none
        one = replay_dedicated(case.calls, 1)
        used, usd = ratio(case.work_s, case.seconds), case.work_s * case.worker_usd_s
        yield _Deployment(INLINE, one, 1, case.seconds, used, usd, case.exposed_by(one))
    if case.name == ALL:
        return
    scalings: tuple[tuple[str, ScalingRule | None], ...] = (
        ("on demand", None),
        ("Knative", ReactiveScaling()),
        ("forecast", ForecastScaling(case.cold_s + TICK_S)),
    )
    for label, scaling in scalings:
        one, usd = case.elastic(scaling)
        yield _Deployment(label, one, one.peak, one.worker_s, one.utilisation, usd, case.exposed_by(one))


Found = Sequence[tuple[_OffloadCase, Sequence[_Deployment]]]


@table("ways", "The same calls on other deployments")
def _serving_options(found: Found) -> Iterator[Row]:
    for case, deployments in found:
        for one in deployments:
            exposed_usd = one.exposed_s * case.device_usd_s if case.found else None
            yield {
                "function": case.name,
                "served_by": one.served_by,
                "workers": as_count(one.workers),
                "worker_s": as_seconds(one.worker_s),
                "used": as_share(one.used),
                "wait_p50_ms": as_ms(1e3 * one.replayed.wait(0.5), people=False),
                "wait_p99_ms": as_ms(1e3 * one.replayed.wait(0.99)),
                "cold_starts": as_count(one.replayed.cold_starts, people=False),
                "usd": as_usd(one.usd),
                "exposed_s": as_seconds(one.exposed_s if case.found else None),
                "exposed_usd": as_usd(exposed_usd),
                "total_usd": as_usd(one.usd + (exposed_usd or 0.0)),
            }


@table("exposed", "Seconds of the run that functions cost")
def _exposed(cases: Iterable[_OffloadCase], counterfactual_s: Mapping[str, float] | None) -> Iterator[Row]:
    for case in cases:
        exposed_s = case.exposed_s if case.found else None  # without a trajectory that waited, it is unknown
        row: dict[str, Cell | FormattedCell] = {
            "function": case.name,
            "busy_s": as_seconds(case.work_s),
            "exposed_s": as_seconds(exposed_s),
            "share_of_run": as_share(None if exposed_s is None else ratio(exposed_s, case.seconds)),
            "exposed_usd": as_usd(None if exposed_s is None else exposed_s * case.device_usd_s),
        }
        if counterfactual_s is not None:
            by = counterfactual_s.get(case.name)
            error = None if by is None or exposed_s is None else ratio(exposed_s - by, case.seconds)
            row |= {"simulated_s": as_seconds(by), "error_of_run": as_share(error)}
        yield row


@table("summary", "Functions as billed against the fewest dedicated workers that are quick enough")
def _summary(found: Found) -> Iterator[Row]:
    for case, deployments in found:
        one, worker_s, usd = case.dedicated(case.fewest)
        per_s = case.functions_usd / case.work_s if case.work_s else 0.0
        compared = [d for d in deployments if d.served_by in COMPARED]
        cheapest = min(compared, key=lambda d: d.usd + d.exposed_s * case.device_usd_s)
        yield {
            "function": case.name,
            "calls": as_count(len(case.calls)),
            "work_s": as_seconds(case.work_s, people=False),
            "functions_usd": as_usd(case.functions_usd),
            "dedicated": as_count(case.fewest),
            "dedicated_usd": as_usd(usd, people=False),
            "dedicated_used": as_share(ratio(one.busy_s, worker_s)),
            "dedicated_wins_above": as_share(ratio(case.worker_usd_s, per_s)),
            "calls_per_s": as_number(ratio(len(case.calls), case.seconds)),
            "break_even_per_s": as_number(case.break_even()),
            "cheapest": cheapest.served_by,
        }


def _notes(rows: RunRows, trace: CallTrace, cases: Sequence[_OffloadCase], wait_s: float) -> Iterable[str]:
    if not cases:
        return
    own = [case for case in cases if case.name != ALL]
    yield (
        "exposed: seconds by which the run is longer than with the function at 0 s, and the price of all devices for "
        "so long; busy: seconds of its calls' work"
    )
    yield f"enough: the fewest workers whose p99 wait is at most {wait_s:g} s; they are paid for the whole run"
    yield "inline: one call at a time in the controller's process, whose core is priced for the seconds of work"
    yield (
        "break-even: calls per second above which these dedicated workers cost less than functions at this run's "
        "dollars per call; '-' where they could not serve so many"
    )
    pool = next((p for p in rows.pools if trace.core_source == f"pool '{p.pool}'"), None)
    source = trace.core_source if pool is None else f"{trace.core_source}: {pool.source}, {pool.date}".rstrip(", ")
    yield (
        f"a worker holds a core, or more where its memory or `cpu` wants it: {unit_price(trace.core_usd_hour)} per "
        f"core-hour ({source or 'no price'})"
    )
    for case in own:
        if case.gpu:
            price = case.gpu_price
            known = (
                "no price"
                if price is None
                else f"{unit_price(price.usd)} per device-hour ({price.source}, {price.date})"
            )
            yield f"{case.name}: a worker holds {case.gpu} too: {known}"
    found, calls = sum(case.found for case in own), sum(len(case.calls) for case in own)
    yield (
        f"{found} of {calls} calls matched with the trajectories of their domains that ended first after them (within "
        f"{MATCH_S:g} s), for the forecast and for exposed seconds"
    )
    if not any(row.queued_s for case in cases for row in case.recorded):
        yield "no call is known to have waited for a worker: calls are replayed as they were begun"
    if any(len(case.calls) == MOST for case in own):
        yield f"only the last {MOST:,} calls of a function are replayed"
    unbilled = [case.provider for case in own if not rows.prices.billed(case.provider)]
    for provider in sorted(set(unbilled)):
        yield f"{provider}: workers on the run's own cores: dollars of its calls are what they would cost elsewhere"
    for provider in sorted({case.provider for case in own}):
        for price in rows.prices.sources(provider):
            yield f"{provider}: {price.unit} at {unit_price(price.usd)} ({price.source}, {price.date})"
    yield from functions.notes(rows)
