"""Environment hosts as programs that the runtime starts, and the fleet of a run."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import sys
import sysconfig
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from placement.types import Assignment, Role
from rollart.adapters.envs.host import TOKEN
from rollart.adapters.envs.hosts import HostConnection
from rollart.adapters.envs.worked import WORKED
from rollart.compose.actors import cpu_pool, node_selector, part_resources
from rollart.compose.clusters import exit_cause, place_actor
from rollart.compose.elastic import present_devices
from rollart.compose.routing import SERVING_ROLES
from rollart.compose.weights import node_wait_s
from rollart.errors import SpecError
from rollart.hosted import EnvironmentHost
from rollart.ledger.clock import ResourceClock
from rollart.policy.hosting import BUSY, hosts_for
from rollart.policy.memory import MemoryRules
from rollart.ports import ActorSpec, EnvironmentFactory, Handle, Recorder, Runtime
from rollart.resident import machine_bytes, resident_bytes
from rollart.runtime.hosting import HostFleet
from rollart.runtime.hostwatch import HostLimits
from rollart.runtime.leases import Leases
from rollart.spec.cluster import PoolSpec
from rollart.spec.environments import UNLESS_QUICK, EnvironmentsSpec
from rollart.spec.places import concurrent_episodes
from rollart.spec.resolve import Resolved, Specs
from rollart.spec.run import RunSpec
from rollart.spec.run_parts import DomainSpec

__all__ = [
    "ROLE",
    "HostProgram",
    "HostAssignments",
    "environment_fleet",
    "worked_example_factory",
    "fitting_hosts",
    "image_hook_config",
    "host_actor",
    "host_count",
    "hosted_environment_factory",
    "import_paths",
    "hosted_domains",
    "memory_rules",
    "environment_host_names",
    "watch_memory",
    "write_domains",
]

ROLE = "environment"
HOST_MODULE = "rollart.adapters.envs.host"

MEMORY_POLL_S = 5.0
"""Between two looks at the controller's memory."""

PROGRAM_CALLS = 4
"""Calls that a host's actor has at a time: its start, the wait for its end, a kill, a stop."""


def environment_fleet(
    resolved: Resolved,
    directory: Path,
    runtime: Runtime,
    leases: Leases,
    recorder: Recorder,
    *,
    used: frozenset[str],
    wanted: Resolved | None = None,
) -> HostFleet | None:
    """The run's environment hosts, not started; None where environments live in the controller. `used`: names of parts
    of earlier lives of the run, which no host gets. `wanted`: the run with all of its plan, if only some of that fits
    on the nodes of the start."""
    spec, waits, count = resolved.cluster.environments, resolved.run.leases, host_count(resolved)
    if not count:
        return None
    domains = write_domains(resolved, directory)
    token, rooms = secrets.token_hex(16), HostAssignments(resolved, wanted or resolved)

    async def make(name: str) -> HostProgram:
        with rooms.given(name, fleet.where(), present_devices(resolved, runtime)) as given:
            actor = host_actor(resolved, directory, name, domains, token, given=given)
            program = await place_actor(resolved, runtime, actor)
        return HostProgram(name, program, runtime, _clock(resolved, name, recorder, given), token)

    numbers = [int(n.rpartition("-")[2]) for n in used if n.startswith(f"{ROLE}-") and n.rpartition("-")[2].isdecimal()]
    fleet = HostFleet(
        make,
        count,
        leases=leases,
        recorder=recorder,
        limits=HostLimits(
            per_host=spec.per_worker,
            health_s=spec.health_s,
            start_s=spec.start_s,
            call_s=waits.env_step_s,
            pull_s=spec.pull_s,
            patience_s=node_wait_s(resolved),
            memory=memory_rules(spec),
        ),
        later=max([rooms.later, *(n + 1 for n in numbers)]),
    )
    return fleet


def memory_rules(spec: EnvironmentsSpec) -> MemoryRules:
    return MemoryRules() if spec.memory_gb == "auto" else MemoryRules(spec.memory_gb * 1e9)


async def watch_memory(spec: EnvironmentsSpec, say: Callable[..., None]) -> None:
    """Where environments live in the controller: say when it has grown by a host's bound, and at each doubling."""
    rules, machine, before = memory_rules(spec), machine_bytes(), resident_bytes(below=False)
    bound = rules.bound(machine, 1)
    while True:
        await asyncio.sleep(MEMORY_POLL_S)
        grown = resident_bytes(below=False) - before
        if grown > bound:
            say(
                "controller_memory",
                "controller",
                grown_gb=round(grown / 1e9, 2),
                bound_gb=round(bound / 1e9, 2),
                cause=f"environments live in the controller and may leak ({rules.words(machine, 1)}): on hosts "
                "(environments.workers) they are started again",
            )
            bound = 2 * grown


