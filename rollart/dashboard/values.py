"""Values of the dashboard's pages that are not a report's: series over time, lost work, and runs side by side. Pure."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollart.dashboard.readings import RunSnapshot
from rollart.ledger.events import ENGINE_DID
from rollart.policy.budget import SpendForecast, recorded_forecast
from rollart.ports import RunEvent
from rollart.report.cost import cost_lines
from rollart.report.curve import curves
from rollart.report.rows import RunRows
from rollart.report.tables import (
    Cell,
    Row,
    Table,
    TableColumn,
    as_count,
    as_seconds,
    as_share,
    as_text,
    as_usd,
    ratio,
    table,
)
from rollart.report.timeline import FAULT_EVENTS, Band, Timeline


@dataclass(frozen=True, slots=True)
class Series:
    """A line of a chart: a value per x, None where there is none, with the interval of each if `low` and `high` are
    given. `dots`: points in place of a line."""

    label: str
    values: Sequence[float | None]
    low: Sequence[float | None] = ()
    high: Sequence[float | None] = ()
    dots: bool = False
    paint: int = 0
    """Number of its colour."""


@dataclass(frozen=True, slots=True)
class Plot:
    """Series over the same x. `unit` of the values: '' (plain), '%' (of shares of 1), 's' or '$'."""

    title: str
    x_label: str
    x: Sequence[float]
    series: Sequence[Series]
    unit: str = ""
    under: str = ""

    def to_json(self) -> dict[str, Any]:
        series = [
            {
                "label": s.label,
                "values": _finite(s.values),
                "low": _finite(s.low),
                "high": _finite(s.high),
                "dots": s.dots,
                "paint": s.paint,
            }
            for s in self.series
        ]
        return {"xLabel": self.x_label, "x": list(self.x), "unit": self.unit, "series": series}


def _finite(values: Iterable[float | None]) -> list[float | None]:
    return [None if v is None or not math.isfinite(v) else v for v in values]


@dataclass(slots=True)
class _Points:
    """Points of several series, to be laid over their common x."""

    at: dict[str, dict[float, tuple[float | None, ...]]] = field(default_factory=lambda: defaultdict(dict))
    paints: dict[str, int] = field(default_factory=dict)
    dotted: set[str] = field(default_factory=set)

    def add(self, label: str, x: float, *values: float | None, paint: int | None = None, dots: bool = False) -> None:
        """`paint`: the next colour if it is not given."""
        self.at[label][x] = values
        self.paints.setdefault(label, len(self.paints) if paint is None else paint)
        if dots:
            self.dotted.add(label)

    def laid(self) -> tuple[list[float], list[Series]]:
        """The x of all series in order, and each series over them: its values, and their intervals if there are any."""
        x = sorted({x for own in self.at.values() for x in own})
        found = []
        for label, own in self.at.items():
            columns = [[own[v][n] if v in own else None for v in x] for n in range(max(map(len, own.values())))]
            values, low, high = (*columns, (), ())[:3]
            found.append(Series(label, values, low, high, label in self.dotted, self.paints[label]))
        return x, found


def success_plots(runs: Sequence[RunRows]) -> list[Plot]:
    """Success by version with its 95 % interval, a chart per domain: of several runs, the runs beside each other."""
    domains: dict[str, _Points] = {}
    for n, rows in enumerate(runs):
        for one in curves(rows):
            points = domains.setdefault(one.domain, _Points())
            named = f"{rows.run}: " if len(runs) > 1 else ""
            for kind, own in (("sampled", one.training), ("held out", one.evaluation)):
                for p in own:
                    paint, dots = (n if len(runs) > 1 else None), kind == "held out"
                    points.add(f"{named}{kind}", p.version, p.success, *p.interval, paint=paint, dots=dots)
    return [
        Plot(f"Success: {domain}", "policy version", *points.laid(), unit="%", under=INTERVALS)
        for domain, points in domains.items()
    ]


INTERVALS = "with 95 % intervals; dots are greedy on held-out seeds"


def metric_plots(runs: Sequence[RunRows]) -> list[Plot]:
    """The trainer's metrics of each version, in the order of `FIRST`. Those of one run with a common prefix
    (`reward/DOMAIN`) share a chart; several runs are lines of one chart for each metric."""
    charts: dict[str, _Points] = {}
    for n, rows in enumerate(runs):
        for row in rows.versions:
            for name, value in row.metrics.items():
                common, _, part = name.partition("/")
                if len(runs) > 1:
                    charts.setdefault(name, _Points()).add(rows.run, row.version, value, paint=n)
                else:
                    charts.setdefault(common, _Points()).add(part or common.replace("_", " "), row.version, value)
    return [
        Plot(name.replace("_", " ").capitalize(), "policy version", *points.laid())
        for name, points in sorted(charts.items(), key=lambda item: (_rank(item[0]), item[0]))
    ]


FIRST = ("reward", "loss", "entropy", "grad_norm", "staleness_mean", "behaviour_gap")
"""Metrics that are shown before the others."""


def _rank(metric: str) -> int:
    common = metric.partition("/")[0]
    return FIRST.index(common) if common in FIRST else len(FIRST)


def is_first(plot: Plot) -> bool:
    """True for a chart of one of the metrics of `FIRST`."""
    return _rank(plot.title.lower().replace(" ", "_")) < len(FIRST)


def step_plot(events: Sequence[RunEvent]) -> Plot | None:
    """Seconds of each step: waiting for samples and training."""
    points = _Points()
    for event in events:
        for name, label in (("waited_s", "waiting for samples"), ("train_s", "training and publish")):
            if isinstance(value := event.fields.get(name), int | float):
                points.add(label, float(event.fields.get("step") or 0), float(value))
    return (
        Plot("Step time", "step", *points.laid(), unit="s", under="seconds of each training step") if events else None
    )


def engine_plots(rows: RunRows) -> list[Plot]:
    """The engines' own counters over time."""
    names = {"batch": "", "KV cache in use": "%", "prefix hits": "%", "sampled tokens per second": ""}
    charts = {name: _Points() for name in names}
    for event in rows.events_of(ENGINE_DID):
        s = {name: float(value) for name, value in event.fields.items() if isinstance(value, int | float)}
        prompt, generated = s.get("prompt_tokens", 0.0), s.get("generated_tokens", 0.0)
        hits = s.get("cached_tokens", 0.0) - s.get("external_tokens", 0.0)
        values = (
            ratio(generated, s.get("steps", 0.0)),
            s.get("kv_used"),
            ratio(hits, prompt),
            ratio(generated, s.get("seconds", 0.0)),
        )
        for points, value in zip(charts.values(), values, strict=True):
            points.add(event.subject, event.t, value)
    return [
        Plot(name[:1].upper() + name[1:], "second of the run", *points.laid(), unit=names[name])
        for name, points in charts.items()
        if points.at
    ]


