"""Two runs beside each other: the inputs that differ, then the outcomes, and which parts add up to the difference in
seconds and dollars. Pure, from two ledgers' rows.

Seconds are those of the run's trainer, which is in exactly one state at each of them, and those without a trainer; they
add up to the wall time. Dollars are the lines of the cost report. A difference of two products is split evenly between
its factors: (m − n) (x + y) / 2 is due to the number of steps, and (y − x) (m + n) / 2 to the seconds of a step, where
n steps of x seconds became m steps of y seconds. Both halves add up to the difference; so do amounts and prices.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, TypeAlias

from rollart.ledger.events import FUNCTION_VERSION
from rollart.ledger.intervals import ResourceState
from rollart.ledger.reader import LedgerReader
from rollart.report import functions
from rollart.report.cost import cost_lines, waste
from rollart.report.curve import Curve, Point, curves
from rollart.report.exposure import TRAINER, WAITS_FOR_SAMPLES
from rollart.report.rows import RunRows, collect
from rollart.report.tables import (
    Report,
    Row,
    as_count,
    as_number,
    as_seconds,
    as_share,
    as_text,
    as_usd,
    ratio,
    table,
)

BINS = 4
"""Parts into which the samples that both runs trained are divided, so that a part has enough episodes for a mean."""

NORMAL_QUANTILE = 1.959964
"""Of the standard normal distribution at 0.975, for 95 % intervals."""

NEAR = 0.05
"""Evaluations are compared if their samples differ by at most this share of those that both runs trained."""

ROUNDING = 1e-9
"""Share of a sum below which a part of its difference is rounding."""

MOST_NAMED = 3
"""Parts that a note names: the table has all of them."""

OF_STEPS = {
    (ResourceState.BUSY, ""): "training",
    (ResourceState.IDLE, WAITS_FOR_SAMPLES): "waiting for samples",
    (ResourceState.SYNC, ""): "publishing",
}
"""States and causes of the trainer whose seconds grow with the number of steps."""

WITHOUT_TRAINER = "without a trainer"

NO_DIFFERENCE = "no difference"

Amount: TypeAlias = tuple[float, float]
"""Device-seconds (of functions: billed seconds), and dollars."""


@dataclass(frozen=True, slots=True)
class ComparedRun:
    """A run: its rows, its configuration (`Resolved.to_dict`), and the version of rollart that started it last ('' if
    unknown)."""

    rows: RunRows
    config: Mapping[str, Any] = field(default_factory=dict)
    product: str = ""

    @property
    def steps(self) -> int:
        """Steps that trained samples."""
        return sum(1 for version in self.rows.versions if version.samples)


@dataclass(frozen=True, slots=True)
class Contribution:
    """A part of both runs' seconds or dollars. `by_count` and `by_size` add up to the difference: of the number of
    steps and the seconds of one, or of an amount and its price."""

    a: float
    b: float
    by_count: float
    by_size: float

    @property
    def difference(self) -> float:
        return self.b - self.a


def read_compared(reader: LedgerReader, run: str) -> ComparedRun:
    started = reader.events("starting")
    product = str(started[-1].fields.get("rollart") or "") if started else ""
    return ComparedRun(collect(reader, run), reader.config(), product)


def diff(a: ComparedRun, b: ComparedRun) -> Report:
    """The report."""
    inputs, seconds, dollars = input_changes(a, b), seconds_apart(a, b), dollars_apart(a.rows, b.rows)
    tables = (_inputs(inputs), _outcome(a, b), _curves(a, b), _seconds(a, b, seconds), _dollars(dollars), _waste(a, b))
    return Report("diff", f"{a.rows.run} and {b.rows.run}", tables, tuple(_notes(a, b, inputs, seconds, dollars)))


def input_changes(a: ComparedRun, b: ComparedRun) -> dict[tuple[str, str], tuple[str, str]]:
    """Inputs that differ, by (kind, key); '-' where a run has no such key."""
    left, right = dict(_inputs_of(a)), dict(_inputs_of(b))
    keys = [*left, *(key for key in right if key not in left)]
    changed = {key: (left.get(key, "-"), right.get(key, "-")) for key in keys if left.get(key) != right.get(key)}
    # Effective settings of functions repeat those that the spec gives.
    given = {key.removeprefix("functions.") for kind, key in changed if kind == "run"}
    return {(kind, key): values for (kind, key), values in changed.items() if kind != "function" or key not in given}


def seconds_apart(a: ComparedRun, b: ComparedRun) -> dict[str, Contribution]:
    """The wall time by part; the differences add up to that of the wall times."""
    left, right = _seconds_by_part(a.rows), _seconds_by_part(b.rows)
    found = {}
    for part in [*left, *(part for part in right if part not in left)]:
        x, y = left.get(part, 0.0), right.get(part, 0.0)
        counts = (a.steps, b.steps) if part in OF_STEPS.values() else (0, 0)
        found[part] = _product_difference(x, y, *counts)
    return found


def dollars_apart(a: RunRows, b: RunRows) -> dict[tuple[str, str], Contribution]:
    """Billed dollars by (role, state and cause); the differences add up to that of the totals."""
    left, right = _amounts(a), _amounts(b)
    found = {}
    for key in [*left, *(key for key in right if key not in left)]:
        (n, x), (m, y) = left.get(key, (0.0, 0.0)), right.get(key, (0.0, 0.0))
        found[key] = _product_difference(x, y, n, m)
    return found


def newcombe(good: int, n: int, other: int, m: int) -> tuple[float, float]:
    """The 95 % interval of other / m − good / n: Newcombe's hybrid of two Wilson intervals (1998, method 10)."""
    p, q = good / n, other / m
    (low, high), (lower, higher) = _wilson(p, n), _wilson(q, m)
    apart = q - p
    return apart - math.hypot(q - lower, high - p), apart + math.hypot(higher - q, p - low)


