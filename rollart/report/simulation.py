"""What simulations found: schedules beside each other, with confidence intervals over seeds. Pure."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rollart.ledger.intervals import State
from rollart.report.rows import ENGINE_ROLES, Cell, Column, Report, RunRows, Table
from rollart.report.summarize import cost_lines, waste

__all__ = ["Finding", "finding", "simulation"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One simulation in figures. Times are virtual seconds; step figures are means over the steps after the `skipped`
    first ones, in which the pipeline fills. `lags` count trained samples by versions between their first token and the
    one they were trained from; `waste` dollars by "role: cause"; `waits` device-seconds by "role: state: cause"."""

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

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Of one step: end, seconds of waiting for its batch, of training and of publishing, and what it trained."""

    ended: float
    waited_s: float
    train_s: float
    publish_s: float
    trajectories: int
    tokens: int


def finding(
    rows: RunRows, steps: Sequence[StepTimes], lags: Mapping[int, int], *, schedule: str, seed: int, trace: str
) -> Finding:
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
        if i.state != State.BUSY:
            waits[f"{i.role}: {i.state}: {i.cause}" if i.cause else f"{i.role}: {i.state}"] += i.unit_seconds
    trained = sum(s.trajectories for s in steps)
    return Finding(
        schedule=schedule,
        seed=seed,
        trace=trace,
        seconds=steps[-1].ended,
        steps=len(steps),
        skipped=skipped,
        step_s=span / len(kept),
        waited_s=_mean(s.waited_s for s in kept),
        train_s=_mean(s.train_s for s in kept),
        publish_s=_mean(s.publish_s for s in kept),
        trajectories_per_s=sum(s.trajectories for s in kept) / span,
        tokens_per_s=sum(s.tokens for s in kept) / span,
        engine_busy=math.fsum(i.unit_seconds for i in engines if i.state == State.BUSY) / life if life else 0.0,
        usd_per_1k=total / trained * 1000,
        wasted=math.fsum(lost.values()) / total if total else 0.0,
        lags=dict(sorted(lags.items())),
        waste={f"{role}: {cause}": usd for (role, cause), usd in lost.items()},
        waits=dict(sorted(waits.items(), key=lambda w: -w[1])),
    )


FIGURES: tuple[tuple[str, str, Callable[[Finding], float]], ...] = (
    ("step", "s", lambda f: f.step_s),
    ("waiting for samples", "s", lambda f: f.waited_s),
    ("training", "s", lambda f: f.train_s),
    ("publish", "s", lambda f: f.publish_s),
    ("trajectories trained", "1/s", lambda f: f.trajectories_per_s),
    ("tokens trained", "1/s", lambda f: f.tokens_per_s),
    ("engines busy", "share", lambda f: f.engine_busy),
    ("per 1,000 trajectories", "USD", lambda f: f.usd_per_1k),
    ("idle and waste", "share", lambda f: f.wasted),
    ("mean lag", "versions", lambda f: _lag(f)),
)


def simulation(run: str, found: Sequence[Finding], notes: Sequence[str] = ()) -> Report:
    """The report: one column per schedule; ± is a 95 % confidence interval over seeds (Student's t)."""
    by: dict[str, list[Finding]] = {}
    for one in found:
        by.setdefault(one.schedule, []).append(one)
    skipped = found[0].skipped
    seeds = max(len(own) for own in by.values())
    foot = (
        f"{found[0].steps} steps, the first {skipped} left out of step figures; {seeds} seed{'s' if seeds > 1 else ''}",
        *(f"trace {f.trace}: {f.schedule}, seed {f.seed}" for f in found),
        *notes,
    )
    tables = (
        _figures(by),
        _lags(by),
        _sums("waste", "Idle and waste, dollars per 1,000 trajectories", by, _per_1k),
        _sums("waits", "Waiting, device-hours", by, lambda f: {k: v / 3600 for k, v in f.waits.items()}),
    )
    return Report("simulate", run, tables, foot)


def _figures(by: Mapping[str, Sequence[Finding]]) -> Table:
    columns = [Column("what"), Column("unit")]
    for name in by:
        columns += [Column(name, "number"), Column(f"{name} ±", "number")]
    rows: list[tuple[Cell, ...]] = []
    for what, unit, of in FIGURES:
        row: list[Cell] = [what, unit]
        for own in by.values():
            row += _interval([of(f) for f in own])
        rows.append(tuple(row))
    return Table("figures", "Figures", tuple(columns), tuple(rows))


def _lags(by: Mapping[str, Sequence[Finding]]) -> Table:
    lags = sorted({lag for own in by.values() for f in own for lag in f.lags})
    columns = (Column("lag in versions", "count"), *(Column(name, "share") for name in by))
    totals = {name: sum(n for f in own for n in f.lags.values()) for name, own in by.items()}
    rows: list[tuple[Cell, ...]] = [
        (lag, *(sum(f.lags.get(lag, 0) for f in own) / totals[name] for name, own in by.items())) for lag in lags
    ]
    return Table("lags", "Staleness of what was trained", columns, tuple(rows))


def _sums(
    name: str, title: str, by: Mapping[str, Sequence[Finding]], of: Callable[[Finding], Mapping[str, float]]
) -> Table:
    means: dict[str, dict[str, float]] = {}
    for schedule, own in by.items():
        for f in own:
            for cause, amount in of(f).items():
                by_schedule = means.setdefault(cause, {})
                by_schedule[schedule] = by_schedule.get(schedule, 0.0) + amount / len(own)
    ordered = sorted(means.items(), key=lambda c: -max(c[1].values()))
    columns = (Column("cause"), *(Column(schedule, "number") for schedule in by))
    rows: list[tuple[Cell, ...]] = [
        (cause, *(amounts.get(schedule, 0.0) for schedule in by)) for cause, amounts in ordered
    ]
    return Table(name, title, columns, tuple(rows))


def _per_1k(found: Finding) -> Mapping[str, float]:
    total = math.fsum(found.waste.values())
    scale = found.usd_per_1k * found.wasted / total if total else 0.0
    return {cause: usd * scale for cause, usd in found.waste.items()}


def _lag(found: Finding) -> float:
    count = sum(found.lags.values())
    return sum(lag * n for lag, n in found.lags.items()) / count if count else 0.0


def _interval(values: Sequence[float]) -> tuple[float, float | None]:
    mean = _mean(values)
    if len(values) < 2:
        return mean, None
    from scipy.stats import t

    deviation = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1))
    return mean, float(t.ppf(0.975, len(values) - 1)) * deviation / math.sqrt(len(values))


def _mean(values: Iterable[float]) -> float:
    given = list(values)
    return math.fsum(given) / len(given)
