"""Update policies of engines, and time limits of waits, from the run spec."""

from __future__ import annotations

from rollart.compose.starts import engine_start_limits
from rollart.policy.updates import Delayed, OnDivergence, Staggered, UpdatePolicy, VersionProbe
from rollart.spec.resolve import Resolved

__all__ = ["node_wait_s", "engine_wait_s", "stall_limit_s", "update_policy"]

STALL_S = 600.0
"""Seconds without progress after which a run fails loudly, unless one of its leases may take longer."""

DELAYED_UPDATE_S = 120.0
"""Default limit of a turn's generation: most iterations end before it."""


def update_policy(resolved: Resolved) -> UpdatePolicy | None:
    """None if all engines update at once."""
    weights = resolved.run.weights
    match weights.update:
        case "delayed":
            return Delayed(DELAYED_UPDATE_S if weights.longest_s is None else weights.longest_s)
        case "staggered":
            return Staggered() if weights.fraction is None else Staggered(weights.fraction)
        case "on_divergence":
            assert weights.threshold is not None, "a rule of the spec"
            return OnDivergence(VersionProbe(-1, "", {}), weights.threshold)
        case "all":
            return None


def engine_wait_s(resolved: Resolved) -> float:
    """Additional seconds that a turn may wait for an engine, beyond a restart and an update."""
    policy = update_policy(resolved)
    return (policy.longest_s if isinstance(policy, Delayed) else 0.0) + node_wait_s(resolved)


def node_wait_s(resolved: Resolved) -> float:
    """Seconds that the run waits for a node when no engine is left."""
    elastic = resolved.cluster.runtime.elastic
    return 0.0 if elastic is None else elastic.wait_s


def stall_limit_s(resolved: Resolved) -> float:
    """Longer than any wait that ends by itself: no lease expires later."""
    leases, hosts = resolved.run.leases, resolved.cluster.environments
    longest = max(
        hosts.start_s if hosts.workers else 0.0,
        hosts.pull_s if hosts.workers and hosts.images is not None else 0.0,
        leases.generate_s,
        engine_start_limits(resolved).most_s + leases.publish_s,
        leases.env_step_s,
        1.5 * leases.reward_s,
        leases.train_s,
    )
    return max(STALL_S, 2.0 * longest)
