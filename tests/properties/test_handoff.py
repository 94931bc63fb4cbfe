"""Prefill and decode on two engines, under random faults, updates and role flips, on the virtual loop.

The simulated engines write down every KV that crosses a weight version (`HandoffFabric.broken`): with engines that
trust the router, as vLLM does, an empty list is the router's fence.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rollart.fleet import (
    EngineKind,
    EnginePlacement,
    EngineRole,
    FleetMove,
    FleetMoveKind,
    FleetObservation,
    Proposal,
    RoutePrices,
    Routes,
)
from rollart.policy.routing import PREFILL_RULES, HardwareAffinity, RoutingPolicy
from rollart.serving.engine_registry import GatewayLimits
from rollart.serving.handoff import MOST_HANDED, HandoffQueue
from rollart.serving.turns import TurnExecutor
from rollart.settings.placement import RebalanceSpec
from rollart.sim import loop
from rollart.strategies.rolling_update import Delayed, Staggered, UpdatePolicy
from rollart.supervise.rebalance import RebalanceSettings
from rollart.testing.handoff import HandoffEngine, HandoffFabric, HandoffTimings
from rollart.testing.run import SimulatedRun, make_simulated_run
from tests.policy.models import LinearModel

ROLES = list(EngineRole)


class World:
    """A run on hand-off engines: `prefill` and `decode` of them, and some that do both."""

    def __init__(
        self,
        *,
        prefill: int,
        decode: int,
        both: int = 0,
        rule_name: str = "remote",
        versioned: bool = False,
        priced: bool = False,
        turns: int = 3,
        steps: int = 3,
        seed: int = 0,
        alpha: int = 1,
        pace: HandoffTimings | None = None,
        handoff_s: float = 2.0,
        train_s: float = 0.3,
        handoffs: int | None = 0,
        slots: int = 1_000_000,
    ) -> None:
        self.fabric = HandoffFabric()
        self.run: SimulatedRun = make_simulated_run(
            quotas={"a": (4, 2), "b": (2, 1)},
            alpha=alpha,
            steps=steps,
            turns=turns,
            tokens=2,
            seed=seed,
            env_s=lambda r: r.expovariate(5.0),
            train_s=lambda r: train_s * r.expovariate(1.0),
            limits=GatewayLimits(generate_s=30.0, engine_s=120.0, handoff_s=handoff_s, handoffs=handoffs, slots=slots),
            max_attempts=50,
        )
        roles = [EngineRole.PREFILL] * prefill + [EngineRole.DECODE] * decode + [EngineRole.ENGINE] * both
        self.engines = [
            HandoffEngine(f"e{i}", self.fabric, seed=seed, pace=pace, versioned=versioned) for i in range(len(roles))
        ]
        self.run.engines = list(self.engines)
        self.run.seats = {
            f"e{i}": EnginePlacement("fast" if role is EngineRole.PREFILL else "wide", role=role)
            for i, role in enumerate(roles)
        }
        kinds = {seat.kind for seat in self.run.seats.values()}
        prices = Routes(RoutePrices(dict.fromkeys(kinds, 1.0)), LinearModel()) if priced else Routes()
        self.run.router = RoutingPolicy(routes=prices, rule=PREFILL_RULES[rule_name])

    def check(self) -> None:
        """Whatever happened: fenced, complete, nothing held, nothing twice."""
        assert self.fabric.broken == []
        assert len(self.run.trainer.batches) == self.run.steps
        trained = Counter(s.id for _, batch in self.run.trainer.batches for s in batch)
        assert set(trained.values()) == {1}
        # A turn's answer that reached the trajectory is the only one: nothing was generated to the end twice.
        assert max(self.fabric.answered.values()) == 1
        assert not self.run.leases.open
        turns = self.run.control.gateway.turns
        assert not turns.sessions
        assert not turns.pulls.unfetched
        if turns.handoffs is not None:
            assert not any(q.open or q.waiting for q in turns.handoffs.queues.values()), "every place was given back"
        assert all(m.running == 0 and m.work_s == 0.0 for m in turns.registry.members.values())
        assert not any(m.sessions or m.prefill_sessions for m in turns.registry.members.values())

    def events(self, kind: str) -> list[dict[str, object]]:
        return [dict(e.fields) for e in self.run.recorder.events if e.kind == kind]  # type: ignore[attr-defined]


async def disturbed(world: World, rng: random.Random, *, flips: bool, deaths: bool, slow: bool) -> None:
    """The run, while engines die (the run's supervisor brings them back), get slow, lose KV and change roles."""

    async def disturb() -> None:
        while True:
            await asyncio.sleep(rng.expovariate(4.0))
            engine = rng.choice(world.engines)
            what = rng.choice(["flip"] * flips + ["die"] * deaths + ["slow", "fast", "expire"] * slow)
            if what == "flip":
                world.run.control.gateway.flip(engine.id, rng.choice(ROLES))
            elif what == "die":
                engine.fail = True
            elif what == "expire":
                engine.exports.clear()
            else:
                engine.slow = 3.0 if what == "slow" else 0.0

    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(world.run.run())
        await asyncio.sleep(0)
        trouble = tasks.create_task(disturb())
        await running
        trouble.cancel()


@contextlib.contextmanager
def watched_queues() -> Iterator[None]:
    """A hand-off is admitted only while fewer than the depth are queued before its decode engine."""
    room = HandoffQueue.room

    def checked(handoffs: HandoffQueue, queue: Any) -> bool:
        found = room(handoffs, queue)
        before = queue.open + queue.member.running - handoffs.slots
        assert not found or before < queue.depth.depth() <= (handoffs.fixed_depth or MOST_HANDED)
        return found

    with patch.object(HandoffQueue, "room", checked):
        yield


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    prefill=st.integers(1, 2),
    decode=st.integers(0, 2),
    both=st.integers(0, 2),
    rule_name=st.sampled_from(["remote", "priced", "dynamo", "vllm_router", "local"]),
    versioned=st.booleans(),
    priced=st.booleans(),
    seed=st.integers(0, 10_000),
    flips=st.booleans(),
    deaths=st.booleans(),
    slow=st.booleans(),
    queue=st.sampled_from([(0, 1_000_000), (1, 1_000_000), (2, 1), (None, 1), (None, 2)]),
)
def test_nothing_is_lost_mixed_or_generated_twice_whatever_fails(
    prefill: int,
    decode: int,
    both: int,
    rule_name: str,
    versioned: bool,
    priced: bool,
    seed: int,
    flips: bool,
    deaths: bool,
    slow: bool,
    queue: tuple[int | None, int],
) -> None:
    world = World(
        prefill=prefill,
        decode=decode,
        both=both,
        rule_name=rule_name,
        versioned=versioned,
        priced=priced,
        seed=seed,
        handoffs=queue[0],
        slots=queue[1],
    )
    rng = random.Random(seed)
    with watched_queues():
        if flips or deaths or slow:
            loop.run(disturbed(world, rng, flips=flips, deaths=deaths, slow=slow), seed=seed)
        else:
            loop.run(world.run.run(), seed=seed)
    world.check()


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    prefill=st.integers(1, 2),
    decode=st.integers(1, 3),
    both=st.integers(0, 2),
    versioned=st.booleans(),
    seed=st.integers(0, 10_000),
    flips=st.booleans(),
    deaths=st.booleans(),
    updates=st.sampled_from([Staggered(0.3), Staggered(1.0), Delayed(0.5), Delayed(1e6)]),
    handoffs=st.sampled_from([0, 1, None]),
)
def test_nothing_is_mixed_where_engines_take_versions_one_by_one(
    prefill: int,
    decode: int,
    both: int,
    versioned: bool,
    seed: int,
    flips: bool,
    deaths: bool,
    updates: UpdatePolicy,
    handoffs: int | None,
) -> None:
    """Both legs of a hand-off are of one version, whichever their engines have."""
    world = World(
        prefill=prefill,
        decode=decode,
        both=both,
        versioned=versioned,
        seed=seed,
        alpha=2,
        pace=BUSY,
        handoff_s=20.0,
        train_s=0.05,
        steps=6,
        handoffs=handoffs,
    )
    world.run.updates = updates
    if flips or deaths:
        loop.run(disturbed(world, random.Random(seed), flips=flips, deaths=deaths, slow=False), seed=seed)
    else:
        loop.run(world.run.run(), seed=seed)
    world.check()


