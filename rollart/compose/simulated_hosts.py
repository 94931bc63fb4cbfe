"""Environment hosts of a simulation, managed by the product's own fleet; on simulated machines in an elastic
cluster."""

from __future__ import annotations

import asyncio
import math

from rollart.compose.actors import cpu_pool
from rollart.compose.clusters import PLACEMENT_S
from rollart.compose.environments import HostAssignments, host_count
from rollart.compose.faults import SimulationFaults, machine_name
from rollart.errors import UsageError
from rollart.runtime.hostwatch import HostLimits
from rollart.sim.hosts import START_S, ModelledHosts
from rollart.sim.machines import HostReservation, MachineInventory
from rollart.spec.resolve import Resolved

__all__ = ["simulated_environment_hosts"]

UNLIMITED_EPISODES = 1_000_000
"""Capacity of a host that exists only in a fault plan, in episodes: unlimited."""


def simulated_environment_hosts(resolved: Resolved, faults: SimulationFaults, wanted: Resolved) -> ModelledHosts | None:
    """None if environments live in the controller and faults cannot hit them. `wanted`: the run with its whole plan.
    Hosts that exist only in a fault plan are on no machine."""
    spec, count = resolved.cluster.environments, host_count(resolved)
    if not count and not faults.affects_hosts:
        return None
    limits = HostLimits(
        per_host=spec.per_worker if count else UNLIMITED_EPISODES,
        health_s=math.inf,
        start_s=START_S,
        call_s=resolved.run.leases.env_step_s,
        pull_s=spec.pull_s,
    )
    hosts = ModelledHosts(faults.hosts, {}, limits)
    if count and faults.machines is not None:
        _on_machines(hosts, faults.machines, resolved, wanted)
    return hosts


def _on_machines(hosts: ModelledHosts, machines: MachineInventory, resolved: Resolved, wanted: Resolved) -> None:
    """Place hosts as in a real run: on the cores of their assignment, or without any, beside other parts."""
    assignments, limit = HostAssignments(resolved, wanted), resolved.cluster.runtime.wait_s + PLACEMENT_S
    pool = cpu_pool(resolved, resolved.cluster.environments.pool).name

    async def room(name: str) -> HostReservation:
        with assignments.assigned(name, hosts.fleet.where(), machines.there()) as given:
            if given is None:
                reservation = HostReservation(machines, pool, 0)
            else:
                first = machine_name(wanted, given.pool, given.devices[0])
                reservation = HostReservation(machines, given.pool, len(given.devices), first)
            try:
                async with asyncio.timeout(limit):
                    await reservation.found()
            except BaseException as error:
                reservation.leave()
                if not isinstance(error, TimeoutError):
                    raise
                raise UsageError(
                    f"no machine of pool '{reservation.pool}' had room for {name} within {limit:g} s"
                ) from None
        return reservation

    hosts.room, hosts.count, hosts.later = room, host_count(resolved), assignments.first_unplanned
