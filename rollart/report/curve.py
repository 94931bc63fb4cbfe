"""Learning curves: success by policy version, per domain, as values, as a line of blocks, and as a picture."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rollart.errors import UsageError
from rollart.ledger.events import EVALUATION_SAMPLED
from rollart.report.rows import RunRows
from rollart.report.tables import Report, Row, as_count, as_number, as_share, table

BLOCKS = "▁▂▃▄▅▆▇█"

Z = 1.96
"""Standard deviations of a 95 % interval."""


@dataclass(frozen=True, slots=True)
class Point:
    """Success of `episodes` that started under a version."""

    version: int
    success: float
    episodes: int

    @property
    def interval(self) -> tuple[float, float]:
        """95 % interval of the success."""
        return wilson(round(self.success * self.episodes), self.episodes)


@dataclass(frozen=True, slots=True)
class Curve:
    """A domain's points: sampled while training, and greedy on held-out seeds."""

    domain: str
    training: tuple[Point, ...]
    evaluation: tuple[Point, ...]


def curves(rows: RunRows) -> list[Curve]:
    """One curve per domain. Training points are by a trajectory's first version."""
    training: dict[str, dict[int, list[int]]] = defaultdict(lambda: defaultdict(lambda: [0, 0]))
    for charge in rows.charges:
        if charge.purpose != "eval" and charge.judged:
            at = training[charge.domain][charge.v0]
            at[0] += charge.judged
            at[1] += charge.successes
    evaluation: dict[str, dict[int, Point]] = defaultdict(dict)
    for event in rows.events_of("evaluation"):
        version, episodes = _int(event.fields.get("version")), _int(event.fields.get("episodes"))
        if episodes:
            rate = _int(event.fields.get("successes")) / episodes
            evaluation[event.subject][version] = Point(version, rate, episodes)
    return [
        Curve(
            domain,
            tuple(Point(v, good / n, n) for v, (n, good) in sorted(training[domain].items())),
            tuple(point for _, point in sorted(evaluation[domain].items())),
        )
        for domain in sorted({*training, *evaluation})
    ]


def curve(rows: RunRows) -> Report:
    """The curve report."""
    found = curves(rows)
    return Report("curve", rows.run, (_summary(found), _points(found), _sampled(rows)))


@table("summary", "Success by policy version (sampled; `evaluated` is greedy on held-out seeds)")
def _summary(found: Sequence[Curve]) -> Iterator[Row]:
    for c in found:
        yield {
            "domain": c.domain,
            "curve": sparkline([p.success for p in c.training]),
            "first": as_share(_at(c.training, 0)),
            "last": as_share(_at(c.training, -1)),
            "evaluated_first": as_share(_at(c.evaluation, 0)),
            "evaluated_last": as_share(_at(c.evaluation, -1)),
        }


@table("points", "Points, with the 95 % interval of their success")
def _points(found: Sequence[Curve]) -> Iterator[Row]:
    for c in found:
        for kind, points in (("training", c.training), ("evaluation", c.evaluation)):
            for p in points:
                low, high = p.interval
                yield {
                    "domain": c.domain,
                    "kind": kind,
                    "version": as_count(p.version),
                    "success": as_share(p.success),
                    "low": as_share(low),
                    "high": as_share(high),
                    "episodes": as_count(p.episodes),
                }


@table("sampled", "Held-out success with several samples per prompt", optional=True)
def _sampled(rows: RunRows) -> Iterator[Row]:
    for event in rows.events_of(EVALUATION_SAMPLED):
        for metric, value in event.fields.items():
            if "@" in metric:
                yield {
                    "domain": event.subject,
                    "version": as_count(_int(event.fields["version"])),
                    "temperature": as_number(_number(event.fields["temperature"])),
                    "metric": metric,
                    "success": as_share(None if value is None else _number(value)),
                    "prompts": as_count(_int(event.fields["prompts"])),
                }


def wilson(successes: int, trials: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share."""
    p, z = successes / trials, Z * Z / trials
    middle, half = (p + z / 2.0) / (1.0 + z), Z / (1.0 + z) * math.sqrt(p * (1.0 - p) / trials + z / (4.0 * trials))
    return max(0.0, middle - half), min(1.0, middle + half)


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """Shares of 1 as blocks, averaged down to at most `width` blocks; the scale is always 0 to 1."""
    if not values:
        return ""
    n = min(width, len(values))
    bins = [values[len(values) * i // n : len(values) * (i + 1) // n] for i in range(n)]
    means = [sum(b) / len(b) for b in bins]
    return "".join(BLOCKS[min(len(BLOCKS) - 1, max(0, int(mean * len(BLOCKS))))] for mean in means)


def write_png(rows: RunRows, path: str | Path) -> None:
    """The curves as a picture. UsageError without matplotlib, or where the file cannot be written."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise UsageError("a picture needs matplotlib", remedy="pip install matplotlib") from None
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    for i, one in enumerate(curves(rows)):
        colour = f"C{i}"
        axes.plot(
            [p.version for p in one.training], [p.success for p in one.training], colour, alpha=0.6, label=one.domain
        )
        axes.plot([p.version for p in one.evaluation], [p.success for p in one.evaluation], "o", color=colour)
    axes.set(
        xlabel="policy version", ylabel="success (line: sampled, dots: greedy, held out)", ylim=(0, 1), title=rows.run
    )
    axes.grid(alpha=0.3)
    axes.legend()
    try:
        FigureCanvasAgg(figure).print_png(str(path))
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror}") from None


def _at(points: Sequence[Point], index: int) -> float | None:
    return points[index].success if points else None


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


def _int(value: object) -> int:
    return int(value) if isinstance(value, int | float) else 0
