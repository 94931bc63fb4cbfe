"""Reads the inputs of a simulation from a recorded run's ledger: trajectories, functions, trainer, times."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean

from rollart.errors import UsageError
from rollart.ledger.intervals import ResourceState
from rollart.ledger.reader import LedgerReader
from rollart.ledger.store import FLUSH_SECONDS
from rollart.ports import Interval, RunEvent
from rollart.report.cost import cost_lines
from rollart.report.rows import ENGINE_ROLES, collect
from rollart.report.simulation import RunTotals
from rollart.sim.trainers import MeasuredSpeed
from rollart.sim.workload import Script, scripts_by_group
from serverless.providers.simulated import Profile
from serverless.types import Invocation

SIMULATED_KEY = "simulated"
"""Configuration key that marks a simulation's ledger."""

MIN_BATCH_SPREAD = 1.3
"""Minimum ratio of the largest to the smallest batch, in tokens, for a line through step times to be meaningful."""


@dataclass(frozen=True, slots=True)
class RecordedTimings:
    """Timings of the run's own hardware that no datasheet lists. `publish_s`: the trainer's share of a publish, without
    the journal's commit; `load_s`: the pause of engines for it; `engine_s`: busy engine-seconds per finished
    trajectory."""

    trainer: MeasuredSpeed
    publish_s: float
    load_s: float
    engine_s: float


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """A recorded run. `scripts`: by domain and group, in starting order; `functions`: by name; `provider`: the one with
    most calls; `starts`: number of starts."""

    name: str
    scripts: Mapping[str, tuple[tuple[Script, ...], ...]]
    functions: Mapping[str, Profile]
    provider: str
    timings: RecordedTimings
    totals: RunTotals
    starts: int


def read_recording(directory: Path) -> RecordedRun:
    """UsageError for a directory without a ledger, a run without a training step, or a simulation."""
    with LedgerReader(directory) as reader:
        if SIMULATED_KEY in reader.config():
            raise UsageError(
                f"{directory}: the ledger of a simulation, whose tokens are counted in pieces (rule: of a real run)",
                remedy="replay the run that it was made from",
            )
        rows, batches = reader.finished(), reader.batch_tokens()
        done = reader.events("step")
        if not rows or not batches or not done:
            problem = "no trajectory has finished" if not rows else "nothing was trained"
            raise UsageError(f"{directory}: {problem} (rule: a training step at least)", remedy="name another run")
        intervals, calls = reader.intervals(), reader.calls()
        usd = math.fsum(line.usd for line in cost_lines(collect(reader, directory.name)))
        starts, facts = len(reader.events("starting")), reader.facts()
    began = done[0].t - _number(done[0], "train_s") - _number(done[0], "waited_s")
    figures = loop_figures(
        intervals,
        began,
        done[-1].t,
        steps=len(done),
        waited_s=math.fsum(_number(e, "waited_s") for e in done),
        wall_s=facts.seconds,
        usd=usd,
    )
    return RecordedRun(
        directory.name,
        scripts_by_group(sorted(rows, key=lambda row: row.t0)),
        _function_profiles(calls),
        Counter(c.provider for c in calls).most_common(1)[0][0] if calls else "",
        _recorded_timings(intervals, done, began, batches, fmean(row.engine_seconds for row in rows)),
        figures,
        max(starts, 1),
    )


def loop_figures(
    intervals: Sequence[Interval], began: float, ended: float, *, steps: int, waited_s: float, wall_s: float, usd: float
) -> RunTotals:
    """Figures of a training loop between two moments, in a run of `wall_s` seconds and `usd` dollars overall."""
    inside = [
        replace(i, t0=max(i.t0, began), t1=min(i.t1, ended)) for i in intervals if max(i.t0, began) < min(i.t1, ended)
    ]
    engines = [i for i in inside if i.role in ENGINE_ROLES]
    outside_usd = math.fsum(i.usd for i in intervals) - math.fsum(i.usd for i in inside)
    return RunTotals(
        steps=steps,
        wall_s=wall_s,
        loop_s=ended - began,
        usd=usd,
        loop_usd=usd - outside_usd,
        waited_s=waited_s,
        train_s=math.fsum(i.seconds for i in inside if i.role == "trainer" and i.state == ResourceState.BUSY),
        publish_s=math.fsum(i.seconds for i in inside if i.role == "trainer" and i.state == ResourceState.SYNC),
        engine_busy_s=math.fsum(i.seconds for i in engines if i.state == ResourceState.BUSY),
    )


