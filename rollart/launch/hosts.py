"""Hosts as programs on the cluster: of environments, and of the workers of reward functions.

Either kind may be absent: environments then live in the controller, and workers on the controller's machine. On an
elastic cluster the number of hosts follows the nodes.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import json
import math
import os
import secrets
import sys
import sysconfig
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from placement.types import ROLLOUT_ROLES, Assignment, Role
from rollart.adapters.env_hosts.client import HostConnection
from rollart.adapters.env_hosts.host import ENVIRONMENT_HOST_TOKEN
from rollart.adapters.envs.worked import WORKED, worked_example_domain
from rollart.adapters.rewards.function_hosts import FunctionHostConnection
from rollart.errors import SpecError
from rollart.fleet import ActorSpec
from rollart.hosted import EnvironmentHost, FunctionHost
from rollart.launch.clusters import exit_cause, place_actor, present_devices
from rollart.launch.layout import cpu_pool, device_clock, node_selector, part_resources, program_actor, resource_kind
from rollart.launch.strategies import node_wait_s
from rollart.launch.weight_store import run_id
from rollart.leases import Leases
from rollart.ledger.intervals import ResourceClock
from rollart.policy.hosts import BUSY, MemoryRules, hosts_for
from rollart.ports import Handle, Recorder, Runtime
from rollart.resident import machine_bytes, resident_bytes
from rollart.settings.cluster import UNLESS_QUICK, EnvironmentsSpec
from rollart.settings.planning import Specs
from rollart.settings.resolve import Resolved, concurrent_episodes
from rollart.settings.run import RunSpec
from rollart.supervise.autoscaling import HostAutoscaler
from rollart.supervise.environment_hosts import EnvironmentHostSupervisor
from rollart.supervise.function_hosts import FunctionHostSupervisor
from rollart.supervise.nodes import NodeTracker
from rollart.supervise.supervisor import HostLimits
from serverless.output import RUN
from serverless.workers.host import FUNCTION_HOST_TOKEN
from serverless.workers.remote import WorkerHosts

ENVIRONMENT_ROLE = "environment"

FUNCTION_ROLE = "reward"

MEMORY_POLL_S = 5.0
"""Seconds between checks of the controller's memory."""

PROGRAM_CALLS = 4
"""Concurrent calls of a host's actor: its start, the wait for its exit, a kill, a stop."""


def environment_fleet(
    resolved: Resolved,
    directory: Path,
    runtime: Runtime,
    leases: Leases,
    recorder: Recorder,
    *,
    used: frozenset[str],
    wanted: Resolved | None = None,
) -> EnvironmentHostSupervisor | None:
    """The run's environment hosts, not started; None if environments live in the controller. `used`: part names of
    earlier lives of the run, which new hosts do not reuse. `wanted`: the run with its whole plan, if only a part fits
    on the initial nodes."""
    spec, waits, count = resolved.cluster.environments, resolved.run.leases, host_count(resolved)
    if not count:
        return None
    domains, warm = hosted_domains(resolved.run), resolved.run.warm_start
    worked = {
        worked_example_domain(n): {"environment": WORKED, "arguments": domains[n]}
        for n in (warm.domains if warm else ())
        if n in domains
    }
    path = directory / "environments.json"
    path.write_text(json.dumps(domains | worked, indent=2) + "\n")
    token, assignments = secrets.token_hex(16), HostAssignments(resolved, wanted or resolved)

    async def make(name: str) -> HostProgram:
        with assignments.assigned(name, fleet.where(), present_devices(resolved, runtime)) as given:
            actor = host_actor(resolved, directory, name, path, token, given=given)
            program = await place_actor(resolved, runtime, actor)
        return HostProgram(name, program, runtime, host_clock(resolved, ENVIRONMENT_ROLE, name, recorder, given), token)

    earlier = [int(n) for role, _, n in (name.rpartition("-") for name in used) if role == ENVIRONMENT_ROLE]
    fleet = EnvironmentHostSupervisor(
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
        later=max([assignments.first_unplanned, *(n + 1 for n in earlier)]),
    )
    return fleet


def function_fleet(
    resolved: Resolved, directory: Path, runtime: Runtime, leases: Leases, recorder: Recorder, *, used: frozenset[str]
) -> tuple[FunctionHostSupervisor, WorkerHosts] | tuple[None, None]:
    """The fleet of the run's function hosts, not started, and the registry that starts workers on them; none if workers
    run on the controller's machine. `used`: part names of earlier lives of the run, which later hosts do not reuse."""
    count, local, waits = len(initial_function_hosts(resolved)), resolved.cluster.functions.local, resolved.run.leases
    if not count:
        return None, None
    hosts, token, run = WorkerHosts(), secrets.token_hex(16), provider_run_id(directory)

    async def make(name: str) -> FunctionProgram:
        program = await place_actor(resolved, runtime, function_actor(resolved, directory, name, token, run))
        given = _assignment(resolved, name)
        cores = float(len(given.devices)) if given else 1.0
        clock = host_clock(resolved, FUNCTION_ROLE, name, recorder, given)
        return FunctionProgram(name, program, runtime, clock, token, hosts, cores)

    limits = HostLimits(
        health_s=local.health_s, start_s=local.start_s, call_s=waits.reward_s, patience_s=node_wait_s(resolved)
    )
    fleet = FunctionHostSupervisor(
        make, function_host_names(resolved, used), count, leases=leases, recorder=recorder, limits=limits
    )
    return fleet, hosts


