"""Statistics of a function's calls: service time, items per call and cold-start time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from serverless.meter import MeterSink, Saving, WorkerSpan
from serverless.types import Cause, Invocation

__all__ = ["CallStatistics", "StatisticsMeter"]

_WEIGHT = 0.05
"""Weight of a new call. The mean covers about the last twenty calls."""


@dataclass(slots=True)
class CallStatistics:
    """One function on one provider. `service_s` and `items` are means per call (0: no call yet). `cold_s` is the time
    of a cold start, near the longest of the recent ones, and `waited` the share of cold starts that a call waited for.
    `busy_s` sums the run time since `since` of the calls that have ended. `billed_s` and `scored` sum their billed
    seconds and their items since the start."""

    service_s: float = 0.0
    items: float = 0.0
    cold_s: float = 0.0
    waited: float = 1.0
    busy_s: float = 0.0
    since: float = 0.0
    billed_s: float = 0.0
    scored: int = 0

    def note(self, call: Invocation) -> None:
        self.billed_s += call.billed_s
        cold_s = call.cold_start_s
        if cold_s > 0.0:
            self.cold_s = max(cold_s, self.cold_s + _WEIGHT * (cold_s - self.cold_s))
            self.waited += _WEIGHT * ((call.cause is not Cause.WARM) - self.waited)
        if call.items:
            seconds = call.t1 - call.t0
            self.scored += call.items
            self.busy_s += seconds if call.t0 > self.since else max(0.0, call.t1 - self.since)
            if not self.items:
                self.service_s, self.items = seconds, float(call.items)
            elif cold_s == 0.0:  # some providers count the start into the call
                self.service_s += _WEIGHT * (seconds - self.service_s)
                self.items += _WEIGHT * (call.items - self.items)

    def take_busy(self, now: float) -> float:
        """Mean number of concurrent calls since the last tick, counting only calls that have ended."""
        passed, busy = now - self.since, self.busy_s
        self.busy_s, self.since = 0.0, now
        return busy / passed if passed > 0.0 else 0.0


class StatisticsMeter:
    """Implements `MeterSink`: forwards everything to `meter` and keeps statistics per function and provider."""

    def __init__(self, meter: MeterSink) -> None:
        self._pass_on = meter.invocation
        self.worker: Callable[[WorkerSpan], None] = meter.worker
        self.saving: Callable[[Saving], None] = meter.saving
        self._statistics_by_key: dict[tuple[str, str], CallStatistics] = {}

    def statistics(self, function: str, provider: str) -> CallStatistics:
        key = (function, provider)
        statistics = self._statistics_by_key.get(key)
        if statistics is None:
            statistics = self._statistics_by_key[key] = CallStatistics()
        return statistics

    def invocation(self, invocation: Invocation) -> None:
        statistics = self._statistics_by_key.get((invocation.function, invocation.provider))
        if statistics is None:
            statistics = self.statistics(invocation.function, invocation.provider)
        statistics.note(invocation)
        self._pass_on(invocation)
