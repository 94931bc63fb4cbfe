"""Results of simulations: schedules beside each other, with confidence intervals over seeds, and the cost of their
faults; and a recorded run beside its simulation. Pure."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import TypeAlias, TypeVar

from rollart.ledger.events import DOMAIN_SHARE
from rollart.ledger.intervals import ResourceState
from rollart.ports import RunEvent
from rollart.report.cost import cost_lines, waste
from rollart.report.rows import ENGINE_ROLES, RunRows
from rollart.report.tables import (
    FormattedCell,
    Report,
    Row,
    Table,
    as_count,
    as_number,
    as_seconds,
    as_share,
    as_text,
    table,
)
from rollart.report.timeline import Timeline
from rollart.report.utilization import DomainShareSummary, domain_shares

INFRA_FAULT = "infra_fault"
"""Outcome of trajectories that an infrastructure fault ended, and the event that records the fault."""

T = TypeVar("T")


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


@dataclass(frozen=True, slots=True)
class SimulationFigures:
    """Figures of one simulation. Times are virtual seconds; step figures are means over the steps after the first
    `skipped` steps, in which the pipeline fills. `lags` counts trained samples by the number of versions between their
    first token and their training; `waste` is dollars by "role: cause"; `waits` is device-seconds by "role: state:
    cause"."""

    schedule: str
    seed: int
    trace: str
    seconds: float
    steps: int
    skipped: int
    step_s: float
    waited_s: float
    train_s: float
    publish_s: float
    trajectories_per_s: float
    tokens_per_s: float
    engine_busy: float
    usd_per_1k: float
    wasted: float
    lags: Mapping[int, int] = field(default_factory=dict)
    waste: Mapping[str, float] = field(default_factory=dict)
    waits: Mapping[str, float] = field(default_factory=dict)
    shares: Mapping[str, DomainShareSummary] = field(default_factory=dict)
    faults: FaultCost | None = None
    """Cost of the fault plan, if there is one."""
    timeline: Timeline | None = None
    """The timeline, if it was requested."""

    @property
    def mean_lag(self) -> float:
        count = sum(self.lags.values())
        return sum(lag * n for lag, n in self.lags.items()) / count if count else 0.0


@dataclass(frozen=True, slots=True)
class StepTimes:
    """One step: its end, seconds of waiting for its batch, of training and of publishing, and its batch's size."""

    ended: float
    waited_s: float
    train_s: float
    publish_s: float
    trajectories: int
    tokens: int


