"""Reward calls that are about to come, from the trajectories that are under way. Pure.

A web service has to guess its load; RL training knows it: every live trajectory will ask for its reward once, when it
ends. How long trajectories of a kind last is seen as they end; the chance that one of a known age ends within the next
seconds follows from those durations (the hazard of the empirical distribution).
"""

from __future__ import annotations

import bisect
import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = ["ExpectedCalls", "Forecast", "workers_for"]

KEPT = 512
"""Durations kept per kind: a quantile of 0.99 needs some hundred; older ones are of another policy."""


@dataclass(frozen=True, slots=True)
class ExpectedCalls:
    """Calls within a horizon: their mean and variance (each live trajectory is one independent chance)."""

    mean: float
    variance: float

    def upper(self, z: float) -> float:
        """`z` standard deviations above the mean: 1.64 for 95 %."""
        return self.mean + z * math.sqrt(self.variance)


class Forecast:
    """Durations by kind of trajectory (a domain), newest `kept` of each."""

    def __init__(self, kept: int = KEPT) -> None:
        self._kept = kept
        self._recent: dict[str, deque[float]] = {}
        self._sorted: dict[str, list[float]] = {}

    def ended(self, kind: str, seconds: float) -> None:
        """A trajectory that asked for its reward lasted so long."""
        recent = self._recent.setdefault(kind, deque())
        ordered = self._sorted.setdefault(kind, [])
        recent.append(seconds)
        bisect.insort(ordered, seconds)
        if len(recent) > self._kept:
            del ordered[bisect.bisect_left(ordered, recent.popleft())]

    def within(self, horizon_s: float, live: Iterable[tuple[str, float]]) -> ExpectedCalls:
        """Calls expected in the next `horizon_s` seconds from live trajectories of (kind, age in seconds)."""
        mean = variance = 0.0
        for kind, age in live:
            p = self.chance(kind, age, horizon_s)
            mean += p
            variance += p * (1.0 - p)
        return ExpectedCalls(mean, variance)

    def seen(self, kind: str) -> int:
        """Durations that are known of a kind."""
        return len(self._sorted.get(kind, ()))

    def among(self, kind: str, began: Sequence[float], now: float, horizon_s: float) -> ExpectedCalls:
        """`within` for all of one kind, given when they began, earliest first: O(kept * log(live)).

        The chance of an ending only changes at an age that is one of the durations, or the horizon short of one:
        all that are between two such ages have the same.
        """
        ordered = self._sorted.get(kind)
        if not ordered or not began:
            return ExpectedCalls(0.0, 0.0)
        if len(began) < len(ordered) // 4:
            return self.within(horizon_s, ((kind, now - t) for t in began))
        # (age, whether it is passed or comes within reach there); what comes within reach at once first
        cuts = sorted([(d - horizon_s, 0) for d in ordered] + [(d, 1) for d in ordered])
        known, reached, passed, older = len(ordered), 0, 0, len(began)
        mean = variance = 0.0
        for age, end in cuts:
            left = bisect.bisect_right(began, now - age, 0, older)
            if left < older:
                p = (reached - passed) / (known - passed)
                mean += p * (older - left)
                variance += p * (1.0 - p) * (older - left)
                older = left
            if not older:
                break
            passed += end
            reached += 1 - end
        return ExpectedCalls(mean + older, variance)

    def chance(self, kind: str, age: float, horizon_s: float) -> float:
        """That a trajectory of this age ends within the horizon. Older than any that was seen: it is overdue, and the
        longest that were seen say nothing more; it is counted as about to end. 0 for a kind that was never seen."""
        ordered = self._sorted.get(kind)
        if not ordered:
            return 0.0
        alive = len(ordered) - bisect.bisect_right(ordered, age)
        if alive == 0:
            return 1.0
        ending = bisect.bisect_right(ordered, age + horizon_s) - (len(ordered) - alive)
        return ending / alive


def workers_for(calls: float, service_s: float, horizon_s: float, *, items: float = 1.0) -> int:
    """Workers that serve `calls` arriving evenly within the horizon (Little's law): at least one for any call, at most
    one for each.

    `items` go in one call, which takes `service_s` seconds.
    """
    if calls <= 1e-6:
        return 0
    if not (service_s > 0 and horizon_s > 0 and items >= 1):
        raise ValueError("service_s and horizon_s above 0, items at least 1")
    most = max(1, math.ceil(calls / items - 1e-9))
    return min(most, max(1, math.ceil(calls / items * service_s / horizon_s - 1e-9)))
