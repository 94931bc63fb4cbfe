"""Observed times of answers: the adaptive time limit of an item, and the calls that are late. Pure.

The limit is learned from correct answers to the same prompt. RollPacker (arXiv 2509.21009), reward scheduler: T =
min(max(T_min, factor * T_anchor), T_max), where T_anchor is the longest time of a correct answer so far.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import OrderedDict, deque
from collections.abc import Mapping

from serverless.keys import canonical, sha256
from serverless.pipeline.stages import HedgeSpec, LimitsSpec
from serverless.types import Item, Scored


def prompt_key(item: Item) -> str:
    """The key of a prompt: metadata `group`, else a digest of the reference and of every message but the last
    assistant's ('' without a canonical form: all such items share one anchor)."""
    group = item.metadata.get("group")
    if isinstance(group, str | int):
        return str(group)
    messages: list[Mapping[str, str]] = list(item.messages)
    for position in range(len(messages) - 1, -1, -1):
        if messages[position].get("role") == "assistant":
            del messages[position]
            break
    try:
        return sha256(canonical([item.reference_answer, [dict(m) for m in messages]]))
    except (TypeError, ValueError):
        return ""


class AnchorTimes:
    """The time of the slowest correct answer by prompt. Bounds: an anchor never decreases, so a limit never does, and
    an answer no slower than a correct one to the same prompt is never cut (factor >= 1), up to `max_s`.

    Keeps `most` prompts; the one with the longest time since a correct answer is dropped first.
    """

    def __init__(self, settings: LimitsSpec, *, most: int = 100_000) -> None:
        self._settings = settings
        self._most = most
        self._slowest: OrderedDict[str, float] = OrderedDict()

    def limit(self, key: str) -> float:
        """Time limit of an item in seconds; the maximum before the first correct answer."""
        settings, anchor_s = self._settings, self._slowest.get(key)
        if anchor_s is None:
            return settings.max_s
        return min(max(settings.min_s, settings.factor * anchor_s), settings.max_s)

    def learn(self, key: str, outcome: Scored, seconds: float) -> None:
        """Record a correct answer. `seconds` is the duration of the call, used if the function reports no time of the
        item: the longer of the two, so the limit errs on the long side."""
        if outcome.value < self._settings.correct:
            return
        took = max(0.0, outcome.metrics.get(self._settings.metric, seconds))
        self._slowest[key] = max(self._slowest.get(key, 0.0), took)
        self._slowest.move_to_end(key)
        if len(self._slowest) > self._most:
            self._slowest.popitem(last=False)


_KEPT = 200
"""Answers over which the quantile rolls: ten lie beyond a p95, and a change shows after as many calls."""

_MOST = 10.0
"""Upper bound of the lateness threshold, in medians. Stragglers that were not hedged (the first ones, or for lack of
budget) are among the answers; where they are as frequent as the quantile leaves out, they would determine their own
threshold."""


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
