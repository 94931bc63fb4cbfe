"""A timeline as SVG: one row for each band, its states stacked."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from rollart.ledger.intervals import ResourceState
from rollart.report.charts import clipped, legend
from rollart.report.markup import MarkupElement, element
from rollart.report.timeline import (
    CALLS,
    COLD,
    DEVICES,
    ELSEWHERE,
    FAULTS,
    QUEUED,
    RESET,
    RUNNING,
    STEP,
    Band,
    Timeline,
)

WIDTH, LEFT, RIGHT = 1100.0, 222.0, 90.0
LOW, HIGH, GAP = 15.0, 38.0, 7.0
"""Heights of a row for one resource and for many, and the gap between rows."""

SLOTS = 60
"""Number of segments of a row with tooltips."""

PAINT: Mapping[str, tuple[str, str]] = {
    ResourceState.BUSY: ("busy", "busy"),
    ResourceState.SYNC: ("sync", "syncing weights"),
    ResourceState.STARTUP: ("startup", "starting"),
    ResourceState.DOWN: ("down", "down"),
    ResourceState.IDLE: ("idle", "waiting"),
    STEP: ("step", "environment's step"),
    RESET: ("startup", "environment's reset"),
    ELSEWHERE: ("elsewhere", "generation, queues, reward"),
    RUNNING: ("busy", "running"),
    COLD: ("startup", "cold start"),
    QUEUED: ("idle", "queued"),
}
"""Class and name of each state, in the order in which they are stacked."""


def timeline_chart(found: Timeline, *, until: float | None = None) -> MarkupElement:
    """The chart of a timeline. `until` (seconds): end of the axis, to give several timelines the same scale."""
    end = max(found.seconds, until or 0.0) or 1.0
    x1 = WIDTH - RIGHT
    parts: list[MarkupElement] = []
    y, kind = 8.0, DEVICES
    for band in found.bands:
        y += 10.0 if band.kind != kind else 0.0
        kind = band.kind
        height = LOW if band.kind == FAULTS or (band.kind == DEVICES and band.members == 1) else HIGH
        parts.append(_row(band, found, LEFT, LEFT + (x1 - LEFT) * found.seconds / end, y, height))
        y += height + (GAP if height == HIGH else 3.0)
    grid = list(_axis(end, x1, y + 2.0))
    return element(
        "svg",
        element("title", found.label or "timeline"),
        *grid,
        *parts,
        viewBox=f"0 0 {WIDTH:.0f} {y + 26.0:.0f}",
        role="img",
        class_="chart wide",
    )


def timeline_legend(found: Sequence[Timeline]) -> MarkupElement:
    """The legend of the states that occur in the timelines."""
    seen = {state for one in found for band in one.bands for state in band.amounts}
    return legend((name, paint) for state, (paint, name) in PAINT.items() if state in seen)


def duration(seconds: float) -> str:
    """`2 h 30 min`: the two largest units that are not 0."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    rest, found = round(seconds), []
    for name, size in (("d", 86_400), ("h", 3600), ("min", 60), ("s", 1)):
        count, rest = divmod(rest, size)
        if count:
            found.append(f"{count} {name}")
    return " ".join(found[:2])


STEPS = (
    1,
    2,
    5,
    10,
    15,
    30,
    60,
    120,
    300,
    600,
    900,
    1800,
    3600,
    7200,
    10_800,
    21_600,
    43_200,
    86_400,
    172_800,
    604_800,
)
"""Candidate distances of axis marks, in seconds."""


def _axis(end: float, x1: float, y: float) -> Iterable[MarkupElement]:
    step = next((s for s in STEPS if end / s <= 9), None)
    if end < 1:
        step = None
    size = float(step) if step is not None else end / 8
    for n in range(int(end / size * 1.000001) + 1):
        x = LEFT + (x1 - LEFT) * n * size / end
        yield element("line", x1=x, x2=x, y1=2.0, y2=y, class_="grid" if n else "base")
        yield element("text", duration(n * size) if n else "0", x=x, y=y + 16.0, class_="tick", text_anchor="middle")


def _row(band: Band, found: Timeline, x0: float, x1: float, y: float, height: float) -> MarkupElement:
    width = (x1 - x0) / found.bins
    if band.kind == FAULTS:
        return element("g", *_words(band, y, height), *_ticks(band, found, x0, width, y, height))
    parts: list[MarkupElement] = []
    low = [0.0] * found.bins
    for state in sorted(band.amounts, key=_order):
        high = [a + b for a, b in zip(low, band.amounts[state], strict=True)]
        path = _area(low, high, band.whole, x0, width, y, height)
        if path:
            parts.append(element("path", d=path, class_=_paint(state)))
        low = high
    return element("g", *_words(band, y, height), *parts, *_slots(band, found, x0, x1, y, height))


