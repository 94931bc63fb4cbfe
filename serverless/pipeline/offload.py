"""`Offload.submit(function, item, deadline_s) -> Outcome`: the only path by which a reward leaves the process.

The stages in order: validation, deduplication of equal items in flight, result cache, admission, batching, time limit
and deadline, call, hedging, isolation of the failing item of a batch, retry, circuit breaker, fallback provider, check
of the answer. `PipelineSpec` switches and configures every stage; `Offload.stages` reports the effect of each.

`Offload` has a `FunctionQueue` per function for its pending items and their waiters, and that has a `ProviderQueue` per
provider for the calls. The decisions of the stages are pure and stand beside them in this package.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import pathlib
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any

from serverless.deploy.package import Package
from serverless.errors import BackendFailed, UnknownFunction
from serverless.meter import MeterSink, NullMeter
from serverless.pipeline.admission import CallQuota
from serverless.pipeline.cache import Cache
from serverless.pipeline.queues import FunctionQueue
from serverless.pipeline.stages import FunctionHealth, OffloadStage, PipelineSpec, StageCounts
from serverless.providers.base import Backend
from serverless.spec import FunctionSpec
from serverless.types import Item, Outcome


class Offload:
    """Scores items through one backend, or several in order of preference. Use `async with`: entering deploys the
    functions (`Package.spec.name`) on each of the (already open) backends.

    Owns the waiting items of every function and a task per invocation in flight. Any number of tasks may call `submit`;
    each waits for its own outcome and is unblocked by that outcome, by its deadline or by its cancellation. A call is
    cancelled when the last of its waiters has left. Invariants: at most `concurrency` invocations are in flight per
    function and provider; at most `queue` items wait per function; every submit gets exactly one outcome; an item is
    called at most `max_attempts` times, not counting refusals, other providers and isolation; retries <= reserve + 10 %
    of items; hedges <= 5 % of calls.

    `cache` is the file of the result cache. `meter` receives savings (the backends report calls). `warn` receives
    warnings for the user. `quota` is the maximum number of calls in flight at each provider, over all functions.
    """

    def __init__(
        self,
        packages: Sequence[Package],
        backends: Backend | Sequence[Backend],
        *,
        seed: int = 0,
        settings: PipelineSpec | None = None,
        cache: pathlib.Path | None = None,
        meter: MeterSink | None = None,
        warn: Callable[[str], None] | None = None,
        quota: int | None = None,
    ) -> None:
        self._packages = tuple(packages)
        self._backends: tuple[Backend, ...] = tuple(backends) if isinstance(backends, Sequence) else (backends,)
        if not self._backends:
            raise BackendFailed("an offload needs a backend", remedy="give one, or several in order of preference")
        common = settings or PipelineSpec()
        self._cache: Cache | None = None
        if cache is not None and common.cache.enabled:
            warn = warn or logging.getLogger(__name__).warning
            self._cache = Cache(cache, max_entries=common.cache.max_entries, warn=warn)
        quotas = [CallQuota(math.inf if quota is None else quota) for _ in self._backends]
        self._queues: dict[str, FunctionQueue] = {}
        for package in self._packages:
            self._queues[package.spec.name] = FunctionQueue(
                package,
                self._backends,
                common,
                cache=self._cache,
                meter=meter or NullMeter(),
                spawn=self._spawn,
                seed=seed,
                quotas=quotas,
            )
        self._group: asyncio.TaskGroup | None = None

    @property
    def functions(self) -> Mapping[str, FunctionSpec]:
        """The deployed functions by name, with their decorators' settings."""
        return {p.spec.name: p.spec for p in self._packages}

    def waiting_for(self, function: str) -> int:
        """Items of one function that wait for a call."""
        return self._queue_of(function).waiting

    def stages(self) -> dict[str, dict[OffloadStage, StageCounts]]:
        """The counts of every stage since the start, by function: a copy."""
        return {name: {s: replace(c) for s, c in queue.stages.items()} for name, queue in self._queues.items()}

    def health(self) -> dict[str, FunctionHealth]:
        """The fault rates of the functions as their callers observed them. The caller decides on the tolerated rate."""
        return {name: queue.health for name, queue in self._queues.items()}

    def refusals(self) -> dict[str, dict[str, dict[str, int]]]:
        """Refused or delayed calls since the start, by function, provider and limit (`ProviderQueue.refusals`)."""
        return {
            name: {one.provider: one.refusals for one in queue.provider_queues} for name, queue in self._queues.items()
        }

    def providers(self, function: str) -> dict[str, tuple[str, int]]:
        """The providers of a function in order of preference: the state of the circuit breaker ("closed" if there is
        none) and the number of calls that may be in flight."""
        return {
            queue.provider: (str(queue.breaker.state), queue.window)
            for queue in self._queue_of(function).provider_queues
        }

    async def submit(self, function: str, item: Item, deadline_s: float) -> Outcome:
        """Score one item within `deadline_s` seconds from now. Every failure is returned as a value.

        Raises `UnknownFunction` and `BackendFailed` (not open) for the caller's mistakes.
        """
        queue = self._queue_of(function)
        if self._group is None:
            raise BackendFailed("the offload is not open", remedy="use `async with`")
        return await queue.submit(item, deadline_s)

    async def __aenter__(self) -> Offload:
        for backend in self._backends:
            for package in self._packages:
                await backend.deploy(package)
        if self._cache is not None:
            self._cache.open()
        self._group = asyncio.TaskGroup()
        await self._group.__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        group, self._group = self._group, None
        with contextlib.ExitStack() as stack:
            if self._cache is not None:
                stack.callback(self._cache.close)
            for queue in self._queues.values():
                queue.close()
            if group is not None:
                await group.__aexit__(None, None, None)

    def _queue_of(self, function: str) -> FunctionQueue:
        queue = self._queues.get(function)
        if queue is None:
            raise UnknownFunction(f"no function {function!r}", remedy=f"functions: {', '.join(self._queues) or 'none'}")
        return queue

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a task for a provider queue."""
        assert self._group is not None
        return self._group.create_task(work)
