"""Environments reset ahead of need: bounds, conservation, and that nothing but time depends on them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.control.domain import training_seed
from rollart.model import Observation, Step, TrajectoryId
from rollart.policy.schedules import FIXED_LAG, SCHEDULES
from rollart.settings.rollout import RedundancySpec, TailBatchingSpec
from rollart.sim import loop
from rollart.strategies.prefetch import Prefetcher
from rollart.testing.ledger import MemoryRecorder
from rollart.testing.parts import SimulatedEnvironment
from rollart.testing.run import SimulatedRun, make_simulated_run

LOCKED = tuple(name for name in FIXED_LAG if name in SCHEDULES)
"""Schedules whose batches are fixed by the order of their prompts."""


@dataclass
class Census:
    """Every environment that was made."""

    live: Counter[str] = field(default_factory=Counter)
    resets: Counter[tuple[str, int]] = field(default_factory=Counter)
    closed: int = 0
    made: int = 0


class Counted(SimulatedEnvironment):
    """Shows its seed. It is never used by two episodes: a reset or a step never begins in a closed one."""

    def __init__(self, census: Census, domain: str, **how: Any) -> None:
        super().__init__(**how)
        self.census, self.domain = census, domain
        self.over = False
        census.made += 1

    async def reset(self, seed: int) -> Observation:
        assert not self.over
        self.census.resets[self.domain, seed] += 1
        await super().reset(seed)
        return Observation(f"seed {seed}")

    async def step(self, action: str) -> Step:
        assert not self.over
        return await super().step(action)

    async def close(self) -> None:
        assert not self.over, "closed once"
        self.over = True
        self.census.closed += 1


@st.composite
def worlds(draw: st.DrawFn, schedules: tuple[str, ...] = tuple(SCHEDULES), *, faults: bool = True) -> SimulatedRun:
    schedule = draw(st.sampled_from(schedules))
    sizes = draw(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 3)), min_size=1, max_size=2))
    seed = draw(st.integers(0, 10_000))
    tail = faults and schedule in ("sync", "sync_plus") and draw(st.booleans())
    redundant = (
        RedundancySpec(groups=1.5, size=1.5) if faults and not tail and draw(st.booleans()) else RedundancySpec()
    )
    world = make_simulated_run(
        quotas={f"d{i}": (groups * size, size) for i, (groups, size) in enumerate(sizes)},
        alpha=FIXED_LAG[schedule] if schedule in FIXED_LAG else draw(st.integers(0, 2)),
        steps=draw(st.integers(1, 5)),
        engines=draw(st.integers(1, 2)),
        turns=draw(st.integers(1, 3)),
        seed=seed,
        engine_s=lambda r: r.expovariate(1.0),
        train_s=lambda r: r.expovariate(0.5),
        schedule=schedule,
        tail=TailBatchingSpec(eta_prompts=1.5, eta_responses=1.5) if tail else None,
        redundancy=redundant,
    )
    reset = draw(st.sampled_from([0.1, 3.0, 30.0]))
    rate = draw(st.sampled_from([0.0, 0.1])) if faults else 0.0

    def seconds(rng: Any) -> float:
        return float(reset * rng.lognormvariate(0.0, 1.0))

    census = Census()

    def factory(name: str, turns: int) -> Any:
        return lambda: Counted(census, name, turns=turns, seed=seed, seconds=seconds, fault_rate=rate)

    world.domains = [replace(d, environment=factory(d.name, d.max_turns)) for d in world.domains]
    world.waits = replace(world.waits, env_reset_s=draw(st.sampled_from([20.0, 1e6])), env_step_s=1e6)
    world.census = census  # type: ignore[attr-defined]
    return world


def watched(world: SimulatedRun) -> list[tuple[int, int]]:
    """Per record and domain: environments held ahead, and their bound."""
    seen: list[tuple[int, int]] = []

    class Watched(MemoryRecorder):
        def charge(self, charge: Any) -> None:
            ahead: Prefetcher = world.control.strategy(Prefetcher)  # type: ignore[assignment]
            for domain in world.domains:
                seen.append((len(ahead.held[domain.name]), max(ahead.rules[domain.name].wanted(), 4 * domain.quota)))
                if (fixed := ahead.rules[domain.name].fixed) != "auto":
                    assert len(ahead.held[domain.name]) <= fixed
            super().charge(charge)

    world.journal = world.recorder = Watched()
    return seen


@pytest.mark.slow
@settings(max_examples=120, deadline=None)
@given(worlds(), st.one_of(st.just("auto"), st.integers(1, 9)), st.integers(0, 2**32))
def test_no_more_than_asked_for_and_each_is_closed_and_of_its_seed(
    world: SimulatedRun, fixed: int | Literal["auto"], fuzz: int
) -> None:
    seen = watched(world)
    world.prefetch = fixed
    world.max_attempts = 50
    loop.run(world.run(), seed=fuzz)
    census: Census = world.census  # type: ignore[attr-defined]
    assert all(held <= bound for held, bound in seen)
    assert census.closed == census.made, "each is closed, used or not"
    ahead = world.control.strategy(Prefetcher)
    assert ahead is not None
    assert ahead.used + ahead.unused == ahead.begun
    assert not world.leases.open
    assert world.published == list(range(1, world.steps + 1))
    for _, batch in world.trainer.batches:
        for sample in batch:
            domain, _, index = sample.group.partition("~")[0].rpartition("-")
            assert census.resets[domain, training_seed(0, domain, int(index))] > 0
            shown = world.tokenizer.decode(sample.token_ids[: sample.loss_mask.index(True)])
            assert shown == f"seed {training_seed(0, domain, int(index))}", "the seed of its own prompt"


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(worlds(LOCKED, faults=False), st.integers(1, 20))
def test_the_same_is_trained_with_and_without(world: SimulatedRun, ahead: int) -> None:
    world.waits = replace(world.waits, env_reset_s=1e6)
    found: dict[int, list[list[tuple[TrajectoryId, tuple[int, ...]]]]] = {}
    for n in (0, ahead):
        again = replace(world, trainer=replace(world.trainer, batches=[]), published=[])
        again.prefetch = n
        again.journal = again.recorder = MemoryRecorder()
        fresh = make_simulated_run(engines=len(world.engines), engine_s=lambda r: r.expovariate(1.0))
        again.engines = fresh.engines
        loop.run(again.run(), seed=None)
        found[n] = [sorted((s.id, s.token_ids) for s in batch) for _, batch in again.trainer.batches]
    assert found[0] == found[ahead]
