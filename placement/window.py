"""The rate that a window of trajectories in flight sustains, given how long a run holds its slots.

A slot is taken at admission and released at the publish of the version that its trajectory was trained into. Until then
it waits for the longest member of its group, for enough groups to make a batch, for training and for the publish.

Groups start at publishes, a batch of slots at a time. With F the share of groups that are complete at an age, S the
seconds between two publishes and x those from a publish until the next batch is complete (S = x + training + publish),
N groups start for B that are trained. Groups older than α publishes are aborted, so that B = N·F(x + αS); and after a
publish the slots are full: N·(1 + Σ_{i<α} (1 − F(x + iS))) = slots. Where nothing is aborted N is B, and the sum has no
end. Both fix x, and with it S: the rate is B / S. Where batches wait for the groups at their bound, x is also so long
that `TAIL_QUANTILE` of them are complete at x + αS.
"""

from __future__ import annotations

import functools
import math
from bisect import bisect_right
from dataclasses import dataclass

from placement.problem import DomainProfile, Problem, log_normal
from placement.types import ROLLOUT_ROLES, Placement, Role

QUANTILE_POINTS = 64
"""Quantiles that stand for a distribution: maxima of groups of eight come out within 2 % at a sigma of 1."""
MAX_PUBLISHES_OUTLIVED = 1000.0
"""Limit of publishes that a group may outlive: only training that takes no time has more."""
TAIL_QUANTILE = 0.99
"""Share of a domain's groups that must be complete at their bound if batches wait for them. The longest of 32 groups,
which a batch of 256 in groups of 8 waits for, is on average as long as their quantile of 98.2 %."""
SLOPE_STEP = 0.02
"""Relative difference over which slopes are taken: the distribution has a few thousand points."""


@dataclass(frozen=True, slots=True)
class DomainWindow:
    """The slots of one domain: mean seconds of a trajectory in flight, of its group's longest member, of training and
    of the publish; the number of slots and the seconds that each is held; and the trajectories/s, over all domains,
    that its part of the window sustains."""

    domain: str
    seconds: float
    longest_s: float
    train_s: float
    publish_s: float
    slots: float
    held_s: float
    rate: float


@dataclass(frozen=True, slots=True)
class HoldingSlopes:
    """A slot is held for `own × seconds in flight + rest × seconds of training and publish`. One of `started`
    trajectories is trained."""

    own: float
    rest: float
    started: float = 1.0


def domain_windows(found: Placement, problem: Problem) -> tuple[DomainWindow, ...]:
    """The slots of every domain under a plan; empty without training, a window or a bound. Waiting for other
    domains' parts of the batch is not counted."""
    train, window, bound = problem.train, problem.window, problem.trajectories_in_flight
    trainer = next(iter(found.of(Role.TRAINER)), None)
    if train is None or window is None or trainer is None or not math.isfinite(bound) or found.rate <= 0:
        return ()
    train_s = trainer.utilisation * train.batch / found.rate
    publish_s = problem.publish_s(trainer.pool, {d.pool for d in found.deployments if d.role in ROLLOUT_ROLES})
    total = sum(d.weight for d in problem.domains)
    held = []
    for domain in problem.domains:
        flows = [f for f in found.flows if f.domain == domain.name]
        rate = sum(f.rate for f in flows)
        if not rate:
            continue
        seconds = sum(f.rate * f.seconds for f in flows) / rate
        longest = seconds * mean_longest_ratio(domain, window.groups.get(domain.name, 1), window.context)
        slots = bound * domain.weight / total
        held_s, _ = _holding_time(problem, domain, seconds, train_s + publish_s)
        held.append(DomainWindow(domain.name, seconds, longest, train_s, publish_s, slots, held_s, bound / held_s))
    return tuple(held)


def holding_slopes(problem: Problem, domain: DomainProfile, seconds: float, rest_s: float) -> HoldingSlopes:
    """The slopes of the holding time near `seconds` in flight and `rest_s` of training and publish. The holding time is
    homogeneous of degree one in both, so that its slopes determine it."""
    if seconds <= 0 or rest_s <= 0:
        held_s, started = _holding_time(problem, domain, max(seconds, 1e-9), 0.0)
        return HoldingSlopes(held_s / max(seconds, 1e-9), 1.0, started)
    here, started = _holding_time(problem, domain, seconds, rest_s)
    above, _ = _holding_time(problem, domain, seconds * (1 + SLOPE_STEP), rest_s)
    below, _ = _holding_time(problem, domain, seconds * (1 - SLOPE_STEP), rest_s)
    own = max((above - below) / (2 * SLOPE_STEP * seconds), 0.0)
    return HoldingSlopes(own, max(here - own * seconds, 0.0) / rest_s, started)