class HostAssignments:
    """What the plan gave to environments, for the hosts of a run as they come: each has its own, or none."""

    def __init__(self, resolved: Resolved, wanted: Resolved) -> None:
        """`wanted`: the run with all of its plan, `resolved` with what of it fits on the nodes of the start."""
        self._wanted = wanted
        self._plan = wanted.plan.of(Role.ENVIRONMENT)
        begun, count = {a.name for a in resolved.plan.of(Role.ENVIRONMENT)}, host_count(resolved)
        self._open = [a for a in self._plan if a.replica < count or a.name not in begun]
        self._of: dict[str, str] = {}
        self._coming: set[str] = set()

    @property
    def later(self) -> int:
        """The first number that no part of the plan has."""
        return max((a.replica for a in self._plan), default=-1) + 1

    @contextlib.contextmanager
    def given(
        self, name: str, staying: Collection[str], devices: Mapping[str, int] | None
    ) -> Iterator[Assignment | None]:
        """While the host looks for its place: what is there, of so many devices by pool, and none has of the hosts that
        stay. First to the one of its name."""
        there = self._coming.union(staying)
        free = [a for a in self._open if self._of.get(a.name, "") not in there]
        found = None
        if free and len(self._plan) - len(free) < fitting_hosts(self._wanted, devices):
            found = next((a for a in free if a.name == name), free[0])
            self._of[found.name] = name
        self._coming.add(name)
        try:
            yield found
        finally:
            self._coming.discard(name)


def host_count(resolved: Resolved, devices: Mapping[str, int] | None = None) -> int:
    """Hosts at the start of a run, or for so many devices by pool; 0 where environments live in the controller. It
    never falls when devices are added."""
    spec, run, given = resolved.cluster.environments, resolved.run, len(resolved.plan.of(Role.ENVIRONMENT))
    if spec.workers == UNLESS_QUICK:  # not decided: no run
        return 0
    here = given if devices is None else fitting_hosts(resolved, devices)
    if spec.workers != "auto":  # those whose cores of the plan are not there are left out
        return min(spec.workers, max(1, spec.workers - max(0, min(given, spec.workers) - here)))
    pool = _pool(resolved)
    cores = pool.count if devices is None else devices.get(pool.name, 0)
    return hosts_for(
        cores=here * BUSY if given else _expected_busy_cores(resolved),
        most=here if given else cores,
        episodes=concurrent_episodes(run).most,
        per_host=spec.per_worker,
    )


def fitting_hosts(resolved: Resolved, devices: Mapping[str, int] | None) -> int:
    """How many of those that the plan gives cores have theirs on so many devices by pool, after its other parts but
    engines; all of them where nodes do not come and go."""
    given = resolved.plan.of(Role.ENVIRONMENT)
    if devices is None:
        return len(given)
    fixed = {
        a.name: a for a in resolved.plan.assignments if a.role not in SERVING_ROLES and a.role is not Role.ENVIRONMENT
    }
    left = {pool: n - sum(len(a.devices) for a in fixed.values() if a.pool == pool) for pool, n in devices.items()}
    found = 0
    for assignment in given:
        left[assignment.pool] = left.get(assignment.pool, 0) - len(assignment.devices)
        found += left[assignment.pool] >= 0
    return found


def environment_host_names(resolved: Resolved) -> frozenset[str]:
    """The plan's parts that are environment hosts, whose time these account for."""
    count = host_count(resolved)
    return frozenset(a.name for a in resolved.plan.of(Role.ENVIRONMENT) if a.replica < count)


def _expected_busy_cores(resolved: Resolved) -> float:
    """Cores that environments keep busy at the rate that is predicted; 0 where nothing says so."""
    rate = (resolved.plan.rates or {}).get("trajectories", 0.0)
    if resolved.problem is None:
        return 0.0
    batch = resolved.run.batch.trajectories
    return sum(
        rate * resolved.quotas.get(d.name, 0) / batch * d.turns.mean * d.environment.core_s
        for d in resolved.problem.domains
    )


def worked_example_factory(fleet: HostFleet | None) -> Callable[[DomainSpec], EnvironmentFactory] | None:
    """What gives a domain's worked examples as episodes where environments live on hosts."""
    return None if fleet is None else lambda domain: fleet.environment(worked_example_domain(domain.name))


def hosted_environment_factory(fleet: HostFleet | None) -> Callable[[DomainSpec], EnvironmentFactory] | None:
    """What gives a domain its environments where they live on hosts."""
    return None if fleet is None else lambda domain: fleet.environment(domain.name)


def hosted_domains(run: RunSpec) -> dict[str, Any]:
    """What hosts can make: nothing else can be asked of them."""
    return {
        d.name: {"environment": d.environment, "arguments": dict(d.environment_args)}
        for d in run.domains
        if isinstance(d.environment, str)
    }


