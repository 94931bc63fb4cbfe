"""Rows of the suite: published against simulated figures, and claims about their order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Claim", "Done", "Figure", "Found", "Row"]


@dataclass(frozen=True, slots=True)
class Figure:
    """One published figure, or a band from `published` to `most`, and the simulated one. `tuned`: a constant was chosen
    so that it comes out, so it proves nothing."""

    name: str
    published: float
    simulated: float
    most: float | None = None
    tuned: bool = False

    @property
    def ratio(self) -> float:
        """Simulated over published; for a band over its nearer edge, 1 inside."""
        high = self.published if self.most is None else self.most
        if self.published <= self.simulated <= high:
            return 1.0
        edge = self.published if self.simulated < self.published else high
        return self.simulated / edge if edge else float("inf")

    @property
    def bound(self) -> bool:
        """Whether only an upper bound was published: easily kept, so it is judged and not counted."""
        return not self.published

    def within(self, share: float) -> bool:
        return abs(self.ratio - 1.0) <= share + 1e-9


@dataclass(frozen=True, slots=True)
class Claim:
    """An order or a sign that the paper found, and whether it is so here."""

    text: str
    holds: bool


@dataclass(frozen=True, slots=True)
class Found:
    figures: tuple[Figure, ...]
    claims: tuple[Claim, ...]
    note: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """`play(seeds)` runs it; `miss` is the explanation of deviating figures."""

    id: str
    title: str
    conditions: str
    play: Callable[[int], Found]
    miss: str = ""


@dataclass(frozen=True, slots=True)
class Done:
    """A row that was played, and the CPU seconds that it took."""

    row: Row
    found: Found
    cpu_s: float

    @property
    def ordered(self) -> bool:
        return all(c.holds for c in self.found.claims)

    @property
    def missed(self) -> bool:
        """True if an order, a sign or a value is off; `row.miss` then explains it."""
        return not self.ordered or any(not f.within(0.25) for f in self.found.figures)

    def figures(self) -> list[Figure]:
        """Figures that count: neither tuned nor bounds."""
        return [f for f in self.found.figures if not f.tuned and not f.bound]
