"""Engines that come and go at random, among failures and publishes, on the virtual loop: nothing of the run is lost or
counted twice, no device is in two hands, and every second of every engine is billed once."""

from __future__ import annotations

import asyncio
import random
from collections import Counter, defaultdict
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.errors import PartDied
from rollart.fleet import (
    EngineKind,
    EngineRole,
    FleetMove,
    FleetMoveKind,
    FleetObservation,
    Proposal,
    RoutePrices,
    Routes,
)
from rollart.ledger.intervals import RESOURCE_CLOSED, RESOURCE_OPENED
from rollart.model import Completion, GenerateRequest
from rollart.policy.routing import PREFILL_RULES, RoutingPolicy
from rollart.serving.engine_registry import GatewayLimits
from rollart.settings.placement import RebalanceSpec
from rollart.sim import loop
from rollart.supervise.rebalance import RebalanceSettings
from rollart.testing.handoff import HandoffEngine, HandoffFabric
from rollart.testing.laws import find_tiling_errors
from rollart.testing.ledger import MemoryRecorder
from rollart.testing.parts import SimulatedSite
from rollart.testing.run import SimulatedRun, make_simulated_run
from tests.policy.models import LinearModel

ROLES = list(EngineRole)
DEVICES = {"fast": 3, "wide": 4}
KINDS = [EngineKind(pool, role, tp) for pool in DEVICES for role in ROLES for tp in (1, 2)]


class Watched(HandoffEngine):
    """Remembers when it was asked."""

    asked: float = 0.0

    async def generate(self, request: GenerateRequest) -> Completion:
        self.asked = asyncio.get_running_loop().time()
        return await super().generate(request)