def host_count_keepers(
    wanted: Resolved,
    nodes: NodeTracker | None,
    environments: EnvironmentHostSupervisor | None,
    functions: FunctionHostSupervisor | None,
    recorder: Recorder,
) -> list[HostAutoscaler]:
    """One keeper per fleet; none for a static cluster. `wanted`: the run with its whole plan."""
    return [
        HostAutoscaler(fleet, nodes, functools.partial(count, wanted), recorder, what=what)
        for fleet, count, what in (
            (environments, host_count, "environments"),
            (functions, function_host_count, "function workers"),
        )
        if nodes is not None and fleet is not None
    ]


def host_count(resolved: Resolved, devices: Mapping[str, int] | None = None) -> int:
    """Hosts at the start of a run, or for the given devices by pool; 0 if environments live in the controller.
    Monotonic in the devices."""
    spec, run, given = resolved.cluster.environments, resolved.run, len(resolved.plan.of(Role.ENVIRONMENT))
    if spec.workers == UNLESS_QUICK:  # still undecided: only a run decides
        return 0
    here = given if devices is None else fitting_hosts(resolved, devices)
    if spec.workers != "auto":  # without the hosts whose planned cores are absent
        return min(spec.workers, max(1, spec.workers - max(0, min(given, spec.workers) - here)))
    pool = cpu_pool(resolved, spec.pool)
    cores = pool.count if devices is None else devices.get(pool.name, 0)
    return hosts_for(
        cores=here * BUSY if given else _expected_busy_cores(resolved),
        most=here if given else cores,
        episodes=concurrent_episodes(run).most,
        per_host=spec.per_worker,
    )


def function_host_count(resolved: Resolved, devices: Mapping[str, int] | None = None) -> int:
    """Hosts at the start of a run, or for the given devices by pool."""
    functions = resolved.cluster.functions
    if "local" not in functions.chain:
        return 0
    wanted = functions.local.hosts
    if wanted != "auto":
        return wanted
    if resolved.cluster.runtime.backend == "local":
        return 0
    pool = cpu_pool(resolved, functions.local.pool)
    present = pool.count if devices is None else devices.get(pool.name, 0)
    machines = math.ceil(present / (pool.devices_per_host or pool.count))
    workers = sum(spec.concurrency for spec in resolved.functions.values()) or machines
    return len(_reward_assignments(resolved)) or max(1, min(machines, workers))


def fitting_hosts(resolved: Resolved, devices: Mapping[str, int] | None) -> int:
    """Number of planned environment hosts whose cores exist, given devices by pool and after all other parts except
    engines; all of them for a static cluster."""
    given = resolved.plan.of(Role.ENVIRONMENT)
    if devices is None:
        return len(given)
    fixed = [a for a in resolved.plan.assignments if a.role not in (*ROLLOUT_ROLES, Role.ENVIRONMENT)]
    left = {pool: n - sum(len(a.devices) for a in fixed if a.pool == pool) for pool, n in devices.items()}
    found = 0
    for assignment in given:
        left[assignment.pool] = left.get(assignment.pool, 0) - len(assignment.devices)
        found += left[assignment.pool] >= 0
    return found


def environment_host_names(resolved: Resolved) -> frozenset[str]:
    """Names of the plan's parts that run as environment hosts, which keep their own billing clocks."""
    count = host_count(resolved)
    return frozenset(a.name for a in resolved.plan.of(Role.ENVIRONMENT) if a.replica < count)


def initial_function_hosts(resolved: Resolved, *, profiled: bool = False) -> tuple[str, ...]:
    """Names of the initial hosts; none if workers run on the controller's machine, or if the run has no function.
    `profiled`: functions exist that only a profile describes."""
    count = function_host_count(resolved) if profiled or resolved.run.functions else 0
    return tuple(itertools.islice(function_host_names(resolved, frozenset()), count))


def function_host_names(resolved: Resolved, used: frozenset[str]) -> Iterator[str]:
    """Names of the plan's parts first, then new names that no earlier part had."""
    given = [a.name for a in _reward_assignments(resolved)]
    planned = {a.name for a in resolved.plan.of(Role.REWARD)}
    fresh = (name for name in (f"{FUNCTION_ROLE}-{n}" for n in itertools.count()) if name not in planned)
    first = list(itertools.islice(fresh, max(0, function_host_count(resolved) - len(given))))
    return itertools.chain(given, first, (name for name in fresh if name not in used))


