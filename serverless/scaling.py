"""Live scaling: every second, workers for the calls that wait, run, and are about to come.

Reinforcement learning knows its load: each trajectory under way asks for its reward once, when it ends, so workers can
be ready before a burst instead of after it (`policy.forecast`). What no trajectory announces is followed by Knative's
rules (`policy.autoscale`), and what idles goes when idling has cost as much as its cold start (`policy.keepalive`).
"""

from __future__ import annotations

import asyncio
import pathlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from serverless.backends.base import Backend, ProvisionedBackend, ScalableBackend, WorkerLoad
from serverless.meter import MeterSink
from serverless.policy.forecast import ExpectedCalls, Forecast
from serverless.scaling_decide import CallForecast, Decider, Hysteresis, ScalingObservation
from serverless.scaling_provision import ProvisionedLevels, Provisioner
from serverless.scaling_seen import StatisticsMeter
from serverless.scaling_spec import ScalingSpec
from serverless.spec import FunctionSpec

__all__ = ["DemandSource", "NoDemand", "ScalingPrices", "ScalingDecision", "Scaler", "ScalerContext"]

_PROVISION_S = 90.0
"""A level that may change once a minute is for the calls of longer than a minute."""


class DemandSource(Protocol):
    """Trajectories, as whoever runs them knows them. Synchronous; asked once a look."""

    def live(self) -> Mapping[str, Sequence[float]]:
        """By kind (a domain), when those began that are under way and have not asked for their reward: loop seconds,
        earliest first."""

    def ended(self) -> Iterable[tuple[str, float]]:
        """Kind and duration, in seconds, of those that have asked for it since the last time this was called."""

    def kinds(self, function: str) -> Collection[str]:
        """Kinds whose trajectories are scored by a function."""


class NoDemand:
    """Nothing is known of what is to come."""

    def live(self) -> Mapping[str, Sequence[float]]:
        return {}

    def ended(self) -> Iterable[tuple[str, float]]:
        return ()

    def kinds(self, function: str) -> Collection[str]:
        return ()


@dataclass(frozen=True, slots=True)
class ScalingPrices:
    """Dollars per second: of an idle worker, by function and provider, and of a trajectory that waits."""

    idle: Callable[[FunctionSpec, str], float] = lambda spec, provider: 0.0
    waiting: Callable[[], float] = lambda: 0.0


@dataclass(frozen=True, slots=True)
class ScalingDecision:
    """Workers wanted of a function on a provider were `before` and are `after` from `t` on, because of `why` (forecast,
    reactive, idle, set back). `failed` says what went wrong, if it did: the number then stays."""

    t: float
    function: str
    provider: str
    before: int
    after: int
    why: str
    failed: str = ""


@dataclass(frozen=True, slots=True)
class ScalerContext:
    """What a scaler is told, and whom it tells. `waiting` are a function's items that are in no call yet; `route` the
    provider that its next call would go to ('': the first); `remember` a file for levels (`ProvisionedLevels`)."""

    demand: DemandSource = field(default_factory=NoDemand)
    prices: ScalingPrices = field(default_factory=ScalingPrices)
    waiting: Callable[[str], int] = lambda function: 0
    route: Callable[[str], str] = lambda function: ""
    tell: Callable[[ScalingDecision], None] = lambda scaled: None
    remember: pathlib.Path | None = None


@dataclass(slots=True)
class _ScaledFunction:
    """One function on one provider."""

    spec: FunctionSpec
    backend: ScalableBackend | ProvisionedBackend
    decider: Decider
    target: int
    provisioner: Provisioner | None = None
    keep_alive_s: float | None = None


