"""What the task domains ask for, measured while they run, and how far that has moved from what a plan assumed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rollart.fleet import DomainWork

__all__ = ["MEMORY", "MIN_FINISHED", "WorkloadMeter", "drift"]

MEMORY = 200
"""Finished trajectories of a domain that its means look back on. With lengths that vary as much as their mean, a mean
over so many is good to about 5 %: well below the drift that asks for a new plan."""

MIN_FINISHED = 50
"""Finished trajectories before a domain's means are judged at all. The first to finish are the short ones."""


@dataclass(slots=True)
class _Means:
    """Sums with exponential decay over trajectories; `weight` is the sum of the decayed ones."""

    weight: float = 0.0
    turns: float = 0.0
    first: float = 0.0
    new: float = 0.0
    output: float = 0.0
    wait: float = 0.0
    finished: int = 0


@dataclass(slots=True)
class WorkloadMeter:
    """Fed once per finished trajectory; O(1)."""

    finished: int = 0
    """Trajectories in all: its growth over a window is the measured rate."""
    _domains: dict[str, _Means] = field(default_factory=dict)
    _recent: dict[str, float] = field(default_factory=dict)

    def add(
        self, domain: str, *, turns: int, first_tokens: int, new_tokens: int, output_tokens: int, wait_s: float
    ) -> None:
        """A trajectory finished: `new_tokens` of observation after the first prompt, over all of its turns, as are
        `output_tokens` and `wait_s`."""
        self.finished += 1
        means = self._domains.get(domain)
        if means is None:
            means = self._domains[domain] = _Means()
        keep = 1.0 - 1.0 / MEMORY
        means.weight = means.weight * keep + 1.0
        means.turns = means.turns * keep + turns
        means.first = means.first * keep + first_tokens
        means.new = means.new * keep + new_tokens
        means.output = means.output * keep + output_tokens
        means.wait = means.wait * keep + wait_s
        means.finished += 1
        # Shares look back on as many trajectories of the whole mix as there are domains to tell apart, times MEMORY.
        fade = 1.0 - 1.0 / (MEMORY * len(self._domains))
        for name in self._recent:
            self._recent[name] *= fade
        self._recent[domain] = self._recent.get(domain, 0.0) + 1.0

    def work(self) -> dict[str, DomainWork]:
        """Every domain that was seen at least `MIN_FINISHED` times."""
        total = sum(self._recent.values())
        return {
            name: DomainWork(
                share=self._recent[name] / total,
                turns=m.turns / m.weight,
                first_tokens=m.first / m.weight,
                new_tokens=m.new / max(m.turns - m.weight, 1.0) if m.new else 0.0,
                output_tokens=m.output / m.turns,
                wait_s=m.wait / m.turns,
                finished=m.finished,
            )
            for name, m in self._domains.items()
            if m.finished >= MIN_FINISHED
        }


def drift(before: Mapping[str, DomainWork], now: Mapping[str, DomainWork]) -> tuple[float, str]:
    """The largest relative change of any figure that a plan depends on, and which one it is ('' for none). A change is
    relative to the larger of the two: at most 1, either way. Domains that only one side knows say nothing: not seen
    often enough is not gone; what has become rare shows in its share."""
    worst, name = 0.0, ""
    for domain in sorted(set(before) & set(now)):
        a, b = before[domain], now[domain]
        changes = {
            "share": _change(a.share, b.share),
            "turns": _change(a.turns, b.turns),
            "prompt tokens": _change(_prompt(a), _prompt(b)),
            "output tokens": _change(a.turns * a.output_tokens, b.turns * b.output_tokens),
        }
        for figure, change in changes.items():
            if change > worst:
                worst, name = change, f"{figure} of {domain}"
    return worst, name


def _prompt(work: DomainWork) -> float:
    """Tokens that a whole trajectory shows the policy."""
    return work.first_tokens + max(work.turns - 1.0, 0.0) * work.new_tokens


def _change(a: float, b: float) -> float:
    larger = max(abs(a), abs(b))
    return abs(a - b) / larger if larger else 0.0
