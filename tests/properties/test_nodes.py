"""Nodes that come and go at random under a run on the virtual loop: the plan follows, nothing of the run is lost, no
device is in two hands, and the last engine that serves is never drained."""

from __future__ import annotations

import asyncio
import functools
import random
import tempfile
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.errors import PartDied
from rollart.fleet import EngineKind, EngineRole, FleetMoveKind, FleetObservation, KindLoad
from rollart.launch.clusters import FixedCountPlanner
from rollart.model import EngineId, WeightsRef
from rollart.ports import Engine
from rollart.serving.engine_registry import GatewayLimits
from rollart.settings.placement import RebalanceSpec
from rollart.settings.resolve import Resolved, resolve_files
from rollart.sim import loop
from rollart.supervise.fleet import ReservedEngine
from rollart.supervise.nodes import AvailabilitySettings, NodeTracker
from rollart.supervise.rebalance import RebalanceSettings
from rollart.testing.handoff import HandoffEngine, HandoffFabric
from rollart.testing.laws import find_tiling_errors
from rollart.testing.ledger import MemoryRecorder
from rollart.testing.parts import SimulatedPart, SimulatedSite
from rollart.testing.run import SimulatedRun, make_simulated_run
from tests.e2e.harness import tiny

KIND = EngineKind("wide", EngineRole.ENGINE, 1)
WANTED, SIZE = 4, 2
"""Engines, and devices of a node."""

CLUSTER = {
    "name": "c",
    "runtime": {"elastic": True},
    "pools": [
        {"name": "train", "device": "cpu", "count": 1, "price": 1.0},
        {"name": "wide", "device": "H20", "count": 6, "devices_per_host": 2, "price": 1.0},
    ],
    "engines": {"count": WANTED, "threads": 1},
    "trainer": {"threads": 1, "device": "cpu"},
}


@functools.cache
def resolved(**engines: int) -> Resolved:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory)
        (path / "run.yaml").write_text(yaml.safe_dump(tiny(placement={"rebalance": {"restart_s": 0.5}})))
        (path / "cluster.yaml").write_text(yaml.safe_dump({**CLUSTER, "engines": engines or CLUSTER["engines"]}))
        return resolve_files(path / "run.yaml", path / "cluster.yaml")


class Ground(SimulatedSite):
    """Nodes of two devices each: an engine sits on one, dies with it, and comes back where there is room."""

    def __init__(self, recorder: MemoryRecorder) -> None:
        fabric = HandoffFabric()
        super().__init__({"wide": 0}, lambda name: HandoffEngine(name, fabric), recorder, start_s=0.2)
        self.nodes: dict[str, int] = {}
        self.on: dict[EngineId, str] = {}

    def where(self) -> Mapping[EngineId, str]:
        return dict(self.on)

    def seat(self, engine: EngineId) -> bool:
        """Whether there is room: the first node that has it."""
        for node in self.nodes:
            if sum(n == node for e, n in self.on.items() if e != engine) < SIZE:
                self.on[engine] = node
                return True
        self.on.pop(engine, None)
        return False

    async def place(self, kind: EngineKind) -> ReservedEngine:
        placed = await super().place(kind)
        seated = OnNode(placed.part, self)  # type: ignore[arg-type]
        return ReservedEngine(seated, placed.seat)

    async def clear(self, engine_id: EngineId) -> None:
        await super().clear(engine_id)
        self.on.pop(engine_id, None)

    def die(self, node: str) -> None:
        self.nodes.pop(node, None)
        for engine in [e for e, n in self.on.items() if n == node and e in self.parts]:
            self.parts[engine].die()


class OnNode:
    """The part, which needs room on a node for every start."""

    def __init__(self, part: SimulatedPart, site: Ground) -> None:
        self._part, self._site = part, site
        self.id = part.id

    async def start(self, weights: WeightsRef) -> Engine:
        if self._site.on.get(self.id) not in self._site.nodes and not self._site.seat(self.id):
            raise PartDied(self.id, "no node could hold it")
        started = await self._part.start(weights)
        if self._site.on.get(self.id) not in self._site.nodes:
            self._part.die()
            raise PartDied(self.id, "its node died")
        return started

    async def wait(self) -> str:
        return await self._part.wait()