def _wilson(p: float, n: int) -> tuple[float, float]:
    z2 = NORMAL_QUANTILE**2
    centre = (p + z2 / (2 * n)) / (1 + z2 / n)
    half = NORMAL_QUANTILE * math.sqrt(p * (1 - p) / n + z2 / (4 * n * n)) / (1 + z2 / n)
    return centre - half, centre + half


def _product_difference(x: float, y: float, n: float, m: float) -> Contribution:
    """The difference y − x of m parts and n parts; all of it is by size if a count is 0 on both sides, and by count if
    it is on one side."""
    if n and m:
        by_count = (m - n) * (x / n + y / m) / 2
        if math.isclose(by_count, y - x, abs_tol=ROUNDING * max(abs(x), abs(y))):
            by_count = y - x
    else:
        by_count = y - x if n or m else 0.0
    return Contribution(x, y, by_count, y - x - by_count)


def _inputs_of(run: ComparedRun) -> Iterator[tuple[tuple[str, str], str]]:
    """Inputs as texts, by (kind, key)."""
    config = run.config
    for kind in ("run", "cluster"):
        yield from (((kind, key), value) for key, value in _flat(config.get(kind, {})))
    yield from ((("function", key), value) for key, value in _flat(config.get("functions", {})))
    for assignment in config.get("plan", {}).get("assignments", ()):
        devices = ", ".join(map(str, assignment["devices"]))
        yield ("plan", assignment["part"]), f"{assignment['pool']}: {devices}"
    for pool, usd in config.get("usd_per_device_hour", {}).items():
        yield ("price", f"device-hour of {pool}"), f"{usd:g}"
    for price in config.get("prices", {}).get("prices", ()):
        yield ("price", f"{price['name']} per {price['unit']}"), f"{price['usd']:g}"
    for event in run.rows.events_of(FUNCTION_VERSION):
        yield ("code", event.subject), str(event.fields.get("version"))
    if run.product:
        yield ("code", "rollart"), run.product


