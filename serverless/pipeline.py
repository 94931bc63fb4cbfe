"""`Offload.submit(function, item, deadline_s) -> Outcome`: the one way by which a reward leaves the process.

validate -> join an equal item under way -> known result -> admission -> gather into a batch -> time limit and deadline
-> call -> hedge if it is late -> find the guilty item of a failed batch -> retry -> breaker -> next provider -> check
the answer. `serverless.settings.PipelineSpec` switches and sets every stage; `Offload.stages` tells what each did.

Where it is: `pipeline_line` keeps who waits for what, `pipeline_lane` one provider's calls, `pipeline_queue` the
waiting items; every decision is a pure policy under `policy/`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import pathlib
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any

from serverless.backends.base import Backend
from serverless.cache import Cache
from serverless.deploy.package import Package
from serverless.errors import BackendFailed, UnknownFunction
from serverless.meter import MeterSink, NullMeter
from serverless.pipeline_line import FunctionQueue
from serverless.pipeline_stats import FunctionHealth, OffloadStage, StageCounts
from serverless.policy.retry import RetryPolicy
from serverless.settings import PipelineSpec
from serverless.spec import FunctionSpec
from serverless.types import Item, Outcome

__all__ = ["Offload"]


class Offload:
    """Scores items through one backend, or a chain of them in order of preference. Use `async with`: entering deploys
    the functions (`Package.spec.name`) on each of the (already open) backends.

    Owns the waiting items of every function and a task per invocation in flight. Any number of tasks may call `submit`;
    each waits for its own outcome and is unblocked by it, by its deadline or by its cancellation. A call that nobody
    waits for any more is cancelled.
    Invariants: at most `concurrency` invocations in flight per function and provider, `queue` items waiting per
    function; every submit gets exactly one outcome; an item is called at most `max_attempts` times, refusals, other
    providers and the search for a guilty item apart; retries <= reserve + 10 % of items, hedges <= 5 % of calls.

    `cache` is the file of the result cache, `meter` where savings are reported (calls are by the backends), `warn`
    takes what a person should know. `retry` overrides the settings' part. `overrides` are settings by function.
    """

    def __init__(
        self,
        packages: Sequence[Package],
        backends: Backend | Sequence[Backend],
        *,
        seed: int = 0,
        retry: RetryPolicy | None = None,
        settings: PipelineSpec | None = None,
        overrides: Mapping[str, PipelineSpec] | None = None,
        cache: pathlib.Path | None = None,
        meter: MeterSink | None = None,
        warn: Callable[[str], None] | None = None,
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
        self._lines: dict[str, FunctionQueue] = {}
        for package in self._packages:
            chosen = (overrides or {}).get(package.spec.name, common)
            self._lines[package.spec.name] = FunctionQueue(
                package,
                self._backends,
                chosen,
                retry=retry or chosen.retry.policy(),
                cache=self._cache if chosen.cache.enabled else None,
                meter=meter or NullMeter(),
                spawn=self._spawn,
                seed=seed,
            )
        self._group: asyncio.TaskGroup | None = None

    @property
    def functions(self) -> Mapping[str, FunctionSpec]:
        """The deployed functions by name, with their decorators' settings."""
        return {p.spec.name: p.spec for p in self._packages}

    @property
    def waiting(self) -> int:
        """Items that wait for a call."""
        return sum(line.waiting for line in self._lines.values())

    def waiting_for(self, function: str) -> int:
        """Items of one function that wait for a call."""
        return self._line(function).waiting

    def stages(self) -> dict[str, dict[OffloadStage, StageCounts]]:
        """What every stage did, cost and saved since the start, by function: a copy."""
        return {name: {s: replace(c) for s, c in line.stages.items()} for name, line in self._lines.items()}

    def health(self) -> dict[str, FunctionHealth]:
        """The functions' fault rates as their callers met them. Whoever runs them decides what rate is too high."""
        return {name: line.health for name, line in self._lines.items()}

    def providers(self, function: str) -> dict[str, tuple[str, int]]:
        """The chain of a function: by provider its breaker's state ("closed" if it has none) and the calls it may have
        in flight."""
        return {
            backend.provider: (str(lane.breaker.state) if lane.breaker is not None else "closed", lane.window)
            for backend, lane in zip(self._backends, self._line(function).lanes, strict=False)
        }

    async def submit(self, function: str, item: Item, deadline_s: float) -> Outcome:
        """Score one item within `deadline_s` seconds from now. A failure is a value, whatever it is.

        `UnknownFunction` and `BackendFailed` (not open) are the caller's mistakes.
        """
        line = self._line(function)
        if self._group is None:
            raise BackendFailed("the offload is not open", remedy="use `async with`")
        return await line.submit(item, deadline_s)

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
            for line in self._lines.values():
                line.close()
            if group is not None:
                await group.__aexit__(None, None, None)

    def _line(self, function: str) -> FunctionQueue:
        line = self._lines.get(function)
        if line is None:
            raise UnknownFunction(f"no function {function!r}", remedy=f"functions: {', '.join(self._lines) or 'none'}")
        return line

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """For the lanes of this offload."""
        assert self._group is not None
        return self._group.create_task(work)
