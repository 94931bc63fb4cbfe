"""The throughput that a run's window sustains under its plan: `placement.window` with the run's groups and publish
time."""

from __future__ import annotations

import functools
import math
from bisect import bisect_left, bisect_right
from dataclasses import dataclass, replace

from placement.publish import PublishPath
from placement.solve import solve
from placement.types import ROLLOUT_ROLES, Infeasible, Role
from placement.window import DomainWindow, domain_windows, longest_member_ratios
from rollart.settings.planning import publishing_of, window_of
from rollart.settings.resolve import Resolved
from rollart.settings.run import LAG, MAX_STALENESS

WINDOW_TOLERANCE = 0.01
"""Relative tolerance of a plan against its window."""
SUFFICIENT_RATE_SHARE = 0.9
"""Share of the best rate over all staleness values that a recommended one reaches: each version of lag costs samples to
learn from (docs/training.md), so the last tenth of the rate is not worth several versions."""


@dataclass(frozen=True, slots=True)
class RecommendedStaleness:
    """The smallest `staleness` at which a plan whose batches wait for their longest groups yields `rate`
    trajectories/s, at least `SUFFICIENT_RATE_SHARE` of `best`, the rate at the largest staleness. Independent of the
    run's own staleness."""

    staleness: int
    rate: float
    best: float


def sustained_slots(resolved: Resolved) -> tuple[DomainWindow, ...]:
    """The slots of every domain; empty without a computed plan of the whole loop."""
    found, problem, run = resolved.plan.placement, resolved.problem, resolved.run
    trained = resolved.plan.of(Role.TRAINER)
    if found is None or problem is None or not trained:
        return ()
    window = problem.window or window_of(run, resolved.cluster, problem.performance.shape)
    return domain_windows(found, replace(problem, window=window))


def fresh_group_shares(resolved: Resolved) -> dict[str, float]:
    """By domain, the share of groups that the staleness bound keeps at the planned rate.

    A group that starts at a publish has (alpha + 1) steps, minus training and publish, until its last batch is taken.
    """
    problem, run, shares = resolved.problem, resolved.run, dict[str, float]()
    if run.schedule in LAG or problem is None or problem.train is None or resolved.plan.placement is None:
        return shares
    step = problem.train.batch / resolved.plan.placement.rate if resolved.plan.placement.rate else math.inf
    profiles = {d.name: d for d in problem.domains}
    for held in sustained_slots(resolved):
        lengths = longest_member_ratios(
            profiles[held.domain], run.domain(held.domain).group_size, float(run.model.context)
        )
        limit = ((run.staleness + 1) * step * (1 + WINDOW_TOLERANCE) - held.train_s - held.publish_s) / held.seconds
        shares[held.domain] = bisect_right(lengths, limit) / len(lengths)
    return shares


def recommended_staleness(resolved: Resolved) -> RecommendedStaleness | None:
    """The staleness that the domains' lengths require; None if no window of groups is planned.

    Each staleness is judged by a plan made for it: a plan for a longer window has slower engines, whose groups take
    longer. So no plan demands another staleness than its own.
    """
    problem, run = resolved.problem, resolved.run
    if run.schedule in LAG or not sustained_slots(resolved):
        return None
    assert problem is not None
    assert problem.train is not None
    train, window = problem.train, window_of(run, resolved.cluster, problem.performance.shape)
    window = replace(window, aborts=False, waits=True)

    @functools.cache
    def rate(staleness: int) -> float:
        asked = replace(problem, train=replace(train, staleness=staleness))
        found = solve(asked if problem.fixed is not None else replace(asked, window=window))
        if isinstance(found, Infeasible):
            return 0.0
        return min([found.rate, *(held.rate for held in domain_windows(found, replace(asked, window=window)))])

    best = rate(MAX_STALENESS)
    least = bisect_left(
        range(MAX_STALENESS), True, key=lambda staleness: rate(staleness) >= SUFFICIENT_RATE_SHARE * best
    )
    return RecommendedStaleness(least, rate(least), best)


def publish_paths(resolved: Resolved) -> dict[str, PublishPath]:
    """By pool with engines, the path of a version to it; empty without a plan or a trainer."""
    problem, trained = resolved.problem, resolved.plan.of(Role.TRAINER)
    if problem is None or not trained:
        return {}
    publishing = publishing_of(resolved.run, resolved.cluster, problem.performance.shape)
    pools = sorted({a.pool for a in resolved.plan.assignments if a.role in ROLLOUT_ROLES})
    return {pool: publishing.path(problem.pools, problem.links, trained[0].pool, pool) for pool in pools}