def band_plots(found: Timeline, kind: str) -> list[Plot]:
    """The bands of one kind of a timeline as lines: mean numbers in each bin, by state."""
    x = [found.begins + (n + 0.5) * found.bin_s for n in range(found.bins)]
    return [_band_plot(band, x) for band in found.bands if band.kind == kind]


def _band_plot(band: Band, x: Sequence[float]) -> Plot:
    series = [Series(state, values, paint=n) for n, (state, values) in enumerate(band.amounts.items())]
    return Plot(band.name[:1].upper() + band.name[1:], "second of the run", x, series, under="mean number at a time")


def total_usd(rows: RunRows) -> float:
    """What is billed so far."""
    return math.fsum(line.usd for line in cost_lines(rows))


def at_end(snapshot: RunSnapshot) -> SpendForecast | None:
    """Dollars of a running run at its last step, as its last step forecast them."""
    return recorded_forecast(snapshot.steps[-1].fields) if snapshot.running and snapshot.steps else None


@table("lost_work", "Lost work", optional=True)
def lost_work(snapshot: RunSnapshot) -> Iterator[Row]:
    """Events that lost work, by kind, with the last case of each."""
    last = {event.kind: event for event in reversed(snapshot.faults)}
    for kind, count, first, latest in snapshot.event_sums:
        if kind in FAULT_EVENTS:
            yield {
                "event": kind.replace("_", " "),
                "count": as_count(count),
                "first_s": as_seconds(first),
                "last_s": as_seconds(latest),
                "last_case": as_text(event_text(last[kind]) if kind in last else "", wrap=True),
            }


def event_text(event: RunEvent) -> str:
    fields = (f"{name} {value}" for name, value in event.fields.items() if value not in (None, ""))
    return ", ".join((event.subject, *fields))


@table("events", "Last events that lost work")
def last_faults(events: Sequence[RunEvent]) -> Iterator[Row]:
    for event in events:
        yield {
            "second": as_seconds(event.t),
            "event": event.kind.replace("_", " "),
            "about": as_text(event_text(event), wrap=True),
        }


def role_states(rows: RunRows) -> dict[str, dict[str, float]]:
    """Share of each role's device time in each state."""
    seconds: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for i in rows.intervals:
        seconds[i.role][i.state] += i.unit_seconds
    return {
        role: {state: s / total for state, s in own.items()}
        for role, own in seconds.items()
        if (total := math.fsum(own.values())) > 0
    }


@table("runs", "Runs")
def runs_table(snapshots: Sequence[RunSnapshot]) -> Iterator[Row]:
    for one in snapshots:
        rows = one.rows
        facts = None if rows is None else rows.facts
        forecast = at_end(one)
        last = [] if rows is None else [c.training[-1].success for c in curves(rows) if c.training]
        yield {
            "run": one.name,
            "state": one.state,
            "step": as_count(None if facts is None else facts.step),
            "steps": as_count(one.settings.get("steps")),
            "version": as_count(None if facts is None else facts.version),
            "trained": as_count(None if facts is None else facts.trained_samples),
            "success": as_share(math.fsum(last) / len(last) if last else None),
            "seconds": as_seconds(None if facts is None else facts.seconds),
            "usd": as_usd(None if rows is None else total_usd(rows)),
            "usd_at_the_last_step": as_usd(None if forecast is None else forecast.usd),
        }


def side_by_side(runs: Mapping[str, Table], *, keys: int, value: str) -> Table:
    """The column `value` of the same table of several runs, a column per run: rows that agree in their first `keys`
    columns are one row."""
    first = next(iter(runs.values()))
    cells: dict[tuple[Cell, ...], dict[str, Cell]] = {}
    columns: tuple[TableColumn, ...] = ()
    kind = "number"
    for run, own in runs.items():
        at = next((n for n, c in enumerate(own.columns) if c.name == value), None)
        if at is None:
            continue
        columns, kind = own.columns[:keys], own.columns[at].kind
        for row in own.rows:
            cells.setdefault(row[:keys], {})[run] = row[at]
    shown = tuple((*key, *(found.get(run) for run in runs)) for key, found in cells.items())
    return Table(first.name, first.title, (*columns, *(TableColumn(run, kind) for run in runs)), shown)
