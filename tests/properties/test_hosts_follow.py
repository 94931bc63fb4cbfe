"""Machines that come and go at random under the environment hosts of a simulation, which follow them by the code of
real runs: no place is given twice, nothing that was played is lost, and at rest there is a host for each core."""

from __future__ import annotations

import asyncio
import functools
import random
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from placement.types import Assignment, Role
from rollart.launch.clusters import fit_to_devices
from rollart.launch.hosts import host_count_keepers
from rollart.leases import Leases
from rollart.settings.faults import FaultPlanSpec
from rollart.settings.resolve import Resolved, resolve_files
from rollart.sim import loop
from rollart.sim.environments import ModelledHosts, SimulatedHost, run_autoscaled_hosts
from rollart.sim.site import MachineInventory
from rollart.testing.laws import find_tiling_errors
from rollart.testing.ledger import MemoryRecorder
from rollart.testing.parts import SimulatedEnvironment
from rollart.testing.run import make_simulated_run
from rollart.tools.faults import SimulationFaults
from rollart.tools.simulate import simulated_environment_hosts, simulated_nodes
from tests.e2e.harness import tiny

CORES, SIZE, SETTLE_S = 6, 2, 2.0
MACHINES = [f"machine-cores-{n}" for n in range(CORES // SIZE)]

CLUSTER = {
    "name": "c",
    "runtime": {"elastic": {"settle_s": SETTLE_S}},
    "pools": [
        {"name": "wide", "device": "cpu", "count": 2, "price": 1.0},
        {"name": "cores", "device": "cpu", "count": CORES, "devices_per_host": SIZE, "price": 0.1},
    ],
    "engines": {"count": 1, "threads": 1},
    "trainer": {"threads": 1},
    "environments": {"workers": "auto", "pool": "cores"},
}


@functools.cache
def resolved() -> Resolved:
    """The plan gave each core of the pool to environments."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory)
        (path / "run.yaml").write_text(yaml.safe_dump(tiny()))
        (path / "cluster.yaml").write_text(yaml.safe_dump(CLUSTER))
        found = resolve_files(path / "run.yaml", path / "cluster.yaml")
    parts = [replace(a, pool="wide", devices=(n,)) for n, a in enumerate(found.plan.assignments)]
    cores = [Assignment(Role.ENVIRONMENT, n, "cores", (n,)) for n in range(CORES)]
    return replace(found, plan=replace(found.plan, assignments=(*parts, *cores), idle={"wide": 0, "cores": 0}))


class Watched(MemoryRecorder):
    """At every row: no host holds more episodes than it has slots, no machine more hosts than it has cores, and only
    running hosts hold any."""

    hosts: ModelledHosts
    machines: MachineInventory

    def interval(self, *args: Any, **row: Any) -> None:
        self.look()
        super().interval(*args, **row)

    def charge(self, charge: Any) -> None:
        self.look()
        super().charge(charge)

    def look(self) -> None:
        for known in self.hosts.fleet.hosts.values():
            held = len(self.hosts.parts[known.id].lives[-1].episodes) if known.link is not None else 0
            assert held <= known.live <= self.hosts.limits.per_host
        held_of = Counter[str]()
        for room in self.machines.reservations:
            assert not room.machine or self.machines.machines[room.machine].up
            held_of[room.machine] += room.devices if room.machine else 0
        assert max(held_of.values(), default=0) <= SIZE


class World:
    """The hosts on machines of which these are up at the start."""

    def __init__(self, up: set[int]) -> None:
        self.recorder, trouble, wanted = Watched(), SimulationFaults(FaultPlanSpec(), resolved(), 0), resolved()
        assert trouble.machines is not None
        self.machines, self.wanted = trouble.machines, wanted
        for number, name in enumerate(MACHINES):
            self.machines.machines[name].up = number in up
        found = simulated_environment_hosts(fit_to_devices(wanted, self.machines.there()), trouble, wanted)
        assert found is not None
        self.hosts = found
        self.recorder.hosts, self.recorder.machines = found, self.machines

    async def kept(self, leases: Leases) -> None:
        nodes = simulated_nodes(self.wanted, self.machines, self.recorder)
        fleet = self.hosts.open(leases, self.recorder)
        await run_autoscaled_hosts(
            fleet, lambda fleet: host_count_keepers(self.wanted, nodes, fleet, None, self.recorder)
        )

    def happen(self, what: str, machine: str) -> None:
        {"come": self.machines.come, "warn": self.machines.warn, "go": self.machines.go}[what](machine)

    def events(self, kind: str) -> list[str]:
        return [e.subject for e in self.recorder.events if e.kind == kind]


HAPPENINGS = st.lists(
    st.tuples(st.sampled_from(["come", "warn", "go"]), st.sampled_from(MACHINES), st.sampled_from([0.0, 1.0, 7.0])),
    max_size=8,  # a host that is lost six times without an episode in between would be given up, as in a run
)


def assigned(world: World, story: Callable[[], Awaitable[None]]) -> None:
    """Host events without a run, and the final state long after them."""

    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            keeping = tasks.create_task(world.kept(Leases(world.recorder)))
            await asyncio.sleep(1.0)
            await story()
            fleet = world.hosts.fleet
            await asyncio.sleep(3000.0)
            machines = world.machines.machines
            staying = [name for name in MACHINES if machines[name].up and not machines[name].leaving]
            if staying:
                assert len(fleet.names) == len(staying) * SIZE
                assert fleet.up() == fleet.where().keys()
                assert set(fleet.where().values()) <= set(staying)
            keeping.cancel()

    loop.run(main())
    assert not any(room.machine for room in world.machines.reservations), "all rooms are given back"
    assert find_tiling_errors(world.recorder.intervals) == []


@settings(max_examples=40, deadline=None)
@example([("come", MACHINES[2], 1.0), ("go", MACHINES[1], 1.0), ("warn", MACHINES[2], 0.0)], {0})  # no room after all
@given(HAPPENINGS, st.sets(st.integers(0, 2), min_size=1))
def test_when_machines_rest_there_is_a_host_for_each_core(
    happenings: list[tuple[str, str, float]], up: set[int]
) -> None:
    world = World(up)

    async def story() -> None:
        for what, machine, seconds in happenings:
            world.happen(what, machine)
            await asyncio.sleep(seconds)

    assigned(world, story)


def test_hosts_go_with_their_machine_and_others_come_with_one() -> None:
    world = World({0, 1})

    async def story() -> None:
        fleet = world.hosts.fleet
        await asyncio.sleep(10.0)
        assert Counter(fleet.where().values()) == {"machine-cores-0": 2, "machine-cores-1": 2}
        world.machines.go("machine-cores-1")
        await asyncio.sleep(SETTLE_S / 2)
        assert (len(fleet.names), len(fleet.up())) == (4, 2), "they might find room elsewhere"
        await asyncio.sleep(SETTLE_S)
        assert Counter(fleet.where().values()) == {"machine-cores-0": 2}
        assert world.events("host_lost") == ["environment-2", "environment-3"]
        world.machines.come("machine-cores-2")
        await asyncio.sleep(2.5 * SETTLE_S)
        assert Counter(fleet.where().values()) == {"machine-cores-0": 2, "machine-cores-2": 2}
        world.machines.warn("machine-cores-0")
        await asyncio.sleep(0.1)
        assert Counter(fleet.where().values()) == {"machine-cores-2": 2}, "there is room for no more"
        assert world.events("host_retired")[-2:] == ["environment-1", "environment-0"]

    assigned(world, story)


def played(seed: int) -> World:
    """A run of three steps whose machines come and go all the time."""
    rng, world = random.Random(seed), World({0, 1})
    run = make_simulated_run(
        quotas={"d": (12, 3)},
        steps=3,
        engines=2,
        turns=3,
        seed=seed,
        max_attempts=1000,
        engine_s=lambda r: r.expovariate(1.0),
        train_s=lambda r: r.expovariate(0.5),
        recorder=world.recorder,
        journal=world.recorder,
    )

    def environment(where: SimulatedHost) -> SimulatedEnvironment:
        return SimulatedEnvironment(turns=3, seed=seed, seconds=lambda r: r.expovariate(1.0))

    world.hosts.make["d"] = environment
    world.hosts.limits = replace(world.hosts.limits, per_host=4, call_s=100.0, max_restarts=1000)
    run.domains = [replace(run.domains[0], environment=world.hosts.environment("d"))]
    run.waits = replace(run.waits, env_reset_s=100.0, env_step_s=100.0)

    async def trouble() -> None:
        while True:
            await asyncio.sleep(rng.expovariate(0.4))
            world.happen(rng.choice(["come", "come", "warn", "go"]), rng.choice(MACHINES))

    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            leases = Leases(world.recorder)
            around = [tasks.create_task(world.kept(leases)), tasks.create_task(trouble())]
            await asyncio.sleep(0.1)
            await run.run()
            for task in around:
                task.cancel()

        assert not leases.open

    loop.run(main(), seed=seed)
    trained = [s.id for _, batch in run.trainer.batches for s in batch]
    assert len(trained) == len(set(trained)) == 3 * 12, "each once"
    ended = [c.trajectory for c in world.recorder.charges]
    assert len(ended) == len(set(ended)), "a trajectory ends once"
    faults = {e.subject: str(e.fields["detail"]) for e in world.recorder.events if e.kind == "infra_fault"}
    assert not faults.keys() & set(trained), "no sample of an episode whose machine went"
    assert all("its machine went down" in detail for detail in faults.values())
    places = world.hosts.fleet.slots
    assert (places.queue.first(), places.going, len(places.ahead)) == (None, 0, 0)
    assert not any(life.episodes for part in world.hosts.parts.values() for life in part.lives)
    assert not run.leases.open
    return world


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 100_000))
def test_a_run_loses_nothing_and_plays_nothing_twice(seed: int) -> None:
    played(seed)


def test_the_runs_above_do_change() -> None:
    """Else they would show nothing."""
    worlds = [played(seed) for seed in range(6)]
    for kind in ("host_lost", "host_retired", "infra_fault", "node_leaving"):
        assert sum(len(world.events(kind)) for world in worlds) > 4, kind
