"""What the window of a run sustains under its plan: `placement.window` with its groups and the way of its weights."""

from __future__ import annotations

from placement.architecture import Shape
from placement.types import Role
from placement.window import Held, windows
from rollart.compose.routing import SERVING
from rollart.sim.links import PUSH, RDMA
from rollart.spec.resolve import Resolved

__all__ = ["sustained"]


def sustained(resolved: Resolved) -> tuple[Held, ...]:
    """Every domain's slots; none without a computed plan of the whole loop."""
    found, problem, run = resolved.plan.placement, resolved.problem, resolved.run
    trainers = resolved.plan.of(Role.TRAINER)
    if found is None or problem is None or not trainers or not isinstance(problem.performance.shape, Shape):
        return ()
    elsewhere = any(a.pool != trainers[0].pool for a in resolved.plan.assignments if a.role in SERVING)
    gb = problem.performance.shape.weight_bytes / 1e9
    publish_s = (PUSH if elsewhere else RDMA).seconds(gb) + RDMA.seconds(gb)
    groups = {d.name: d.group_size for d in run.domains}
    return windows(found, problem, groups=groups, publish_s=publish_s, context=float(run.model.context))
