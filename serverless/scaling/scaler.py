"""Live scaling: once a second, start workers for the calls that wait, run, or are about to arrive.

In reinforcement learning, the load is known in advance: each live trajectory requests its reward once, when it ends, so
workers can be ready before a burst (`forecast`). Load that no trajectory announces is covered by Knative's rules
(`autoscaler`). An idle worker is stopped once its idle time has cost as much as its cold start (`decisions`).

On providers that charge for provisioned workers by the second, a `Provisioner` adjusts the paid level: rarely, with
every second metered, and reset at the end.
"""

from __future__ import annotations

import asyncio
import json
import logging
import pathlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field

from serverless.meter import MeterSink, WorkerSpan, WorkerState
from serverless.providers.base import Backend, ProvisionedBackend, ScalableBackend, WorkerLoad
from serverless.scaling.decisions import (
    CallForecast,
    CallStatistics,
    Decider,
    Hysteresis,
    ScalingObservation,
    StatisticsMeter,
)
from serverless.scaling.forecast import ExpectedCalls, Forecast
from serverless.scaling.settings import ScalingSpec
from serverless.spec import FunctionSpec


class DemandSource:
    """The live trajectories of the caller; this one announces none. Synchronous; read once per tick."""

    def live(self) -> Mapping[str, Sequence[float]]:
        """Start times of the live trajectories that have not requested their reward, by kind (a domain): loop seconds,
        earliest first."""
        return {}

    def ended(self) -> Iterable[tuple[str, float]]:
        """Kind and duration (seconds) of each trajectory that has requested its reward since the previous call."""
        return ()

    def kinds(self, function: str) -> Collection[str]:
        """The kinds of trajectory that a function scores."""
        return ()


@dataclass(frozen=True, slots=True)
class ScalingPrices:
    """US dollars per second: of an idle worker (by function and provider) and of a trajectory that waits."""

    idle: Callable[[FunctionSpec, str], float] = lambda spec, provider: 0.0
    waiting: Callable[[], float] = lambda: 0.0


@dataclass(frozen=True, slots=True)
class ScalingDecision:
    """A change of the wanted number of workers of a function on a provider, from `before` to `after`, in force from `t`
    on.

    `why` is forecast, reactive, idle or set back. `failed` is the error text of a failed change, after which the number
    stays.
    """

    t: float
    function: str
    provider: str
    before: int
    after: int
    why: str
    failed: str = ""


@dataclass(frozen=True, slots=True)
class ScalerContext:
    """Inputs and outputs of a scaler. `waiting` returns the number of a function's items that are in no call yet.
    `route` returns the provider of its next call ('': the first). `remember` is the file for original levels
    (`ProvisionedLevels`)."""

    demand: DemandSource = field(default_factory=DemandSource)
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


_PROVISION_S = 90.0
"""Minimum horizon. A level that may change once a minute serves calls that take longer than a minute."""

_PRIOR = 64.0
"""Prior weight of items that needed a call. A first burst whose calls have not ended is no evidence of a cache."""


