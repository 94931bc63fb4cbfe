"""Location of reward function workers: on the controller's machine, or on hosts that the runtime starts."""

from __future__ import annotations

import asyncio
import itertools
import math
import secrets
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from placement.types import Assignment, Role
from rollart.adapters.rewards.hosts import FunctionHostConnection
from rollart.compose.actors import cpu_pool, node_selector, part_resources, resource_kind
from rollart.compose.clusters import exit_cause, place_actor
from rollart.compose.stored import run_id
from rollart.compose.weights import node_wait_s
from rollart.hosted import FunctionHost
from rollart.ledger.clock import ResourceClock
from rollart.ports import ActorSpec, Handle, Recorder, Runtime
from rollart.runtime.function_hosts import FunctionHostSupervisor
from rollart.runtime.hostwatch import HostLimits
from rollart.runtime.leases import Leases
from rollart.spec.cluster import PoolSpec
from rollart.spec.resolve import Resolved
from serverless.backends.hosted import WorkerHosts
from serverless.backends.worker_host import TOKEN

__all__ = [
    "ROLE",
    "function_actor",
    "function_fleet",
    "function_host_count",
    "initial_function_hosts",
    "function_host_names",
    "planned_function_hosts",
    "provider_run_id",
]

ROLE = "reward"
HOST_MODULE = "serverless.backends.worker_host"

PROGRAM_CALLS = 4
"""Concurrent calls of a host's actor: its start, the wait for its exit, a kill, a stop."""


def function_fleet(
    resolved: Resolved, directory: Path, runtime: Runtime, leases: Leases, recorder: Recorder, *, used: frozenset[str]
) -> tuple[FunctionHostSupervisor, WorkerHosts] | tuple[None, None]:
    """The fleet of the run's function hosts, not started, and the registry that starts workers on them; none if workers
    run on the controller's machine. `used`: part names of earlier lives of the run, which later hosts do not reuse."""
    count, local, waits = len(initial_function_hosts(resolved)), resolved.cluster.functions.local, resolved.run.leases
    if not count:
        return None, None
    hosts, token = WorkerHosts(), secrets.token_hex(16)

    async def make(name: str) -> FunctionProgram:
        program = await place_actor(resolved, runtime, function_actor(resolved, directory, name, token))
        clock, cores = _clock(resolved, name, recorder), _cores(resolved, name)
        return FunctionProgram(name, program, runtime, clock, hosts, token, cores)

    limits = HostLimits(
        health_s=local.health_s,
        start_s=local.start_s,
        call_s=waits.reward_s,
        patience_s=node_wait_s(resolved),
    )
    fleet = FunctionHostSupervisor(
        make, function_host_names(resolved, used), count, leases=leases, recorder=recorder, limits=limits
    )
    return fleet, hosts


def initial_function_hosts(resolved: Resolved, *, profiled: bool = False) -> tuple[str, ...]:
    """Names of the initial hosts; none if workers run on the controller's machine, or if the run has no function.
    `profiled`: functions exist that only a profile describes."""
    count = function_host_count(resolved) if profiled or resolved.run.functions else 0
    return tuple(itertools.islice(function_host_names(resolved, frozenset()), count))


def function_host_names(resolved: Resolved, used: frozenset[str]) -> Iterator[str]:
    """Names of the plan's parts first, then new names that no earlier part had."""
    given = [a.name for a in _reward_assignments(resolved)]
    planned = {a.name for a in resolved.plan.of(Role.REWARD)}
    fresh = (name for name in (f"{ROLE}-{n}" for n in itertools.count()) if name not in planned)
    first = list(itertools.islice(fresh, max(0, function_host_count(resolved) - len(given))))
    return itertools.chain(given, first, (name for name in fresh if name not in used))


def planned_function_hosts(resolved: Resolved) -> frozenset[str]:
    """Names of the plan's parts that run as function hosts, which keep their own billing clocks."""
    return frozenset(initial_function_hosts(resolved)) & {a.name for a in _reward_assignments(resolved)}


