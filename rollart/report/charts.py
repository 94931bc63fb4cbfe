"""Charts as SVG: pure, from values to elements. Colours are classes of the page's style sheet (`report.render`).

Bars are horizontal, so that names stay readable; whiskers are confidence intervals; tooltips show a bar's figures. Bars
are painted `s0` to `s7` for compared series, and by names of states for parts of a whole. A timeline has one row for
each band, its states stacked.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rollart.ledger.intervals import ResourceState
from rollart.report.render import MarkupElement, element
from rollart.report.tables import PLAIN, estimate, figure
from rollart.report.timeline import (
    CALLS,
    COLD,
    DEVICES,
    ELSEWHERE,
    FAULTS,
    QUEUED,
    RESET,
    REWARD,
    RUNNING,
    STEP,
    TURN_PAIR,
    TURNS,
    Band,
    Timeline,
)

WIDTH = 520.0
"""Width of a chart in its own units; the page scales it."""

LETTER = 6.4
"""Approximate width of a letter at a font size of 12 units."""

LONGEST_BESIDE = 24
"""Longest label beside its bar, in letters; with a longer one, all labels stand above their bars."""

VALUES = 108.0
"""Width reserved for figures beside bars."""

SERIES = 8
OVERSHOOT = 1.6
"""Largest ratio of an interval's end to the longest bar before the interval is cut: with two seeds it can be ten times
the mean."""

TIMELINE_WIDTH, LEFT, RIGHT = 1100.0, 222.0, 90.0
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
    REWARD: ("other", "waiting for its reward"),
    TURN_PAIR[0]: ("busy", "a turn: generation and the environment's step"),
    TURN_PAIR[1]: ("elsewhere", "the turn after it"),
}
"""Class and name of each state, in the order in which they are stacked."""

TIME_STEPS = (
    *(digit * power for power in (1e-5, 1e-4, 1e-3, 0.01, 0.1) for digit in (1, 2, 5)),
    *(1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200),
    *(10_800, 21_600, 43_200, 86_400, 172_800, 604_800),
)
"""Candidate distances of axis marks, in seconds."""


@dataclass(frozen=True, slots=True)
class BarSegment:
    """A part of a bar, ≥ 0, and the class that paints it."""

    name: str
    value: float
    paint: str
    interval: float | None = None


@dataclass(frozen=True, slots=True)
class Bar:
    """Segments end to end. `value` is their total, the sum if None (parts that overlap in time total less than their
    sum), and `interval` half of its confidence interval."""

    name: str
    segments: tuple[BarSegment, ...]
    interval: float | None = None
    value: float | None = None

    @classmethod
    def single(cls, name: str, value: float, paint: str, interval: float | None = None) -> Bar:
        """A bar of one segment."""
        return cls(name, (BarSegment(name, value, paint),), interval)

    @property
    def total(self) -> float:
        return math.fsum(s.value for s in self.segments) if self.value is None else self.value

    @property
    def end(self) -> float:
        return max(self.total, math.fsum(s.value for s in self.segments))


@dataclass(frozen=True, slots=True)
class BarGroup:
    """Bars under one label."""

    label: str
    bars: tuple[Bar, ...]


def bar_chart(title: str, groups: Sequence[BarGroup], *, unit: str = PLAIN) -> MarkupElement:
    """One row for each bar. Short labels stand beside bars that are alone in their group, others above."""
    longest = max((len(group.label) for group in groups), default=0)
    beside = longest <= LONGEST_BESIDE and all(len(group.bars) == 1 for group in groups)
    left = longest * LETTER + 12.0 if beside else 2.0
    plot = _Plot(left, WIDTH - VALUES, _reach(groups))
    thick, gap, head = (20.0, 10.0, 0.0) if beside else (10.0, 3.5, 18.0)
    parts: list[MarkupElement] = []
    y = 6.0
    for group in groups:
        if beside:
            parts.append(_label(group.label, left - 8.0, y + thick / 2 + 4.0, left - 10.0, end=True))
        else:
            parts.append(_label(group.label, left + 4.0, y + 11.0, WIDTH - left, end=False))
        y += head
        for bar in group.bars:
            parts.append(_bar(group, bar, plot, y, thick, unit))
            y += thick + gap
        y += 0.0 if beside else 5.0
    axis: list[MarkupElement] = []
    for tick in nice_ticks(plot.most):
        anchor = "middle" if tick else "start"
        axis += _axis_mark(plot.x(tick), y, figure(tick, unit), 15.0, base=not tick, anchor=anchor)
    return _svg(title, [*axis, *parts], WIDTH, y + 22.0, "chart")


def timeline_chart(found: Timeline, *, until: float | None = None) -> MarkupElement:
    """The chart of a timeline. `until` (seconds): end of the axis, to give several timelines the same scale."""
    end = max(found.seconds, until or 0.0) or 1.0
    x1 = TIMELINE_WIDTH - RIGHT
    parts: list[MarkupElement] = []
    y, kind = 8.0, DEVICES
    for band in found.bands:
        y += 10.0 if band.kind != kind else 0.0
        kind = band.kind
        height = LOW if band.kind in (FAULTS, TURNS) or (band.kind == DEVICES and band.members == 1) else HIGH
        parts.append(_row(band, found, LEFT + (x1 - LEFT) * found.seconds / end, y, height))
        y += height + (GAP if height == HIGH else 3.0)
    step = next((float(s) for s in TIME_STEPS if end / s <= 9), end / 8)
    marks: list[MarkupElement] = []
    for n in range(math.ceil(found.begins / step), int((found.begins + end) / step * 1.000001) + 1):
        text = _instant(found, n * step, step) if n else "0"
        x = LEFT + (x1 - LEFT) * (n * step - found.begins) / end
        marks += _axis_mark(x, y + 2.0, text, 16.0, base=not n, anchor="middle")
    return _svg(found.label or "timeline", [*marks, *parts], TIMELINE_WIDTH, y + 26.0, "chart wide")


def legend(entries: Iterable[tuple[str, str]]) -> MarkupElement:
    """Names and the classes that paint them."""
    items = [element("li", element("span", class_=f"swatch {paint}"), name) for name, paint in entries]
    return element("ul", *items, class_="legend")


def timeline_legend(found: Sequence[Timeline]) -> MarkupElement:
    """The legend of the states that occur in the timelines."""
    seen = {state for one in found for band in one.bands for state in band.amounts}
    return legend((name, paint) for state, (paint, name) in PAINT.items() if state in seen)


def nice_ticks(most: float) -> list[float]:
    """0 and about five equal round steps up to `most`: 1, 2 or 5 times a power of ten."""
    if not most > 0:
        return [0.0]
    rough = most / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * k for k in (1, 2, 5, 10) if power * k >= rough * 0.9)
    return [n * step for n in range(int(most / step * 1.000001) + 1)]


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


def _instant(found: Timeline, seconds: float, step: float) -> str:
    """A second of the run; within a stretch of it, as precise as differences of `step` seconds."""
    if not found.begins:
        return duration(seconds)
    return f"{seconds:,.{max(0, math.ceil(-math.log10(step)))}f} s"


def _svg(title: str, parts: Sequence[MarkupElement], width: float, height: float, kind: str) -> MarkupElement:
    box = f"0 0 {width:.0f} {height:.0f}"
    return element("svg", element("title", title), *parts, viewBox=box, role="img", class_=kind)


def _axis_mark(x: float, y: float, text: str, below: float, *, base: bool, anchor: str) -> Iterable[MarkupElement]:
    """A line from the top down to `y`, and the text under it."""
    yield element("line", x1=x, x2=x, y1=2.0, y2=y, class_="base" if base else "grid")
    yield element("text", text, x=x, y=y + below, class_="tick", text_anchor=anchor)


def _label(text: str, x: float, y: float, room: float, *, end: bool) -> MarkupElement:
    """A text, cut to the width `room`."""
    most = max(4, int(room / LETTER))
    shown = [text] if len(text) <= most else [element("title", text), text[: most - 1] + "…"]
    return element("text", *shown, x=x, y=y, class_="label", text_anchor="end" if end else None)


@dataclass(frozen=True, slots=True)
class _Plot:
    """Where values lie: 0 at x0, `most` at x1."""

    x0: float
    x1: float
    most: float

    def x(self, value: float) -> float:
        return self.x0 + (self.x1 - self.x0) * min(1.0, max(0.0, value / self.most))


def _reach(groups: Sequence[BarGroup]) -> float:
    every = [bar for group in groups for bar in group.bars]
    longest = max((bar.end for bar in every), default=0.0)
    if not longest > 0:
        return 1.0
    return min(longest * OVERSHOOT, max(max(bar.end, bar.total + (bar.interval or 0.0)) for bar in every)) * 1.02


def _bar(group: BarGroup, bar: Bar, plot: _Plot, y: float, thick: float, unit: str) -> MarkupElement:
    parts: list[MarkupElement] = []
    at = 0.0
    for segment in bar.segments:
        a, b = plot.x(at), plot.x(at + segment.value)
        at += segment.value
        if b > a:
            parts.append(element("rect", x=a, y=y, width=b - a, height=thick, class_=segment.paint))
    if bar.interval:  # a whisker
        a, b = plot.x(bar.total - bar.interval), plot.x(bar.total + bar.interval)
        middle, cap = y + thick / 2, min(4.0, thick / 3)
        ends = f"M{a:.1f} {middle - cap:.1f}V{middle + cap:.1f}M{a:.1f} {middle:.1f}H{b:.1f}"
        if bar.total + bar.interval <= plot.most:
            ends += f"M{b:.1f} {middle - cap:.1f}V{middle + cap:.1f}"
        parts += [element("path", d=ends, class_="halo"), element("path", d=ends, class_="whisker")]
    total = estimate(bar.total, bar.interval, unit)
    parts.append(element("text", total, x=WIDTH - 2.0, y=y + thick / 2 + 4.0, class_="value", text_anchor="end"))
    name = group.label if bar.name == group.label else f"{group.label}: {bar.name}"
    lines = [f"{name}: {total}"]
    if len(bar.segments) > 1:
        lines += [f"{s.name}: {estimate(s.value, s.interval, unit)}" for s in bar.segments]
    return element("g", element("title", "\n".join(lines)), *parts, class_="bar")


def _row(band: Band, found: Timeline, x1: float, y: float, height: float) -> MarkupElement:
    width = (x1 - LEFT) / found.bins
    if band.kind == FAULTS:
        return element("g", *_words(band, y, height), *_ticks(band, found, width, y, height))
    parts: list[MarkupElement] = []
    low = [0.0] * found.bins
    for state in sorted(band.amounts, key=_order):
        high = [a + b for a, b in zip(low, band.amounts[state], strict=True)]
        path = _area(low, high, band.whole, width, y, height)
        if path:
            parts.append(element("path", d=path, class_=_painted(state)[0]))
        low = high
    return element("g", *_words(band, y, height), *parts, *_slots(band, found, x1, y, height))


def _ticks(band: Band, found: Timeline, width: float, y: float, height: float) -> Iterable[MarkupElement]:
    """A mark for each bin with faults, by logarithmic height; a single fault has a quarter of the height."""
    for n, column in enumerate(zip(*band.amounts.values(), strict=True)):
        count = math.fsum(column)
        if count:
            tall = height * (0.25 + 0.75 * math.log1p(count - 1) / math.log1p(max(1.0, band.whole - 1)))
            lines = [_stretch(found, n, n + 1)]
            lines += [f"{k.replace('_', ' ')}: {c:.0f}" for k, c in zip(band.amounts, column, strict=True) if c]
            x, top, tip = LEFT + n * width, y + height - tall, element("title", "\n".join(lines))
            yield element("rect", tip, x=x, y=top, width=max(width, 2.0), height=tall, class_="down")


def _words(band: Band, y: float, height: float) -> Iterable[MarkupElement]:
    middle = y + height / 2 + 4.0
    many = height == HIGH
    yield _label(band.name, LEFT - 10.0, middle - (7.0 if many else 0.0), LEFT - 14.0, end=True)
    busy = f"{band.share(ResourceState.BUSY):.0%} busy"
    right = {DEVICES: busy, FAULTS: f"{band.members:,} events", TURNS: _counted(band.members, "turn")}.get(
        band.kind, f"peak {band.whole:,.4g}"
    )
    yield element("text", right, x=TIMELINE_WIDTH - RIGHT + 10.0, y=middle, class_="value")
    if many:
        devices = f"{band.members:,} parts, {band.whole:,.4g} devices"
        under = {DEVICES: devices, CALLS: f"{band.members:,} calls"}.get(band.kind, f"{band.members:,} ended")
        yield element("text", under, x=LEFT - 10.0, y=middle + 8.0, class_="tick", text_anchor="end")


def _counted(count: int, name: str) -> str:
    return f"{count:,} {name}" + ("" if count == 1 else "s")


def _area(low: Sequence[float], high: Sequence[float], whole: float, width: float, y: float, height: float) -> str:
    """Closed outline between two step curves; '' if they are equal."""
    if not whole > 0 or all(b - a < whole * 1e-4 for a, b in zip(low, high, strict=True)):
        return ""

    def level(value: float) -> str:
        return f"{y + height * (1.0 - min(1.0, value / whole)):.1f}"

    there = _stairs([level(v) for v in high], width, forth=True)
    back = _stairs([level(v) for v in low], width, forth=False)
    return f"M{LEFT:.1f} {level(low[0])}{there}{back}Z"


def _stairs(levels: Sequence[str], width: float, *, forth: bool) -> str:
    """A step curve in one direction; equal levels are merged into one line."""
    order = range(len(levels)) if forth else range(len(levels) - 1, -1, -1)
    pieces: list[str] = []
    last = ""
    for n in order:
        if levels[n] != last:
            edge = LEFT + width * (n if forth else n + 1)
            pieces.append((f"H{edge:.1f}" if last else "") + f"V{levels[n]}")
            last = levels[n]
    pieces.append(f"H{LEFT + width * len(levels) if forth else LEFT:.1f}")
    return "".join(pieces)


def _slots(band: Band, found: Timeline, x1: float, y: float, height: float) -> Iterable[MarkupElement]:
    count = min(SLOTS, found.bins)
    for n in range(count):
        a, b = n * found.bins // count, (n + 1) * found.bins // count
        lines = [f"{band.name}, {_stretch(found, a, b)}"]
        for state in sorted(band.amounts, key=_order):
            amount = math.fsum(band.amounts[state][a:b]) / (b - a)
            if amount >= band.whole * 5e-4:
                share = f" ({amount / band.whole:.0%})" if band.kind == DEVICES else ""
                lines.append(f"{_painted(state)[1]}: {amount:,.3g}{share}")
        left, right = (LEFT + (x1 - LEFT) * edge / found.bins for edge in (a, b))
        tip = element("title", "\n".join(lines))
        yield element("rect", tip, x=left, y=y, width=right - left, height=height, class_="hover")


def _stretch(found: Timeline, a: int, b: int) -> str:
    """The time from bin `a` to bin `b`."""
    return " to ".join(_instant(found, found.begins + n * found.bin_s, found.bin_s) for n in (a, b))


def _order(state: str) -> tuple[int, str]:
    known = list(PAINT)
    return (known.index(state) if state in known else len(known), state)


def _painted(state: str) -> tuple[str, str]:
    """Class and name of a state."""
    return PAINT.get(state, ("other", state))
