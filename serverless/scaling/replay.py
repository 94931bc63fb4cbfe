"""Replays a recorded load under other conditions: on dedicated workers, or on functions that scale.

Pure and exact at the level of calls: an event simulation of workers that serve one call at a time, in order of arrival.
Calls come from a run's ledger (`ReplayedCall`) with their measured seconds of work, so that only queueing, cold starts
and idle time differ.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from serverless.scaling.autoscaler import KNATIVE, Autoscaler
from serverless.scaling.forecast import Forecast, workers_for
from serverless.scaling.settings import ReactiveSpec


@dataclass(frozen=True, slots=True)
class ReplayedCall:
    """A recorded call. `t` is the time of the request, `seconds` the work, `since` the start of the requesting
    trajectory (None: unknown), `kind` its domain and `job` its owner."""

    t: float
    seconds: float
    since: float | None = None
    kind: str = ""
    job: str = ""


@dataclass(frozen=True, slots=True)
class CallReplay:
    """The result of a replay. `waits` are the seconds from request to start of work, by call in order of request.
    `worker_s` sums the seconds of all workers (`busy_s` at work, `cold_s` starting). `peak` is the maximum number of
    concurrent workers, and `span_s` the time from the first call to the end of the last."""

    waits: tuple[float, ...]
    worker_s: float
    busy_s: float
    cold_s: float
    cold_starts: int
    peak: int
    span_s: float

    @property
    def utilisation(self) -> float:
        """Busy share of all worker-seconds."""
        return self.busy_s / self.worker_s if self.worker_s > 0 else 0.0

    def wait(self, quantile: float) -> float:
        """The nearest-rank quantile of the waits."""
        if not self.waits:
            return 0.0
        ordered = sorted(self.waits)
        return ordered[min(len(ordered) - 1, max(0, math.ceil(quantile * len(ordered)) - 1))]


class ScalingRule:
    """Returns the wanted number of workers at every tick, knowing only past events. This one wants none ahead: a call
    without an idle worker starts one, as on Lambda."""

    def began(self, t: float, call: ReplayedCall) -> None:
        """A trajectory of a later call began. Only its kind and its start may be used."""

    def asked(self, t: float, call: ReplayedCall) -> None:
        """A call was requested."""

    def wanted(self, t: float, under_way: int, ready: int) -> int:
        return 0


class ReactiveScaling(ScalingRule):
    """Knative's autoscaler."""

    def __init__(self, settings: ReactiveSpec = KNATIVE) -> None:
        self._scaler = Autoscaler(settings)

    def wanted(self, t: float, under_way: int, ready: int) -> int:
        self._scaler.observe(t, under_way)
        return self._scaler.wanted(t, ready)


class ForecastScaling(ScalingRule):
    """Scales by the trajectories in flight: workers for the calls expected within the horizon, plus 1.64 standard
    deviations (19 of 20 ticks)."""

    def __init__(self, horizon_s: float) -> None:
        self._horizon = horizon_s
        self._forecast = Forecast()
        self._live: dict[int, tuple[str, float]] = {}
        self._work_s = 0.0
        """Running mean of the calls' work."""

    def began(self, t: float, call: ReplayedCall) -> None:
        self._live[id(call)] = (call.kind, t)

    def asked(self, t: float, call: ReplayedCall) -> None:
        self._work_s += (0.05 if self._work_s else 1.0) * (call.seconds - self._work_s)
        if self._live.pop(id(call), None) is not None and call.since is not None:
            self._forecast.ended(call.kind, t - call.since)

    def wanted(self, t: float, under_way: int, ready: int) -> int:
        if not self._work_s:
            return 0
        live = ((kind, t - since) for kind, since in self._live.values())
        calls = self._forecast.within(self._horizon, live).upper(1.64)
        return workers_for(calls + under_way, self._work_s, self._horizon)


def replay_dedicated(calls: Iterable[ReplayedCall], workers: int) -> CallReplay:
    """Replay the calls on a fixed number of permanent workers. Raises `ValueError` for none."""
    if workers < 1:
        raise ValueError("workers must be at least 1")
    ordered = sorted(calls, key=lambda c: c.t)
    if not ordered:
        return CallReplay((), 0.0, 0.0, 0.0, 0, workers, 0.0)
    free = [ordered[0].t] * workers
    heapq.heapify(free)
    waits, last = [], ordered[0].t
    for call in ordered:
        start = max(call.t, heapq.heappop(free))
        waits.append(start - call.t)
        heapq.heappush(free, start + call.seconds)
        last = max(last, start + call.seconds)
    span = last - ordered[0].t
    return CallReplay(tuple(waits), span * workers, sum(c.seconds for c in ordered), 0.0, 0, workers, span)


def min_dedicated_workers(calls: Sequence[ReplayedCall], wait_s: float, *, quantile: float = 0.99) -> int:
    """The smallest number of dedicated workers with which this quantile of the waits is at most `wait_s`.

    More workers never increase any wait (first come, first served), so the number is found by bisection; a worker per
    call always suffices. 1 for no calls.
    """
    low, high = 1, max(1, len(calls))
    while low < high:
        middle = (low + high) // 2
        if replay_dedicated(calls, middle).wait(quantile) <= wait_s:
            high = middle
        else:
            low = middle + 1
    return low