def _ticks(band: Band, found: Timeline, x0: float, width: float, y: float, height: float) -> Iterable[MarkupElement]:
    """A mark for each bin with faults, by logarithmic height; a single fault has a quarter of the height."""
    for n, column in enumerate(zip(*band.amounts.values(), strict=True)):
        count = math.fsum(column)
        if count:
            tall = height * (0.25 + 0.75 * math.log1p(count - 1) / math.log1p(max(1.0, band.whole - 1)))
            lines = [f"{duration(n * found.bin_s)} to {duration((n + 1) * found.bin_s)}"]
            lines += [f"{k.replace('_', ' ')}: {c:.0f}" for k, c in zip(band.amounts, column, strict=True) if c]
            yield element(
                "rect",
                element("title", "\n".join(lines)),
                x=x0 + n * width,
                y=y + height - tall,
                width=max(width, 2.0),
                height=tall,
                class_="down",
            )


def _words(band: Band, y: float, height: float) -> Iterable[MarkupElement]:
    middle = y + height / 2 + 4.0
    room = LEFT - 14.0
    name = clipped(band.name, room)
    many = height == HIGH
    yield element(
        "text",
        element("title", band.name) if name != band.name else None,
        name,
        x=LEFT - 10.0,
        y=middle - (7.0 if many else 0.0),
        class_="label",
        text_anchor="end",
    )
    right = {
        DEVICES: f"{band.share(ResourceState.BUSY):.0%} busy",
        FAULTS: f"{band.members:,} events",
    }.get(band.kind, f"peak {band.whole:,.4g}")
    yield element("text", right, x=WIDTH - RIGHT + 10.0, y=middle, class_="value")
    if many:
        under = {
            DEVICES: f"{band.members:,} parts, {band.whole:,.4g} devices",
            CALLS: f"{band.members:,} calls",
        }.get(band.kind, f"{band.members:,} ended")
        yield element("text", under, x=LEFT - 10.0, y=middle + 8.0, class_="tick", text_anchor="end")


def _area(
    low: Sequence[float], high: Sequence[float], whole: float, x0: float, width: float, y: float, height: float
) -> str:
    """Closed outline between two step curves; '' if they are equal."""
    if not whole > 0 or all(b - a < whole * 1e-4 for a, b in zip(low, high, strict=True)):
        return ""

    def level(value: float) -> str:
        return f"{y + height * (1.0 - min(1.0, value / whole)):.1f}"

    there = _stairs([level(v) for v in high], x0, width, forth=True)
    back = _stairs([level(v) for v in low], x0, width, forth=False)
    return f"M{x0:.1f} {level(low[0])}{there}{back}Z"


def _stairs(levels: Sequence[str], x0: float, width: float, *, forth: bool) -> str:
    """A step curve in one direction; equal levels are merged into one line."""
    order = range(len(levels)) if forth else range(len(levels) - 1, -1, -1)
    pieces: list[str] = []
    last = ""
    for n in order:
        if levels[n] != last:
            edge = x0 + width * (n if forth else n + 1)
            pieces.append((f"H{edge:.1f}" if last else "") + f"V{levels[n]}")
            last = levels[n]
    pieces.append(f"H{x0 + width * len(levels) if forth else x0:.1f}")
    return "".join(pieces)


def _slots(band: Band, found: Timeline, x0: float, x1: float, y: float, height: float) -> Iterable[MarkupElement]:
    count = min(SLOTS, found.bins)
    for n in range(count):
        a, b = n * found.bins // count, (n + 1) * found.bins // count
        lines = [f"{band.name}, {duration(a * found.bin_s)} to {duration(b * found.bin_s)}"]
        for state in sorted(band.amounts, key=_order):
            amount = math.fsum(band.amounts[state][a:b]) / (b - a)
            if amount >= band.whole * 5e-4:
                share = f" ({amount / band.whole:.0%})" if band.kind == DEVICES else ""
                lines.append(f"{_name(state)}: {amount:,.3g}{share}")
        left, right = (x0 + (x1 - x0) * edge / found.bins for edge in (a, b))
        yield element(
            "rect", element("title", "\n".join(lines)), x=left, y=y, width=right - left, height=height, class_="hover"
        )


def _order(state: str) -> tuple[int, str]:
    known = list(PAINT)
    return (known.index(state) if state in known else len(known), state)


def _paint(state: str) -> str:
    return PAINT[state][0] if state in PAINT else "other"


def _name(state: str) -> str:
    return PAINT[state][1] if state in PAINT else state
