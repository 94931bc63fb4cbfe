"""Thousands of trajectories on hosts that die at random, on virtual time: the scheduler, the fleet and the hosts agree
on the state of each."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from rollart.model import Observation, Step
from rollart.sim import loop
from rollart.sim.environments import ModelledHosts, SimulatedHost
from rollart.sim.faults import FaultPlan, FaultRate, host_target
from rollart.supervise.supervisor import HostLimits
from rollart.testing.ledger import MemoryRecorder
from rollart.testing.parts import SimulatedEnvironment
from rollart.testing.run import make_simulated_run

pytestmark = pytest.mark.slow  # about 5 s of computing


class Watched(MemoryRecorder):
    """At every row the fleet knows of each episode that a host holds, and holds no more than there are places."""

    def __init__(self) -> None:
        super().__init__()
        self.hosts: ModelledHosts | None = None
        self.most = 0

    def charge(self, charge: Any) -> None:
        assert self.hosts is not None
        for known in self.hosts.fleet.hosts.values():
            held = len(self.hosts.parts[known.id].lives[-1].episodes) if known.link is not None else 0
            assert held <= known.live <= self.hosts.limits.per_host
            self.most = max(self.most, held)
        super().charge(charge)


class Ended(SimulatedEnvironment):
    """Counts how often each of its kind was played to its end."""

    def __init__(self, ends: Counter[int], **how: Any) -> None:
        super().__init__(**how)
        self._ends = ends

    async def reset(self, seed: int) -> Observation:
        self._seed = seed
        return await super().reset(seed)

    async def step(self, action: str) -> Step:
        step = await super().step(action)
        self._ends[self._seed] += step.done
        return step


@pytest.mark.parametrize(("schedule", "prefetch"), [("rollart", 24), ("sync", 0), ("areal", 0)])
def test_thousands_of_trajectories_on_hosts_that_die(schedule: str, prefetch: int) -> None:
    recorder, ends = Watched(), Counter[int]()
    run = make_simulated_run(
        quotas={"d": (64, 4)},
        alpha=1 if schedule != "sync" else 0,
        steps=25,
        engines=4,
        turns=3,
        seed=11,
        engine_s=lambda r: r.expovariate(1.0),
        train_s=lambda r: r.expovariate(0.2),
        schedule=schedule,
        recorder=recorder,
        journal=recorder,
    )

    def environment(where: SimulatedHost) -> Ended:
        return Ended(ends, turns=3, seed=11, seconds=lambda r: r.expovariate(0.5))

    machines = [SimulatedHost(f"environment-{n}", node=f"node-{n // 2}") for n in range(6)]
    limits = replace(HostLimits(per_host=14, health_s=float("inf"), start_s=1e6, call_s=200.0), max_restarts=1000)
    recorder.hosts = run.hosts = ModelledHosts(machines, {"d": environment}, limits, start_s=2.0)
    run.domains = [replace(run.domains[0], environment=run.hosts.environment("d"))]
    run.waits = replace(run.waits, env_reset_s=200.0, env_step_s=200.0)
    run.prefetch = prefetch
    run.max_attempts = 1000
    dying = FaultPlan(
        {m.name: host_target(m) for m in machines},
        rates=[FaultRate([(m.name,) for m in machines], every_s=60.0, seconds=15.0)],
        seed=3,
    )

    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            chaos = tasks.create_task(dying.run())
            await run.run()
            chaos.cancel()

    loop.run(main(), seed=5)
    outcomes = Counter(c.outcome for c in recorder.charges)
    names = [c.trajectory for c in recorder.charges]
    assert len(names) == len(set(names)), "a trajectory ends once"
    assert outcomes["finished"] >= 25 * 64
    trained = [s.id for _, batch in run.trainer.batches for s in batch]
    assert len(trained) == len(set(trained)) == 25 * 64
    faults = {e.subject: e.fields for e in recorder.events if e.kind == "infra_fault"}
    assert len(faults) > 50
    assert not faults.keys() & set(trained), "no sample of an episode that met a fault"
    paid = {c.trajectory for c in recorder.charges if c.score is not None}
    assert not faults.keys() & paid, "no reward from a fault"
    assert sum(ends.values()) >= len(paid) >= 25 * 64
    assert all("its machine went down" in str(f["detail"]) for f in faults.values())
    ended = [e for e in recorder.events if e.kind == "host_lost"]
    assert len(ended) >= 20
    assert recorder.most > 7
    fleet = run.hosts.fleet
    assert (fleet.slots.queue.first(), fleet.slots.going, len(fleet.slots.ahead)) == (None, 0, 0)
    lives = [life for part in run.hosts.parts.values() for life in part.lives]
    assert not any(life.episodes for life in lives)
    assert not run.leases.open
