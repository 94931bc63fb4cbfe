"""What the window of a run sustains under its plan: `placement.window` with its groups and its publish time."""

from __future__ import annotations

from placement.architecture import Shape
from placement.publish import PublishPath
from placement.types import Role
from placement.window import Held, windows
from rollart.compose.routing import SERVING
from rollart.spec.planning import publishing_of, window_of
from rollart.spec.resolve import Resolved

__all__ = ["publish_paths", "sustained"]


def sustained(resolved: Resolved) -> tuple[Held, ...]:
    """Every domain's slots; none without a computed plan of the whole loop."""
    found, problem, run = resolved.plan.placement, resolved.problem, resolved.run
    trained = resolved.plan.of(Role.TRAINER)
    if found is None or problem is None or not trained or not isinstance(problem.performance.shape, Shape):
        return ()
    return windows(found, problem, problem.window or window_of(run, resolved.cluster, problem.performance.shape))


def publish_paths(resolved: Resolved) -> dict[str, PublishPath]:
    """By pool with engines, how a version gets there; none where nothing is planned or trained."""
    problem, trained = resolved.problem, resolved.plan.of(Role.TRAINER)
    if problem is None or not trained or not isinstance(problem.performance.shape, Shape):
        return {}
    publishing = publishing_of(resolved.run, resolved.cluster, problem.performance.shape)
    pools = sorted({a.pool for a in resolved.plan.assignments if a.role in SERVING})
    return {pool: publishing.path(problem.pools, problem.links, trained[0].pool, pool) for pool in pools}