def simulation_figures(
    rows: RunRows, steps: Sequence[StepTimes], lags: Mapping[int, int], *, schedule: str, seed: int, trace: str
) -> SimulationFigures:
    """From a simulation's ledger and its steps. ValueError without steps."""
    if not steps:
        raise ValueError("a simulation without steps has no figures (rule: at least one)")
    skipped = min(2, len(steps) // 3)
    kept, since = steps[skipped:], steps[skipped - 1].ended if skipped else 0.0
    span = kept[-1].ended - since
    lines = cost_lines(rows)
    total = math.fsum(line.usd for line in lines)
    lost = waste(rows, lines)
    engines = [i for i in rows.intervals if i.role in ENGINE_ROLES]
    life = math.fsum(i.unit_seconds for i in engines)
    waits: dict[str, float] = defaultdict(float)
    for i in rows.intervals:
        if i.state != ResourceState.BUSY:
            waits[f"{i.role}: {i.state}: {i.cause}" if i.cause else f"{i.role}: {i.state}"] += i.unit_seconds
    trained = sum(s.trajectories for s in steps)
    return SimulationFigures(
        schedule=schedule,
        seed=seed,
        trace=trace,
        seconds=steps[-1].ended,
        steps=len(steps),
        skipped=skipped,
        step_s=span / len(kept),
        waited_s=fmean(s.waited_s for s in kept),
        train_s=fmean(s.train_s for s in kept),
        publish_s=fmean(s.publish_s for s in kept),
        trajectories_per_s=sum(s.trajectories for s in kept) / span,
        tokens_per_s=sum(s.tokens for s in kept) / span,
        engine_busy=math.fsum(i.unit_seconds for i in engines if i.state == ResourceState.BUSY) / life if life else 0.0,
        usd_per_1k=total / trained * 1000,
        wasted=math.fsum(lost.values()) / total if total else 0.0,
        lags=dict(sorted(lags.items())),
        waste={f"{role}: {cause}": usd for (role, cause), usd in lost.items()},
        waits=dict(sorted(waits.items(), key=lambda w: -w[1])),
        shares=domain_shares(rows.events_of(DOMAIN_SHARE)),
    )


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure of a simulation: `key` is its stable name for machines, `label` its name for people."""

    key: str
    label: str
    unit: str
    of: Callable[[SimulationFigures], float]


FIGURES = (
    Figure("step_s", "step", "s", lambda f: f.step_s),
    Figure("waited_s", "waiting for samples", "s", lambda f: f.waited_s),
    Figure("train_s", "training", "s", lambda f: f.train_s),
    Figure("publish_s", "publish", "s", lambda f: f.publish_s),
    Figure("trajectories_per_s", "trajectories trained", "1/s", lambda f: f.trajectories_per_s),
    Figure("tokens_per_s", "tokens trained", "1/s", lambda f: f.tokens_per_s),
    Figure("engine_busy", "engines busy", "share", lambda f: f.engine_busy),
    Figure("usd_per_1k", "per 1,000 trajectories", "USD", lambda f: f.usd_per_1k),
    Figure("wasted", "idle and waste", "share", lambda f: f.wasted),
    Figure("mean_lag", "mean lag", "versions", lambda f: f.mean_lag),
)


Figures: TypeAlias = Mapping[str, Sequence[SimulationFigures]]
"""Simulations by schedule, one of each seed."""


def simulation(run: str, found: Sequence[SimulationFigures], notes: Sequence[str] = ()) -> Report:
    """The report: one column per schedule; ± is a 95 % confidence interval over seeds (Student's t)."""
    by: dict[str, list[SimulationFigures]] = {}
    for one in found:
        by.setdefault(one.schedule, []).append(one)
    skipped = found[0].skipped
    seeds = max(len(own) for own in by.values())
    foot = (
        f"{found[0].steps} steps, the first {skipped} left out of step figures; {seeds} seed{'s' if seeds > 1 else ''}",
        *(f"trace {f.trace}: {f.schedule}, seed {f.seed}" for f in found),
        *notes,
    )
    tables: tuple[Table, ...] = (
        _figures(by),
        _shares_of_lags(by),
        _sums("waste", "Idle and waste, dollars per 1,000 trajectories", by, _per_1k),
        _sums("waits", "Waiting, device-hours", by, lambda f: {k: v / 3600 for k, v in f.waits.items()}),
        _each(found),
    )
    costs = {name: [f.faults for f in own if f.faults is not None] for name, own in by.items()}
    if all(costs.values()):
        tables = (*tables, faults_table(costs))
    if any(f.shares for f in found):
        tables = (*tables, _compared_shares(by))
    return Report("simulate", run, tables, foot)


@table("figures", "Figures")
def _figures(by: Figures) -> Iterator[Row]:
    for figure in FIGURES:
        yield {
            "figure": as_text(figure.key, people=False),
            "what": figure.label,
            "unit": figure.unit,
            **_intervals({name: [figure.of(f) for f in own] for name, own in by.items()}, as_number, people=True),
        }


@table("lags", "Staleness of what was trained")
def _shares_of_lags(by: Figures) -> Iterator[Row]:
    """Share of trained samples by lag. All seeds have the same weight, whatever their number of samples."""

    def shares(lag: int) -> dict[str, list[float]]:
        return {name: [f.lags.get(lag, 0) / (sum(f.lags.values()) or 1) for f in own] for name, own in by.items()}

    for lag in sorted({lag for own in by.values() for f in own for lag in f.lags}):
        yield {"lag in versions": as_count(lag), **_intervals(shares(lag), as_share)}


def _sums(name: str, title: str, by: Figures, of: Callable[[SimulationFigures], Mapping[str, float]]) -> Table:
    """Sums by cause, the largest first; a seed without a cause counts as 0."""
    amounts = {schedule: [of(f) for f in own] for schedule, own in by.items()}
    causes = {
        cause: {schedule: [one.get(cause, 0.0) for one in own] for schedule, own in amounts.items()}
        for cause in _keys(one for own in amounts.values() for one in own)
    }
    ordered = sorted(causes.items(), key=lambda item: -max(fmean(values) for values in item[1].values()))
    return Table.of(name, title, ({"cause": cause, **_intervals(values, as_number)} for cause, values in ordered))


def _intervals(
    by: Mapping[str, Sequence[float]], formatted: Callable[..., FormattedCell], *, people: bool = False
) -> Row:
    """A column per schedule with the mean over seeds, and a column with its interval, for machines or also `people`."""
    row: dict[str, FormattedCell] = {}
    for name, values in by.items():
        mean, half = interval(values)
        row |= {name: formatted(mean), f"{name} ±": formatted(half, people=people)}
    return row


@table("simulations", "Simulations", people=False)
def _each(found: Sequence[SimulationFigures]) -> Iterator[Row]:
    """Every single simulation, for statistical tests of differences."""
    for f in found:
        yield {
            "schedule": f.schedule,
            "seed": as_count(f.seed),
            "trace": f.trace,
            "seconds": as_seconds(f.seconds),
            "steps": as_count(f.steps),
            "skipped": as_count(f.skipped),
            **{figure.key: as_number(figure.of(f)) for figure in FIGURES},
        }


@table("shares", "Shares of domains in what was trained; drift in groups")
def _compared_shares(by: Figures) -> Iterator[Row]:
    """Shares of domains by schedule: means over seeds, and the worst drift of any seed."""
    for domain in _keys(f.shares for own in by.values() for f in own):
        row: dict[str, str | FormattedCell] = {"domain": domain}
        for name, own in by.items():
            seen = [f.shares[domain] for f in own if domain in f.shares]
            count = len(seen) or 1
            row |= {
                f"{name} wanted": as_share(sum(s.wanted for s in seen) / count),
                f"{name} trained": as_share(sum(s.trained for s in seen) / count),
                f"{name} worst drift": as_number(max((s.worst for s in seen), default=None)),
            }
        yield row


def _per_1k(found: SimulationFigures) -> Mapping[str, float]:
    total = math.fsum(found.waste.values())
    scale = found.usd_per_1k * found.wasted / total if total else 0.0
    return {cause: usd * scale for cause, usd in found.waste.items()}


def interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float | None]:
    """Mean, and half of its confidence interval (Student's t), None for a single value."""
    mean = fmean(values)
    if len(values) < 2:
        return mean, None
    from scipy.special import stdtrit  # scipy.stats would take a second to import

    deviation = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1))
    return mean, float(stdtrit(len(values) - 1, (1 + confidence) / 2)) * deviation / math.sqrt(len(values))


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
    rows: list[Row] = []

    def add(label: str, unit: str, values: Mapping[str, Sequence[float]]) -> None:
        rows.append({"what": label, "unit": unit, **{name: as_number(fmean(own)) for name, own in values.items()}})

    def each(label: str, unit: str, parts: Mapping[str, Sequence[Mapping[str, float]]], scale: float = 1.0) -> None:
        for key in _keys(part for own in parts.values() for part in own):
            add(label.format(key), unit, {n: [p.get(key, 0.0) * scale for p in own] for n, own in parts.items()})

    def of(figure: Callable[[FaultCost], T]) -> dict[str, list[T]]:
        return {name: [figure(c) for c in own] for name, own in by.items()}

    each("{} outages", "count", of(lambda c: c.observed.outages))
    each("{} down", "part-hours", of(lambda c: c.observed.down_s), 1 / 3600)
    add("devices known to be down", "device-hours", of(lambda c: c.down_device_s / 3600))
    add("and paid", "USD", of(lambda c: c.down_usd))
    add("answers lost with engines", "tokens", of(lambda c: c.observed.lost_tokens))
    add("KV lost with engines", "tokens", of(lambda c: c.observed.lost_kv_tokens))
    each("aborted: {}", "trajectories", of(lambda c: c.aborted))
    add("sampled for the aborted", "tokens", of(lambda c: c.aborted_tokens))
    add("engines for the aborted", "engine-hours", of(lambda c: c.aborted_engine_s / 3600))
    each("calls failed: {}", "count", of(lambda c: c.failed_calls))
    return Table.of("faults", "What faults cost", rows)


