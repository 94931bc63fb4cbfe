"""How much of every step each domain gets: weights, floors and caps, and shares that follow what is measured.

Three parts, each usable alone. `bounded_shares` turns weights into fractions within floors and caps. `Apportionment`
turns fractions into whole numbers that sum exactly, step after step. `DriftQuota` moves the weights with measured cost
and learning (asynchronous multi-model federated learning schedules by energy and drift; here a domain is a model).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

__all__ = ["Apportionment", "DomainShare", "DriftQuota", "bounded_shares"]

_SLACK = 1e-9
"""Rounding noise of sums of fractions: 0.1 + 0.2 is not a broken rule."""


@dataclass(frozen=True, slots=True)
class DomainShare:
    """`weight` > 0 is relative; `floor` and `cap` are fractions of every step."""

    domain: str
    weight: float
    floor: float = 0.0
    cap: float = 1.0

    def __post_init__(self) -> None:
        if not (self.weight > 0 and math.isfinite(self.weight)):
            raise ValueError(f"domain {self.domain}: weight {self.weight} must be positive and finite")
        if not 0.0 <= self.floor <= self.cap <= 1.0:
            raise ValueError(f"domain {self.domain}: 0 <= floor {self.floor} <= cap {self.cap} <= 1 does not hold")


def bounded_shares(domains: Sequence[DomainShare], weights: Mapping[str, float] | None = None) -> dict[str, float]:
    """Fractions that sum to 1, proportional to the weights wherever no floor or cap binds.

    `weights` replaces those of the domains. The shares are clip(lambda * w, floor, cap) for the one lambda at which
    they sum to 1. ValueError if no fractions can hold all floors and caps.
    """
    if not domains:
        raise ValueError("no domains to share between")
    lowest, highest = sum(d.floor for d in domains), sum(d.cap for d in domains)
    if lowest > 1.0 + _SLACK or highest < 1.0 - _SLACK:
        raise ValueError(f"floors sum to {lowest:g} and caps to {highest:g}: 1 must lie between them")
    want = {d.domain: (d.weight if weights is None else weights[d.domain]) for d in domains}
    fixed: dict[str, float] = {}
    while len(fixed) < len(domains):
        open_ = [d for d in domains if d.domain not in fixed]
        rest, total = 1.0 - sum(fixed.values()), sum(want[d.domain] for d in open_)
        raw = {d.domain: max(rest, 0.0) * want[d.domain] / total for d in open_}
        over = {d.domain: d.cap for d in open_ if raw[d.domain] > d.cap}
        under = {d.domain: d.floor for d in open_ if raw[d.domain] < d.floor}
        if not over and not under:
            return {d.domain: fixed.get(d.domain, raw.get(d.domain, 0.0)) for d in domains}
        # The side with the larger violation is settled first: fixing it moves lambda towards the other side only.
        too_much = sum(raw[n] - cap for n, cap in over.items())
        too_little = sum(floor - raw[n] for n, floor in under.items())
        if too_much >= too_little:
            fixed.update(over)
        if too_little >= too_much:
            fixed.update(under)
    return {d.domain: fixed[d.domain] for d in domains}


@dataclass(slots=True)
class Apportionment:
    """Whole units per step by largest remainder, with what rounding took or gave carried to the next step.

    Floors and caps hold in every step, in whole units: a domain gets at least floor(floor * units) and at most
    ceil(cap * units), which always leaves a solution. Ties go to the earlier domain. The carried debts sum to zero and
    are bounded, so long-run shares converge to the fractions like 1 / steps. A unit is what is launched: a group.
    """

    domains: tuple[DomainShare, ...]
    debt: dict[str, float] = field(default_factory=dict)
    """Units that a domain is still owed (negative: has had too many). Save it to resume."""

    def step(self, units: int, shares: Mapping[str, float] | None = None) -> dict[str, int]:
        """How many of `units` each domain gets now; the numbers sum to `units`. `shares` default to the weights'."""
        if units < 0:
            raise ValueError(f"units {units} must not be negative")
        shares = bounded_shares(self.domains) if shares is None else shares
        low = {d.domain: math.floor(d.floor * units + _SLACK) for d in self.domains}
        high = {d.domain: math.ceil(d.cap * units - _SLACK) for d in self.domains}
        owed = {d.domain: self.debt.get(d.domain, 0.0) + units * shares[d.domain] for d in self.domains}
        given = {n: min(max(math.floor(o + _SLACK), low[n]), high[n]) for n, o in owed.items()}
        order = {d.domain: i for i, d in enumerate(self.domains)}
        missing = units - sum(given.values())
        while missing > 0:
            name = max((n for n in given if given[n] < high[n]), key=lambda n: (owed[n] - given[n], -order[n]))
            given[name], missing = given[name] + 1, missing - 1
        while missing < 0:
            name = min((n for n in given if given[n] > low[n]), key=lambda n: (owed[n] - given[n], -order[n]))
            given[name], missing = given[name] - 1, missing + 1
        self.debt = {n: owed[n] - given[n] for n in given}
        return given


