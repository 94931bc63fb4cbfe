"""What the window of a run sustains under its plan: `placement.window` with its groups and its publish time."""

from __future__ import annotations

import math
from dataclasses import dataclass

from placement.architecture import Shape
from placement.publish import PublishPath
from placement.types import Role
from placement.window import Held, spans, windows
from rollart.compose.routing import SERVING
from rollart.spec.planning import publishing_of, window_of
from rollart.spec.resolve import Resolved
from rollart.spec.run import LAG

__all__ = ["InTime", "in_time", "publish_paths", "sustained"]

TAIL = 0.99
"""Share of a domain's groups that is to end within the staleness bound: what is left is about one group in a batch."""


@dataclass(frozen=True, slots=True)
class InTime:
    """`share` of a domain's groups ends within the run's staleness bound, `TAIL` of them within `staleness`."""

    domain: str
    share: float
    staleness: int


def sustained(resolved: Resolved) -> tuple[Held, ...]:
    """Every domain's slots; none without a computed plan of the whole loop."""
    found, problem, run = resolved.plan.placement, resolved.problem, resolved.run
    trained = resolved.plan.of(Role.TRAINER)
    if found is None or problem is None or not trained or not isinstance(problem.performance.shape, Shape):
        return ()
    return windows(found, problem, problem.window or window_of(run, resolved.cluster, problem.performance.shape))


def in_time(resolved: Resolved) -> tuple[InTime, ...]:
    """By domain, what the staleness bound keeps of its lengths at the planned rate.

    A group that starts at a publish can take (alpha + 1) steps less training and publish until its last batch is taken.
    """
    problem, run, found = resolved.problem, resolved.run, []
    if run.schedule in LAG or problem is None or problem.train is None or resolved.plan.placement is None:
        return ()
    step = problem.train.batch / resolved.plan.placement.rate if resolved.plan.placement.rate else math.inf
    profiles = {d.name: d for d in problem.domains}
    for held in sustained(resolved):
        members = run.domain(held.domain).group_size
        lengths = [held.seconds * x for x in spans(profiles[held.domain], members, float(run.model.context))]
        rest, tail = held.train_s + held.publish_s, lengths[math.ceil(TAIL * len(lengths)) - 1]
        limit = (run.staleness + 1) * step - rest
        share = sum(length <= limit for length in lengths) / len(lengths)
        found.append(InTime(held.domain, share, max(math.ceil((tail + rest) / step - 1), 0)))
    return tuple(found)


def publish_paths(resolved: Resolved) -> dict[str, PublishPath]:
    """By pool with engines, how a version gets there; none where nothing is planned or trained."""
    problem, trained = resolved.problem, resolved.plan.of(Role.TRAINER)
    if problem is None or not trained or not isinstance(problem.performance.shape, Shape):
        return {}
    publishing = publishing_of(resolved.run, resolved.cluster, problem.performance.shape)
    pools = sorted({a.pool for a in resolved.plan.assignments if a.role in SERVING})
    return {pool: publishing.path(problem.pools, problem.links, trained[0].pool, pool) for pool in pools}
