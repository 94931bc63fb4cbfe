"""Host autoscaling: fleets whose number of hosts follows the cluster's nodes."""

from __future__ import annotations

import functools

from rollart.compose.environments import host_count
from rollart.compose.functions import function_host_count
from rollart.ports import Recorder
from rollart.runtime.crews import HostAutoscaler
from rollart.runtime.function_hosts import FunctionHostSupervisor
from rollart.runtime.hosting import EnvironmentHostSupervisor
from rollart.runtime.nodes import NodeTracker
from rollart.spec.resolve import Resolved

__all__ = ["host_count_keepers"]


def host_count_keepers(
    wanted: Resolved,
    nodes: NodeTracker | None,
    environments: EnvironmentHostSupervisor | None,
    functions: FunctionHostSupervisor | None,
    recorder: Recorder,
) -> list[HostAutoscaler]:
    """One keeper per fleet; none for a static cluster. `wanted`: the run with its whole plan."""
    found = []
    if nodes is not None and environments is not None:
        count = functools.partial(host_count, wanted)
        found.append(HostAutoscaler(environments, nodes, count, recorder, what="environments"))
    if nodes is not None and functions is not None:
        count = functools.partial(function_host_count, wanted)
        found.append(HostAutoscaler(functions, nodes, count, recorder, what="function workers"))
    return found