def write_domains(resolved: Resolved, directory: Path) -> Path:
    """The file that says so, with the worked examples that a warm start asks for."""
    path, domains = directory / "environments.json", hosted_domains(resolved.run)
    warm = resolved.run.warm_start
    worked = {
        worked_example_domain(n): {"environment": WORKED, "arguments": domains[n]}
        for n in (warm.domains if warm else ())
        if n in domains
    }
    path.write_text(json.dumps(domains | worked, indent=2) + "\n")
    return path


def worked_example_domain(domain: str) -> str:
    """What hosts know a domain's worked examples by: no domain's own name has a space."""
    return f"worked examples of {domain}"


def image_hook_config(spec: EnvironmentsSpec) -> dict[str, Any] | None:
    """What brings images on hosts, as they are told of it."""
    if spec.images is None:
        return None
    most = None if spec.images_gb is None else int(spec.images_gb * 1e9)
    return {"hook": spec.images, "arguments": spec.images_args, "bytes": most}


def import_paths(specs: Resolved | Specs) -> list[str]:
    """Where hosts import environments from: beside the run spec and, under the controller's own interpreter, wherever
    the controller imports from (the directory of a script that launches, PYTHONPATH), except installed packages."""
    if specs.cluster.environments.python:
        return [specs.base]
    packages = tuple(sysconfig.get_paths()[key] for key in ("stdlib", "platstdlib", "purelib", "platlib"))
    own = (os.path.abspath(path) for path in sys.path)
    return list(dict.fromkeys([specs.base, *(p for p in own if os.path.isdir(p) and not p.startswith(packages))]))


def host_actor(
    resolved: Resolved, directory: Path, name: str, domains: Path, token: str, *, given: Assignment | None
) -> ActorSpec:
    """In the room that the plan gave it, or beside what others hold."""
    on_ray, module = resolved.cluster.runtime.backend == "ray", "rollart.adapters.clusters"
    room = ({}, node_selector(resolved, _pool(resolved))) if given is None else part_resources(resolved, given)
    return ActorSpec(
        name=name,
        factory=f"{module}.ray_host:NodeProgram" if on_ray else f"{module}.program:Program",
        args=(
            name,
            HOST_MODULE,
            [
                "--domains",
                str(domains),
                *(f"--path={path}" for path in import_paths(resolved)),
                *_warm_arguments(resolved),
            ],
            str(directory / "logs" / f"{name}.log"),
        ),
        kwargs={
            "env": {TOKEN: token, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
            "python": resolved.cluster.environments.python,
        },
        resources=room[0],
        labels=room[1],
        max_restarts=-1 if on_ray else 0,
        max_concurrency=PROGRAM_CALLS if on_ray else 1000,
    )


class HostProgram:
    """Implements `hosting.HostPart` over a `Program` actor."""

    def __init__(self, name: str, program: Handle, runtime: Runtime, clock: ResourceClock, token: str) -> None:
        self._name = name
        self._program = program
        self._runtime = runtime
        self._clock = clock
        self._token = token

    @property
    def id(self) -> str:
        return self._name

    @property
    def clock(self) -> ResourceClock:
        return self._clock

    @property
    def node(self) -> str:
        return self._program.node

    async def start(self) -> EnvironmentHost:
        await self._program.call("kill")  # at once: one that is left from before hangs
        try:
            address = str(await self._program.call("start", []))
        except OSError as error:
            why = f"{error.strerror or error}: {error.filename}"
            raise SpecError(f"environments.python: {why}", remedy="name an interpreter that is there") from None
        connection = await HostConnection.open(self._name, address, self._token)
        for domain, problem in connection.problems.items():
            await connection.aclose()
            raise SpecError(
                f"environment of domain '{domain}': {problem} (on {self._name})",
                remedy="mend environment_args, or install what it needs where environments.python points to "
                "(pip install 'rollart[envs]')",
            )
        return connection

    async def wait(self) -> str:
        return await exit_cause(self._program)

    async def close(self) -> None:
        await self._program.kill()
        await self._runtime.release(self._name)


def _warm_arguments(resolved: Resolved) -> list[str]:
    spec = resolved.cluster.environments
    warm = ["--warm", str(spec.warm), "--reuse", str(spec.reuse)] if spec.warm else []
    images = image_hook_config(spec)
    return warm if images is None else [*warm, "--images", json.dumps(images)]


def _pool(resolved: Resolved) -> PoolSpec:
    """Where hosts run beside others."""
    return cpu_pool(resolved, resolved.cluster.environments.pool)


def _clock(resolved: Resolved, name: str, recorder: Recorder, given: Assignment | None) -> ResourceClock:
    """A host that has a core of the plan pays for it; one that shares its machine's with what holds them costs nothing
    more."""
    now = asyncio.get_running_loop().time
    if given is None:
        return ResourceClock(role=ROLE, resource=name, recorder=recorder, clock=now)
    usd, units = resolved.usd_per_device_hour[given.pool], float(len(given.devices))
    return ResourceClock(role=ROLE, resource=name, recorder=recorder, clock=now, units=units, usd_per_unit_hour=usd)
