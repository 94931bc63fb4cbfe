"""Billing clocks of plan parts without a supervisor: the trainer, and reward devices without a host."""

from __future__ import annotations

import contextlib

from rollart.compose.actors import part_clock
from rollart.compose.environments import environment_host_names
from rollart.compose.functions import planned_function_hosts
from rollart.compose.routing import SERVING_ROLES
from rollart.ledger.clock import ResourceClock
from rollart.ledger.store import Ledger
from rollart.spec.resolve import Resolved

__all__ = ["unsupervised_clocks"]


def unsupervised_clocks(
    stack: contextlib.AsyncExitStack, resolved: Resolved, ledger: Ledger
) -> dict[str, ResourceClock]:
    """Clocks of the plan's parts other than engines and hosts, which have their own. Closed with the stack."""
    hosts = environment_host_names(resolved) | planned_function_hosts(resolved)
    others = [a for a in resolved.plan.assignments if a.role not in SERVING_ROLES and a.name not in hosts]
    found = {a.name: part_clock(resolved, ledger, a) for a in others}
    for clock in found.values():
        stack.callback(clock.close)
    return found
