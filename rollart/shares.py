"""Shares of several domains by weight, within floors and caps, and portions of nearly equal size. Pure; for specs,
policies, plans and the trainer alike."""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_SLACK = 1e-9
"""Tolerance for rounding in sums of fractions: 0.1 + 0.2 does not break a rule."""


@dataclass(frozen=True, slots=True)
class DomainShare:
    """`weight` > 0 is relative; `floor` and `cap` are fractions of every step."""

    domain: str
    weight: float
    floor: float = 0.0
    cap: float = 1.0

    def __post_init__(self) -> None:
        if not (self.weight > 0 and math.isfinite(self.weight)):
            raise ValueError(f"domain {self.domain}: weight {self.weight} must be positive and finite")
        if not 0.0 <= self.floor <= self.cap <= 1.0:
            raise ValueError(f"domain {self.domain}: 0 <= floor {self.floor} <= cap {self.cap} <= 1 does not hold")


def bounded_shares(domains: Sequence[DomainShare], weights: Mapping[str, float] | None = None) -> dict[str, float]:
    """Fractions that sum to 1, proportional to the weights where no floor or cap binds.

    `weights` replaces the domains' weights. The shares are clip(lambda * w, floor, cap) for the one lambda at which
    they sum to 1. ValueError if no fractions can satisfy all floors and caps.
    """
    if not domains:
        raise ValueError("no domains to share between")
    lowest, highest = sum(d.floor for d in domains), sum(d.cap for d in domains)
    if lowest > 1.0 + _SLACK or highest < 1.0 - _SLACK:
        raise ValueError(f"floors sum to {lowest:g} and caps to {highest:g}: 1 must lie between them")
    want = {d.domain: (d.weight if weights is None else weights[d.domain]) for d in domains}
    fixed: dict[str, float] = {}
    while len(fixed) < len(domains):
        open_ = [d for d in domains if d.domain not in fixed]
        rest, total = 1.0 - sum(fixed.values()), sum(want[d.domain] for d in open_)
        raw = {d.domain: max(rest, 0.0) * want[d.domain] / total for d in open_}
        over = {d.domain: d.cap for d in open_ if raw[d.domain] > d.cap}
        under = {d.domain: d.floor for d in open_ if raw[d.domain] < d.floor}
        if not over and not under:
            return {d.domain: fixed.get(d.domain, raw.get(d.domain, 0.0)) for d in domains}
        # The side with the larger violation is fixed first: this moves lambda towards the other side only.
        too_much = sum(raw[n] - cap for n, cap in over.items())
        too_little = sum(floor - raw[n] for n, floor in under.items())
        if too_much >= too_little:
            fixed.update(over)
        if too_little >= too_much:
            fixed.update(under)
    return {d.domain: fixed[d.domain] for d in domains}


def balanced_portions(sizes: Sequence[int], parts: int) -> list[list[int]]:
    """Indices of `sizes` in `parts` portions with nearly equal totals; each index is in exactly one, ascending.

    Largest first, each to the portion with the smallest total so far, the lower number on a tie (Graham 1969, "Bounds
    on multiprocessing timing anomalies": no total exceeds the mean by more than (1 - 1/parts) × the largest size, nor
    the optimum by more than a third).
    """
    if parts < 1:
        raise ValueError(f"{parts} consumers: at least 1 is needed")
    heap = [(0, part) for part in range(parts)]
    out: list[list[int]] = [[] for _ in range(parts)]
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        total, part = heap[0]
        out[part].append(index)
        heapq.heapreplace(heap, (total + sizes[index], part))
    return [sorted(portion) for portion in out]
