"""Few slots on environment hosts: no deadlock, no fault for waiting, and each slot is held by at most one episode.

Prefetching, redundancy, evaluation and dying hosts share the slots, on the product's own scheduler and fleet.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.control.control_plane import ControlSettings
from rollart.model import Observation, Step
from rollart.policy.host_slots import PlacementPriority
from rollart.policy.schedules import FIXED_LAG, SCHEDULES
from rollart.settings.rollout import RedundancySpec
from rollart.settings.run import EvaluationSpec
from rollart.sim import loop
from rollart.sim.environments import ModelledHosts, SimulatedHost
from rollart.sim.faults import FaultPlan, FaultRate, host_target
from rollart.strategies.prefetch import Prefetcher
from rollart.supervise.supervisor import HostLimits
from rollart.testing.parts import SimulatedEnvironment
from rollart.testing.run import SimulatedRun, make_simulated_run

STEP_S = 5.0
"""Longest wait for a call of an environment; each takes a fifth of it at most, and a place may take far longer."""


@dataclass
class Census:
    """Every environment."""

    made: int = 0
    closed: int = 0


class Counted(SimulatedEnvironment):
    """Never used by two episodes."""

    def __init__(self, census: Census, **how: Any) -> None:
        super().__init__(**how)
        self.census = census
        self.over = False
        census.made += 1

    async def reset(self, seed: int) -> Observation:
        assert not self.over
        return await super().reset(seed)

    async def step(self, action: str) -> Step:
        assert not self.over
        return await super().step(action)

    async def close(self) -> None:
        assert not self.over, "closed once"
        self.over = True
        self.census.closed += 1


@dataclass
class Small:
    """A run with few slots, and its observed state."""

    run: SimulatedRun
    hosts: ModelledHosts
    census: Census
    deaths: FaultPlan | None

    def play(self, fuzz: int) -> None:
        async def main() -> None:
            async with asyncio.TaskGroup() as tasks:
                dying = None if self.deaths is None else tasks.create_task(self.deaths.run())
                await self.run.run()
                if dying is not None:
                    dying.cancel()

        loop.run(main(), seed=fuzz)


@st.composite
def runs(draw: st.DrawFn, *, deaths: bool) -> Small:
    schedule = draw(st.sampled_from(tuple(SCHEDULES)))
    sizes = draw(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 3)), min_size=1, max_size=2))
    census, seed, turns = Census(), draw(st.integers(0, 10_000)), draw(st.integers(1, 3))
    run = make_simulated_run(
        quotas={f"d{i}": (groups * size, size) for i, (groups, size) in enumerate(sizes)},
        alpha=FIXED_LAG[schedule] if schedule in FIXED_LAG else draw(st.integers(0, 2)),
        steps=draw(st.integers(1, 3)),
        turns=turns,
        seed=seed,
        engine_s=lambda r: r.expovariate(1.0),
        train_s=lambda r: r.expovariate(0.5),
        schedule=schedule,
        redundancy=RedundancySpec(groups=1.5, size=1.5) if draw(st.booleans()) else RedundancySpec(),
    )

    def factory(where: SimulatedHost) -> Counted:
        return Counted(census, turns=turns, seed=seed, seconds=lambda r: r.uniform(0.0, STEP_S / 5))

    machines = [SimulatedHost(f"environment-{n}") for n in range(draw(st.integers(1, 3)))]
    limits = HostLimits(per_host=draw(st.integers(1, 3)), health_s=float("inf"), start_s=1e6, call_s=STEP_S)
    limits = replace(limits, max_restarts=1000)
    hosts = ModelledHosts(
        machines, {d.name: factory for d in run.domains}, limits, start_s=draw(st.sampled_from([0, 3]))
    )
    run.domains = [replace(d, environment=hosts.environment(d.name)) for d in run.domains]
    run.hosts = hosts
    run.waits = replace(run.waits, env_reset_s=STEP_S, env_step_s=STEP_S)
    run.prefetch = draw(st.sampled_from([0, "auto", 1, 3, 9]))
    run.max_attempts = 1000
    evaluation = EvaluationSpec(episodes=draw(st.integers(0, 3)))
    plain = run.settings

    def settings_of() -> ControlSettings:
        return replace(plain(), evaluation=evaluation)

    run.settings = settings_of  # type: ignore[method-assign]
    plan = None
    if deaths:
        rate = FaultRate(
            [(m.name,) for m in machines], draw(st.sampled_from([10.0, 60.0])), draw(st.sampled_from([1.0, 20.0]))
        )
        plan = FaultPlan({m.name: host_target(m) for m in machines}, rates=[rate], seed=seed)
    return Small(run, hosts, census, plan)


def over(small: Small) -> None:
    """Everything was trained, and no episode holds or waits for a slot."""
    run, fleet, census = small.run, small.hosts.fleet, small.census
    assert run.published == list(range(1, run.steps + 1))
    assert census.closed == census.made
    lives = [life for part in small.hosts.parts.values() for life in part.lives]
    assert max(life.most for life in lives) <= small.hosts.limits.per_host
    assert fleet.slots.queue.first() is None
    assert set(fleet.slots.queue.waiting.values()) == {0}
    assert not fleet.slots.ahead
    assert fleet.slots.going == 0
    assert all(not life.episodes for life in lives)
    assert all(h.live == 0 for h in fleet.hosts.values())
    assert not run.leases.open
    if (ahead := run.control.strategy(Prefetcher)) is not None:
        assert ahead.used + ahead.unused == ahead.begun
    samples = [s.id for _, batch in run.trainer.batches for s in batch]
    assert len(samples) == len(set(samples)), "none is trained twice"


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(runs(deaths=False), st.integers(0, 2**32))
def test_waiting_for_a_place_is_nobodys_fault_and_ends(small: Small, fuzz: int) -> None:
    small.play(fuzz)
    over(small)
    faults = [e for e in small.run.recorder.events if e.kind in ("infra_fault", "lease_expired")]  # type: ignore[attr-defined]
    assert faults == []


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(runs(deaths=True), st.integers(0, 2**32))
def test_hosts_that_die_take_their_episodes_and_leak_no_place(small: Small, fuzz: int) -> None:
    small.play(fuzz)
    over(small)
    events = small.run.recorder.events  # type: ignore[attr-defined]
    lost = {e.subject for e in events if e.kind == "host_lost"}
    assert {e.fields["host"] for e in events if e.kind == "infra_fault"} <= lost
    assert not [e for e in events if e.kind == "lease_expired"]


def few(places: int, ahead: int, **quotas: tuple[int, int]) -> tuple[Small, dict[str, Mapping[str, Any]]]:
    """A run on one host with so many slots, and the waits of its episodes."""
    census = Census()
    run = make_simulated_run(quotas=quotas, alpha=0, steps=4, turns=2, engine_s=lambda r: 1.0, train_s=lambda r: 5.0)

    def factory(where: SimulatedHost) -> Counted:
        return Counted(census, turns=2, seed=0, seconds=lambda r: 0.5)

    limits = HostLimits(per_host=places, health_s=float("inf"), start_s=1e6)
    run.hosts = ModelledHosts([SimulatedHost("environment-0")], {d.name: factory for d in run.domains}, limits)
    run.domains = [replace(d, environment=run.hosts.environment(d.name)) for d in run.domains]
    run.prefetch = ahead
    small = Small(run, run.hosts, census, None)
    small.play(0)
    over(small)
    events = run.recorder.events  # type: ignore[attr-defined]
    return small, {e.subject: e.fields for e in events if e.kind == "environment_places"}


def test_a_wait_for_a_place_is_told() -> None:
    _, told = few(2, 6, d=(4, 2))
    assert told["train"]["waited"] > 0
    assert told["train"]["wait_s"] >= told["train"]["longest_s"] > 0
    assert set(told) <= {claim.name.lower() for claim in PlacementPriority}


def test_what_is_ahead_of_need_gives_way_to_those_that_run() -> None:
    """While a batch trains, prefetched environments of a domain take all slots; later the other domain goes first."""
    small, told = few(3, 3, a=(2, 2), b=(2, 2))
    assert told["ahead"]["given_up"] > 0
    ahead = small.run.control.strategy(Prefetcher)
    assert ahead is not None
    assert ahead.used > 0
    assert ahead.unused >= told["ahead"]["given_up"]
