"""Rebalancing on the product's gateway must not herd: two equal pools, each with half of the sticky engines, in a
closed loop.

Four engines of 14,000 prefilled tokens/s; trajectories of one turn are always in flight. One pool is down for 25 s.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest

from rollart.fleet import EngineKind, EnginePlacement, EngineRole, FleetObservation, RoutePrices, Routes
from rollart.launch.plan import PlacementPlanner
from rollart.leases import Leases
from rollart.ledger.intervals import EngineShares, ResourceClock
from rollart.model import EngineId, Sampling
from rollart.policy.routing import PREFILL_RULES, RoutingPolicy
from rollart.serving.engine_registry import GatewayLimits
from rollart.serving.gateway import Gateway
from rollart.sim import loop
from rollart.testing.ledger import MemoryRecorder
from rollart.testing.queueing import QueueEngine, QueueEngineSpeed, QueueTurnModel

SPEED = QueueEngineSpeed(1 / 14_000)
POOLS = "ab"
KINDS = {pool: EngineKind(pool, EngineRole.ENGINE, 4) for pool in POOLS}
AWAY_S, BACK_S, END_S = 30.0, 55.0, 200.0


@dataclass
class Seen:
    finished: int = 0
    """After the pool is back."""
    last: tuple[float, ...] = ()
    """Turns running per engine of each pool at the end, mean of the last looks."""


class Drive:
    def __init__(self, trajectories: int, *, reprices: bool) -> None:
        self.trajectories = trajectories
        self.now = asyncio.get_running_loop().time
        recorder = MemoryRecorder()
        model = QueueTurnModel(dict.fromkeys(POOLS, SPEED), dict.fromkeys(POOLS, 20.0), 700.0, 0.02, 2e-6)
        prices = RoutePrices(dict.fromkeys(KINDS.values(), 1.0), in_flight=0.05)
        self.routes = Routes(prices, model, {"x": dict.fromkeys(POOLS, 0.5)})
        self.planner = PlacementPlanner.__new__(PlacementPlanner)  # only its prices are asked for: no problem to solve
        self.planner.routes = self.routes
        self.reprices = reprices
        seats = {
            f"{pool}{i}": EnginePlacement(pool, pool.upper(), EngineRole.ENGINE, 4) for pool in POOLS for i in range(2)
        }
        self.gateway = Gateway(
            Leases(recorder),
            limits=GatewayLimits(generate_s=1e5, handoff_s=1e5),
            version=0,
            on_suspect=lambda _: None,
            recorder=recorder,
            router=RoutingPolicy(self.routes, rule=PREFILL_RULES["priced"]),
            seats=seats,
        )
        self.engines = {name: QueueEngine(EngineId(name), SPEED, 0.02, 2e-6) for name in seats}
        for name, engine in self.engines.items():
            clock = ResourceClock(role="engine", resource=name, recorder=recorder, clock=self.now)
            self.gateway.join(engine, version=0, shares=EngineShares(clock, clock=self.now))
        self.seen = Seen()

    async def trajectory(self, i: int) -> None:
        episode = 0
        while True:
            episode += 1
            session = f"s{i}.{episode}"
            await asyncio.sleep(0.5 * (0.5 + (i * 7 + episode * 13) % 11 / 10))
            await self.gateway.generate(session, tuple(range(500)), Sampling(400), spend=lambda _: None, domain="x")
            self.seen.finished += self.now() > BACK_S
            await self.gateway.forget(session)

    async def look(self) -> None:
        looks = []
        while True:
            await asyncio.sleep(5.0)
            load = self.gateway.load()
            if self.reprices:
                self.gateway.turns.follow(await self.planner.reprice(FleetObservation({}, load, 1.0, 30.0)))
            looks.append([load[KINDS[pool]].running for pool in POOLS])
            self.seen.last = tuple(sum(column) / len(column) for column in zip(*looks[-10:], strict=True))

    async def run(self) -> Seen:
        members = self.gateway.registry.members
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(engine.run()) for engine in self.engines.values()]
            tasks += [group.create_task(self.trajectory(i)) for i in range(self.trajectories)]
            tasks.append(group.create_task(self.look()))
            await asyncio.sleep(AWAY_S)
            for name in ("b0", "b1"):
                members[name].draining = True
            await asyncio.sleep(BACK_S - AWAY_S)
            for name in ("b0", "b1"):
                members[name].draining = False
                self.gateway.turns.evict_sessions(members[name])
            await asyncio.sleep(END_S - BACK_S)
            for task in tasks:
                task.cancel()
        return self.seen


def drive(trajectories: int, *, reprices: bool) -> Seen:
    async def main() -> Seen:
        return await Drive(trajectories, reprices=reprices).run()

    return loop.run(main())


@pytest.mark.slow  # 200 simulated seconds of 80 or 160 trajectories: seconds of computing
@pytest.mark.parametrize("trajectories", [80, 160])
def test_repricing_does_not_herd_and_a_pool_that_is_back_is_used_again(trajectories: int) -> None:
    planned, repriced = drive(trajectories, reprices=False), drive(trajectories, reprices=True)
    assert repriced.finished >= 0.95 * planned.finished
    a, b = repriced.last
    assert b == pytest.approx(a, rel=0.25), "half of the homes each, as planned"
