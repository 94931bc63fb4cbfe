"""Rehearsals on virtual time: their cold starts, overheads and throttles, and that they repeat."""

from __future__ import annotations

import asyncio
import random
import statistics
from dataclasses import replace
from typing import Any

import pytest

from rollart.sim import loop as virtual
from serverless.providers.rehearsal import (
    LAMBDA,
    MODAL,
    LogNormalSeconds,
    Platform,
    RehearsedBackend,
    RehearsedLauncher,
)
from serverless.providers.simulated import Profile, SimulatedBackend
from serverless.types import FaultKind, Throttle
from serverless.wire import encode
from serverless.workers.pool import WorkerFault
from tests.serverless.support import item, package

PLAIN = package()
EVENT = [encode(item())]


def simulated(**profile: Any) -> SimulatedBackend:
    return SimulatedBackend({"behave": lambda sample: 1.0}, profiles={"behave": Profile(cold_start_s=0.0, **profile)})


async def starts(platform: Platform, count: int, seed: int = 0) -> list[float]:
    launcher = RehearsedLauncher(simulated(), platform, seed=seed)
    loop, seconds = asyncio.get_running_loop(), []
    for slot in range(count):
        began = loop.time()
        worker = await launcher.start(PLAIN, slot, lambda: None)
        seconds.append(loop.time() - began)
        assert worker.alive
        assert worker.init_s == pytest.approx(seconds[-1])
    return seconds


@pytest.mark.parametrize("platform", [LAMBDA, MODAL])
def test_cold_starts_have_the_platforms_distribution_and_repeat(platform: Platform) -> None:
    seconds = virtual.run(starts(platform, 400))
    assert statistics.median(seconds) == pytest.approx(platform.cold_start.median_s, rel=0.2)
    assert virtual.run(starts(platform, 400)) == seconds
    assert virtual.run(starts(platform, 400, seed=1)) != seconds


def test_a_distribution_between_two_quantiles_has_them() -> None:
    rng = random.Random(0)
    drawn = sorted(LogNormalSeconds.between(1.0, 3.0).draw(rng) for _ in range(4000))
    assert drawn[2000] == pytest.approx(1.0, rel=0.05)
    assert drawn[3800] == pytest.approx(3.0, rel=0.1)


def test_environments_start_no_faster_than_the_platform_scales() -> None:
    platform = replace(LAMBDA, scale_burst=2, scale_per_s=1.0, cold_start=LogNormalSeconds(0.0, 0.0))

    async def main() -> list[Any]:
        launcher = RehearsedLauncher(simulated(), platform)
        outcomes = []
        for wait in (0.0, 0.0, 0.0, 0.5, 0.5, 0.0):
            await asyncio.sleep(wait)
            try:
                await launcher.start(PLAIN, 0, lambda: None)
                outcomes.append("started")
            except WorkerFault as error:
                outcomes.append((error.fault.kind, error.fault.throttle))
        return outcomes

    refused = (FaultKind.THROTTLED, Throttle.SCALING)
    assert virtual.run(main()) == ["started", "started", refused, refused, "started", refused]


def test_more_calls_than_the_account_has_are_throttled_and_the_overhead_is_there() -> None:
    platform = replace(LAMBDA, concurrency=2, call=LogNormalSeconds(0.25, 0.0))

    async def main() -> tuple[list[Any], float]:
        loop = asyncio.get_running_loop()
        async with RehearsedBackend(simulated(call_s=0.5, item_s=0.0), platform) as backend:
            await backend.deploy(PLAIN)
            async with asyncio.TaskGroup() as group:
                calls = [group.create_task(backend.invoke("behave", EVENT, deadline_s=9.0)) for _ in range(3)]
            took = loop.time()
            late = await backend.invoke("behave", EVENT, deadline_s=0.1)
            assert late.fault is not None
            assert late.fault.kind is FaultKind.DEADLINE
            return [call.result().fault for call in calls], took

    (first, second, third), took = virtual.run(main())
    assert (first, second) == (None, None)
    assert (third.kind, third.throttle, third.retryable) == (FaultKind.THROTTLED, Throttle.CONCURRENCY, True)
    assert took == pytest.approx(0.75)