class Scaler:
    """Owns how many workers of `functions` are kept on those of `backends` that can be told, while it is open. Use
    `async with`, inside that of the backends (which have the functions deployed) and of whatever calls them.

    Its task waits for the next look, nothing else waits for it: calls start workers on demand as before. The calls'
    meter must be `seen`. At the end every function is left to its own `warm` and `keep_alive_s`, and levels that cost
    money are set back, even if the owner is cancelled meanwhile: at most 30 s and one request each.
    Bounds: `warm <= workers kept <= concurrency`; a look costs O(log live) after reading when the live ones began.
    """

    def __init__(
        self,
        functions: Mapping[str, FunctionSpec],
        backends: Sequence[Backend],
        *,
        seen: StatisticsMeter,
        meter: MeterSink,
        settings: ScalingSpec | None = None,
        around: ScalerContext | None = None,
        hysteresis: Callable[[], Hysteresis] = Hysteresis,
    ) -> None:
        self._settings = settings or ScalingSpec()
        self._around = around or ScalerContext()
        self._seen = seen
        self._meter = meter
        self._forecast = Forecast()
        self._scored: dict[str, int] = {}
        self._hysteresis = hysteresis
        self._lines: list[_ScaledFunction] = []
        self._group: asyncio.TaskGroup | None = None
        self._tasks: list[asyncio.Task[None]] = []
        if self._settings.enabled:
            levels = ProvisionedLevels(self._around.remember)
            self._lines = [
                line
                for spec in functions.values()
                for backend in backends
                if (line := self._line(spec, backend, levels)) is not None
            ]

    def look(self) -> None:
        """One look, now. The task does this every `tick_s`."""
        now = asyncio.get_running_loop().time()
        around, live = self._around, self._around.demand.live()
        for kind, seconds in around.demand.ended():
            self._forecast.ended(kind, seconds)
            self._scored[kind] = self._scored.get(kind, 0) + 1
        for line in self._lines:
            name, provider = line.spec.name, line.backend.provider
            load, book = line.backend.load(name), self._seen.book(name, provider)
            first = around.route(name) or next(o.backend.provider for o in self._lines if o.spec.name == name)
            on = provider == first
            wanted = line.decider.decide(
                ScalingObservation(
                    now,
                    load,
                    book,
                    around.waiting(name) if on else 0,
                    self._coming(name, now, live, load, book.scored) if on else _nothing,
                    around.prices.idle(line.spec, provider),
                    around.prices.waiting(),
                )
            )
            self._apply(line, wanted.workers, wanted.why, wanted.keep_alive_s, now)

    async def __aenter__(self) -> Scaler:
        if self._lines:
            self._group = asyncio.TaskGroup()
            await self._group.__aenter__()
            paid = [line.provisioner for line in self._lines if line.provisioner is not None]
            # Not asked for, yet there: what a life of this run that was killed has left.
            works = (p.run() if self._settings.provisioned else p.back() for p in paid)
            self._tasks = [self._group.create_task(work) for work in works]
            self._tasks.append(self._group.create_task(self._run()))
        return self

    async def __aexit__(self, *exc: object) -> None:
        group, self._group = self._group, None
        if group is None:
            return
        try:
            for task in self._tasks:
                task.cancel()
            await group.__aexit__(None, None, None)
        finally:
            now = asyncio.get_running_loop().time()
            for line in self._lines:
                if line.provisioner is None:
                    self._apply(line, 0, "set back", line.spec.keep_alive_s, now)
            await self._set_back()

    async def _run(self) -> None:
        while True:
            self.look()
            await asyncio.sleep(self._settings.tick_s)

    async def _set_back(self) -> None:
        """All at once, each in bounded time of its own; a cancellation waits for them."""
        paid = [line.provisioner for line in self._lines if line.provisioner is not None]
        if not paid:
            return
        together = asyncio.gather(*(p.back() for p in paid), return_exceptions=True)
        cancelled = False
        while not together.done():
            try:
                await asyncio.shield(together)
            except asyncio.CancelledError:
                cancelled = True
        if cancelled:
            raise asyncio.CancelledError

    def _line(self, spec: FunctionSpec, backend: Backend, levels: ProvisionedLevels) -> _ScaledFunction | None:
        if isinstance(backend, ScalableBackend):
            return _ScaledFunction(spec, backend, Decider(spec, self._settings), spec.warm)
        if not isinstance(backend, ProvisionedBackend):
            return None
        name, provider = spec.name, backend.provider
        if not self._settings.provisioned and f"{provider}/{name}" not in levels.before:
            return None

        def told(before: int, after: int, why: str, failed: str) -> None:
            now = asyncio.get_running_loop().time()
            self._around.tell(ScalingDecision(now, name, provider, before, after, why, failed))

        provisioner = Provisioner(
            spec,
            backend,
            meter=self._meter,
            book=self._seen.book(name, provider),
            levels=levels,
            told=told,
            hysteresis=self._hysteresis(),
        )
        return _ScaledFunction(
            spec, backend, Decider(spec, self._settings, least_horizon_s=_PROVISION_S), 0, provisioner
        )

    def _apply(self, line: _ScaledFunction, workers: int, why: str, keep_alive_s: float | None, now: float) -> None:
        if line.provisioner is not None:
            line.provisioner.want(workers, why)
            return
        assert isinstance(line.backend, ScalableBackend)
        before = line.target
        changed = keep_alive_s if keep_alive_s != line.keep_alive_s else None
        line.keep_alive_s = keep_alive_s
        line.target = line.backend.keep(line.spec.name, workers, keep_alive_s=changed)
        if line.target != before:
            self._around.tell(ScalingDecision(now, line.spec.name, line.backend.provider, before, line.target, why))

    def _coming(
        self, function: str, now: float, live: Mapping[str, Sequence[float]], load: WorkerLoad, items: int
    ) -> CallForecast:
        """Items of a function within a horizon: of each kind that it scores and of which enough have ended, those that
        will end. Fewer by the share that needed no call until now (the cache, equal items)."""
        kinds = self._around.demand.kinds(function)
        known = [k for k in kinds if self._forecast.seen(k) >= self._settings.forecast.min_seen]
        if not known:
            return _nothing
        asked = sum(self._scored.get(k, 0) for k in kinds)
        book_items = items + load.under_way + self._around.waiting(function)
        share = min(1.0, (book_items + _PRIOR) / (asked + _PRIOR))

        def coming(horizon_s: float) -> ExpectedCalls:
            found = [self._forecast.among(k, live.get(k, ()), now, horizon_s) for k in known]
            return ExpectedCalls(share * sum(e.mean for e in found), share * sum(e.variance for e in found))

        return coming


_PRIOR = 64.0
"""Items that are taken to have needed a call before any was seen: a first burst whose calls have not ended is no sign
of a cache."""


def _nothing(horizon_s: float) -> None:
    return None
