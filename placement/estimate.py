"""Workload profiles of task domains, from finished trajectories.

Means are exact; quantiles come from a seeded random sample of a domain's trajectories. Pure: the same trajectories in
the same order, the same profiles.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from placement.problem import DomainProfile, EnvironmentCost, Quantity, RewardCost
from placement.types import require_at_least

SAMPLE = 256
"""Trajectories per domain that quantiles are taken from: the median of a smooth distribution is then within ±3 % of
its rank in two cases of three."""


@dataclass(frozen=True, slots=True)
class ObservedTrajectory:
    """One finished trajectory: sums over its turns.

    `first_tokens` of prompt at the first turn; `new_tokens` of observation over all later turns; `output_tokens` over
    all turns. `wait_s` in the environment over all turns, `reset_s` before the first; `reward_s` of work to score it,
    if known.
    """

    domain: str
    turns: int
    first_tokens: float
    new_tokens: float
    output_tokens: float
    wait_s: float = 0.0
    reset_s: float = 0.0
    reward_s: float | None = None

    def __post_init__(self) -> None:
        if self.turns < 1:
            raise ValueError(f"observed {self.domain}: turns is {self.turns} (rule: at least 1)")
        for name in ("first_tokens", "new_tokens", "output_tokens", "wait_s", "reset_s", "reward_s"):
            require_at_least(f"observed {self.domain}: {name}", getattr(self, name))
        if self.first_tokens <= 0:
            raise ValueError(f"observed {self.domain}: first_tokens is {self.first_tokens} (rule: above 0)")
        if self.output_tokens < self.turns:
            raise ValueError(
                f"observed {self.domain}: output_tokens is {self.output_tokens} in {self.turns} turns "
                "(rule: at least one per turn)"
            )
        if self.turns == 1 and self.new_tokens:
            raise ValueError(f"observed {self.domain}: new_tokens is {self.new_tokens} (rule: 0 if there is one turn)")


def estimate_profiles(
    observed: Iterable[ObservedTrajectory], rewards: Mapping[str, RewardCost] | None = None
) -> tuple[DomainProfile, ...]:
    """The profile of every domain, by name. `weight` is a domain's share of the trajectories; shares sum to 1.
    `rewards` describes how a domain is scored (cores, memory); its seconds are measured here."""
    by_domain: dict[str, list[ObservedTrajectory]] = defaultdict(list)
    for one in observed:
        by_domain[one.domain].append(one)
    total = sum(map(len, by_domain.values()))
    return tuple(
        replace(_profile(own, (rewards or {}).get(name)), weight=len(own) / total)
        for name, own in sorted(by_domain.items())
    )


def _profile(own: Sequence[ObservedTrajectory], scoring: RewardCost | None) -> DomainProfile:
    """Means are ratios of sums, so that the profile's `total_tokens` is the mean length of the trajectories."""
    domain, n, turns = own[0].domain, len(own), sum(o.turns for o in own)
    scored = [o.reward_s for o in own if o.reward_s is not None]
    reward = None
    if scored:
        seconds = sum(scored) / len(scored)
        reward = replace(scoring or RewardCost(seconds), seconds=seconds)
    rng = random.Random(f"0/{domain}")
    ranks = [rng.random() for _ in own]
    drawn = [own[i] for i in sorted(range(n), key=lambda i: -ranks[i])[:SAMPLE]]
    return DomainProfile(
        name=domain,
        turns=_quantity(turns / n, [o.turns for o in drawn]),
        new_tokens=_quantity(
            sum(o.new_tokens for o in own) / max(turns - n, 1),
            [o.new_tokens / (o.turns - 1) for o in drawn if o.turns > 1],
        ),
        output_tokens=_quantity(sum(o.output_tokens for o in own) / turns, [o.output_tokens / o.turns for o in drawn]),
        first_tokens=_quantity(sum(o.first_tokens for o in own) / n, [o.first_tokens for o in drawn]),
        environment=EnvironmentCost(sum(o.wait_s for o in own) / turns, reset_s=sum(o.reset_s for o in own) / n),
        reward=reward,
        source=f"measured, n={n}",
    )


def _quantity(mean: float, drawn: Sequence[float]) -> Quantity:
    """A mean with the median and 90th percentile of the sample; without them if the sample is empty."""
    if not drawn:
        return Quantity(mean)
    ranked = sorted(map(float, drawn))
    return Quantity(mean, ranked[math.ceil(0.5 * len(ranked)) - 1], ranked[math.ceil(0.9 * len(ranked)) - 1])
