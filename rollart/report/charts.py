"""Bar charts as SVG: pure, from values to elements.

Bars are horizontal, so that names stay readable; whiskers are confidence intervals; tooltips show a bar's figures.
Colours are classes of the page's style sheet (`report.page`): `s0` to `s7` for compared series, names of states for
parts of a whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rollart.report.markup import MarkupElement, element
from rollart.report.tables import PLAIN, estimate, figure

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


def series_paint(n: int) -> str:
    """The class of the n-th compared series."""
    return f"s{n % SERIES}"


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
    height = y + 22.0
    svg = element(
        "svg",
        element("title", title),
        *_axis(plot, y, unit),
        *parts,
        viewBox=f"0 0 {WIDTH:.0f} {height:.0f}",
        role="img",
        class_="chart",
    )
    return svg


def legend(entries: Iterable[tuple[str, str]]) -> MarkupElement:
    """Names and the classes that paint them."""
    items = [element("li", element("span", class_=f"swatch {paint}"), name) for name, paint in entries]
    return element("ul", *items, class_="legend")


def nice_ticks(most: float, about: int = 5) -> list[float]:
    """0 and equal round steps up to `most`: 1, 2 or 5 times a power of ten."""
    if not most > 0:
        return [0.0]
    rough = most / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * k for k in (1, 2, 5, 10) if power * k >= rough * 0.9)
    return [n * step for n in range(int(most / step * 1.000001) + 1)]


def clipped(text: str, room: float) -> str:
    """A text, cut to the width `room`."""
    most = max(4, int(room / LETTER))
    return text if len(text) <= most else text[: most - 1] + "…"


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


def _axis(plot: _Plot, y: float, unit: str) -> Iterable[MarkupElement]:
    for tick in nice_ticks(plot.most):
        x = plot.x(tick)
        yield element("line", x1=x, x2=x, y1=2.0, y2=y, class_="grid" if tick else "base")
        yield element(
            "text", figure(tick, unit), x=x, y=y + 15.0, class_="tick", text_anchor="middle" if tick else "start"
        )


def _label(text: str, x: float, y: float, room: float, *, end: bool) -> MarkupElement:
    shown = clipped(text, room)
    return element(
        "text",
        element("title", text) if shown != text else None,
        shown,
        x=x,
        y=y,
        class_="label",
        text_anchor="end" if end else None,
    )


def _bar(group: BarGroup, bar: Bar, plot: _Plot, y: float, thick: float, unit: str) -> MarkupElement:
    parts: list[MarkupElement] = []
    at = 0.0
    for segment in bar.segments:
        a, b = plot.x(at), plot.x(at + segment.value)
        at += segment.value
        if b > a:
            parts.append(element("rect", x=a, y=y, width=b - a, height=thick, class_=segment.paint))
    parts += _whisker(bar, plot, y + thick / 2, thick)
    total = estimate(bar.total, bar.interval, unit)
    parts.append(element("text", total, x=WIDTH - 2.0, y=y + thick / 2 + 4.0, class_="value", text_anchor="end"))
    name = group.label if bar.name == group.label else f"{group.label}: {bar.name}"
    lines = [f"{name}: {total}"]
    if len(bar.segments) > 1:
        lines += [f"{s.name}: {estimate(s.value, s.interval, unit)}" for s in bar.segments]
    return element("g", element("title", "\n".join(lines)), *parts, class_="bar")


def _whisker(bar: Bar, plot: _Plot, y: float, thick: float) -> Iterable[MarkupElement]:
    if not bar.interval:
        return
    a, b = plot.x(bar.total - bar.interval), plot.x(bar.total + bar.interval)
    cap = min(4.0, thick / 3)
    ends = f"M{a:.1f} {y - cap:.1f}V{y + cap:.1f}M{a:.1f} {y:.1f}H{b:.1f}"
    if bar.total + bar.interval <= plot.most:
        ends += f"M{b:.1f} {y - cap:.1f}V{y + cap:.1f}"
    yield element("path", d=ends, class_="halo")
    yield element("path", d=ends, class_="whisker")