def planned_function_hosts(resolved: Resolved) -> frozenset[str]:
    """Names of the plan's parts that run as function hosts, which keep their own billing clocks."""
    return frozenset(initial_function_hosts(resolved)) & {a.name for a in _reward_assignments(resolved)}


def hosted_domains(run: RunSpec) -> dict[str, Any]:
    """The domains that hosts can create environments for, with their arguments."""
    return {
        d.name: {"environment": d.environment, "arguments": dict(d.environment_args)}
        for d in run.domains
        if isinstance(d.environment, str)
    }


def image_hook_config(spec: EnvironmentsSpec) -> dict[str, Any] | None:
    """The image hook's configuration, as hosts receive it."""
    if spec.images is None:
        return None
    most = None if spec.images_gb is None else int(spec.images_gb * 1e9)
    return {"hook": spec.images, "arguments": spec.images_args, "bytes": most}


def memory_rules(spec: EnvironmentsSpec) -> MemoryRules:
    return MemoryRules() if spec.memory_gb == "auto" else MemoryRules(spec.memory_gb * 1e9)


async def watch_memory(spec: EnvironmentsSpec, emit: Callable[..., None]) -> None:
    """For environments in the controller: report when its memory has grown by a host's bound, and at each doubling."""
    rules, machine, before = memory_rules(spec), machine_bytes(), resident_bytes(below=False)
    bound = rules.bound(machine, 1)
    while True:
        await asyncio.sleep(MEMORY_POLL_S)
        grown = resident_bytes(below=False) - before
        if grown > bound:
            emit(
                "controller_memory",
                "controller",
                grown_gb=round(grown / 1e9, 2),
                bound_gb=round(bound / 1e9, 2),
                cause=f"environments live in the controller and may leak ({rules.describe(machine, 1)}): on hosts "
                "(environments.workers) they are started again",
            )
            bound = 2 * grown


def import_paths(specs: Specs) -> list[str]:
    """Import paths of environments on hosts: the run spec's directory and, under the controller's own interpreter, the
    controller's import paths (the directory of a launching script, PYTHONPATH) without installed packages."""
    if specs.cluster.environments.python:
        return [specs.base]
    packages = tuple(sysconfig.get_paths()[key] for key in ("stdlib", "platstdlib", "purelib", "platlib"))
    own = (os.path.abspath(path) for path in sys.path)
    return list(dict.fromkeys([specs.base, *(p for p in own if os.path.isdir(p) and not p.startswith(packages))]))


def provider_run_id(directory: Path) -> str:
    """The run's id at function providers: its name and a suffix that is unique in the account. A resume keeps it."""
    return run_id(directory, directory / "functions" / "run")


class HostAssignments:
    """Assigns the plan's environment devices to hosts as they start: each host has one assignment of its own, or
    none."""

    def __init__(self, resolved: Resolved, wanted: Resolved) -> None:
        """`wanted`: the run with its whole plan; `resolved`: the part that fits on the initial nodes."""
        self._wanted = wanted
        self._plan = wanted.plan.of(Role.ENVIRONMENT)
        begun, count = {a.name for a in resolved.plan.of(Role.ENVIRONMENT)}, host_count(resolved)
        self._available = [a for a in self._plan if a.replica < count or a.name not in begun]
        self._host_of: dict[str, str] = {}
        self._starting: set[str] = set()

    @property
    def first_unplanned(self) -> int:
        """The first number that no part of the plan has."""
        return max((a.replica for a in self._plan), default=-1) + 1

    @contextlib.contextmanager
    def assigned(
        self, name: str, staying: Collection[str], devices: Mapping[str, int] | None
    ) -> Iterator[Assignment | None]:
        """The host's assignment while the host is being placed, out of the assignments that fit on the `devices` by
        pool and belong to no host in `staying`; preferably the one of the host's own name. None if none is free."""
        excluded = self._starting.union(staying)
        free = [a for a in self._available if self._host_of.get(a.name, "") not in excluded]
        found = None
        if free and len(self._plan) - len(free) < fitting_hosts(self._wanted, devices):
            found = next((a for a in free if a.name == name), free[0])
            self._host_of[found.name] = name
        self._starting.add(name)
        try:
            yield found
        finally:
            self._starting.discard(name)


