"""Decides the number of workers of one function and the keep-alive of idle ones. Pure."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from serverless.backends.base import WorkerLoad
from serverless.policy.autoscale import Autoscaler
from serverless.policy.forecast import ExpectedCalls, workers_for
from serverless.policy.keepalive import KeepAlive
from serverless.scaling_seen import CallStatistics
from serverless.scaling_spec import ScalingSpec
from serverless.spec import FunctionSpec

__all__ = ["CallForecast", "Decider", "Hysteresis", "ScalingObservation", "ScalingTarget"]

CallForecast = Callable[[float], ExpectedCalls | None]
"""Items expected within a number of seconds, from live trajectories; None if nothing is known of them."""

_MARGIN = 1.2
"""Ratio of horizon to cold start. It covers a start that takes longer than those observed."""

_EXPECTED = 0.5
"""The number of expected calls from which on the next call is assumed to come within the horizon."""


@dataclass(frozen=True, slots=True)
class ScalingObservation:
    """The inputs of one decision. `waiting` counts items that are in no call yet. `idle_usd_per_s` is the cost of an
    idle worker, `waiting_usd_per_s` that of a trajectory that waits for its reward."""

    now: float
    load: WorkerLoad
    statistics: CallStatistics
    waiting: int
    expected_calls: CallForecast
    idle_usd_per_s: float = 0.0
    waiting_usd_per_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ScalingTarget:
    """The wanted number of workers. `why` is "forecast", "reactive" or "idle"; `keep_alive_s` None means unchanged."""

    workers: int
    why: str
    keep_alive_s: float | None = None


class Decider:
    """Decides for one function on one provider. Times must not decrease. The number of workers is the maximum of the
    autoscaler's and the forecast's, in 0..concurrency; on a tie, the reason is the forecast."""

    def __init__(self, spec: FunctionSpec, settings: ScalingSpec, *, least_horizon_s: float = 0.0) -> None:
        self._spec = spec
        self._settings = settings
        self._least_horizon_s = least_horizon_s
        self._autoscaler = Autoscaler(settings.reactive) if settings.reactive.enabled else None
        self._applied_s: float | None = None

    def decide(self, observation: ScalingObservation) -> ScalingTarget:
        items = max(1.0, observation.statistics.items)
        reactive = self._reactive(observation, items)
        ahead = self._ahead(observation, items)
        workers = min(self._spec.concurrency, max(reactive, ahead))
        why = "idle" if not workers else "forecast" if ahead >= min(reactive, workers) else "reactive"
        return ScalingTarget(workers, why, self._keep_alive(observation, workers))

    def _reactive(self, observation: ScalingObservation, items: float) -> int:
        if self._autoscaler is None:
            return 0
        ended = observation.statistics.take_busy(observation.now)
        at_once = max(observation.load.under_way + observation.waiting / items, ended)
        self._autoscaler.observe(observation.now, at_once)
        return self._autoscaler.wanted(observation.now, observation.load.workers)

    def _ahead(self, observation: ScalingObservation, items: float) -> int:
        settings = self._settings.forecast
        if not settings.enabled or not observation.statistics.items:
            return 0
        auto = _MARGIN * observation.statistics.cold_s + 2.0 * self._settings.tick_s
        horizon = max(auto if settings.horizon_s == "auto" else settings.horizon_s, self._least_horizon_s)
        expected = observation.expected_calls(horizon)
        if expected is None:
            return 0
        known = observation.load.under_way * items + observation.waiting
        return workers_for(
            expected.upper(settings.z) + known, max(1e-6, observation.statistics.service_s), horizon, items=items
        )

    def _keep_alive(self, observation: ScalingObservation, workers: int) -> float | None:
        """Keep-alive by ski rental. A cold start costs the worker's seconds, and those of a trajectory if a call waits
        for the start, which is rare where workers are started ahead. The most recently used worker is used next, so a
        worker above the `workers` that are kept is needed only if the calls until break-even need more than these. A
        change below a fifth is not applied."""
        settings, cold_s = self._settings.keep_alive, observation.statistics.cold_s
        if not settings.enabled or cold_s <= 0.0:
            return None
        price = observation.idle_usd_per_s
        rule = KeepAlive(
            price, cold_s * (price + observation.statistics.waited * observation.waiting_usd_per_s), settings.trust
        )
        even = rule.break_even_s
        next_s: float | None = None
        if math.isfinite(even):
            expected = observation.expected_calls(even)
            if expected is not None and even > 0.0:
                service_s = max(1e-6, observation.statistics.service_s)
                needed = workers_for(expected.mean, service_s, even, items=max(1.0, observation.statistics.items))
                next_s = even if expected.mean >= _EXPECTED and needed > workers else math.inf
        longest = self._spec.keep_alive_s if settings.max_s is None else settings.max_s
        seconds = min(longest, max(settings.min_s, rule.seconds(next_s)))
        if self._applied_s is None or abs(seconds - self._applied_s) > 0.2 * self._applied_s:
            self._applied_s = seconds
        return self._applied_s


@dataclass(slots=True)
class Hysteresis:
    """Limits changes of a level that is slow and expensive to change. A change is at least a fifth of the level and at
    least 1. The level rises at most once in `up_s`. It falls at most once in `down_s`, and not below any number wanted
    in that time. The first change may come at once."""

    up_s: float = 60.0
    down_s: float = 300.0
    share: float = 0.2
    changed: float = -math.inf
    requested: deque[tuple[float, int]] = field(default_factory=deque)

    def next(self, now: float, level: int, wanted: int) -> int:
        """The next level, or `level` for no change. After a change, the caller calls `changed_at`."""
        self.requested.append((now, wanted))
        while self.requested[0][0] < now - self.down_s:
            self.requested.popleft()
        if wanted > level:
            return wanted if self._enough(level, wanted) and now >= self.changed + self.up_s else level
        highest = max(n for _, n in self.requested)
        if highest < level and self._enough(level, highest) and now >= self.changed + self.down_s:
            return highest
        return level

    def changed_at(self, now: float) -> None:
        """Record an attempted change, successful or failed."""
        self.changed = now

    def _enough(self, level: int, to: int) -> bool:
        return abs(to - level) >= max(1.0, self.share * level)