BUSY = HandoffTimings(prefill_s=0.05, decode_s=0.05, pull_s=0.05)
"""Slow enough that every update meets prefills and pulls under way."""


@pytest.mark.parametrize("seed", range(6))
def test_the_fence_holds_when_every_update_meets_a_hand_off(seed: int) -> None:
    world = World(prefill=2, decode=2, steps=8, pace=BUSY, seed=seed, handoff_s=20.0, train_s=0.01)
    loop.run(world.run.run(), seed=seed)
    world.check()
    assert world.fabric.remote > 0
    taken = world.events("handoffs_taken_back")
    assert 0 < len(taken) <= world.run.steps, "emitted once per update, not once per turn"
    assert world.events("handoff_failed") == [], "an update is no failure"
    assert world.run.control.gateway.turns.paths.keys() == {"remote"}, "and prefills no turn locally"


def test_without_the_fence_the_same_runs_mix_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault itself, so that the test above is known to look for it: both halves of the fence are needed."""

    async def nothing(*_: object) -> None:
        return None

    def mixed() -> int:
        broken = 0
        for seed in range(6):
            world = World(prefill=2, decode=2, steps=8, pace=BUSY, seed=seed, handoff_s=20.0, train_s=0.01)
            loop.run(world.run.run(), seed=seed)
            broken += len(world.fabric.broken)
        return broken

    with monkeypatch.context() as patched:
        patched.setattr("rollart.serving.handoff.HandoffTracker.take_back", nothing)
        assert mixed() > 0, "legs that an update meets"
    with monkeypatch.context() as patched:
        patched.setattr("rollart.serving.handoff.HandoffTracker.take_back", nothing)
        patched.setattr(TurnExecutor, "fenced", lambda *_: None)
        assert mixed() > 0, "and KV sent after it"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_engines_that_compare_versions_themselves_keep_their_decodes_through_an_update(seed: int) -> None:
    world = World(prefill=2, decode=2, steps=8, pace=BUSY, seed=seed, versioned=True, handoff_s=20.0, train_s=0.01)
    loop.run(world.run.run(), seed=seed)
    world.check()
    assert world.fabric.remote > 0


@example(seed=1)
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 1000))
def test_kv_that_comes_back_spares_the_prefill_engine_the_context(seed: int) -> None:
    """Multi-turn: with KV returned from decode to prefill, only new tokens are computed."""

    def computed(returns: bool) -> int:
        world = World(prefill=1, decode=1, turns=6, steps=1, seed=seed, alpha=0)
        for engine in world.engines:
            engine.returns = returns
        # Without a copy of its own the prefill engine depends on the returned KV.
        world.engines[0].kv = Forgetful()
        loop.run(world.run.run(), seed=seed)
        world.check()
        assert world.fabric.remote > 0
        assert (world.fabric.returned > 0) == returns
        return world.fabric.computed

    assert computed(True) < 0.6 * computed(False)


class Forgetful(dict[str, tuple[int, int]]):
    """A prefix cache that is always evicted."""

    def get(self, key: str, default: object = None) -> object:  # type: ignore[override]
        return default


class Restless:
    """A planner that always has something better, at random: other prices, other shares, other roles, or an error."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    async def reprice(self, observed: FleetObservation) -> Routes:
        await asyncio.sleep(self.rng.random() * 0.1)
        kinds = [EngineKind(pool, role, 1) for pool in ("fast", "wide") for role in ROLES]
        prices = RoutePrices({kind: self.rng.random() for kind in kinds}, in_flight=self.rng.random())
        share = self.rng.random()
        return Routes(prices, LinearModel(), {"a": {"fast": share, "wide": 1 - share}})

    async def reflow(self, observed: FleetObservation) -> Routes:
        if self.rng.random() < 0.2:
            raise ArithmeticError("no convergence")
        return Routes() if self.rng.random() < 0.2 else await self.reprice(observed)

    async def replan(self, observed: FleetObservation, reason: str) -> Proposal | None:
        here = [kind for kind, load in sorted(observed.load.items()) if load.engines]
        kind = self.rng.choice(here)
        after = self.rng.choice([r for r in ROLES if r is not kind.role])
        move = FleetMove(FleetMoveKind.FLIP, kind.pool, kind.tp, 1, kind.role, after)
        return Proposal((move,), await self.reprice(observed), 1.0, 2.0)

    def adopt(self, proposal: Proposal) -> None:
        assert proposal.router_only


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 10_000), deaths=st.booleans(), rule_name=st.sampled_from(["remote", "priced"]))
def test_a_restless_rebalancer_breaks_nothing(seed: int, deaths: bool, rule_name: str) -> None:
    world = World(prefill=1, decode=2, both=1, seed=seed, rule_name=rule_name, turns=4, steps=4)
    world.run.planner = Restless(seed)
    world.run.rebalance = RebalanceSettings(RebalanceSpec(reprice_s=0.05, flows_s=0.2), measure_s=0.1, settle_s=0.1)

    async def nag() -> None:
        while True:
            await asyncio.sleep(0.3)
            rebalancer = world.run.control.rebalancer
            assert rebalancer is not None
            rebalancer.notify("price change")

    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(disturbed(world, random.Random(seed), flips=False, deaths=deaths, slow=True))
            await asyncio.sleep(0.01)
            nagging = tasks.create_task(nag())
            await running
            nagging.cancel()

    loop.run(main(), seed=seed)
    world.check()
    assert world.events("rebalanced")
    assert world.events("role_flipped")


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_the_same_seed_is_the_same_run(seed: int) -> None:
    def history() -> list[object]:
        world = World(prefill=1, decode=1, both=1, seed=seed, rule_name="priced", priced=True)
        loop.run(disturbed(world, random.Random(seed), flips=True, deaths=True, slow=True), seed=seed)
        return [world.run.recorder.events, world.run.recorder.charges]  # type: ignore[attr-defined]

    assert history() == history()


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_a_pool_that_dies_stalls_nobody(seed: int) -> None:
    """Domain `a` wants pool `fast`; all of it goes and never comes back."""
    world = World(prefill=0, decode=1, both=2, seed=seed, rule_name="local", turns=4, steps=4)
    world.run.seats = {"e0": EnginePlacement("fast"), "e1": EnginePlacement("wide"), "e2": EnginePlacement("wide")}
    world.run.router = RoutingPolicy(affinity=HardwareAffinity({"a": "fast"}, order=("wide",)))

    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(world.run.run())
            await asyncio.sleep(0.5)
            world.engines[0].restart = lambda version: None  # type: ignore[method-assign]
            world.engines[0].fail = True
            await running

    loop.run(main(), seed=seed)
    world.check()
    fallen = world.events("affinity_fallback")
    assert fallen
    assert fallen[0]["preferred"] == "fast"
    assert fallen[0]["pool"] == "wide"
