"""Hedging of one provider's late calls: decides which calls are late, and starts second attempts when there is room."""

from __future__ import annotations

from collections.abc import Callable

from serverless.pipeline_entry import PipelineCall
from serverless.pipeline_stats import StageCounts
from serverless.pipeline_timers import Timers
from serverless.policy.hedge import HedgeBudget, Latencies
from serverless.settings import HedgeSpec
from serverless.types import Cause

__all__ = ["Hedger"]


class Hedger:
    """Owns the latencies, the hedge budget and the late calls of one provider. `has_room` returns True if an invocation
    may begin; `start_hedge` begins one. Calls that isolate a failing item are not hedged, since their faults are
    needed."""

    def __init__(
        self,
        settings: HedgeSpec,
        stage: StageCounts,
        *,
        has_room: Callable[[], bool],
        start_hedge: Callable[[PipelineCall], None],
    ) -> None:
        self._latencies = Latencies(settings)
        self._budget = HedgeBudget(settings)
        self._stage = stage
        self._has_room = has_room
        self._start_hedge = start_hedge
        self._watched: Timers[PipelineCall] = Timers(self._is_late, lambda call: call.done)
        self._late: dict[PipelineCall, None] = {}

    def called(self, call: PipelineCall, now: float) -> None:
        """Record the start of a call: it earns its share of a hedge and is watched."""
        self._stage.entered += 1
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
        while self._late and self._has_room() and self._budget.take(spare=1.0):
            self._hedge(self._late.popitem()[0])

    def close(self) -> None:
        self._watched.close()
        self._late.clear()

    def _is_late(self, call: PipelineCall) -> None:
        if self._has_room() and self._budget.take():
            self._hedge(call)
        else:
            self._late[call] = None

    def _hedge(self, call: PipelineCall) -> None:
        self._stage.acted += 1
        self._stage.extra_calls += 1
        self._start_hedge(call)
