"""Simulates Lambda and Modal locally: their cold starts, overheads and throttles, added to another backend.

It shows a run's behaviour when a burst meets cold environments, before paying for it. The figures are drawn per
function from a seeded generator, so a rehearsal is repeatable; they are models with a source, not promises of the
providers.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from serverless.deploy.package import Package
from serverless.providers.base import Reply
from serverless.types import Cause, FaultKind, InfraFault, Throttle
from serverless.workers.pool import Launcher, PooledBackend, Worker, WorkerFault


@dataclass(frozen=True, slots=True)
class LogNormalSeconds:
    """A log-normal duration in seconds: `median_s` times e to a normal of deviation `sigma`."""

    median_s: float
    sigma: float

    @classmethod
    def between(cls, median_s: float, p95_s: float) -> LogNormalSeconds:
        """The distribution with these two quantiles."""
        return cls(median_s, math.log(p95_s / median_s) / 1.6449)

    def draw(self, rng: random.Random) -> float:
        return self.median_s * rng.lognormvariate(0.0, self.sigma)


@dataclass(frozen=True, slots=True)
class Platform:
    """The behaviour of a provider beyond the function's own cost.

    cold_start   from the request of an environment until the function's own start-up begins; billed
    call         overhead of a warm call, both ways
    concurrency  maximum concurrent calls in the account; further calls are throttled (CONCURRENCY)
    scale_burst  environments that can start at once, and `scale_per_s` more each second; further ones are throttled
                 (SCALING)
    """

    name: str
    cold_start: LogNormalSeconds
    call: LogNormalSeconds
    concurrency: int
    scale_burst: int
    scale_per_s: float
    source: str


LAMBDA = Platform(
    "aws_lambda",
    cold_start=LogNormalSeconds.between(0.25, 0.8),
    call=LogNormalSeconds.between(0.0034, 0.010),
    concurrency=1000,
    scale_burst=1000,
    scale_per_s=100.0,
    source=(
        "cold start: published measurements go from 100 ms to over 1 s, of which 108-136 ms were measured for "
        "awslambdaric 4.2.2 alone; call: p50 3.4 and p95 8-12 ms measured with the same, without a network; limits: "
        "AWS quotas, 1,000 at once in a region, 1,000 new environments per function in 10 s; the init phase of managed "
        "runtimes is billed since 2025-08-01"
    ),
)

MODAL = Platform(
    "modal",
    cold_start=LogNormalSeconds.between(1.1, 3.0),
    call=LogNormalSeconds.between(0.0064, 0.026),
    concurrency=1000,
    scale_burst=100,
    scale_per_s=20.0,
    source=(
        "cold start: 1.0-1.1 s measured for the container runtime of modal 1.6.4 alone, the tail assumed; call: "
        "p50 6.4-26 ms measured with the same, without a network; limits: the 1,000 containers of a Team plan, the "
        "rate of starts assumed"
    ),
)

PLATFORMS = {platform.name: platform for platform in (LAMBDA, MODAL)}


class RehearsedLauncher:
    """Implements `Launcher` around another: starts later, and not faster than the platform scales.

    For `LocalBackend(launcher=lambda own: RehearsedLauncher(own, LAMBDA))`. For one event loop, like the pools.
    """

    def __init__(self, launcher: Launcher, platform: Platform, *, seed: int = 0) -> None:
        self._launcher = launcher
        self._platform = platform
        self._seed = seed
        self._rngs: dict[str, random.Random] = {}
        self._tokens: dict[str, tuple[float, float]] = {}
        """The token bucket of starts of each function: its tokens, and when they were counted."""

    async def start(self, package: Package, slot: int, gone: Callable[[], None]) -> Worker:
        name, platform = package.spec.name, self._platform
        now, burst = asyncio.get_running_loop().time(), float(platform.scale_burst)
        tokens, since = self._tokens.get(name, (burst, now))
        tokens = min(burst, tokens + (now - since) * platform.scale_per_s)
        self._tokens[name] = (tokens - 1.0 if tokens >= 1.0 else tokens, now)
        if tokens < 1.0:
            detail = f"rehearsal: {platform.name} starts {platform.scale_per_s:g} environments a second"
            raise WorkerFault(InfraFault(FaultKind.THROTTLED, retryable=True, detail=detail, throttle=Throttle.SCALING))
        cold_s = platform.cold_start.draw(self._rngs.setdefault(name, random.Random(f"{self._seed}/{name}")))
        await asyncio.sleep(cold_s)
        started = await self._launcher.start(package, slot, gone)
        started.init_s += cold_s
        return started


class RehearsedBackend:
    """Implements `Backend` and `ScalableBackend` around another: calls take the platform's overhead, and calls above
    its concurrency are throttled.

    Its cold starts are the inner backend's: give that one a `RehearsedLauncher`. Bills name the inner provider.
    """

    def __init__(self, backend: PooledBackend, platform: Platform, *, seed: int = 0) -> None:
        self.provider = backend.provider
        self.deploy = backend.deploy
        self.load = backend.load
        self.keep = backend.keep
        self._backend = backend
        self._platform = platform
        self._rng = random.Random(f"{seed}/calls")
        self._running = 0

    async def invoke(
        self, function: str, event: Sequence[dict[str, Any]], *, deadline_s: float, cause: Cause = Cause.CALL
    ) -> Reply:
        platform = self._platform
        if self._running >= platform.concurrency:
            detail = f"rehearsal: {platform.concurrency} calls run on {platform.name}"
            fault = InfraFault(FaultKind.THROTTLED, retryable=True, detail=detail, throttle=Throttle.CONCURRENCY)
            return Reply(fault=fault)
        overhead_s = platform.call.draw(self._rng)
        self._running += 1
        try:
            if overhead_s >= deadline_s:
                await asyncio.sleep(deadline_s)
                detail = f"no answer in {deadline_s:.3f} s"
                return Reply(fault=InfraFault(FaultKind.DEADLINE, retryable=False, detail=detail))
            await asyncio.sleep(overhead_s)
            return await self._backend.invoke(function, event, deadline_s=deadline_s - overhead_s, cause=cause)
        finally:
            self._running -= 1

    async def __aenter__(self) -> RehearsedBackend:
        await self._backend.__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._backend.__aexit__(*exc)
