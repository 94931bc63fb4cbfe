"""Hedging of one provider's late calls: decides which calls are late, and starts second attempts when there is room.

`Latencies` is pure; `Hedger` watches the calls.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass

from serverless.pipeline.items import PipelineCall, Timers
from serverless.pipeline.retrying import TokenBucket
from serverless.pipeline.stages import HedgeSpec, StageCounts
from serverless.types import Cause

_SAVED = 5.0
"""Maximum number of hedges saved in a quiet time for a burst of late calls."""


@dataclass(eq=False)
class Hedger:
    """Owns the latencies, the hedge budget and the late calls of one provider. `has_room` returns True if an invocation
    may begin; `start_hedge` begins one. Calls that isolate a failing item are not hedged, since their faults are
    needed."""

    settings: HedgeSpec
    stage: StageCounts
    _: KW_ONLY
    has_room: Callable[[], bool]
    start_hedge: Callable[[PipelineCall], None]

    def __post_init__(self) -> None:
        self._latencies = Latencies(self.settings)
        self._budget = TokenBucket(self.settings.budget, most=max(_SAVED, self.settings.budget))
        self._watched: Timers[PipelineCall] = Timers(self._is_late, lambda call: call.done)
        self._late: dict[PipelineCall, None] = {}

    def called(self, call: PipelineCall, now: float) -> None:
        """Record the start of a call: it earns its share of a hedge and is watched."""
        if not self.settings.enabled:
            return
        self.stage.entered += 1
        self._budget.earn()
        if call.cause is not Cause.ISOLATION:
            after = self._latencies.late_after(len(call.entries))
            if after is not None and call.expires - now > after:
                self._watched.add(now + after, call)
        self.pump()

    def answered(self, seconds: float, items: int) -> None:
        self._latencies.add(seconds, items)

    def over(self, call: PipelineCall) -> None:
        """The call needs no hedge any more."""
        self._late.pop(call, None)

    def pump(self) -> None:
        """Hedge late calls, the most recent first, while there is room and a token in reserve.

        A call that has just become late needs no token in reserve. If the share of stragglers equals the budget, most
        are then hedged at once and a few not at all, instead of all of them after a wait.
        """
        while self._late and self.has_room() and self._budget.take(spare=1.0):
            self._hedge(self._late.popitem()[0])

    def close(self) -> None:
        self._watched.close()
        self._late.clear()

    def _is_late(self, call: PipelineCall) -> None:
        if self.has_room() and self._budget.take():
            self._hedge(call)
        else:
            self._late[call] = None

    def _hedge(self, call: PipelineCall) -> None:
        self.stage.acted += 1
        self.stage.extra_calls += 1
        self.start_hedge(call)


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