class World:
    def __init__(self, seed: int, settle_s: float) -> None:
        self.recorder, self.rng = MemoryRecorder(), random.Random(seed)
        self.site = Ground(self.recorder)
        self.made = 0
        self.drained_last = 0
        self.run: SimulatedRun = make_simulated_run(
            quotas={"a": (4, 2), "b": (2, 1)},
            steps=8,
            turns=4,
            tokens=2,
            seed=seed,
            env_s=lambda r: r.expovariate(2.0),
            train_s=lambda r: r.expovariate(1.0),
            max_attempts=100,
            limits=GatewayLimits(generate_s=20.0, engine_s=400.0, handoff_s=2.0),
            recorder=self.recorder,
            journal=self.recorder,
            planner=FixedCountPlanner(resolved(), None),
            rebalance=RebalanceSettings(RebalanceSpec(reprice_s=0.0, flows_s=0.0), measure_s=5.0, settle_s=0.1),
            kinds=[KIND],
            drain_s=20.0,
        )
        self.run.site = self.site
        self.nodes = NodeTracker(AvailabilitySettings(settle_s, 60.0), self.site.where, {"wide": 6})

    async def main(self, *, trouble: bool) -> None:
        self.site.nodes["n0"] = SIZE
        self.site.resize({"wide": SIZE})
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(self.run.run())
            await asyncio.sleep(1.0)
            self.run.control.follow(self.nodes)
            self.nodes.found([("n0", {"wide": SIZE})])
            around = tasks.create_task(self._trouble() if trouble else self._join())
            watch = tasks.create_task(self._watch())
            await running
            around.cancel()
            watch.cancel()

    async def _join(self) -> None:
        await asyncio.sleep(1.0)
        self._come()

    async def _trouble(self) -> None:
        """n0 stays: there is always a node to serve on."""
        while True:
            await asyncio.sleep(self.rng.expovariate(0.5))
            others = [n for n in self.site.nodes if n != "n0"]
            if len(others) < 2 and self.rng.random() < 0.6:
                self._come()
            elif others:
                node = self.rng.choice(others)
                if self.rng.random() < 0.5:
                    self.nodes.leaving(node)
                    await asyncio.sleep(self.rng.expovariate(0.5))
                self.site.die(node)
                self.nodes.lost(node)

    async def _watch(self) -> None:
        """Never more devices held than there are, but by engines that are on their way back."""
        while True:
            await asyncio.sleep(0.05)
            alive = [e for e, n in self.site.on.items() if n in self.site.nodes]
            assert len(alive) <= SIZE * len(self.site.nodes)
            assert len(self.site.parts) <= WANTED

    def _come(self) -> None:
        self.made += 1
        name = f"n{self.made}"
        self.site.nodes[name] = SIZE
        self.nodes.joined(name, {"wide": SIZE})

    def events(self, kind: str) -> list[str]:
        return [e.subject for e in self.recorder.events if e.kind == kind]

    def check(self) -> None:
        assert len(self.run.trainer.batches) == self.run.steps
        trained = [s.id for _, batch in self.run.trainer.batches for s in batch]
        assert len(trained) == len(set(trained)), "once"
        assert not self.run.leases.open
        assert find_tiling_errors(self.recorder.intervals) == []
        serving = 0
        for event in self.recorder.events:
            serving += {"engine_started": 1, "engine_lost": -1, "engine_drained": -1}.get(event.kind, 0)
            assert event.kind != "engine_drained" or serving >= 1, "the last one was drained"


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 100_000), settle_s=st.sampled_from([0.1, 2.0]))
def test_nodes_come_and_go_and_nothing_is_lost(seed: int, settle_s: float) -> None:
    world = World(seed, settle_s)
    loop.run(world.main(trouble=True), seed=seed)
    world.check()


def test_the_worlds_above_do_change() -> None:
    """Else they would show nothing."""
    worlds = [World(seed, 0.1) for seed in range(6)]
    for seed, world in enumerate(worlds):
        loop.run(world.main(trouble=True), seed=seed)
    for kind in ("rebalanced", "engine_drained", "engine_lost", "engine_given_up"):
        assert sum(len(world.events(kind)) for world in worlds) > 2, kind


def test_engines_start_on_a_node_that_joins() -> None:
    world = World(0, 0.5)
    loop.run(world.main(trouble=False))
    world.check()
    at_first, then = world.events("rebalanced")
    assert at_first == "wide has 2 devices after 6", "the plan was made for all there may be"
    assert then == "wide has 4 devices after 2"
    assert len(world.site.parts) == WANTED


def ask(planner: FixedCountPlanner, load: Mapping[EngineKind, int], devices: Mapping[str, int]) -> dict[str, int]:
    """Engines by role after the proposal's moves; the planner must not need the loop."""
    observed = FleetObservation({}, {k: KindLoad(n, n, 0.0, 0.0) for k, n in load.items()}, 0.0, 0.0, True, devices)
    proposal = asyncio.run(planner.replan(observed, "nodes"))
    roles: dict[str, int] = {}
    for kind, n in load.items():
        roles[kind.role] = roles.get(kind.role, 0) + n
    for move in () if proposal is None else proposal.moves:
        for role, sign in ((move.before, -1), (move.after, 1)):
            if role is not None:
                roles[role] = roles.get(role, 0) + sign * move.replicas
        assert move.kind is not FleetMoveKind.DRAIN, "serving engines stay"
    return {str(role): n for role, n in roles.items() if n}


@settings(max_examples=60)
@given(prefill=st.integers(0, 3), decode=st.integers(0, 3), there=st.integers(0, 8))
def test_given_engines_fill_what_is_there_and_no_role_is_without_one(prefill: int, decode: int, there: int) -> None:
    planner = FixedCountPlanner(resolved(prefill=2, decode=2), None)
    load = {
        EngineKind("wide", role, 1): n for role, n in ((EngineRole.PREFILL, prefill), (EngineRole.DECODE, decode)) if n
    }
    after = ask(planner, load, {"wide": there, "train": 1})
    there = min(there, 6)
    assert sum(after.values()) == max(prefill + decode, min(there, max(prefill, 2) + max(decode, 2)))
    if sum(after.values()) >= 2:
        assert set(after) == {"prefill", "decode"}