class Scaler:
    """Controls the number of workers of `functions` on the scalable ones of `backends` while it is open. Use `async
    with`, inside that of the backends (which have the functions deployed) and of their callers.

    Its task waits only for the next tick, and no other task waits for it: calls still start workers on demand. The
    meter of the calls must be `seen`. At the end, every function returns to its own `warm` and `keep_alive_s`, and paid
    levels are reset even if the owner is cancelled meanwhile; each takes one request of at most 30 s. Bounds: `warm <=
    workers kept <= concurrency`. A tick costs O(log live) after reading the start times of live trajectories.
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
        self._context = around or ScalerContext()
        self._seen = seen
        self._meter = meter
        self._forecast = Forecast()
        self._scored: dict[str, int] = {}
        self._hysteresis = hysteresis
        self._managed: list[_ScaledFunction] = []
        self._group: asyncio.TaskGroup | None = None
        self._tasks: list[asyncio.Task[None]] = []
        if self._settings.enabled:
            levels = ProvisionedLevels(self._context.remember)
            self._managed = [
                managed
                for spec in functions.values()
                for backend in backends
                if (managed := self._managed_function(spec, backend, levels)) is not None
            ]
        self._paid = [managed.provisioner for managed in self._managed if managed.provisioner is not None]

    def tick(self) -> None:
        """Run one tick now. The task does this every `tick_s`."""
        now = asyncio.get_running_loop().time()
        around, live = self._context, self._context.demand.live()
        for kind, seconds in around.demand.ended():
            self._forecast.ended(kind, seconds)
            self._scored[kind] = self._scored.get(kind, 0) + 1
        for managed in self._managed:
            name, provider = managed.spec.name, managed.backend.provider
            load, statistics = managed.backend.load(name), self._seen.statistics(name, provider)
            first = around.route(name) or next(o.backend.provider for o in self._managed if o.spec.name == name)
            on = provider == first
            wanted = managed.decider.decide(
                ScalingObservation(
                    now,
                    load,
                    statistics,
                    around.waiting(name) if on else 0,
                    self._forecast_calls(name, now, live, load, statistics.scored) if on else _nothing,
                    around.prices.idle(managed.spec, provider),
                    around.prices.waiting(),
                )
            )
            self._apply(managed, wanted.workers, wanted.why, wanted.keep_alive_s, now)

    async def __aenter__(self) -> Scaler:
        if self._managed:
            self._group = asyncio.TaskGroup()
            await self._group.__aenter__()
            # Without `provisioned`, only the levels that a killed run left behind are reset.
            works = (p.run() if self._settings.provisioned else p.restore() for p in self._paid)
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
            for managed in self._managed:
                if managed.provisioner is None:
                    self._apply(managed, 0, "set back", managed.spec.keep_alive_s, now)
            # Reset all levels concurrently, each within its own time limit. A cancellation waits for them.
            resets = asyncio.gather(*(p.restore() for p in self._paid), return_exceptions=True)
            cancelled = False
            while not resets.done():
                try:
                    await asyncio.shield(resets)
                except asyncio.CancelledError:
                    cancelled = True
            if cancelled:
                raise asyncio.CancelledError

    async def _run(self) -> None:
        while True:
            self.tick()
            await asyncio.sleep(self._settings.tick_s)

    def _managed_function(
        self, spec: FunctionSpec, backend: Backend, levels: ProvisionedLevels
    ) -> _ScaledFunction | None:
        if isinstance(backend, ScalableBackend):
            return _ScaledFunction(spec, backend, Decider(spec, self._settings), spec.warm)
        if not isinstance(backend, ProvisionedBackend):
            return None
        name, provider = spec.name, backend.provider
        if not self._settings.provisioned and f"{provider}/{name}" not in levels.before:
            return None

        def on_change(before: int, after: int, why: str, failed: str) -> None:
            now = asyncio.get_running_loop().time()
            self._context.tell(ScalingDecision(now, name, provider, before, after, why, failed))

        provisioner = Provisioner(
            spec,
            backend,
            meter=self._meter,
            statistics=self._seen.statistics(name, provider),
            levels=levels,
            on_change=on_change,
            hysteresis=self._hysteresis(),
        )
        return _ScaledFunction(
            spec, backend, Decider(spec, self._settings, least_horizon_s=_PROVISION_S), 0, provisioner
        )

    def _apply(self, managed: _ScaledFunction, workers: int, why: str, keep_alive_s: float | None, now: float) -> None:
        if managed.provisioner is not None:
            managed.provisioner.want(workers, why)
            return
        assert isinstance(managed.backend, ScalableBackend)
        before = managed.target
        changed = keep_alive_s if keep_alive_s != managed.keep_alive_s else None
        managed.keep_alive_s = keep_alive_s
        managed.target = managed.backend.keep(managed.spec.name, workers, keep_alive_s=changed)
        if managed.target != before:
            self._context.tell(
                ScalingDecision(now, managed.spec.name, managed.backend.provider, before, managed.target, why)
            )

    def _forecast_calls(
        self, function: str, now: float, live: Mapping[str, Sequence[float]], load: WorkerLoad, items: int
    ) -> CallForecast:
        """Forecast of a function's items within a horizon: the expected ends of the trajectories of each kind that it
        scores and that has enough history. It is reduced by the share of items that needed no call so far (cache, equal
        items)."""
        kinds = self._context.demand.kinds(function)
        known = [k for k in kinds if self._forecast.seen(k) >= self._settings.forecast.min_seen]
        if not known:
            return _nothing
        asked = sum(self._scored.get(k, 0) for k in kinds)
        book_items = items + load.under_way + self._context.waiting(function)
        share = min(1.0, (book_items + _PRIOR) / (asked + _PRIOR))

        def expected_calls(horizon_s: float) -> ExpectedCalls:
            found = [self._forecast.among(k, live.get(k, ()), now, horizon_s) for k in known]
            return ExpectedCalls(share * sum(e.mean for e in found), share * sum(e.variance for e in found))

        return expected_calls


def _nothing(horizon_s: float) -> None:
    return None


_REQUEST_S = 300.0
"""Lambda may take minutes to prepare provisioned environments."""

_BACK_S = 30.0
"""Limit on resetting a level at the end. It is one request, which does not wait for environments."""

_SPAN_S = 60.0
"""Interval of metering. A process that is killed leaves at most this much time unmetered."""


@dataclass(eq=False)
class Provisioner:
    """Manages the provisioned level of one function on one provider.

    `run` waits for calls of `want` and is unblocked by them. After `run` has ended, `restore` resets the original
    level. A failed request is reported and retried at the next permitted change; no exception reaches the caller. The
    level stays within 0..concurrency and never falls below the original one. `on_change` is called with the level
    before, the level after, the reason, and the error text or ''.
    """

    spec: FunctionSpec
    backend: ProvisionedBackend
    _: KW_ONLY
    meter: MeterSink
    statistics: CallStatistics
    levels: ProvisionedLevels
    on_change: Callable[[int, int, str, str], None]
    hysteresis: Hysteresis
    _wanted: int = field(default=0, init=False)
    _why: str = field(default="idle", init=False)
    _requested: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _original: int | None = field(default=None, init=False)
    _since: float = field(default=0.0, init=False)
    _billed_s: float = field(default=0.0, init=False)
    level: int = field(default=0, init=False)

    @property
    def _key(self) -> str:
        return f"{self.backend.provider}/{self.spec.name}"

    def want(self, workers: int, why: str) -> None:
        self._wanted, self._why = workers, why
        self._requested.set()

    async def run(self) -> None:
        """Follow the wanted level until cancelled."""
        now = asyncio.get_running_loop().time
        try:
            while True:
                await self._requested.wait()
                self._requested.clear()
                if self._original is None and not await self._read_level():
                    continue
                assert self._original is not None
                wanted = max(self._original, min(self._wanted, self.spec.concurrency))
                level = self.hysteresis.next(now(), self.level, wanted)
                if level != self.level:
                    await self._change(level)
                elif now() - self._since >= _SPAN_S:
                    self._report()
        finally:
            self._report()

    async def restore(self) -> None:
        """Reset the original level if this run or an earlier life of it changed the level."""
        if self._key not in self.levels.before:
            return
        before, level = self.level, self.levels.before[self._key]
        try:
            async with asyncio.timeout(_BACK_S):
                await self.backend.provision(self.spec.name, level)
        except Exception as error:
            self.on_change(before, level, "set back", _first_line(error))
            return
        finally:
            self._report()
        self.level = level
        self.levels.remember(self._key, None)
        self.on_change(before, level, "set back", "")

    async def _read_level(self) -> bool:
        """Read the current level before the first change. Returns False if it cannot be read yet."""
        loop = asyncio.get_running_loop()
        if loop.time() < self.hysteresis.changed + self.hysteresis.up_s:
            return False
        try:
            async with asyncio.timeout(_REQUEST_S):
                self.level = await self.backend.provisioned(self.spec.name)
        except Exception as error:
            self.hysteresis.changed = loop.time()
            self.on_change(0, 0, "look", _first_line(error))
            return False
        # The file wins over the provider's level: a killed run may have left its own level there.
        self._original = self.levels.before.get(self._key, self.level)
        self._since, self._billed_s = loop.time(), self.statistics.billed_s
        return True

    async def _change(self, level: int) -> None:
        loop = asyncio.get_running_loop()
        before, why = self.level, self._why
        self._report()
        assert self._original is not None
        try:
            # Recorded before the request: the request may take effect even if its answer is lost.
            self.levels.remember(self._key, self._original)
            async with asyncio.timeout(_REQUEST_S):
                await self.backend.provision(self.spec.name, level)
        except Exception as error:
            self.on_change(before, level, why, _first_line(error))
        else:
            self.level = level
            if level == self._original:
                self.levels.remember(self._key, None)
            self.on_change(before, level, why, "")
        finally:
            self.hysteresis.changed = loop.time()

    def _report(self) -> None:
        """Meter the time at the current level since the last report, as one worker with the memory of all. A new level
        counts from the time of its request. If the provider's call bills cover the same container seconds, meter only
        the unused part."""
        now = asyncio.get_running_loop().time()
        since, self._since = self._since, now
        billed, self._billed_s = self.statistics.billed_s - self._billed_s, self.statistics.billed_s
        if self._original is None or now <= since:
            return
        seconds = self.level * (now - since)
        if self.backend.calls_included:
            seconds = max(0.0, seconds - billed)
        memory_mb = round(self.spec.memory_mb * seconds / (now - since))
        if memory_mb:
            span = WorkerSpan(
                self.spec.name, self.backend.provider, "provisioned", since, now, WorkerState.IDLE, memory_mb
            )
            self.meter.worker(span)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]


@dataclass(slots=True)
class ProvisionedLevels:
    """The levels from before a run changed them, stored in a file. A run that was killed leaves its own level at the
    provider, and the resumed run must not take it for the user's. Nothing is stored if `path` is None."""

    path: pathlib.Path | None = None
    before: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.path is None or not self.path.exists():
            return
        try:
            self.before = {str(key): int(level) for key, level in json.loads(self.path.read_text()).items()}
        except (OSError, ValueError, TypeError, AttributeError) as error:
            logging.getLogger(__name__).warning("%s is not read: %s", self.path, error)

    def remember(self, key: str, level: int | None) -> None:
        """Record the original level of a function. `level` None: the original level is in force again."""
        if level is None:
            self.before.pop(key, None)
        else:
            self.before[key] = level
        if self.path is not None:
            partial = self.path.with_suffix(".partial")
            partial.write_text(json.dumps(self.before))
            partial.replace(self.path)