def _recorded_timings(
    intervals: Sequence[Interval], done: Sequence[RunEvent], began: float, tokens: Sequence[int], engine_s: float
) -> RecordedTimings:
    busy = [i for i in intervals if i.role == "trainer" and i.state == ResourceState.BUSY]
    sync = [i for i in intervals if i.role == "trainer" and i.state == ResourceState.SYNC]
    load = [i for i in intervals if i.role in ENGINE_ROLES and i.state == ResourceState.SYNC]
    engines = len({i.resource for i in load}) or 1
    marks = [began, *(e.t for e in done)]
    steps = [seconds_within(busy, a, b) for a, b in pairwise(marks)]
    # With draining schedules some publishes also wait for trajectories; the median publish hardly does.
    publishes = sorted(seconds_within(sync, a, b) for a, b in pairwise(marks))
    load_s = seconds_within(load, began, marks[-1]) / engines / len(done)
    return RecordedTimings(
        trainer=fit_trainer_speed(tokens, steps[-len(tokens) :]),
        publish_s=max(0.0, publishes[len(publishes) // 2] - load_s - FLUSH_SECONDS),
        load_s=load_s,
        engine_s=engine_s,
    )


def fit_trainer_speed(tokens: Sequence[int], seconds: Sequence[float]) -> MeasuredSpeed:
    """The line through the step times; through the origin if batch sizes are too similar for another line, or if the
    line has a negative coefficient. Its sum over the steps equals that of the times."""
    pairs = list(zip(tokens, seconds, strict=False))
    through_origin = math.fsum(s for _, s in pairs) / sum(t for t, _ in pairs), 0.0
    return MeasuredSpeed(*(_fitted_line(pairs) or through_origin))


def _fitted_line(pairs: Sequence[tuple[int, float]]) -> tuple[float, float] | None:
    """Slope and intercept of the least-squares line; None if the sizes are too similar, or a coefficient is
    negative."""
    sizes, n = [size for size, _ in pairs], len(pairs)
    if n <= 2 or min(sizes) * MIN_BATCH_SPREAD > max(sizes):
        return None
    mean, mean_s = sum(sizes) / n, math.fsum(s for _, s in pairs) / n
    slope = math.fsum((size - mean) * (s - mean_s) for size, s in pairs) / math.fsum(
        (size - mean) ** 2 for size in sizes
    )
    rest = mean_s - slope * mean
    return (slope, rest) if slope >= 0 and rest >= 0 else None


def _function_profiles(calls: Sequence[Invocation]) -> dict[str, Profile]:
    """Timing of each function: the line through the billed seconds of its calls by their items (their mean, if the
    calls have similar numbers of items), the mean of the remaining time of a warm call, and of a cold start."""
    served, found = [c for c in calls if c.status == "ok"], {}
    for name in sorted({c.function for c in served}):
        own = [c for c in served if c.function == name]
        warm = [c.t1 - c.t0 for c in own if not c.cold_start_s]
        cold = [c.cold_start_s for c in own if c.cold_start_s]
        seconds = [c.billed_s - c.start_billed_s for c in own]
        billed = fmean(seconds)
        by_items = [(c.items, s) for c, s in zip(own, seconds, strict=True) if c.items]
        item_s, call_s = _fitted_line(by_items) or (0.0, billed)
        found[name] = Profile(
            cold_start_s=fmean(cold) if cold else 0.0,
            call_s=call_s,
            item_s=item_s,
            overhead_s=max(0.0, fmean(warm) - billed) if warm else 0.0,
        )
    return found


def seconds_within(intervals: Iterable[Interval], t0: float, t1: float) -> float:
    """Seconds of the intervals between two moments."""
    return math.fsum(max(0.0, min(i.t1, t1) - max(i.t0, t0)) for i in intervals)


def _number(event: RunEvent, name: str) -> float:
    value = event.fields[name]
    assert isinstance(value, int | float)
    return float(value)
