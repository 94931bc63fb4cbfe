"""Engines lent to training in the tail of a rollout: only where the rest fits, always back, no wedge."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections import Counter, defaultdict
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from placement.hardware import device
from rollart.control.trajectory import WaitLimits
from rollart.ledger.intervals import ResourceClock
from rollart.model import EngineId
from rollart.serving.engine_registry import GatewayLimits
from rollart.sim.engine import EngineLimits, ModelledEngine
from rollart.sim.environments import SimulatedDomain
from rollart.sim.loop import run
from rollart.sim.trainers import ModelledTrainer, TrainerSpeed
from rollart.sim.workload import PRESETS, GeneratedWorkload, MassTokenizer
from rollart.strategies.lending import DeviceLender, LendingSettings
from rollart.testing.laws import find_tiling_errors
from rollart.testing.ledger import MemoryRecorder
from rollart.testing.run import SimulatedRun, make_simulated_run
from tests.sim.models import shape, steps

DEVICES = 4


class Lent:
    """A modelled run with a trainer that borrows. `held` is the time of the engines' devices in training."""

    def __init__(self, *, seed: int = 0, kv: int = 10_000_000, setup_s: float = 1.0, domain: str = "gem_math") -> None:
        self.recorder = MemoryRecorder()
        world = SimulatedDomain(GeneratedWorkload(PRESETS[domain], seed, name=domain), seed=seed, name=domain)
        made = self.run = make_simulated_run(
            quotas={domain: (24, 4)},
            steps=4,
            alpha=0,
            schedule="sync_plus",
            recorder=self.recorder,
            journal=self.recorder,
            max_attempts=50,
        )
        limits = EngineLimits(kv_tokens=kv)
        self.engines = [ModelledEngine(f"e{i}", steps("H20"), limits=limits) for i in range(DEVICES)]
        made.engines = self.engines  # type: ignore[assignment]
        self.trainer = ModelledTrainer(TrainerSpeed(shape(), device("H800"), 1, mfu=0.05), streams=True)
        made.trainer = self.trainer  # type: ignore[assignment]
        made.tokenizer = MassTokenizer()
        made.waits = WaitLimits(env_reset_s=36_000.0, env_step_s=36_000.0, context_tokens=1 << 17)
        made.limits = GatewayLimits(generate_s=360_000.0, engine_s=36_000.0, sync_s=3600.0)
        made.domains = [
            dataclasses.replace(made.domains[0], environment=world.make, max_turns=1000, max_tokens=1 << 30)
        ]
        made.lending = LendingSettings(setup_s=setup_s, context_tokens=1 << 17)
        made.borrow = self.borrow
        self.lent: tuple[EngineId, ...] = ()
        self.ever: list[tuple[EngineId, ...]] = []

    def borrow(self, engines: Sequence[EngineId]) -> None:
        self.trainer.borrow(float(len(engines)))
        own: ResourceClock = self.run.trainer_clock
        for clock in own.beside:
            clock.assign("rollout")
        own.beside = tuple(self.run.clocks[e] for e in engines)
        for clock in own.beside:
            clock.assign("train")
            clock.enter(own.state)
        self.lent = tuple(engines)
        self.ever.append(self.lent)
        for e in engines:
            assert not self.run.shares[e].requests, "no request runs on a training engine"

    def events(self, kind: str) -> list[dict[str, object]]:
        return [{"subject": e.subject, **e.fields} for e in self.recorder.events if e.kind == kind]

    def check(self, seconds: float) -> None:
        made = self.run
        assert made.published == list(range(1, made.steps + 1))
        assert Counter(self.recorder.gone.values())["trained"] == made.steps * 24
        assert not made.leases.open
        assert self.lent == (), "everything was given back"
        lender = made.control.strategy(DeviceLender)
        assert lender is not None
        assert lender.lent == ()
        assert not any(m.away or m.draining for m in made.control.gateway.registry.members.values())
        assert find_tiling_errors(self.recorder.intervals) == []
        by_device: dict[str, float] = defaultdict(float)
        for i in self.recorder.intervals:
            by_device[i.resource] += i.seconds
        assert all(s == pytest.approx(seconds, rel=1e-9) for s in by_device.values()), "every device, every second"
        assert len(by_device) == DEVICES + 1