def replay_elastic(
    calls: Sequence[ReplayedCall],
    *,
    cold_s: float,
    keep_s: float,
    scaling: ScalingRule | None = None,
    tick_s: float = 1.0,
    most: int = 10_000,
) -> CallReplay:
    """Replay the calls on functions. A call without an idle worker starts one (up to `most`) and takes the first free
    one. An idle worker ends after `keep_s`, unless `scaling` wants it. Workers that `scaling` wants are started at its
    ticks."""
    if not (cold_s >= 0 and keep_s >= 0 and tick_s > 0 and most >= 1):
        raise ValueError("cold_s, keep_s at least 0; tick_s above 0; most at least 1")
    return _ElasticReplay(
        sorted(calls, key=lambda c: c.t), cold_s, keep_s, scaling or ScalingRule(), tick_s, most
    ).run()


ASKED, BEGAN, READY, DONE, TICK, IDLE = range(6)


@dataclass(slots=True)
class _ElasticReplay:
    calls: list[ReplayedCall]
    cold_s: float
    keep_s: float
    scaling: ScalingRule
    tick_s: float
    most: int
    workers: dict[int, float] = field(default_factory=dict)
    """Start time by worker."""
    idle: deque[int] = field(default_factory=deque)
    """Idle workers. The most recently used one is last and is used next."""
    since: dict[int, float] = field(default_factory=dict)
    """Start of the idle time by worker."""
    starting: int = 0
    waiting: deque[int] = field(default_factory=deque)
    waits: dict[int, float] = field(default_factory=dict)
    worker_s: float = 0.0
    cold_starts: int = 0
    peak: int = 0
    busy: int = 0
    kept: int = 0
    """The number of workers that `scaling` wants."""
    events: list[tuple[float, int, int, int]] = field(default_factory=list)
    """(time, kind, order, call or worker). At equal times, calls precede other events, so that a worker that becomes
    free at that time still counts as busy."""
    numbers: Iterator[int] = field(default_factory=itertools.count)

    def run(self) -> CallReplay:
        if not self.calls:
            return CallReplay((), 0.0, 0.0, 0.0, 0, 0, 0.0)
        first = min(c.t if c.since is None else c.since for c in self.calls)
        for n, call in enumerate(self.calls):
            self._push(call.t, ASKED, n)
            if call.since is not None:
                self._push(call.since, BEGAN, n)
        self._push(first, TICK, 0)
        left, end = len(self.calls), self.calls[0].t
        while self.events and left:
            t, kind, _, what = heapq.heappop(self.events)
            if kind == DONE:
                left, end = left - 1, t
            self._handle(t, kind, what)
        for worker in list(self.workers):
            self._end(worker, end)
        busy = sum(c.seconds for c in self.calls)
        waits = tuple(self.waits[n] for n in range(len(self.calls)))
        cold = self.cold_starts * self.cold_s
        return CallReplay(waits, self.worker_s, busy, cold, self.cold_starts, self.peak, end - self.calls[0].t)

    def _push(self, t: float, kind: int, what: int) -> None:
        heapq.heappush(self.events, (t, kind, next(self.numbers), what))

    def _handle(self, t: float, kind: int, what: int) -> None:
        if kind == BEGAN:
            self.scaling.began(t, self.calls[what])
        elif kind == ASKED:
            self.scaling.asked(t, self.calls[what])
            self.waiting.append(what)
            self._serve(t)
            if len(self.waiting) > self.starting:
                self._start(t)
        elif kind == READY:
            self.starting -= 1
            self._rest(t, what)
        elif kind == DONE:
            self.busy -= 1
            self._rest(t, what)
        elif kind == IDLE:
            self._expire(t, what)
        else:  # TICK
            self.kept = min(self.most, self.scaling.wanted(t, self.busy + len(self.waiting), len(self.workers)))
            while len(self.workers) < self.kept:
                self._start(t)
            for worker in list(self.idle):
                self._expire(t, worker)
            self._push(t + self.tick_s, TICK, 0)

    def _start(self, t: float) -> None:
        if len(self.workers) >= self.most:
            return
        worker = next(self.numbers)
        self.workers[worker] = t
        self.starting += 1
        self.cold_starts += 1
        self.peak = max(self.peak, len(self.workers))
        self._push(t + self.cold_s, READY, worker)

    def _rest(self, t: float, worker: int) -> None:
        self.idle.append(worker)
        self.since[worker] = t
        self._serve(t)
        if worker in self.since:
            self._push(t + self.keep_s, IDLE, worker)

    def _serve(self, t: float) -> None:
        while self.waiting and self.idle:
            n, worker = self.waiting.popleft(), self.idle.pop()
            del self.since[worker]
            self.waits[n] = t - self.calls[n].t
            self.busy += 1
            self._push(t + self.calls[n].seconds, DONE, worker)

    def _expire(self, t: float, worker: int) -> None:
        if worker in self.since and t - self.since[worker] >= self.keep_s - 1e-9 and len(self.workers) > self.kept:
            self.idle.remove(worker)
            del self.since[worker]
            self._end(worker, t)

    def _end(self, worker: int, t: float) -> None:
        self.worker_s += max(0.0, t - self.workers.pop(worker))
