"""The measured workload of the task domains, and its drift from the workload that a plan assumed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rollart.fleet import DomainWork

MEMORY = 200
"""Window of a domain's means, in finished trajectories. Where the standard deviation of lengths equals their mean, a
mean over this many is accurate to about 5 %: well below the drift that triggers a new plan."""

MIN_FINISHED = 50
"""Finished trajectories before a domain's means are used at all. The first to finish are the short ones."""


@dataclass(slots=True)
class _Means:
    """Sums with exponential decay over trajectories; `weight` is the sum of the decayed weights."""

    weight: float = 0.0
    turns: float = 0.0
    first: float = 0.0
    new: float = 0.0
    output: float = 0.0
    wait: float = 0.0
    finished: int = 0


@dataclass(slots=True)
class WorkloadMeter:
    """Updated once per finished trajectory; O(1)."""

    finished: int = 0
    """Trajectories in all: its growth over a window is the measured rate."""
    _domains: dict[str, _Means] = field(default_factory=dict)
    _recent: dict[str, float] = field(default_factory=dict)

    def add(
        self, domain: str, *, turns: int, first_tokens: int, new_tokens: int, output_tokens: int, wait_s: float
    ) -> None:
        """A trajectory finished. `new_tokens` of observation after the first prompt, `output_tokens` and `wait_s` are
        totals over its turns."""
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
        # The window of the shares is MEMORY trajectories of the whole mix per domain.
        fade = 1.0 - 1.0 / (MEMORY * len(self._domains))
        for name in self._recent:
            self._recent[name] *= fade
        self._recent[domain] = self._recent.get(domain, 0.0) + 1.0

    def work(self) -> dict[str, DomainWork]:
        """Every domain with at least `MIN_FINISHED` finished trajectories."""
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
    """The largest relative change of any figure that a plan depends on, and the name of this figure ('' for none). A
    change is relative to the larger of the two values: at most 1, in either direction. Domains on one side only are
    ignored: a domain with few trajectories has not vanished, and a rare one shows in its share."""
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
