"""Forecasts reward calls from the live trajectories. Pure.

A web service must estimate its load; in RL training it is known: every live trajectory requests its reward once, when
it ends. Durations are recorded by kind of trajectory as they end. The probability that a trajectory of a given age ends
within the next seconds follows from these durations (the hazard of the empirical distribution).
"""

from __future__ import annotations

import bisect
import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

KEPT = 512
"""Durations kept per kind: a 0.99 quantile needs several hundred; older ones belong to another policy."""


@dataclass(frozen=True, slots=True)
class ExpectedCalls:
    """Mean and variance of the calls within a horizon (each live trajectory is an independent Bernoulli variable)."""

    mean: float
    variance: float

    def upper(self, z: float) -> float:
        """The mean plus `z` standard deviations: 1.64 for 95 %."""
        return self.mean + z * math.sqrt(self.variance)


class Forecast:
    """Durations by kind of trajectory (a domain), the newest `kept` of each."""

    def __init__(self, kept: int = KEPT) -> None:
        self._kept = kept
        self._recent: dict[str, deque[float]] = {}
        self._sorted: dict[str, list[float]] = {}

    def ended(self, kind: str, seconds: float) -> None:
        """Record the duration of a trajectory that requested its reward."""
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
        """The number of recorded durations of a kind."""
        return len(self._sorted.get(kind, ()))

    def among(self, kind: str, began: Sequence[float], now: float, horizon_s: float) -> ExpectedCalls:
        """`within` for all trajectories of one kind, given their start times, earliest first: O(kept * log(live)).

        The probability of ending changes only at ages that equal a duration, or a duration minus the horizon: all
        trajectories between two such ages have the same one.
        """
        ordered = self._sorted.get(kind)
        if not ordered or not began:
            return ExpectedCalls(0.0, 0.0)
        if len(began) < len(ordered) // 4:
            return self.within(horizon_s, ((kind, now - t) for t in began))
        # (age, 1 if a duration is passed there, 0 if one comes within the horizon); the latter first
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
        """Probability that a trajectory of this age ends within the horizon. A trajectory older than every recorded
        duration is overdue and counts as about to end. 0 for a kind without records."""
        ordered = self._sorted.get(kind)
        if not ordered:
            return 0.0
        alive = len(ordered) - bisect.bisect_right(ordered, age)
        if alive == 0:
            return 1.0
        ending = bisect.bisect_right(ordered, age + horizon_s) - (len(ordered) - alive)
        return ending / alive


def workers_for(calls: float, service_s: float, horizon_s: float, *, items: float = 1.0) -> int:
    """Workers for `calls` items that arrive evenly within the horizon (Little's law): at least one for any, at most one
    for each.

    One call carries `items` and takes `service_s` seconds.
    """
    if calls <= 1e-6:
        return 0
    if not (service_s > 0 and horizon_s > 0 and items >= 1):
        raise ValueError("service_s and horizon_s above 0, items at least 1")
    most = max(1, math.ceil(calls / items - 1e-9))
    return min(most, max(1, math.ceil(calls / items * service_s / horizon_s - 1e-9)))
