"""Skew-aware dispatch on the product's gateway over modelled engines: the same prompts twice, a fifth of them long."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.papers.bounds import lpt_order
from rollart.fleet import EnginePlacement
from rollart.leases import Leases
from rollart.ledger.intervals import EngineShares, ResourceClock
from rollart.model import Sampling
from rollart.serving.engine_registry import GatewayLimits
from rollart.serving.gateway import Gateway
from rollart.serving.kv_admission import ConcurrencySettings, TrajectoryDispatch
from rollart.settings.rollout import ConcurrencySpec
from rollart.sim import loop
from rollart.sim.engine import EngineLimits, ModelledEngine
from rollart.strategies.skew_aware import SkewAwareDispatcher
from rollart.testing.ledger import MemoryRecorder
from tests.sim.models import steps

PROMPT = 200


@dataclass
class Rollout:
    """Epochs of single-turn trajectories, all of an epoch at once; engines take `slots` at a time."""

    lengths: list[int]
    engines: int
    skew_aware: bool
    slots: int = 8
    epochs: int = 2
    seconds: list[float] = field(default_factory=list)
    """Of each epoch."""
    order: list[int] = field(default_factory=list)
    """Of the last epoch: prompts as they were let in."""
    ended: list[tuple[int, int]] = field(default_factory=list)
    assignments: dict[int, str] = field(default_factory=dict)

    async def run(self) -> None:
        now, recorder = asyncio.get_running_loop().time, MemoryRecorder()
        aimd = ConcurrencySpec(start=self.slots, most=self.slots, interval_s=1.0, settle_s=5.0)
        self.gateway = Gateway(
            Leases(recorder),
            limits=GatewayLimits(generate_s=1e5),
            version=0,
            on_suspect=lambda _: None,
            recorder=recorder,
            concurrency=ConcurrencySettings(
                aimd, dispatch=SkewAwareDispatcher if self.skew_aware else TrajectoryDispatch
            ),
        )
        for n in range(self.engines):
            engine = ModelledEngine(f"e{n}", steps(), limits=EngineLimits(kv_tokens=200_000))
            clock = ResourceClock(role="engine", resource=engine.id, recorder=recorder, clock=now)
            shares = EngineShares(clock, clock=now)
            self.gateway.join(engine, version=0, shares=shares, seat=EnginePlacement("p", "H800"))
        admission = self.gateway.admission
        assert admission is not None
        async with asyncio.TaskGroup() as tasks:
            looking = tasks.create_task(admission.run())
            for epoch in range(self.epochs):
                began = now()
                self.order.clear()
                async with asyncio.TaskGroup() as work:
                    for n in range(len(self.lengths)):
                        work.create_task(self.trajectory(epoch, n))
                self.seconds.append(now() - began)
            looking.cancel()

    async def trajectory(self, epoch: int, prompt: int) -> None:
        name = f"d-{epoch}.{prompt}"

        def sent(_: int) -> None:
            self.order.append(prompt)
            (sticky,) = [e for e, m in self.gateway.registry.members.items() if name in m.sessions]
            self.assignments[prompt] = sticky

        await self.gateway.generate(
            name,
            (PROMPT,),
            Sampling(self.lengths[prompt]),
            spend=lambda _: None,
            sent=sent,
            domain="d",
            length=PROMPT,
            prompt=str(prompt),
        )
        self.gateway.turns.finished(name)
        await self.gateway.forget(name)
        self.ended.append((epoch, prompt))


def skewed(count: int, seed: int) -> list[int]:
    """A fifth is ten times as long as the rest; no two are equal."""
    rng = Random(seed)
    return [(2_000 if n % 5 == 4 else 200) + n for n in rng.sample(range(count), count)]


def test_in_one_engine_those_that_wait_go_longest_first() -> None:
    lengths = skewed(40, 0)
    rollout = Rollout(lengths, 1, skew_aware=True, slots=4)
    loop.run(rollout.run())
    assert rollout.order == lpt_order(lengths)


@pytest.mark.parametrize("seed", range(4))
def test_what_is_known_to_be_skewed_is_done_sooner_than_in_the_order_it_came(seed: int) -> None:
    lengths = skewed(120, seed)
    took = []
    for skew_aware in (False, True):
        rollout = Rollout(lengths, 4, skew_aware=skew_aware)
        loop.run(rollout.run())
        took.append(rollout.seconds[1])
    assert took[1] < 0.85 * took[0], took


@pytest.mark.parametrize("seed", range(4))
def test_it_costs_nothing_where_lengths_say_nothing(seed: int) -> None:
    """The first epoch: every length is news."""
    lengths = skewed(120, seed)
    took = []
    for skew_aware in (False, True):
        rollout = Rollout(lengths, 4, skew_aware=skew_aware, epochs=1)
        loop.run(rollout.run())
        took.append(rollout.seconds[0])
    assert took[1] <= 1.02 * took[0], took


def test_long_ones_have_engines_of_their_own() -> None:
    lengths = skewed(120, 1)
    rollout = Rollout(lengths, 4, skew_aware=True, epochs=3)
    loop.run(rollout.run())
    longs = Counter(rollout.assignments[n] for n, length in enumerate(lengths) if length >= 2_000)
    others = Counter(rollout.assignments[n] for n, length in enumerate(lengths) if length < 2_000)
    theirs = max(others, key=lambda sticky: others[sticky])
    assert others[theirs] > 0.5 * others.total(), others
    assert longs[theirs] <= 0.1 * longs.total(), longs  # when none of the others waits, any engine will do


@settings(max_examples=20)
@given(
    st.lists(st.integers(1, 3_000), min_size=1, max_size=50), st.integers(1, 4), st.integers(1, 9), st.integers(0, 3)
)
def test_nobody_is_lost(lengths: list[int], engines: int, slots: int, seed: int) -> None:
    rollout = Rollout(lengths, engines, skew_aware=True, slots=slots)
    loop.run(rollout.run(), seed=seed)
    assert sorted(rollout.ended) == [(epoch, n) for epoch in range(2) for n in range(len(lengths))]


def test_a_trajectory_that_loses_its_home_counts_once_among_those_it_is_compared_with() -> None:
    async def main() -> tuple[int, int]:
        now, recorder = asyncio.get_running_loop().time, MemoryRecorder()
        dispatcher = SkewAwareDispatcher()
        gateway = Gateway(
            Leases(recorder),
            limits=GatewayLimits(generate_s=1e5),
            version=0,
            on_suspect=lambda _: None,
            recorder=recorder,
            concurrency=ConcurrencySettings(ConcurrencySpec(start=8, most=8), dispatch=lambda: dispatcher),
        )
        for n in range(2):
            engine = ModelledEngine(f"e{n}", steps(), limits=EngineLimits(kv_tokens=200_000))
            clock = ResourceClock(role="engine", resource=engine.id, recorder=recorder, clock=now)
            gateway.join(engine, version=0, shares=EngineShares(clock, clock=now), seat=EnginePlacement("p", "H800"))

        async def turn(n: int) -> None:
            await gateway.generate(
                f"d-{n}",
                (PROMPT,),
                Sampling(20 + n),
                spend=lambda _: None,
                sent=lambda _: None,
                domain="d",
                length=PROMPT,
                prompt=str(n),
            )

        for n in range(6):
            await turn(n)
        assert gateway.admission is not None
        first = gateway.admission.admitted
        gateway.lose("e0")
        for n in range(6):
            await turn(n)
        return gateway.admission.admitted - first, dispatcher.predictions

    again, predicted = loop.run(main())
    assert again > 0, "some had to find another home"
    assert predicted == 6