def _keys(parts: Iterable[Iterable[str]]) -> list[str]:
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


@dataclass(frozen=True, slots=True)
class RunTotals:
    """Seconds and dollars of a run from start to end (`wall_s`, `usd`), and of its training loop: from the start of the
    first step's rollouts to the publish of the last step's version. `waited_s` to `publish_s` are the trainer's parts
    of the loop, `engine_busy_s` adds up over engines."""

    steps: int
    wall_s: float
    loop_s: float
    usd: float
    loop_usd: float
    waited_s: float
    train_s: float
    publish_s: float
    engine_busy_s: float


@dataclass(frozen=True, slots=True)
class SimulationCheck:
    """A recorded run, and its simulated training loop. The time outside the loop (starts, warm start, evaluations) is
    no part of a simulation and is taken as recorded."""

    recorded: RunTotals
    simulated: RunTotals

    @property
    def wall_s(self) -> float:
        """Predicted seconds of the run."""
        return self.recorded.wall_s - self.recorded.loop_s + self.simulated.loop_s

    @property
    def usd(self) -> float:
        """Predicted dollars of the run."""
        return self.recorded.usd - self.recorded.loop_usd + self.simulated.loop_usd


def check_report(run: str, check: SimulationCheck, notes: Sequence[str] = ()) -> Report:
    """The report: recorded against predicted."""
    a, b = check.recorded, check.simulated
    per: tuple[tuple[str, Callable[[RunTotals], float]], ...] = (
        ("step", lambda o: o.loop_s / o.steps),
        ("waiting for samples, a step", lambda o: o.waited_s / o.steps),
        ("training, a step", lambda o: o.train_s / o.steps),
        ("publish, a step", lambda o: o.publish_s / o.steps),
        ("engines busy, a step", lambda o: o.engine_busy_s / o.steps),
    )
    rows: list[Row] = [
        *(_compared(what, "s", of(a), of(b)) for what, of in per),
        _compared("training loop", "s", a.loop_s, b.loop_s),
        _compared("training loop", "USD", a.loop_usd, b.loop_usd),
        _compared("before and after it", "s", a.wall_s - a.loop_s, None),
        _compared("before and after it", "USD", a.usd - a.loop_usd, None),
        _compared("wall time", "s", a.wall_s, check.wall_s),
        _compared("dollars", "USD", a.usd, check.usd),
    ]
    table = Table.of("check", f"Recorded against simulated, {a.steps} steps", rows)
    return Report("check", run, (table,), ("before and after the loop: as recorded", *notes))


def _compared(label: str, unit: str, recorded: float, predicted: float | None) -> Row:
    """Without a prediction the recorded amount is taken as it is."""
    deviation = predicted / recorded - 1.0 if recorded and predicted is not None else None
    return {
        "what": label,
        "unit": unit,
        "recorded": as_number(recorded),
        "predicted": as_number(recorded if predicted is None else predicted),
        "deviation": as_share(deviation),
    }