async def played(made: SimulatedRun) -> float:
    await made.run()
    return asyncio.get_running_loop().time()


def test_engines_are_lent_and_their_seconds_are_trainings() -> None:
    world = Lent()
    seconds = run(played(world.run))
    world.check(seconds)
    assert world.events("engines_lent")
    lent = sum(i.seconds for i in world.recorder.intervals if i.role == "train" and i.resource != "trainer")
    assert lent > 0
    without = Lent()
    without.run.lending = None
    assert without.events("engines_lent") == []
    assert run(played(without.run)) > seconds, "training dominates here: it gains"


def test_answers_that_moved_are_whole() -> None:
    """As many tokens as without: tokens generated before the move count, and are generated once."""
    tokens = {}
    for name in ("lent", "kept"):
        world = Lent()
        if name == "kept":
            world.run.lending = None
        run(played(world.run))
        tokens[name] = {c.trajectory: c.action_tokens for c in world.recorder.charges}
        if name == "lent":
            assert any(int(str(e["moved"])) for e in world.events("engines_lent"))
    assert tokens["lent"] == tokens["kept"]


def test_nothing_is_lent_while_the_rest_does_not_fit() -> None:
    world = Lent(kv=60_000)
    seconds = run(played(world.run))
    world.check(seconds)
    assert world.events("engines_lent") == []
    assert world.events("engines_kept")


def test_what_is_lent_comes_back_where_the_others_die() -> None:
    world = Lent()

    async def main() -> float:
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(played(world.run))
            while not world.lent:
                await asyncio.sleep(0.5)
            for engine in world.engines:
                if engine.id not in world.lent:
                    engine.fail = True
            seconds = await running
        return seconds

    seconds = run(main())
    world.check(seconds)
    assert any("is in doubt" in str(e["subject"]) for e in world.events("engines_returned"))


@pytest.mark.parametrize("asked", [False, True])
def test_what_is_taken_back_while_its_turns_leave_loses_none_of_them(asked: bool) -> None:
    """Weights move, or an engine dies, before (or after) those were asked to end that are to go elsewhere."""
    world, given = Lent(), 0

    for engine in world.engines:

        async def aborted(requests: Sequence[str], abort=engine.abort) -> None:  # type: ignore[no-untyped-def]
            nonlocal given
            lender = world.run.control.strategy(DeviceLender)
            assert lender is not None
            back = requests and lender.lent and given < 3
            given += bool(back)
            if back and not asked:
                lender.give_back("weights move")
            await abort(requests)
            if back and asked:
                lender.give_back("weights move")

        engine.abort = aborted  # type: ignore[method-assign, assignment]
    world.check(run(played(world.run)))
    assert given
    assert world.events("infra_fault") == []
    assert world.events("lease_expired") == [], "no wait remains for reclaimed engines to drain"
    assert all(i.seconds <= 1.0 for i in world.recorder.intervals if i.cause == "lent"), "the setup, no more"


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(
    st.integers(0, 10_000),
    st.sampled_from([200_000, 600_000, 10_000_000]),
    st.sampled_from([0.0, 5.0, 500.0]),
    st.sampled_from(["none", "lent", "any"]),
)
def test_whatever_dies_nothing_is_lost_and_nothing_wedges(seed: int, kv: int, setup_s: float, deaths: str) -> None:
    world = Lent(seed=seed, kv=kv, setup_s=setup_s)
    rng = random.Random(seed)

    async def disturb() -> None:
        while True:
            await asyncio.sleep(rng.expovariate(1 / 60))
            up = [e for e in world.engines if not e.fail]
            if deaths == "lent":
                up = [e for e in up if e.id in world.lent]
            if up:
                rng.choice(up).fail = True

    async def main() -> float:
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(played(world.run))
            trouble = tasks.create_task(disturb()) if deaths != "none" else None
            seconds = await running
            if trouble is not None:
                trouble.cancel()
        return seconds

    world.check(run(main(), seed=seed))
