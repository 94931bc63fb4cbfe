"""A modelled function provider: the same pool, with workers that are sleeps on the loop. For virtual time.

Latencies and faults are drawn from one seeded `Random` per function, so a run repeats exactly.
"""

from __future__ import annotations

import asyncio
import inspect
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from serverless.backends.base import Load, Reply
from serverless.backends.host import PoolHost
from serverless.backends.pool import Answer, Request, WorkerFault
from serverless.deploy.handler import ListHandler, adapt, is_async, score_concurrently
from serverless.deploy.package import Package
from serverless.meter import MeterSink, NullMeter
from serverless.types import Cause, FaultKind, InfraFault

__all__ = ["Profile", "SimulatedBackend"]


@dataclass(frozen=True, slots=True)
class Profile:
    """How a function behaves. Seconds; a latency is `call_s + items * item_s`, times a log-normal factor.

    `sigma` 0 makes it constant; its median is the given one. `faults` are probabilities of a call, by kind:
    TIMEOUT never answers, CRASH and OUT_OF_MEMORY end the worker halfway, others are answers.
    """

    cold_start_s: float = 0.1
    call_s: float = 0.005
    item_s: float = 0.001
    sigma: float = 0.0
    overhead_s: float = 0.0
    """The way there and back: waited for, not billed."""
    faults: Mapping[FaultKind, float] | None = None
    failed_start: float = 0.0
    """Probability that a start fails (retryable)."""

    def __post_init__(self) -> None:
        total = sum((self.faults or {}).values())
        if not 0.0 <= total <= 1.0 or not 0.0 <= self.failed_start <= 1.0:
            raise ValueError(f"faults sum to {total:g}, failed_start is {self.failed_start:g}: not in 0..1")


class SimulatedBackend:
    """Implements `Backend` and `Scalable`. `functions` maps a name to the callable that a real package would hold; it
    runs inline and takes no loop time. Functions without a profile get the default one."""

    provider = "simulated"

    def __init__(
        self,
        functions: Mapping[str, Callable[..., Any]],
        *,
        meter: MeterSink | None = None,
        profiles: Mapping[str, Profile] | None = None,
        seed: int = 0,
    ) -> None:
        self._functions = functions
        self._profiles = profiles or {}
        self._seed = seed
        self._host = PoolHost(self, provider=self.provider, meter=meter or NullMeter())

    async def deploy(self, package: Package) -> None:
        self._host.deploy(package)

    async def invoke(
        self, function: str, event: Sequence[dict[str, Any]], *, deadline_s: float, cause: Cause = Cause.CALL
    ) -> Reply:
        return await self._host.pool(function).invoke(event, deadline_s, cause)

    def workers(self, function: str) -> int:
        """Workers of a function that exist now."""
        return self._host.pool(function).size

    def load(self, function: str) -> Load:
        return self._host.load(function)

    def keep(self, function: str, workers: int, *, keep_alive_s: float | None = None) -> int:
        """See `Scalable`."""
        return self._host.keep(function, workers, keep_alive_s)

    async def __aenter__(self) -> SimulatedBackend:
        await self._host.open()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._host.close()

    async def start(self, package: Package, worker: str, slot: int, gone: Callable[[], None]) -> _SimulatedWorker:
        """Launcher: a cold start on the loop."""
        name = package.spec.name
        profile = self._profiles.get(name, Profile())
        rng = self._host.state(name, lambda: random.Random(f"{self._seed}/{name}"))
        init_s = profile.cold_start_s * rng.lognormvariate(0.0, profile.sigma)
        fails = rng.random() < profile.failed_start
        await asyncio.sleep(init_s)
        if fails:
            raise WorkerFault(InfraFault(FaultKind.UNAVAILABLE, retryable=True, detail="simulated: start failed"))
        target = self._functions[name]
        if is_async(target):
            return _SimulatedWorker(lambda event, _: score_concurrently(target, event), profile, rng, init_s)
        return _SimulatedWorker(adapt(target, takes=package.spec.takes), profile, rng, init_s)


class _SimulatedWorker:
    def __init__(self, handler: ListHandler, profile: Profile, rng: random.Random, init_s: float) -> None:
        self._handler = handler
        self._profile = profile
        self._rng = rng
        self.init_s = init_s
        self.alive = True

    async def call(self, request: Request) -> Answer:
        profile = self._profile
        factor = self._rng.lognormvariate(0.0, profile.sigma)
        seconds = (profile.call_s + profile.item_s * len(request.event)) * factor
        kind = self._fault()
        if kind is FaultKind.TIMEOUT:
            await asyncio.sleep(request.remaining_s * 2.0 + 1.0)
        if kind in (FaultKind.CRASH, FaultKind.OUT_OF_MEMORY):
            await asyncio.sleep(seconds / 2.0)
            self.alive = False
            raise WorkerFault(InfraFault(kind, retryable=True, detail="simulated"))
        await asyncio.sleep(seconds + profile.overhead_s)
        if kind is not None:
            return Answer(None, seconds, InfraFault(kind, retryable=True, detail="simulated"))
        try:
            body = self._handler(list(request.event), None)
            return Answer(await body if inspect.isawaitable(body) else body, seconds)
        except Exception as error:
            detail = f"{type(error).__name__}: {error}"
            return Answer(None, seconds, InfraFault(FaultKind.CRASH, retryable=False, detail=detail))

    def kill(self) -> None:
        self.alive = False

    def _fault(self) -> FaultKind | None:
        draw = self._rng.random()
        for kind, probability in (self._profile.faults or {}).items():
            if draw < probability:
                return kind
            draw -= probability
        return None
