"""What a window of trajectories sustains: a plan's rate once slots are held as long as the run holds them.

A slot is taken at admission and given back at the publish of the version that its trajectory was trained into. Until
then it waits for the longest member of its group, for training and for the publish: fewer trajectories are under way
than the window has slots, and a plan's rate, for which a trajectory is over when generated, may be out of reach.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from placement.problem import Problem
from placement.types import Placement, Role
from placement.workload import DomainProfile, log_normal

__all__ = ["Held", "longest_of", "windows"]

POINTS = 64
"""Quantiles that stand for a distribution: maxima of groups of eight come out within 2 % at a sigma of 1."""


@dataclass(frozen=True, slots=True)
class Held:
    """One domain's slots: seconds that a trajectory is under way on average, that its group's longest member is, of
    training and of the publish; and the trajectories/s, over all domains, that its part of the window sustains."""

    domain: str
    seconds: float
    longest_s: float
    train_s: float
    publish_s: float
    slots: float
    rate: float

    @property
    def held_s(self) -> float:
        return self.longest_s + self.train_s + self.publish_s


def windows(
    found: Placement, problem: Problem, *, groups: Mapping[str, int], publish_s: float, context: float
) -> tuple[Held, ...]:
    """Every domain's slots under a plan; none without training or a bound. `groups`: members by domain; `context`: most
    tokens of a trajectory. What waits for other domains' parts of the batch is not counted."""
    train, bound = problem.train, problem.trajectories_in_flight
    trainer = next((d for d in found.deployments if d.role is Role.TRAINER), None)
    if train is None or trainer is None or not math.isfinite(bound) or found.rate <= 0:
        return ()
    train_s = trainer.utilisation * train.batch / found.rate
    total = sum(d.weight for d in problem.domains)
    held = []
    for domain in problem.domains:
        flows = [f for f in found.flows if f.domain == domain.name]
        rate = sum(f.rate for f in flows)
        if not rate:
            continue
        seconds = sum(f.rate * f.seconds for f in flows) / rate
        longest = seconds * longest_of(domain, groups.get(domain.name, 1), context)
        slots = bound * domain.weight / total
        sustained = bound / (longest + train_s + publish_s)
        held.append(Held(domain.name, seconds, longest, train_s, publish_s, slots, sustained))
    return tuple(held)


def longest_of(domain: DomainProfile, members: int, context: float) -> float:
    """How much longer the longest member of a group takes than the mean trajectory: at least 1, which it is where no
    quantile says that lengths vary. Members share half of the variance of their answers, and none of that of turns."""
    turns, answers = log_normal(domain.turns)[1], log_normal(domain.output_tokens)[1]
    common, own = math.sqrt(answers**2 / 2), math.sqrt(answers**2 / 2 + turns**2)
    if members < 2 or own == 0:
        return 1.0
    z = [_normal((k + 0.5) / POINTS) for k in range(POINTS)]
    highest = [_normal(((k + 0.5) / POINTS) ** (1 / members)) for k in range(POINTS)]
    # Relative to the mean before the context ends it; the mean is that of what is left.
    middle, most = math.exp(-(common**2 + own**2) / 2), max(context / domain.total_tokens, 1.0)
    mean = top = 0.0
    for c in z:
        ours = middle * math.exp(common * c)
        mean += sum(min(ours * math.exp(own * x), most) for x in z)
        top += sum(min(ours * math.exp(own * x), most) for x in highest)
    return max(top / mean, 1.0)


def _normal(p: float) -> float:
    """Quantile of the normal distribution, by bisection of its error function."""
    low, high = -8.0, 8.0
    while high - low > 1e-9:
        mid = (low + high) / 2
        low, high = (mid, high) if 0.5 * (1 + math.erf(mid / math.sqrt(2))) < p else (low, mid)
    return low
