"""Workload profiles estimated online from finished trajectories, with the largest weight on recent ones.

Means are exponentially decayed sums; quantiles come from a weighted reservoir sample of the trajectories (Efraimidis &
Spirakis 2006, with forward decay after Cormode et al. 2009). Both have a constant cost per trajectory, however long the
stream. Pure and seeded: the same trajectories in the same order, the same profile.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

from placement.problem import DomainProfile, EnvironmentCost, Quantity, RewardCost
from placement.types import require_at_least, require_positive

RESERVOIR = 256
"""Trajectories per domain that quantiles are taken from: the median of a smooth distribution is then within ±3 % of
its rank in two cases of three."""


@dataclass(frozen=True, slots=True)
class ObservedTrajectory:
    """One finished trajectory: sums over its turns. `t` in seconds on any clock that all of them share.

    `first_tokens` of prompt at the first turn, of which `cached_tokens` were cached already by another trajectory;
    `new_tokens` of observation over all later turns; `output_tokens` over all turns. `wait_s` in the environment and
    `core_s` of CPU there over all turns, `reset_s` before the first; `reward_s` of work to score it, if known.
    """

    domain: str
    t: float
    turns: int
    first_tokens: float
    new_tokens: float
    output_tokens: float
    cached_tokens: float = 0.0
    wait_s: float = 0.0
    core_s: float = 0.0
    reset_s: float = 0.0
    reward_s: float | None = None

    def __post_init__(self) -> None:
        if self.turns < 1:
            raise ValueError(f"observed {self.domain}: turns is {self.turns} (rule: at least 1)")
        for name in NUMBERS:
            value = getattr(self, name)
            if name != "t" or not math.isfinite(value):
                require_at_least(f"observed {self.domain}: {name}", value)
        if self.first_tokens <= 0:
            raise ValueError(f"observed {self.domain}: first_tokens is {self.first_tokens} (rule: above 0)")
        if self.output_tokens < self.turns:
            raise ValueError(
                f"observed {self.domain}: output_tokens is {self.output_tokens} in {self.turns} turns "
                "(rule: at least one per turn)"
            )
        if self.turns == 1 and self.new_tokens:
            raise ValueError(f"observed {self.domain}: new_tokens is {self.new_tokens} (rule: 0 if there is one turn)")
        if self.cached_tokens >= self.first_tokens:
            raise ValueError(
                f"observed {self.domain}: cached_tokens is {self.cached_tokens} (rule: below its first_tokens, "
                f"{self.first_tokens})"
            )
        require_at_least(f"observed {self.domain}: reward_s", self.reward_s)


NUMBERS = tuple(f.name for f in fields(ObservedTrajectory) if f.name not in ("domain", "turns", "reward_s"))

SUMMED = (
    "turns",
    "later",
    "first_tokens",
    "new_tokens",
    "output_tokens",
    "cached_tokens",
    "wait_s",
    "core_s",
    "reset_s",
    "scored",
    "reward_s",
)


@dataclass(slots=True)
class _DomainEstimator:
    """Decayed sums of one domain, as of `age`, and its sample: a heap of (priority, index, figures)."""

    random: random.Random
    age: float
    count: int = 0
    weight: float = 0.0
    sums: dict[str, float] = field(default_factory=lambda: dict.fromkeys(SUMMED, 0.0))
    sample: list[tuple[float, int, tuple[float, float, float, float]]] = field(default_factory=list)


class ProfileEstimator:
    """Profiles of the domains of a stream of trajectories.

    The weight of a trajectory halves every `half_life_s` seconds, or every `half_life` trajectories of any domain that
    come after it; with neither, all count alike. A trajectory that arrives late (a smaller `t` than the latest) counts
    with the weight of its own time. `rewards` describes how a domain is scored (cores, memory); its seconds are
    measured here.
    """

    def __init__(
        self,
        *,
        half_life_s: float | None = None,
        half_life: float | None = None,
        rewards: Mapping[str, RewardCost] | None = None,
        seed: int = 0,
    ) -> None:
        if half_life_s is not None and half_life is not None:
            raise ValueError("half_life_s and half_life are both given (rule: one of them, or neither)")
        for name, value in (("half_life_s", half_life_s), ("half_life", half_life)):
            require_positive(name, value)
        self._by_time = half_life_s is not None
        self._half_life = half_life_s if half_life_s is not None else half_life
        self._rewards = dict(rewards or {})
        self._seed = seed
        self._domains: dict[str, _DomainEstimator] = {}
        self._seen = 0
        self._now = -math.inf

    @property
    def domains(self) -> tuple[str, ...]:
        """Those seen so far, by name."""
        return tuple(sorted(self._domains))

    def count(self, domain: str) -> int:
        """Trajectories of a domain seen so far, whatever they still weigh."""
        return self._domains[domain].count if domain in self._domains else 0

    def add(self, observed: ObservedTrajectory) -> None:
        self._seen += 1
        self._now = max(self._now, observed.t)
        at = observed.t if self._by_time else float(self._seen)
        known = self._domains.get(observed.domain)
        if known is None:
            known = _DomainEstimator(random.Random(f"{self._seed}/{observed.domain}"), at)
            self._domains[observed.domain] = known
        if at > known.age:
            self._decay(known, at)
        weight = self._share(known.age - at)
        known.count += 1
        known.weight += weight
        for name, value in _figures(observed).items():
            known.sums[name] += weight * value
        self._keep(known, observed, at)

    def profile(self, domain: str) -> DomainProfile:
        """The work of a trajectory of the domain. `weight` is the domain's share of the recent trajectories; shares sum
        to 1.

        Means are ratios of sums, so that the profile's `total_tokens` is the mean length of the trajectories.
        ValueError for an unknown domain.
        """
        known = self._domains.get(domain)
        if known is None:
            names = ", ".join(self.domains) or "none"
            raise ValueError(f"domain {domain}: no trajectory was observed (rule: one of those seen: {names})")
        s, n = known.sums, known.weight
        drawn = list(zip(*(figures for _, _, figures in sorted(known.sample)), strict=True))
        later = s["later"]
        reward = None
        if s["scored"] > 0:
            seconds = s["reward_s"] / s["scored"]
            reward = replace(self._rewards.get(domain, RewardCost(seconds)), seconds=seconds)
        return DomainProfile(
            name=domain,
            turns=_quantity(max(1.0, s["turns"] / n), drawn[0]),
            new_tokens=_quantity(s["new_tokens"] / later if later > 0 else 0.0, drawn[2]),
            output_tokens=_quantity(max(1.0, s["output_tokens"] / s["turns"]), drawn[3]),
            weight=self._weight(known) / sum(map(self._weight, self._domains.values())),
            first_tokens=_quantity(s["first_tokens"] / n, drawn[1]),
            shared_prefix=min(s["cached_tokens"] / s["first_tokens"], 1.0 - 1e-9),
            environment=EnvironmentCost(s["wait_s"] / s["turns"], s["core_s"] / s["turns"], s["reset_s"] / n),
            reward=reward,
            source=f"measured, n={known.count}",
        )

    def profiles(self) -> tuple[DomainProfile, ...]:
        """Those of all domains seen, by name."""
        return tuple(self.profile(name) for name in self.domains)

    def _share(self, age: float) -> float:
        """The decay factor of a weight after `age`."""
        return 1.0 if self._half_life is None else 2.0 ** (-age / self._half_life)

    def _decay(self, known: _DomainEstimator, at: float) -> None:
        left = self._share(at - known.age)
        known.age = at
        known.weight *= left
        for name in known.sums:
            known.sums[name] *= left

    def _weight(self, known: _DomainEstimator) -> float:
        """A domain's decayed count as of the latest trajectory of any. Never 0, however long it was not seen."""
        now = self._now if self._by_time else float(self._seen)
        return max(known.weight * self._share(now - known.age), 1e-300)

    def _keep(self, known: _DomainEstimator, observed: ObservedTrajectory, at: float) -> None:
        """Keep the trajectories with the largest log(weight) + Gumbel noise: a sample without replacement in which the
        chances are those of the weights. Weights grow with `at` instead of decaying, so priorities never change."""
        grown = 0.0 if self._half_life is None else at * math.log(2.0) / self._half_life
        noise = -math.log(-math.log(known.random.uniform(1e-12, 1.0 - 1e-12)))
        figures = (
            float(observed.turns),
            observed.first_tokens,
            observed.new_tokens / (observed.turns - 1) if observed.turns > 1 else math.nan,
            observed.output_tokens / observed.turns,
        )
        entry = (grown + noise, known.count, figures)
        if len(known.sample) < RESERVOIR:
            heapq.heappush(known.sample, entry)
        else:
            heapq.heappushpop(known.sample, entry)


def _figures(observed: ObservedTrajectory) -> dict[str, float]:
    figures = {name: float(getattr(observed, name)) for name in SUMMED if name not in ("later", "scored", "reward_s")}
    known = observed.reward_s is not None
    return figures | {"later": observed.turns - 1.0, "scored": float(known), "reward_s": observed.reward_s or 0.0}


def _quantity(mean: float, drawn: Sequence[float]) -> Quantity:
    """A mean with the median and 90th percentile of the sample; without them if the sample is empty."""
    known = sorted(x for x in drawn if not math.isnan(x))
    if not known:
        return Quantity(mean)
    return Quantity(mean, known[math.ceil(0.5 * len(known)) - 1], known[math.ceil(0.9 * len(known)) - 1])
