"""A fleet of environment hosts as a run has it, for the tests of a module: real processes, one loop that goes on."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from rollart.adapters.clusters.local import LocalRuntime
from rollart.launch.hosts import environment_fleet
from rollart.launch.layout import pool_nodes
from rollart.leases import Leases
from rollart.ports import Environment, Runtime
from rollart.settings.resolve import Resolved, resolve_files
from rollart.supervise.environment_hosts import EnvironmentHostSupervisor
from rollart.testing.ledger import MemoryRecorder
from tests.e2e.harness import CLUSTER, tiny

__all__ = ["DOMAINS", "Hosts", "hosts_of", "resolved_with"]

DOMAINS = {
    "tale": "tests.contracts.worlds:Tale",
    "told": "tests.contracts.worlds:Told",
    "blocking": "tests.contracts.worlds:Blocking",
    "lake": "rollart.adapters.envs.frozen_lake:FrozenLakeText",
}


class Hosts:
    """A started fleet, and its events in the ledger."""

    def __init__(self, fleet: EnvironmentHostSupervisor, recorder: MemoryRecorder) -> None:
        self.fleet = fleet
        self.recorder = recorder

    def make(self, domain: str) -> Environment:
        return self.fleet.environment(domain)()

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [{"subject": e.subject, **e.fields} for e in self.recorder.events if e.kind == kind]


def resolved_with(
    directory: Path,
    *,
    cluster: Mapping[str, Any] = CLUSTER,
    domains: Mapping[str, tuple[str, dict[str, Any]]] | None = None,
    **environments: Any,
) -> Resolved:
    """A run of all domains (import path and arguments; `DOMAINS` if not given) on a cluster with these
    `environments`."""
    one = tiny()["domains"][0]
    given = domains or {name: (path, {}) for name, path in DOMAINS.items()}
    every = [
        {**one, "name": name, "environment": path, "environment_args": args} for name, (path, args) in given.items()
    ]
    run = tiny(domains=every, batch__trajectories=2 * len(every))
    (directory / "run.yaml").write_text(yaml.safe_dump(run))
    (directory / "cluster.yaml").write_text(yaml.safe_dump({**cluster, "environments": environments}))
    return resolve_files(directory / "run.yaml", directory / "cluster.yaml")


@contextlib.asynccontextmanager
async def hosts_of(
    resolved: Resolved, directory: Path, runtime: Runtime | None = None, wanted: Resolved | None = None
) -> AsyncIterator[Hosts]:
    recorder = MemoryRecorder()
    used = runtime or LocalRuntime(pool_nodes(resolved))
    await used.start()
    try:
        leases = Leases(recorder)
        fleet = environment_fleet(resolved, directory, used, leases, recorder, used=frozenset(), wanted=wanted)
        assert fleet is not None
        running = asyncio.get_running_loop().create_task(fleet.run())
        try:
            async with asyncio.timeout(60):
                ready = asyncio.get_running_loop().create_task(fleet.ready())
                await asyncio.wait({running, ready}, return_when=asyncio.FIRST_COMPLETED)
                if running.done():
                    ready.cancel()
                    await running
            yield Hosts(fleet, recorder)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
    finally:
        await used.close()
