"""Which of a run's hosts follow nodes that come and go, and how many of them there should be."""

from __future__ import annotations

import functools

from rollart.compose.environments import host_count
from rollart.compose.functions import function_host_count
from rollart.ports import Recorder
from rollart.runtime.crews import CrewKeeper
from rollart.runtime.function_hosts import FunctionFleet
from rollart.runtime.hosting import HostFleet
from rollart.runtime.nodes import Nodes
from rollart.spec.resolve import Resolved

__all__ = ["host_count_keepers"]


def host_count_keepers(
    wanted: Resolved,
    nodes: Nodes | None,
    environments: HostFleet | None,
    functions: FunctionFleet | None,
    recorder: Recorder,
) -> list[CrewKeeper]:
    """None where nodes do not come and go. `wanted`: the run with all of its plan."""
    found = []
    if nodes is not None and environments is not None:
        count = functools.partial(host_count, wanted)
        found.append(CrewKeeper(environments, nodes, count, recorder, what="environments"))
    if nodes is not None and functions is not None:
        count = functools.partial(function_host_count, wanted)
        found.append(CrewKeeper(functions, nodes, count, recorder, what="function workers"))
    return found
