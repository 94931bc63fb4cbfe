"""What the window of a run sustains under its plan: `placement.window` with its groups and the way of its weights."""

from __future__ import annotations

from placement.architecture import Shape
from placement.types import Role
from placement.window import Held, windows
from rollart.compose.routing import SERVING
from rollart.spec.planning import window_of
from rollart.spec.resolve import Resolved

__all__ = ["sustained"]


def sustained(resolved: Resolved) -> tuple[Held, ...]:
    """Every domain's slots; none without a computed plan of the whole loop."""
    found, problem, run = resolved.plan.placement, resolved.problem, resolved.run
    trainers = resolved.plan.of(Role.TRAINER)
    if found is None or problem is None or not trainers or not isinstance(problem.performance.shape, Shape):
        return ()
    window = problem.window or window_of(run, problem.performance.shape)
    near = all(a.pool == trainers[0].pool for a in resolved.plan.assignments if a.role in SERVING)
    return windows(found, problem, window, publish_s=window.published(near=near))
