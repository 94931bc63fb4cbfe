"""Engines of different speed under a plan's shares, on the product's gateway: the number of trajectories per engine,
also while one engine is down.

Three pools of one engine each, of 4, 2 and 1 times a speed. Every trajectory is one turn of equal work, so that shares
in proportion to speed keep all three busy; prices are such that a turn costs the same everywhere.
"""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from rollart.fleet import EngineKind, EnginePlacement, EngineRole, RoutePrices, Routes
from rollart.leases import Leases
from rollart.ledger.intervals import EngineShares, ResourceClock
from rollart.model import EngineId, Sampling
from rollart.policy.routing import RoutingPolicy
from rollart.serving.engine_registry import GatewayLimits
from rollart.serving.gateway import Gateway
from rollart.sim import loop
from rollart.testing.ledger import MemoryRecorder
from rollart.testing.queueing import QueueEngine, QueueEngineSpeed, QueueTurnModel

TIMES = {"quick": 4.0, "middle": 2.0, "slow": 1.0}
SHARES = {pool: times / sum(TIMES.values()) for pool, times in TIMES.items()}
SPEEDS = {pool: QueueEngineSpeed(1e-3 / times, 0.004 / times, 1e-6) for pool, times in TIMES.items()}
PROMPT, OUTPUT, LIVE, TURNS = 100, 32, 28, 420


async def assignments(shares: dict[str, float], *, gone: str = "") -> tuple[Counter[str], float]:
    """Turns by pool, and how long all of them took. `gone`: a pool whose engine is lost from the first turn on."""
    recorder, now = MemoryRecorder(), asyncio.get_running_loop().time
    kinds = {pool: EngineKind(pool, EngineRole.ENGINE, 1) for pool in TIMES}
    model = QueueTurnModel(SPEEDS, dict.fromkeys(TIMES, 6.0), float(PROMPT), 0.0, 0.0)
    prices = RoutePrices({kinds[pool]: times for pool, times in TIMES.items()})
    gateway = Gateway(
        Leases(recorder),
        limits=GatewayLimits(generate_s=1e6),
        version=0,
        on_suspect=lambda _: None,
        recorder=recorder,
        router=RoutingPolicy(Routes(prices, model, {"x": shares})),
        seats={pool: EnginePlacement(pool, pool, EngineRole.ENGINE, 1) for pool in TIMES},
    )
    given: Counter[str] = Counter()
    left = iter(range(TURNS))

    async def play() -> None:
        for turn in left:
            await gateway.generate(f"s{turn}", tuple(range(PROMPT)), Sampling(OUTPUT), spend=lambda _: None, domain="x")
            given[gateway.assignments()[f"s{turn}"]] += 1
            await gateway.forget(f"s{turn}")

    async with asyncio.TaskGroup() as tasks:
        serving = []
        for pool in TIMES:
            engine = QueueEngine(EngineId(pool), SPEEDS[pool])
            clock = ResourceClock(role="engine", resource=pool, recorder=recorder, clock=now)
            gateway.join(engine, version=0, shares=EngineShares(clock, clock=now))
            serving.append(tasks.create_task(engine.run()))
        if gone:
            gateway.lose(EngineId(gone))
        began = now()
        async with asyncio.TaskGroup() as plays:
            for _ in range(LIVE):
                plays.create_task(play())
        took = now() - began
        for task in serving:
            task.cancel()
    return given, took


@pytest.mark.parametrize("gone", ["", "quick", "slow"])
def test_turns_go_by_the_shares_of_the_pools_that_are_there(gone: str) -> None:
    given, _ = loop.run(assignments(SHARES, gone=gone))
    there = {pool: share for pool, share in SHARES.items() if pool != gone}
    assert given.total() == TURNS
    for pool, share in there.items():
        assert given[pool] / TURNS == pytest.approx(share / sum(there.values()), abs=0.04), given


def test_shares_by_speed_are_faster_than_equal_ones() -> None:
    _, by_speed = loop.run(assignments(SHARES))
    _, alike = loop.run(assignments(dict.fromkeys(TIMES, 1 / len(TIMES))))
    assert by_speed < 0.8 * alike