def _flat(value: object, path: str = "") -> Iterator[tuple[str, str]]:
    """Leaves by dotted path, as overrides name them: items of a list by their name, else by their index."""
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _flat(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        for n, item in enumerate(value):
            name = item.get("name", n) if isinstance(item, Mapping) else n
            yield from _flat(item, f"{path}.{name}")
    else:
        yield path, "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _seconds_by_part(rows: RunRows) -> dict[str, float]:
    """The run's seconds by the state of its trainer; of several resources the one that was there longest."""
    by_resource: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for i in rows.intervals:
        if i.role == TRAINER:
            other = f"trainer {i.state}: {i.cause}" if i.cause else f"trainer {i.state}"
            part = OF_STEPS.get((ResourceState(i.state), i.cause), other.replace("_", " "))
            by_resource[i.resource][part] += i.seconds
    found = max(by_resource.values(), key=lambda parts: math.fsum(parts.values()), default={})
    return {**found, WITHOUT_TRAINER: rows.facts.seconds - math.fsum(found.values())}


def _amounts(rows: RunRows) -> dict[tuple[str, str], Amount]:
    found: dict[tuple[str, str], Amount] = defaultdict(lambda: (0.0, 0.0))

    def add(role: str, state: str, cause: str, amount: float, usd: float) -> None:
        key = role, f"{state}: {cause}" if cause else state
        found[key] = found[key][0] + amount, found[key][1] + usd

    for i in rows.intervals:
        add(i.role, i.state, i.cause, i.unit_seconds, i.usd)
    for line in functions.lines(rows):
        if line.billed:
            add(line.role, line.state, line.cause, line.seconds, line.usd)
    for line in functions.token_lines(rows):
        add(line.role, "tokens", line.cause, 0.0, line.usd)
    return dict(found)


@table("inputs", "Inputs that differ (key: a → b)", optional=True)
def _inputs(changes: Mapping[tuple[str, str], tuple[str, str]]) -> Iterator[Row]:
    for (kind, key), (before, after) in changes.items():
        yield {"kind": kind, "key": key, "a": as_text(before, wrap=True), "b": as_text(after, wrap=True)}


@table("outcome", "Outcomes")
def _outcome(a: ComparedRun, b: ComparedRun) -> Iterator[Row]:
    for (what, unit, x), (_, _, y) in zip(_figures(a), _figures(b), strict=True):
        apart = None if x is None or y is None else y - x
        relative = None if apart is None or not x else apart / x
        yield {
            "what": what,
            "unit": unit,
            "a": as_number(x),
            "b": as_number(y),
            "difference": as_number(apart),
            "relative": as_share(relative),
        }


def _figures(run: ComparedRun) -> Iterator[tuple[str, str, float | None]]:
    rows, lines = run.rows, cost_lines(run.rows)
    usd, facts = math.fsum(line.usd for line in lines), rows.facts
    yield "wall time", "s", facts.seconds
    yield "total cost", "USD", usd
    yield "steps", "count", run.steps
    yield "trajectories trained", "count", facts.trained_samples
    yield "wall time per step", "s", ratio(facts.seconds, run.steps)
    yield "trajectories trained per second", "1/s", ratio(facts.trained_samples, facts.seconds)
    yield "cost per 1,000 trained trajectories", "USD", ratio(usd * 1000, facts.trained_samples)
    yield "idle and waste", "share", ratio(math.fsum(waste(rows, lines).values()), usd)


@table("curves", "Success at as many trained samples (a difference is one if its 95 % interval leaves out 0)")
def _curves(a: ComparedRun, b: ComparedRun) -> Iterator[Row]:
    common = min(a.rows.facts.trained_samples, b.rows.facts.trained_samples)
    left, right = ({c.domain: c for c in curves(run.rows)} for run in (a, b))
    for domain in sorted(left.keys() & right.keys()):
        for kind, samples, one, other in _pairs(a, b, left[domain], right[domain], common):
            n, m = one.episodes, other.episodes
            low, high = newcombe(round(one.success * n), n, round(other.success * m), m)
            yield {
                "domain": domain,
                "kind": kind,
                "samples": as_count(samples),
                "a": as_share(one.success),
                "b": as_share(other.success),
                "difference": as_share(other.success - one.success),
                "low": as_share(low),
                "high": as_share(high),
                "a_episodes": as_count(n, people=False),
                "b_episodes": as_count(m, people=False),
                "finding": "b is higher" if low > 0 else "b is lower" if high < 0 else "",
            }


def _pairs(
    a: ComparedRun, b: ComparedRun, left: Curve, right: Curve, common: int
) -> Iterator[tuple[str, int, Point, Point]]:
    """Points of both curves after as many trained samples: sampled episodes in bins, and evaluations."""
    bins = [_binned(run, one.training, common) for run, one in ((a, left), (b, right))]
    for n, (one, other) in enumerate(zip(*bins, strict=True)):
        if one.episodes and other.episodes:
            yield "training", round(common * (n + 1) / BINS), one, other
    others = [(_samples_at(b, point.version), point) for point in right.evaluation]
    for point in left.evaluation:
        samples = _samples_at(a, point.version)
        if samples <= common and others:
            reached, other = min(others, key=lambda found: abs(found[0] - samples))
            if abs(reached - samples) <= NEAR * common:
                yield "held-out", samples, point, other


def _binned(run: ComparedRun, points: Sequence[Point], common: int) -> list[Point]:
    """One point per bin, of the episodes that began when this share of the common samples had been trained."""
    sums = [[0, 0.0] for _ in range(BINS)]
    for point in points:
        samples = _samples_at(run, point.version)
        if samples < common:
            at = sums[samples * BINS // common]
            at[0] += point.episodes
            at[1] += point.success * point.episodes
    return [Point(n, ratio(good, int(count)) or 0.0, int(count)) for n, (count, good) in enumerate(sums)]


def _samples_at(run: ComparedRun, version: int) -> int:
    """Samples that had been trained when `version` was current."""
    versions = [row.version for row in run.rows.versions]
    trained = list(accumulate(row.samples for row in run.rows.versions))
    at = bisect_right(versions, version)
    return trained[at - 1] if at else 0


@table("seconds", "Wall time by part; by the number of steps, and by the seconds of a step (the differences add up)")
def _seconds(a: ComparedRun, b: ComparedRun, parts: Mapping[str, Contribution]) -> Iterator[Row]:
    for part, c in sorted(parts.items(), key=lambda item: -abs(item[1].difference)):
        per_step = part in OF_STEPS.values()
        yield {
            "part": part,
            "a_s": as_seconds(c.a),
            "b_s": as_seconds(c.b),
            "difference_s": as_seconds(c.difference),
            "by_steps_s": as_seconds(c.by_count),
            "by_speed_s": as_seconds(c.by_size),
            "a_step_s": as_number(ratio(c.a, a.steps) if per_step else None),
            "b_step_s": as_number(ratio(c.b, b.steps) if per_step else None),
        }


@table("dollars", "Dollars by role and cause; by the amount, and by its price (the differences add up)")
def _dollars(parts: Mapping[tuple[str, str], Contribution]) -> Iterator[Row]:
    for (role, cause), c in sorted(parts.items(), key=lambda item: -abs(item[1].difference)):
        yield {
            "role": role,
            "cause": cause,
            "a_usd": as_usd(c.a),
            "b_usd": as_usd(c.b),
            "difference_usd": as_usd(c.difference),
            "by_amount_usd": as_usd(c.by_count),
            "by_price_usd": as_usd(c.by_size),
        }


@table("waste", "Idle and waste by cause (part of the dollars above)")
def _waste(a: ComparedRun, b: ComparedRun) -> Iterator[Row]:
    left, right = (waste(run.rows, cost_lines(run.rows)) for run in (a, b))
    for role, cause in sorted({*left, *right}, key=lambda key: -abs(right.get(key, 0.0) - left.get(key, 0.0))):
        x, y = left.get((role, cause), 0.0), right.get((role, cause), 0.0)
        yield {"role": role, "cause": cause, "a_usd": as_usd(x), "b_usd": as_usd(y), "difference_usd": as_usd(y - x)}


def _notes(
    a: ComparedRun,
    b: ComparedRun,
    inputs: Mapping[tuple[str, str], tuple[str, str]],
    seconds: Mapping[str, Contribution],
    dollars: Mapping[tuple[str, str], Contribution],
) -> Iterator[str]:
    yield f"a: {a.rows.run}; b: {b.rows.run}"
    parts = {part: c.difference for part, c in seconds.items() if c.difference}
    costs = {": ".join(key): c.difference for key, c in dollars.items() if c.difference}
    if not (inputs or parts or costs):
        yield NO_DIFFERENCE
        return
    if not inputs:
        yield "no input differs: the differences are those of two runs of one spec"
    if parts:
        apart = math.fsum(parts.values())
        named = ", ".join(f"{part} {s:+,.1f} s" for part, s in _largest(parts))
        yield f"b took {abs(apart):,.1f} s {'longer' if apart > 0 else 'less'}: {named}"
    if costs:
        apart = math.fsum(costs.values())
        named = ", ".join(f"{cost} {_signed_usd(usd)}" for cost, usd in _largest(costs))
        yield f"b cost ${abs(apart):,.3g} {'more' if apart > 0 else 'less'}: {named}"
    yield (
        "intervals are of the number of episodes alone, each counted as independent: another seed of one spec may "
        "differ by more"
    )


def _largest(parts: Mapping[str, float]) -> list[tuple[str, float]]:
    return sorted(parts.items(), key=lambda item: -abs(item[1]))[:MOST_NAMED]


def _signed_usd(usd: float) -> str:
    return f"{'-' if usd < 0 else '+'}${abs(usd):,.3g}"