def _holding_time(problem: Problem, domain: DomainProfile, seconds: float, rest_s: float) -> tuple[float, float]:
    """Seconds that a slot is held, and trajectories started per trained trajectory."""
    train, window = problem.train, problem.window
    assert train is not None, "there is training"
    assert window is not None, "there are slots to hold"
    members = window.groups.get(domain.name, 1)
    share = domain.weight / sum(d.weight for d in problem.domains)
    places = problem.trajectories_in_flight / train.batch
    between, started = publish_interval(
        longest_member_ratios(domain, members, window.context),
        rest_s / seconds,
        staleness=train.staleness,
        places=places,
        aborts=window.aborts,
        waits=window.waits,
        groups=max(share * train.batch / members, 1.0),
    )
    return places * between * seconds, started


def publish_interval(
    lengths: tuple[float, ...],
    rest: float,
    *,
    staleness: int,
    places: float,
    aborts: bool,
    groups: float,
    waits: bool = False,
) -> tuple[float, float]:
    """Time between two publishes, and groups started per trained group. `lengths` of groups in order, equally likely;
    `rest` = training and publish; `places` in batches; `groups`: number in a batch; the wait for the last of them is at
    most its mean duration."""

    def complete(age: float) -> float:
        """F, between points in proportion."""
        k = bisect_right(lengths, age)
        if k == 0:
            return 0.0
        if k == len(lengths):
            return 1.0
        inside = (age - lengths[k - 1]) / (lengths[k] - lengths[k - 1])
        return (k + inside) / (len(lengths) + 1)

    def lacks(x: float) -> float:
        """Above 0: too few are complete x after a publish."""
        between = x + rest
        if waits and complete(x + staleness * between) < TAIL_QUANTILE:
            return math.inf
        if not aborts:
            left, age = 0.0, x
            while age < lengths[-1]:
                left += 1.0 - complete(age)
                age += max(between, lengths[-1] / MAX_PUBLISHES_OUTLIVED)
            return left - (places - 1.0)
        waiting = sum(1.0 - complete(x + i * between) for i in range(staleness))
        return 1.0 + waiting - places * complete(x + staleness * between)

    enough = 0.5 / groups
    low, high = 0.0, lengths[-1]
    if lacks(0.0) <= enough:
        high = 0.0
    while high - low > 1e-6 * high:
        mid = (low + high) / 2
        low, high = (mid, high) if lacks(mid) > enough else (low, mid)
    late = high + staleness * (high + rest)
    return high + rest, 1.0 / max(complete(late), 1.0 / places) if aborts else 1.0


@functools.lru_cache(maxsize=256)
def longest_member_ratios(domain: DomainProfile, members: int, context: float) -> tuple[float, ...]:
    """Seconds of the longest member of a group over those of the mean trajectory: equally likely values, in order. All
    1 if no quantile shows a variation of lengths. Members share half of the variance of their answers, and none of that
    of turns."""
    turns, answers = log_normal(domain.turns)[1], log_normal(domain.output_tokens)[1]
    common, own = math.sqrt(answers**2 / 2), math.sqrt(answers**2 / 2 + turns**2)
    if own == 0:
        return (1.0,)
    z = [_normal_quantile((k + 0.5) / QUANTILE_POINTS) for k in range(QUANTILE_POINTS)]
    highest = [_normal_quantile(((k + 0.5) / QUANTILE_POINTS) ** (1 / members)) for k in range(QUANTILE_POINTS)]
    # Relative to the mean before truncation by the context; then rescaled by the mean after it.
    middle, most = math.exp(-(common**2 + own**2) / 2), max(context / domain.total_tokens, 1.0)
    mean = 0.0
    longest = []
    for c in z:
        ours = middle * math.exp(common * c)
        mean += sum(min(ours * math.exp(own * x), most) for x in z) / QUANTILE_POINTS**2
        longest += [min(ours * math.exp(own * x), most) for x in highest]
    return tuple(sorted(length / mean for length in longest))


def mean_longest_ratio(domain: DomainProfile, members: int, context: float) -> float:
    """How much longer the longest member of a group takes than the mean trajectory, on average: at least 1."""
    if members < 2:
        return 1.0
    found = longest_member_ratios(domain, members, context)
    return max(sum(found) / len(found), 1.0)


def _normal_quantile(p: float) -> float:
    """Quantile of the normal distribution, by bisection of its error function."""
    low, high = -8.0, 8.0
    while high - low > 1e-9:
        mid = (low + high) / 2
        low, high = (mid, high) if 0.5 * (1 + math.erf(mid / math.sqrt(2))) < p else (low, mid)
    return low