def function_actor(resolved: Resolved, directory: Path, name: str, token: str) -> ActorSpec:
    """The actor of a function host: on the resources planned for rewards while these last, else without any, beside
    other parts."""
    on_ray, functions = resolved.cluster.runtime.backend == "ray", resolved.cluster.functions
    module, given = "rollart.adapters.clusters", _assignment(resolved, name)
    reservation = ({}, node_selector(resolved, _pool(resolved))) if given is None else part_resources(resolved, given)
    unsafe = ["--allow-unsafe"] if functions.allow_unsafe else []
    return ActorSpec(
        name=name,
        factory=f"{module}.ray_host:NodeProgram" if on_ray else f"{module}.program:Program",
        args=(
            name,
            HOST_MODULE,
            ["--logs", str(directory / "functions" / "logs"), "--runtime", functions.local.runtime, *unsafe],
            str(directory / "logs" / f"{name}.log"),
        ),
        kwargs={"env": {TOKEN: token}},
        resources=reservation[0],
        labels=reservation[1],
        max_restarts=-1 if on_ray else 0,
        max_concurrency=PROGRAM_CALLS if on_ray else 1000,
    )


class FunctionProgram:
    """Implements `function_hosts.FunctionPart` over a `Program` actor."""

    def __init__(
        self,
        name: str,
        program: Handle,
        runtime: Runtime,
        clock: ResourceClock,
        hosts: WorkerHosts,
        token: str,
        cores: float,
    ) -> None:
        """`cores`: the host's cores for workers, as a weight relative to other hosts."""
        self._name = name
        self._program = program
        self._runtime = runtime
        self._clock = clock
        self._hosts = hosts
        self._token = token
        self._cores = cores

    @property
    def id(self) -> str:
        return self._name

    @property
    def clock(self) -> ResourceClock:
        return self._clock

    @property
    def node(self) -> str:
        return self._program.node

    async def start(self, notify: Callable[[], None]) -> FunctionHost:
        await self._program.call("kill")  # without a grace period: a leftover process hangs
        address = str(await self._program.call("start", []))
        return await FunctionHostConnection.open(
            self._hosts, self._name, address, self._token, weight=self._cores, notify=notify
        )

    async def wait(self) -> str:
        return await exit_cause(self._program)

    async def close(self) -> None:
        await self._program.kill()
        await self._runtime.release(self._name)


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
    pool = _pool(resolved)
    present = pool.count if devices is None else devices.get(pool.name, 0)
    machines = math.ceil(present / (pool.devices_per_host or pool.count))
    workers = sum(spec.concurrency for spec in resolved.functions.values()) or machines
    return len(_reward_assignments(resolved)) or max(1, min(machines, workers))


def provider_run_id(directory: Path) -> str:
    """The run's id at function providers: its name and a suffix that is unique in the account. A resume keeps it."""
    return run_id(directory, directory / "functions" / "run")


def _reward_assignments(resolved: Resolved) -> list[Assignment]:
    """The plan's reward parts on cores. A reward model on a GPU is not run by rollart."""
    pools = {pool.name: pool for pool in resolved.cluster.pools}
    return [a for a in resolved.plan.of(Role.REWARD) if resource_kind(resolved, pools[a.pool]) == "CPU"]


def _assignment(resolved: Resolved, name: str) -> Assignment | None:
    return next((a for a in _reward_assignments(resolved) if a.name == name), None)


def _cores(resolved: Resolved, name: str) -> float:
    given = _assignment(resolved, name)
    return 1.0 if given is None else float(len(given.devices))


def _pool(resolved: Resolved) -> PoolSpec:
    """The pool of hosts without planned cores."""
    return cpu_pool(resolved, resolved.cluster.functions.local.pool)


def _clock(resolved: Resolved, name: str, recorder: Recorder) -> ResourceClock:
    """A host with planned cores is billed for them; a host that shares a machine with other parts costs nothing
    extra."""
    given, now = _assignment(resolved, name), asyncio.get_running_loop().time
    if given is None:
        return ResourceClock(role=ROLE, resource=name, recorder=recorder, clock=now)
    usd, units = resolved.usd_per_device_hour[given.pool], float(len(given.devices))
    return ResourceClock(role=ROLE, resource=name, recorder=recorder, clock=now, units=units, usd_per_unit_hour=usd)