@dataclass(slots=True)
class DriftQuota:
    """Shares that follow what domains cost and how much the policy still moves on them.

    The target weight of a domain is weight * (drift / cost) ** `sensitivity`, both relative to their means over
    domains: what teaches more per second or dollar gets more. `memory` steps are averaged; a step moves no share by
    more than `max_step`. A step goes a part of the way from one point within floors and caps to another, so they hold
    on the way. Domains that nothing was observed of count as average.
    """

    domains: tuple[DomainShare, ...]
    sensitivity: float = 1.0
    memory: float = 10.0
    max_step: float = 0.05
    shares: dict[str, float] = field(default_factory=dict)
    """The current fractions. Save them with `seen` to resume."""
    seen: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Averaged (cost, drift) of each domain that was observed."""

    def __post_init__(self) -> None:
        if self.memory < 1 or not 0 < self.max_step <= 1 or self.sensitivity < 0:
            raise ValueError(
                f"memory {self.memory} must be at least 1, max_step {self.max_step} within (0, 1], "
                f"sensitivity {self.sensitivity} not negative"
            )
        self.shares = self.shares or bounded_shares(self.domains)

    def observe(self, domain: str, *, cost: float, drift: float) -> None:
        """One step's figures of a domain: `cost` per sample (seconds or dollars, > 0), `drift` >= 0 of the policy on it
        (say, the mean absolute advantage, or KL between versions)."""
        if domain not in {d.domain for d in self.domains}:
            raise ValueError(f"domain {domain} has no share")
        if not (cost > 0 and drift >= 0 and math.isfinite(cost) and math.isfinite(drift)):
            raise ValueError(f"domain {domain}: cost {cost} must be positive and drift {drift} not negative")
        keep = 1.0 - 1.0 / self.memory
        old = self.seen.get(domain)
        self.seen[domain] = (
            (cost, drift) if old is None else (keep * old[0] + (1 - keep) * cost, keep * old[1] + (1 - keep) * drift)
        )

    def step(self) -> dict[str, float]:
        """The shares of the next step, for `Apportionment.step`."""
        target = bounded_shares(self.domains, self._weights())
        far = max(abs(target[d.domain] - self.shares[d.domain]) for d in self.domains)
        part = 1.0 if far <= self.max_step else self.max_step / far
        self.shares = {n: s + part * (target[n] - s) for n, s in self.shares.items()}
        return dict(self.shares)

    def _weights(self) -> dict[str, float]:
        base = {d.domain: d.weight for d in self.domains}
        if not self.seen:
            return base
        cost = sum(c for c, _ in self.seen.values()) / len(self.seen)
        drift = sum(g for _, g in self.seen.values()) / len(self.seen)
        factors = {}
        for name, (c, g) in self.seen.items():
            # A domain that has stopped moving keeps a thousandth: it may start again, and its floor is the caller's.
            moved = max(g / drift, 1e-3) if drift > 0 else 1.0
            factors[name] = (moved * cost / c) ** self.sensitivity
        return {n: w * factors.get(n, 1.0) for n, w in base.items()}