class Nomad:
    """A planner that wants other engines each time, whether there is room for them or not."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.adopted = 0

    async def reprice(self, observed: FleetObservation) -> Routes:
        prices = RoutePrices({kind: self._rng.random() for kind in observed.load}, in_flight=self._rng.random())
        return Routes(prices, LinearModel())

    async def reflow(self, observed: FleetObservation) -> Routes:
        return await self.reprice(observed)

    async def replan(self, observed: FleetObservation, reason: str) -> Proposal | None:
        assert observed.movable
        moves = []
        for kind, load in sorted(observed.load.items()):
            if load.healthy and self._rng.random() < 0.5:
                moves.append(
                    FleetMove(FleetMoveKind.DRAIN, kind.pool, kind.tp, self._rng.randint(1, load.healthy), kind.role)
                )
        for kind in self._rng.sample(KINDS, self._rng.randint(1, 3)):
            moves.append(FleetMove(FleetMoveKind.START, kind.pool, kind.tp, 1, None, kind.role))
        return Proposal(tuple(moves), await self.reprice(observed), 1.0, 2.0)

    def adopt(self, proposal: Proposal) -> None:
        self.adopted += 1


class World:
    def __init__(self, seed: int, *, drain_s: float, rule_name: str) -> None:
        self.fabric = HandoffFabric()
        self.recorder = MemoryRecorder()
        self.rng = random.Random(seed)
        self.planner = Nomad(random.Random(seed + 1))
        self.made: dict[str, Watched] = {}
        self.run: SimulatedRun = make_simulated_run(
            quotas={"a": (4, 2), "b": (2, 1)},
            steps=5,
            turns=4,
            tokens=2,
            seed=seed,
            env_s=lambda r: r.expovariate(2.0),
            train_s=lambda r: r.expovariate(1.0),
            limits=GatewayLimits(generate_s=20.0, engine_s=200.0, handoff_s=2.0),
            max_attempts=50,
            recorder=self.recorder,
            journal=self.recorder,
            planner=self.planner,
            router=RoutingPolicy(rule=PREFILL_RULES[rule_name]),
            rebalance=RebalanceSettings(RebalanceSpec(reprice_s=0.1, flows_s=0.5), measure_s=0.1, settle_s=0.1),
            kinds=[EngineKind("fast", EngineRole.ENGINE, 1), EngineKind("wide", EngineRole.ENGINE, 2)],
            drain_s=drain_s,
        )
        self.site = self.run.site = SimulatedSite(DEVICES, self._engine, self.recorder, start_s=0.3)

    def _engine(self, name: str) -> Watched:
        assert name not in self.made, "a name is used once"
        self.made[name] = Watched(name, self.fabric, seed=len(self.made))
        return self.made[name]

    async def disturbed(self, *, deaths: bool, broken: bool) -> None:
        async def nag() -> None:
            while True:
                await asyncio.sleep(self.rng.expovariate(2.0))
                assert self.run.control.rebalancer is not None
                self.run.control.rebalancer.notify("price change")

        async def disturb() -> None:
            died: Counter[str] = Counter()
            while True:
                # Now and then: an engine that starts again is given up after five times, and the last ends the run.
                await asyncio.sleep(self.rng.expovariate(1.0) + 2.0 * broken)
                running = sorted(e for e, part in self.site.parts.items() if part.runs and died[e] < 3)
                if deaths and running:
                    engine = self.rng.choice(running)
                    died[engine] += 1
                    self.site.parts[engine].die()  # type: ignore[index]
                if broken:
                    self.site.broken = True
                    await asyncio.sleep(0.5)
                    self.site.broken = False

        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(self.run.run())
            await asyncio.sleep(2.0)
            trouble = [tasks.create_task(nag()), tasks.create_task(disturb())]
            await running
            for task in trouble:
                task.cancel()

    def events(self, kind: str) -> list[str]:
        return [e.subject for e in self.recorder.events if e.kind == kind]

    def check(self) -> None:
        assert len(self.run.trainer.batches) == self.run.steps
        trained = Counter(s.id for _, batch in self.run.trainer.batches for s in batch)
        assert set(trained.values()) == {1}, "once"
        assert max(self.fabric.answered.values()) == 1, "no turn is generated twice"
        assert self.fabric.broken == [], "no KV crosses a version"
        assert not self.run.leases.open
        turns = self.run.control.gateway.turns
        assert not turns.sessions
        assert all(m.running == m.lent == 0 for m in turns.registry.members.values())
        self._check_devices()
        for event in self.recorder.events:
            if event.kind == "engine_drained":
                began = event.t - float(event.fields["seconds"] or 0.0)
                assert self.made[event.subject].asked <= began + 1e-3, "asked after it began to drain"

    def _check_devices(self) -> None:
        """Bills match the present engines: never more than the pools have, never two of a name, never a gap."""
        assert find_tiling_errors(self.recorder.intervals) == []
        opened, closed = self.events(RESOURCE_OPENED), self.events(RESOURCE_CLOSED)
        assert len(opened) == len(set(opened))
        assert sorted(opened) == sorted(closed)
        held = 0.0
        for event in self.recorder.events:
            if event.subject in self.made and event.kind in (RESOURCE_OPENED, RESOURCE_CLOSED):
                held += float(event.fields["units"] or 0.0) * (1 if event.kind == RESOURCE_OPENED else -1)
                assert 0 <= held <= sum(DEVICES.values())
        seconds: dict[str, float] = defaultdict(float)
        for interval in self.recorder.intervals:
            seconds[interval.resource] += interval.seconds
        drained = self.events("engine_drained")
        assert len(drained) == len(set(drained))
        assert all(seconds[name] > 0 for name in drained)
        members = self.run.control.gateway.seats().keys()
        assert not set(drained) & set(members)


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 100_000),
    trouble=st.sampled_from(["none", "deaths", "broken"]),
    drain_s=st.sampled_from([0.01, 30.0]),
    rule_name=st.sampled_from(["remote", "priced", "local"]),
)
def test_engines_come_and_go_and_nothing_is_lost(seed: int, trouble: str, drain_s: float, rule_name: str) -> None:
    world = World(seed, drain_s=drain_s, rule_name=rule_name)
    loop.run(world.disturbed(deaths=trouble == "deaths", broken=trouble == "broken"), seed=seed)
    world.check()


def test_the_worlds_above_do_move() -> None:
    """Else they would show nothing."""
    worlds: Sequence[World] = [World(seed, drain_s=0.01, rule_name="remote") for seed in range(5)]
    for seed, world in enumerate(worlds):
        loop.run(world.disturbed(deaths=False, broken=True), seed=seed)
    assert sum(len(world.events("engine_drained")) for world in worlds) > 20
    assert sum(world.planner.adopted for world in worlds) > 5
    assert sum(len(world.events("rebalance_failed")) for world in worlds) > 5
    cut = [e.fields["cut_short"] for w in worlds for e in w.recorder.events if e.kind == "engine_drained"]
    assert set(cut) == {True, False}


def test_what_was_drained_last_comes_back_where_nothing_else_starts() -> None:
    """The only engine goes for two smaller ones, and these do not start for a while."""

    class Once(Nomad):
        async def replan(self, observed: FleetObservation, reason: str) -> Proposal | None:
            moves = (
                FleetMove(FleetMoveKind.DRAIN, "wide", 4, 1, EngineRole.ENGINE),
                FleetMove(FleetMoveKind.START, "wide", 2, 2, None, EngineRole.ENGINE),
            )
            return Proposal(moves, Routes(), 1.0, 2.0)

    async def main(world: World, broken_s: float) -> None:
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(world.run.run())
            await asyncio.sleep(1.0)
            assert world.run.control.rebalancer is not None
            world.run.control.rebalancer.notify("price change")
            world.site.broken = True
            await asyncio.sleep(broken_s)
            world.site.broken = False
            await running

    def lone() -> World:
        world = World(0, drain_s=30.0, rule_name="local")
        world.run.planner = Once(world.rng)
        world.run.kinds = [EngineKind("wide", EngineRole.ENGINE, 4)]
        return world

    world = lone()
    loop.run(main(world, 4.0))
    world.check()
    started = world.events("engine_started")
    assert started[0] == "engine-0"
    assert world.events(RESOURCE_OPENED).index(started[1]) > 3, "after others that did not start"
    assert [seat.tp for seat in world.run.control.gateway.seats().values()] == [4]
    assert len(world.events("rebalance_failed")) == 1
    assert world.events("plan_adopted") == []
    world = lone()
    with pytest.raises(ExceptionGroup) as failed:
        loop.run(main(world, 1000.0))
    (error,) = leaves(failed.value)
    assert isinstance(error, PartDied)
    assert "no such device" in str(error)


def leaves(group: BaseExceptionGroup[BaseException]) -> list[BaseException]:
    found = [leaves(e) if isinstance(e, BaseExceptionGroup) else [e] for e in group.exceptions]
    return [error for some in found for error in some]
