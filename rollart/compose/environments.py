"""Environment hosts as programs that the runtime starts, and the fleet of a run."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Callable
from pathlib import Path

from rollart.adapters.envs.host import TOKEN
from rollart.adapters.envs.hosts import HostConnection
from rollart.compose.actors import resource, selector
from rollart.compose.clusters import placed
from rollart.errors import PartDied, SpecError
from rollart.hosted import EnvironmentHost
from rollart.ledger.clock import ResourceClock
from rollart.ports import ActorSpec, EnvironmentFactory, Handle, Recorder, Runtime
from rollart.runtime.hosting import HostFleet
from rollart.runtime.hostwatch import HostLimits
from rollart.runtime.leases import Leases
from rollart.spec.cluster import PoolSpec
from rollart.spec.resolve import Resolved
from rollart.spec.run_parts import DomainSpec

__all__ = ["HOST", "ROLE", "HostProgram", "environment_fleet", "hosted", "host_actor", "write_domains"]

ROLE = "environment"
HOST = "rollart.adapters.envs.host"

PROGRAM_CALLS = 4
"""Calls that a host's actor has at a time: its start, the wait for its end, a kill, a stop."""


def environment_fleet(
    resolved: Resolved, directory: Path, runtime: Runtime, leases: Leases, recorder: Recorder, *, used: frozenset[str]
) -> HostFleet | None:
    """The run's environment hosts, not started; None where environments live in the controller. `used`: names of parts
    of earlier lives of the run, which no host gets."""
    spec, waits = resolved.cluster.environments, resolved.run.leases
    if not spec.workers:
        return None
    domains = write_domains(resolved, directory)
    token = secrets.token_hex(16)

    async def make(name: str) -> HostProgram:
        actor = host_actor(resolved, directory, name, domains, token)
        program = await placed(resolved, runtime, actor)
        return HostProgram(name, program, _clock(name, recorder), token)

    numbers = [int(n.rpartition("-")[2]) for n in used if n.startswith(f"{ROLE}-") and n.rpartition("-")[2].isdecimal()]
    return HostFleet(
        make,
        spec.workers,
        leases=leases,
        recorder=recorder,
        limits=HostLimits(
            per_host=spec.per_worker, health_s=spec.health_s, start_s=spec.start_s, call_s=waits.env_step_s
        ),
        first=max(numbers, default=-1) + 1,
    )


def hosted(fleet: HostFleet | None) -> Callable[[DomainSpec], EnvironmentFactory] | None:
    """What gives a domain its environments where they live on hosts."""
    return None if fleet is None else lambda domain: fleet.environment(domain.name)


def write_domains(resolved: Resolved, directory: Path) -> Path:
    """What hosts can make: nothing else can be asked of them."""
    domains = {
        d.name: {"environment": d.environment, "arguments": dict(d.environment_args)}
        for d in resolved.run.domains
        if isinstance(d.environment, str)
    }
    path = directory / "environments.json"
    path.write_text(json.dumps(domains, indent=2) + "\n")
    return path


def host_actor(resolved: Resolved, directory: Path, name: str, domains: Path, token: str) -> ActorSpec:
    on_ray = resolved.cluster.runtime.backend == "ray"
    module = "rollart.adapters.clusters"
    return ActorSpec(
        name=name,
        factory=f"{module}.ray_host:NodeProgram" if on_ray else f"{module}.program:Program",
        args=(
            name,
            HOST,
            ["--domains", str(domains), "--path", resolved.base, *_ahead(resolved)],
            str(directory / "logs" / f"{name}.log"),
        ),
        kwargs={
            "env": {TOKEN: token, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
            "python": resolved.cluster.environments.python,
        },
        labels=selector(resolved, _pool(resolved)),
        max_restarts=-1 if on_ray else 0,
        max_concurrency=PROGRAM_CALLS if on_ray else 1000,
    )


class HostProgram:
    """Implements `hosting.HostPart` over a `Program` actor."""

    def __init__(self, name: str, program: Handle, clock: ResourceClock, token: str) -> None:
        self._name = name
        self._program = program
        self._clock = clock
        self._token = token

    @property
    def id(self) -> str:
        return self._name

    @property
    def clock(self) -> ResourceClock:
        return self._clock

    async def start(self) -> EnvironmentHost:
        await self._program.call("kill")  # at once: one that is left from before hangs
        address = str(await self._program.call("start", []))
        connection = await HostConnection.open(self._name, address, self._token)
        for domain, problem in connection.problems.items():
            await connection.aclose()
            raise SpecError(
                f"environment of domain '{domain}': {problem} (on {self._name})",
                remedy="install what it needs where environments.python points to, or pip install 'rollart[envs]'",
            )
        return connection

    async def wait(self) -> str:
        try:
            return str(await self._program.call("wait"))
        except PartDied as error:  # not the program alone, but the actor that held it, or its node
            return error.message

    async def close(self) -> None:
        await self._program.kill()


def _ahead(resolved: Resolved) -> list[str]:
    spec = resolved.cluster.environments
    return ["--warm", str(spec.warm), "--reuse", str(spec.reuse)] if spec.warm else []


def _pool(resolved: Resolved) -> PoolSpec:
    """SpecError if there is none."""
    pools, wanted = resolved.cluster.pools, resolved.cluster.environments.pool
    if wanted is None:
        cores = [pool for pool in pools if resource(resolved, pool) == "CPU"]
        return next((pool for pool in cores if pool.device == "cpu"), (cores or pools)[0])
    found = next((pool for pool in pools if pool.name == wanted), None)
    if found is None:
        raise SpecError(
            f"environments.pool is '{wanted}' (rule: a pool of the cluster: {', '.join(p.name for p in pools)})"
        )
    return found


def _clock(name: str, recorder: Recorder) -> ResourceClock:
    """Of a host, which shares its machine's cores with what holds them: its seconds are told, and cost nothing more."""
    return ResourceClock(role=ROLE, resource=name, recorder=recorder, clock=asyncio.get_running_loop().time)