def host_actor(
    resolved: Resolved, directory: Path, name: str, domains: Path, token: str, *, given: Assignment | None
) -> ActorSpec:
    """The actor of an environment host: on the planned resources, or without any, beside other parts."""
    spec = resolved.cluster.environments
    arguments = ["--domains", str(domains), *(f"--path={path}" for path in import_paths(resolved))]
    if spec.warm:
        arguments += ["--warm", str(spec.warm), "--reuse", str(spec.reuse)]
    if (images := image_hook_config(spec)) is not None:
        arguments += ["--images", json.dumps(images)]
    env = {ENVIRONMENT_HOST_TOKEN: token, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    where, module = _host_resources(resolved, spec.pool, given), "rollart.adapters.env_hosts.host"
    return program_actor(
        resolved, directory, name, module, arguments, where, PROGRAM_CALLS, env=env, python=spec.python
    )


def function_actor(resolved: Resolved, directory: Path, name: str, token: str, run: str = "") -> ActorSpec:
    """The actor of a function host: on the resources planned for rewards while these last, else without any, beside
    other parts. `run`: the run's id at function providers."""
    functions = resolved.cluster.functions
    arguments = ["--logs", str(directory / "functions" / "logs"), "--runtime", functions.local.runtime]
    if functions.allow_unsafe:
        arguments.append("--allow-unsafe")
    where = _host_resources(resolved, functions.local.pool, _assignment(resolved, name))
    env, module = {FUNCTION_HOST_TOKEN: token, RUN: run}, "serverless.workers.host"
    return program_actor(resolved, directory, name, module, arguments, where, PROGRAM_CALLS, env=env)


def _host_resources(
    resolved: Resolved, pool: str | None, given: Assignment | None
) -> tuple[dict[str, float], dict[str, str]]:
    """Resources and node labels of a host: the `given` ones, or none on a node of the pool."""
    if given is None:
        return {}, node_selector(resolved, cpu_pool(resolved, pool))
    return part_resources(resolved, given)


def host_clock(resolved: Resolved, role: str, name: str, recorder: Recorder, given: Assignment | None) -> ResourceClock:
    """A host with planned cores is billed for them; a host that shares a machine with other parts costs nothing
    extra."""
    if given is None:
        return ResourceClock(role=role, resource=name, recorder=recorder, clock=asyncio.get_running_loop().time)
    return device_clock(resolved, recorder, role, name, given.pool, len(given.devices))


@dataclass(slots=True)
class HostActor:
    """Implements `HostProcess` over a `Program` actor."""

    id: str
    program: Handle
    runtime: Runtime
    clock: ResourceClock
    token: str

    @property
    def node(self) -> str:
        return self.program.node

    async def wait(self) -> str:
        return await exit_cause(self.program)

    async def close(self) -> None:
        await self.program.kill()
        await self.runtime.release(self.id)

    async def _start_program(self) -> str:
        """The address at which the program serves."""
        await self.program.call("kill")  # without a grace period: a leftover process hangs
        return str(await self.program.call("start", []))


class HostProgram(HostActor):
    """Implements `HostPart`."""

    async def start(self) -> EnvironmentHost:
        try:
            address = await self._start_program()
        except OSError as error:
            reason = f"{error.strerror or error}: {error.filename}"
            raise SpecError(f"environments.python: {reason}", remedy="name an interpreter that is there") from None
        connection = await HostConnection.open(self.id, address, self.token)
        for domain, problem in connection.problems.items():
            await connection.aclose()
            raise SpecError(
                f"environment of domain '{domain}': {problem} (on {self.id})",
                remedy="mend environment_args, or install its dependencies where environments.python points to "
                "(pip install 'rollart[envs]')",
            )
        return connection


@dataclass(slots=True)
class FunctionProgram(HostActor):
    """Implements `FunctionPart`. `cores`: the host's cores for workers, as a weight relative to other hosts."""

    hosts: WorkerHosts
    cores: float

    async def start(self, notify: Callable[[], None]) -> FunctionHost:
        address = await self._start_program()
        return await FunctionHostConnection.open(
            self.hosts, self.id, address, self.token, weight=self.cores, notify=notify
        )


def _expected_busy_cores(resolved: Resolved) -> float:
    """Cores that environments keep busy at the predicted rate; 0 without a prediction."""
    rate = (resolved.plan.rates or {}).get("trajectories", 0.0)
    if resolved.problem is None:
        return 0.0
    batch = resolved.run.batch.trajectories
    return sum(
        rate * resolved.quotas.get(d.name, 0) / batch * d.turns.mean * d.environment.core_s
        for d in resolved.problem.domains
    )


def _reward_assignments(resolved: Resolved) -> list[Assignment]:
    """The plan's reward parts on cores. A reward model on a GPU is not run by rollart."""
    pools = {pool.name: pool for pool in resolved.cluster.pools}
    return [a for a in resolved.plan.of(Role.REWARD) if resource_kind(resolved, pools[a.pool]) == "CPU"]


def _assignment(resolved: Resolved, name: str) -> Assignment | None:
    return next((a for a in _reward_assignments(resolved) if a.name == name), None)
