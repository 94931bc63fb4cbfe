"""Decides the number of workers of one function and the keep-alive of idle ones, from statistics of its calls. Pure.

The keep-alive is a ski-rental problem: idle seconds are the rent, a cold start is the price. A worker that is kept
until its idle time has cost one cold start never costs more than twice the optimum with a known next call (Karlin et
al., 1988). With a forecast of the next call, the bound is relaxed for a lower cost if the forecast is right (Purohit,
Svitkina and Kumar, 2018).
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from serverless.meter import LeftProcesses, MeterSink, Saving, TokenBill, WorkerSpan
from serverless.providers.base import WorkerLoad
from serverless.scaling.autoscaler import Autoscaler
from serverless.scaling.forecast import ExpectedCalls, workers_for
from serverless.scaling.settings import ScalingSpec
from serverless.spec import FunctionSpec
from serverless.types import Cause, Invocation

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
        reactive = 0
        if self._autoscaler is not None:
            ended = observation.statistics.take_busy(observation.now)
            at_once = max(observation.load.under_way + observation.waiting / items, ended)
            self._autoscaler.observe(observation.now, at_once)
            reactive = self._autoscaler.wanted(observation.now, observation.load.workers)
        ahead = self._ahead(observation, items)
        workers = min(self._spec.concurrency, max(reactive, ahead))
        why = "idle" if not workers else "forecast" if ahead >= min(reactive, workers) else "reactive"
        return ScalingTarget(workers, why, self._keep_alive(observation, workers))

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
        even = break_even_s(price, cold_s * (price + observation.statistics.waited * observation.waiting_usd_per_s))
        next_s: float | None = None
        if math.isfinite(even):
            expected = observation.expected_calls(even)
            if expected is not None and even > 0.0:
                service_s = max(1e-6, observation.statistics.service_s)
                needed = workers_for(expected.mean, service_s, even, items=max(1.0, observation.statistics.items))
                next_s = even if expected.mean >= _EXPECTED and needed > workers else math.inf
        longest = self._spec.keep_alive_s if settings.max_s is None else settings.max_s
        seconds = min(longest, max(settings.min_s, keep_alive_s(even, settings.trust, next_s)))
        if self._applied_s is None or abs(seconds - self._applied_s) > 0.2 * self._applied_s:
            self._applied_s = seconds
        return self._applied_s


def break_even_s(idle_usd_per_s: float, cold_usd: float) -> float:
    """The idle seconds of a worker that cost as much as a cold start: its billed seconds and the cost of waiting for it
    (idle GPU-seconds times their price). Infinite where idling is free."""
    return cold_usd / idle_usd_per_s if idle_usd_per_s > 0 else math.inf


def keep_alive_s(even_s: float, trust: float, forecast_s: float | None = None) -> float:
    """Keep-alive in seconds of an idle worker, by ski rental. `even_s`: its break-even. `forecast_s`: the expected time
    until the next call. `trust` in (0, 1]: 1 ignores forecasts; smaller values follow them more closely and cost up to
    1 + 1/trust times the optimum if they are wrong."""
    if forecast_s is None or not math.isfinite(even_s):
        return even_s
    return even_s * trust if forecast_s > even_s else even_s / trust


@dataclass(slots=True)
class Hysteresis:
    """Limits changes of a level that is slow and expensive to change. A change is at least a fifth of the level and at
    least 1. The level rises at most once in `up_s`. It falls at most once in `down_s`, and not below any number wanted
    in that time. The first change may come at once."""

    up_s: float = 60.0
    down_s: float = 300.0
    share: float = 0.2
    changed: float = -math.inf
    """The time of the last attempted change, successful or failed; set by the caller."""
    requested: deque[tuple[float, int]] = field(default_factory=deque)

    def next(self, now: float, level: int, wanted: int) -> int:
        """The next level, or `level` for no change."""
        self.requested.append((now, wanted))
        while self.requested[0][0] < now - self.down_s:
            self.requested.popleft()
        if wanted > level:
            return wanted if self._enough(level, wanted) and now >= self.changed + self.up_s else level
        highest = max(n for _, n in self.requested)
        if highest < level and self._enough(level, highest) and now >= self.changed + self.down_s:
            return highest
        return level

    def _enough(self, level: int, to: int) -> bool:
        return abs(to - level) >= max(1.0, self.share * level)


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
        self.tokens: Callable[[TokenBill], None] = meter.tokens
        self.left: Callable[[LeftProcesses], None] = meter.left
        self._statistics: defaultdict[tuple[str, str], CallStatistics] = defaultdict(CallStatistics)

    def statistics(self, function: str, provider: str) -> CallStatistics:
        return self._statistics[function, provider]

    def invocation(self, invocation: Invocation) -> None:
        self._statistics[invocation.function, invocation.provider].note(invocation)
        self._pass_on(invocation)
