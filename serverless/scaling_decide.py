"""How many workers one function should have now, why, and how long idle ones are worth keeping. Pure."""

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
"""Items expected within so many seconds, from trajectories under way; None where nothing is known of them."""

_MARGIN = 1.2
"""The horizon over the cold start: a start that takes longer than seen is still in time."""

_EXPECTED = 0.5
"""Calls expected until some time, from which on the next call is taken to come before it."""


@dataclass(frozen=True, slots=True)
class ScalingObservation:
    """What is known at a moment. `waiting` are items that are in no call yet; `idle_usd_per_s` is what an idle worker
    costs, `waiting_usd_per_s` what a trajectory does that waits for its reward."""

    now: float
    load: WorkerLoad
    book: CallStatistics
    waiting: int
    coming: CallForecast
    idle_usd_per_s: float = 0.0
    waiting_usd_per_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ScalingTarget:
    """`why` is "forecast", "reactive" or "idle"; `keep_alive_s` None: as it is."""

    workers: int
    why: str
    keep_alive_s: float | None = None


class Decider:
    """One function on one provider. Times must not go back. The number wanted is the larger of what the autoscaler and
    the forecast want, in 0..concurrency; on a tie the forecast is named."""

    def __init__(self, spec: FunctionSpec, settings: ScalingSpec, *, least_horizon_s: float = 0.0) -> None:
        self._spec = spec
        self._settings = settings
        self._least_horizon_s = least_horizon_s
        self._autoscaler = Autoscaler(settings.reactive.policy()) if settings.reactive.enabled else None
        self._kept_s: float | None = None

    def decide(self, look: ScalingObservation) -> ScalingTarget:
        items = max(1.0, look.book.items)
        reactive = self._reactive(look, items)
        ahead = self._ahead(look, items)
        workers = min(self._spec.concurrency, max(reactive, ahead))
        why = "idle" if not workers else "forecast" if ahead >= min(reactive, workers) else "reactive"
        return ScalingTarget(workers, why, self._keep_alive(look, workers))

    def _reactive(self, look: ScalingObservation, items: float) -> int:
        if self._autoscaler is None:
            return 0
        ended = look.book.take_busy(look.now)
        at_once = max(look.load.under_way + look.waiting / items, ended)
        self._autoscaler.observe(look.now, at_once)
        return self._autoscaler.wanted(look.now, look.load.workers)

    def _ahead(self, look: ScalingObservation, items: float) -> int:
        settings = self._settings.forecast
        if not settings.enabled or not look.book.items:
            return 0
        auto = _MARGIN * look.book.cold_s + 2.0 * self._settings.tick_s
        horizon = max(auto if settings.horizon_s == "auto" else settings.horizon_s, self._least_horizon_s)
        expected = look.coming(horizon)
        if expected is None:
            return 0
        known = look.load.under_way * items + look.waiting
        return workers_for(expected.upper(settings.z) + known, max(1e-6, look.book.service_s), horizon, items=items)

    def _keep_alive(self, look: ScalingObservation, workers: int) -> float | None:
        """Ski rental. A start costs its worker's seconds, and those of a trajectory if a call waits for it, which is
        rare where workers are started ahead. The worker used last is used next, so one above the `workers` that are
        kept is needed when calls until then need more than these. A change below a fifth is not worth telling."""
        settings, cold_s = self._settings.keep_alive, look.book.cold_s
        if not settings.enabled or cold_s <= 0.0:
            return None
        price = look.idle_usd_per_s
        rule = KeepAlive(price, cold_s * (price + look.book.waited * look.waiting_usd_per_s), settings.trust)
        even = rule.break_even_s
        next_s: float | None = None
        if math.isfinite(even):
            expected = look.coming(even)
            if expected is not None and even > 0.0:
                service_s = max(1e-6, look.book.service_s)
                needed = workers_for(expected.mean, service_s, even, items=max(1.0, look.book.items))
                next_s = even if expected.mean >= _EXPECTED and needed > workers else math.inf
        longest = self._spec.keep_alive_s if settings.max_s is None else settings.max_s
        seconds = min(longest, max(settings.min_s, rule.seconds(next_s)))
        if self._kept_s is None or abs(seconds - self._kept_s) > 0.2 * self._kept_s:
            self._kept_s = seconds
        return self._kept_s


@dataclass(slots=True)
class Hysteresis:
    """When a level that is slow and dear to change follows what is wanted: by a fifth and one at least, up at most once
    in `up_s`, down at most once in `down_s` and not below what was wanted in that time. It may start at once."""

    up_s: float = 60.0
    down_s: float = 300.0
    share: float = 0.2
    changed: float = -math.inf
    asked: deque[tuple[float, int]] = field(default_factory=deque)

    def next(self, now: float, level: int, wanted: int) -> int:
        """The level to go to, `level` to stay. The caller tells `changed_at` if it went."""
        self.asked.append((now, wanted))
        while self.asked[0][0] < now - self.down_s:
            self.asked.popleft()
        if wanted > level:
            return wanted if self._enough(level, wanted) and now >= self.changed + self.up_s else level
        highest = max(n for _, n in self.asked)
        if highest < level and self._enough(level, highest) and now >= self.changed + self.down_s:
            return highest
        return level

    def changed_at(self, now: float) -> None:
        """It went there, or tried to and failed."""
        self.changed = now

    def _enough(self, level: int, to: int) -> bool:
        return abs(to - level) >= max(1.0, self.share * level)
