"""Each domain's share of every step: weights, floors and caps, debt between batches, and shares that follow
measurements.

`Apportionment` turns fractions into whole numbers that sum exactly, step after step. `DriftQuota` adjusts the weights
to measured cost and learning (asynchronous multi-model federated learning schedules by energy and drift; here a domain
is a model). `FairBatches` decides how many groups of each domain the next batch takes, and `DomainShareTracker` keeps
these numbers for a running job.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from rollart.control.admission import PromptAdmission, SchedulerSettings
from rollart.control.domain import Domain
from rollart.control.strategy import RolloutStrategy
from rollart.control.trajectory import TrajectoryState
from rollart.ledger.events import DOMAIN_SHARE
from rollart.model import Group
from rollart.ports import Recorder, Recovered, RunEvent
from rollart.settings.rollout import FollowSpec
from rollart.shares import DomainShare, bounded_shares

_SLACK = 1e-9
"""Tolerance for rounding in sums of fractions: 0.1 + 0.2 does not break a rule."""


@dataclass(slots=True)
class Apportionment:
    """Whole units per step by largest remainder; rounding errors are carried to the next step.

    Floors and caps hold in every step, in whole units: a domain gets at least floor(floor * units) and at most ceil(cap
    * units), which always leaves a solution. Ties go to the earlier domain. The carried debts sum to zero and are
    bounded, so long-run shares converge to the fractions like 1 / steps. A unit is the object that is launched: a
    group.
    """

    domains: tuple[DomainShare, ...]
    debt: dict[str, float] = field(default_factory=dict)
    """Units that a domain is still owed (negative: it has had too many). Save it to resume."""

    def step(self, units: int, shares: Mapping[str, float] | None = None) -> dict[str, int]:
        """The units of each domain in this step; they sum to `units`. `shares` default to those of the weights."""
        if units < 0:
            raise ValueError(f"units {units} must not be negative")
        shares = bounded_shares(self.domains) if shares is None else shares
        low = {d.domain: math.floor(d.floor * units + _SLACK) for d in self.domains}
        high = {d.domain: math.ceil(d.cap * units - _SLACK) for d in self.domains}
        owed = {d.domain: self.debt.get(d.domain, 0.0) + units * shares[d.domain] for d in self.domains}
        allotted = {n: min(max(math.floor(o + _SLACK), low[n]), high[n]) for n, o in owed.items()}
        order = {d.domain: i for i, d in enumerate(self.domains)}
        missing = units - sum(allotted.values())
        while missing > 0:
            name = max((n for n in allotted if allotted[n] < high[n]), key=lambda n: (owed[n] - allotted[n], -order[n]))
            allotted[name], missing = allotted[name] + 1, missing - 1
        while missing < 0:
            name = min((n for n in allotted if allotted[n] > low[n]), key=lambda n: (owed[n] - allotted[n], -order[n]))
            allotted[name], missing = allotted[name] - 1, missing + 1
        self.debt = {n: owed[n] - allotted[n] for n in allotted}
        return allotted


@dataclass(slots=True)
class DriftQuota:
    """Shares that follow each domain's cost and the policy's drift on it.

    The target weight of a domain is weight * (drift / cost) ** sensitivity, both relative to their means over
    domains: domains that teach more per second or dollar get more. Averages run over `memory` steps; a step moves no
    share by more than `max_step`. A step moves part of the distance between two points within floors and caps, so every
    point between them keeps floors and caps too. Domains without observations count as average.
    """

    domains: tuple[DomainShare, ...]
    settings: FollowSpec
    shares: dict[str, float] = field(default_factory=dict)
    """The current fractions. Save them with `seen` to resume."""
    seen: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Averaged (cost, drift) of each domain that was observed."""

    def __post_init__(self) -> None:
        self.shares = self.shares or bounded_shares(self.domains)

    def observe(self, domain: str, *, cost: float, drift: float) -> None:
        """Record one step of a domain: `cost` per sample (seconds or dollars, > 0), and `drift` >= 0 of the policy on
        it (for example the mean absolute advantage, or KL between versions)."""
        keep = 1.0 - 1.0 / self.settings.memory
        old = self.seen.get(domain)
        self.seen[domain] = (
            (cost, drift) if old is None else (keep * old[0] + (1 - keep) * cost, keep * old[1] + (1 - keep) * drift)
        )

    def step(self) -> dict[str, float]:
        """The shares of the next step, for `Apportionment.step`."""
        target = bounded_shares(self.domains, self._weights())
        far = max(abs(target[d.domain] - self.shares[d.domain]) for d in self.domains)
        part = 1.0 if far <= self.settings.max_step else self.settings.max_step / far
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
            # A domain without drift keeps a thousandth: it may drift again. Its floor is the caller's decision.
            moved = max(g / drift, 1e-3) if drift > 0 else 1.0
            factors[name] = (moved * cost / c) ** self.settings.sensitivity
        return {n: w * factors.get(n, 1.0) for n, w in base.items()}


@dataclass(slots=True)
class FairBatches:
    """The number of groups that the next batch takes from each domain, and the domain that starts a group next.

    A batch has `units` groups. Each domain is due its share of every batch; deviations, through rounding or because a
    batch took the groups that were ready, accumulate as its debt and are repaid later. A batch takes each domain's
    exact part, or, with a `slack` of some groups, at least `low` and at most `high` groups: the range within the
    domain's floor and cap that leaves a debt of no more than the slack. So a batch need not wait for a late domain, yet
    served counts follow the shares:

        |served - due| <= (slack + 1) x domains    after every batch, for every domain

    Each batch has at least floor(floor x units) and at most ceil(cap x units) groups of a domain. Ties go to the
    earlier domain. `untake` returns a batch that was taken and is not trained.
    """

    domains: tuple[DomainShare, ...]
    units: int
    slack: int = 0
    shares: dict[str, float] = field(default_factory=dict)
    due: dict[str, float] = field(default_factory=dict)
    served: dict[str, int] = field(default_factory=dict)
    worst: dict[str, float] = field(default_factory=dict)
    """Largest |served - due| after any batch so far."""

    def __post_init__(self) -> None:
        self.shares = self.shares or bounded_shares(self.domains)
        for d in self.domains:
            self.due.setdefault(d.domain, 0.0)
            self.served.setdefault(d.domain, 0)
            self.worst.setdefault(d.domain, 0.0)

    def planned(self, batches: int = 1) -> dict[str, int]:
        """Groups per domain of the next `batches`, if each takes its exact part."""
        plan = Apportionment(self.domains, self.debt())
        total = dict.fromkeys(self.due, 0)
        for _ in range(batches):
            for name, count in plan.step(self.units, self.shares).items():
                total[name] += count
        return total

    def bounds(self) -> dict[str, tuple[int, int]]:
        """(low, high) of each domain in the next batch; its exact part lies between them."""
        base, debt = self.planned(), self.debt()
        found = {}
        for d in self.domains:
            owed = debt[d.domain] + self.shares[d.domain] * self.units
            low = max(math.floor(d.floor * self.units + _SLACK), math.ceil(owed - self.slack - _SLACK))
            high = min(math.ceil(d.cap * self.units - _SLACK), math.floor(owed + self.slack + _SLACK))
            found[d.domain] = (min(base[d.domain], low), max(base[d.domain], high))
        return found

    def choose(self, ready: Mapping[str, int], taken: Mapping[str, int] | None = None) -> dict[str, int] | None:
        """How many of the `ready` groups the next batch takes, or None while it waits for some domain. `taken` counts
        the groups that a growing batch already has."""
        have = dict.fromkeys(self.due, 0) | dict(taken or {})
        bounds, base = self.bounds(), self.planned()
        room = {n: have[n] + ready.get(n, 0) for n in have}
        if any(room[n] < low for n, (low, _) in bounds.items()):
            return None
        count = {n: max(have[n], min(base[n], room[n])) for n in have}
        missing = self.units - sum(count.values())
        while missing > 0:
            open_ = [n for n, (_, high) in bounds.items() if count[n] < min(high, room[n])]
            if not open_:
                return None
            name = max(open_, key=lambda n: base[n] - count[n])
            count[name], missing = count[name] + 1, missing - 1
        while missing < 0:  # the batch grew beyond the exact part of some domain
            name = max((n for n in count if count[n] > max(have[n], bounds[n][0])), key=lambda n: count[n] - base[n])
            count[name], missing = count[name] - 1, missing + 1
        return {n: count[n] - have[n] for n in count}

    def grow(self, ready: Mapping[str, int], taken: Mapping[str, int]) -> dict[str, int]:
        """How many of the `ready` groups a growing batch may take now, whatever comes later: the remaining room always
        suffices for every domain's lower bound."""
        bounds = self.bounds()
        have = dict.fromkeys(self.due, 0) | dict(taken)
        more = dict.fromkeys(have, 0)
        while True:
            left = self.units - sum(have.values()) - 1
            short = {n: max(0, low - have[n]) for n, (low, _) in bounds.items()}
            open_ = [
                n
                for n in have
                if more[n] < ready.get(n, 0) and have[n] < bounds[n][1] and left >= sum(short.values()) - (short[n] > 0)
            ]
            if left < 0 or not open_:
                return more
            name = max(open_, key=lambda n: bounds[n][0] - have[n])
            have[name], more[name] = have[name] + 1, more[name] + 1

    def next_domain(
        self,
        ahead: Mapping[str, int],
        *,
        window: int,
        batches: int,
        extra: Mapping[str, int] | None = None,
        idle: bool = False,
    ) -> str | None:
        """The domain that should start a group now, or None.

        `ahead` counts the groups that wait or run for batches to come; at most `window` batches of them may, and
        `batches` are still to be taken; `extra` counts redundant groups by domain. A domain starts its exact part of
        these batches. Beyond its part of the next batch it starts a group only while room is left for the other
        domains' parts, so the next batch can be formed whatever ends: a domain that has enough holds no slot for ever.
        `idle` means that no batch is in training: the groups that the next batch needs then start even if a resume
        found the window full of groups that were admitted under other shares, from which the batch cannot be formed.
        The domain with the lowest share of its part in use is picked.
        """
        batches = min(window, batches)
        if batches <= 0:
            return None
        beyond = extra or {}
        spare, total = sum(beyond.values()), sum(ahead.get(n, 0) for n in self.due)
        hard, limit = window * self.units + spare, batches * self.units + spare
        base, plan = self.planned(), self.planned(batches)
        reserved = {n: max(ahead.get(n, 0), base[n]) for n in base}
        stuck = idle and sum(reserved.values()) > hard and self.choose(ahead) is None
        found: list[tuple[float, int, str]] = []
        for order, d in enumerate(self.domains):
            name, used, most = d.domain, ahead.get(d.domain, 0), plan[d.domain] + beyond.get(d.domain, 0)
            needed = used < base[name]
            fits = used < most and total < limit and sum(reserved.values()) - reserved[name] + used + 1 <= hard
            if (stuck and needed) or (total < hard and (needed or fits)):
                found.append((used / most if most else 0.0, order, name))
        return min(found)[2] if found else None

    def take(self, counts: Mapping[str, int]) -> None:
        """A batch of these groups goes to training."""
        self._serve(counts, 1)

    def untake(self, counts: Mapping[str, int], shares: Mapping[str, float]) -> None:
        """Undo `take` for a batch that is not trained after all. `shares` are those under which it was taken."""
        now, self.shares = self.shares, dict(shares)
        self._serve(counts, -1)
        self.shares = now

    def debt(self) -> dict[str, float]:
        """Groups that each domain is owed (negative: it has had too many)."""
        return {n: self.due[n] - self.served[n] for n in self.due}

    def _serve(self, counts: Mapping[str, int], sign: int) -> None:
        for name in self.due:
            self.due[name] += sign * self.shares[name] * self.units
            self.served[name] += sign * counts.get(name, 0)
            if sign > 0:
                self.worst[name] = max(self.worst[name], abs(self.due[name] - self.served[name]))


@dataclass(frozen=True, slots=True)
class FairnessSettings:
    """The configured shares of the domains. `slack`: groups that a domain may lag behind its share before a batch waits
    for it. `follow`: shares adapt to measured cost and learning."""

    domains: tuple[DomainShare, ...]
    slack: int = 0
    follow: FollowSpec | None = None


@dataclass(slots=True)
class _BatchInTraining:
    """A batch between its selection and its publish."""

    groups: frozenset[str]
    counts: Mapping[str, int]
    shares: Mapping[str, float]


@dataclass(slots=True)
class DomainShareTracker(RolloutStrategy):
    """Owns the debt to each domain. The buffer asks for the quotas of a batch and reports the batch; admission asks
    which domain starts a group.

    Counts are in groups, which all have the same size. Invariants: those of `strategies.fairness.FairBatches`. A batch
    counts from its selection, and its count is reversed if the trainer refuses it.
    """

    domains: Sequence[Domain]
    settings: FairnessSettings
    recorder: Recorder
    steps: int
    window: int
    """Largest number of batches that are awaited, complete or in training at a time."""
    apart: bool
    """True if a batch in training no longer counts once the scheduler knows of it."""
    ready: Mapping[str, int] = field(default_factory=dict)
    """Samples per domain in the buffer, which owns and updates the mapping."""
    growing: Counter[str] = field(default_factory=Counter)
    """Groups per domain of the growing batch."""
    _on_the_way: list[_BatchInTraining] = field(default_factory=list)
    _told: int = 0
    _batches: int = 0
    _spent: dict[str, float] = field(default_factory=dict)
    _next: dict[str, float] | None = None
    """Shares from the next batch on. A growing batch keeps its own: it might already hold more than new ones allow."""
    _size: int = field(init=False)
    _fair: FairBatches = field(init=False)
    _quota: DriftQuota | None = field(init=False)

    def __post_init__(self) -> None:
        self._size = self.domains[0].group_size
        units = sum(d.quota for d in self.domains) // self._size
        self._fair = FairBatches(self.settings.domains, units, self.settings.slack)
        follow = self.settings.follow
        self._quota = None if follow is None else DriftQuota(self.settings.domains, follow)

    def quotas(self, ready: Mapping[str, int]) -> dict[str, int] | None:
        """Samples of each domain in a batch drawn from the `ready` samples; None while the batch waits."""
        counts = self._fair.choose(self._groups(ready), self.growing)
        return None if counts is None else {n: c * self._size for n, c in counts.items()}

    def room(self, ready: Mapping[str, int], taken: Sequence[Group]) -> dict[str, int] | None:
        """Samples of each domain that a growing batch may add now; None once it is whole."""
        self.growing = Counter(group.domain for group in taken)
        if self.growing.total() == self._fair.units:
            return None
        return {n: c * self._size for n, c in self._fair.grow(self._groups(ready), self.growing).items()}

    def take(self, groups: Sequence[Group]) -> None:
        """Count these groups as a batch."""
        counts = Counter(group.domain for group in groups)
        self._on_the_way.append(_BatchInTraining(frozenset(g.id for g in groups), counts, dict(self._fair.shares)))
        self._fair.take(counts)
        self._batches += 1
        self.growing = Counter()
        self._move()

    def taken(self, groups: Sequence[Group]) -> None:
        """The scheduler knows of the last batch."""
        self._told += 1

    def refused(self, groups: Sequence[Group]) -> None:
        """Remove refused groups. The count of a batch with one of them is reversed: its other groups grow again."""
        gone = {group.id: group.domain for group in groups}
        if self._on_the_way and self._on_the_way[-1].groups & gone.keys():
            batch = self._on_the_way.pop()
            self._fair.untake(batch.counts, batch.shares)
            self._next = self._next or self._fair.shares
            self._fair.shares = dict(batch.shares)
            self.growing = Counter(batch.counts)
            self._batches -= 1
            self._told = min(self._told, len(self._on_the_way))
        self.growing -= Counter(gone.values())
        self._move()

    def published(self, version: int, consumed: Sequence[Group]) -> None:
        """Remove the oldest batch, which the version contains. Shares follow its cost and its reward spread."""
        if self._on_the_way:
            del self._on_the_way[0]
            self._told = max(self._told - 1, 0)
        if self._quota is not None:
            self._observe(self._quota, consumed)
        self._report(version)

    def charged(self, state: TrajectoryState) -> None:
        """Add the engine seconds of an attempt with any outcome: lost attempts raise the cost of a domain's samples."""
        domain = state.domain.name
        self._spent[domain] = self._spent.get(domain, 0.0) + state.engine_seconds

    def next_domain(self, outstanding: Mapping[str, int], extra: Mapping[str, int]) -> str | None:
        """The domain that should start a group now. `outstanding`: samples that hold a slot; `extra`: samples of
        redundant groups."""
        waiting = len(self._on_the_way) - (self._told if self.apart else 0)
        return self._fair.next_domain(
            self._ahead(outstanding),
            window=self.window - waiting,
            batches=self.steps - self._batches,
            extra=self._groups(extra),
            idle=not self._on_the_way,
        )

    def remaining(self, outstanding: Mapping[str, int]) -> dict[str, int]:
        """Samples per domain that the run is expected to start still."""
        plan, ahead = self._fair.planned(max(self.steps - self._batches, 0)), self._ahead(outstanding)
        return {n: max(plan[n] - ahead.get(n, 0), 0) * self._size for n in plan}

    def resume(self, recovered: Recovered) -> None:
        """Continue from the journal's count of trained groups per domain. The debt at that moment can be computed only
        for constant weights, so impossible debts are forgiven."""
        fair, served = self._fair, recovered.consumed
        total = sum(served.values())
        self._batches = recovered.step
        fair.served.update({n: served.get(n, 0) for n in fair.served})
        fair.due.update({n: fair.shares[n] * total for n in fair.due})
        most = (fair.slack + 1) * len(fair.due)
        if self._quota is not None or any(abs(debt) > most for debt in fair.debt().values()):
            fair.due.update({n: float(count) for n, count in fair.served.items()})

    def _ahead(self, outstanding: Mapping[str, int]) -> dict[str, int]:
        ahead = Counter(self._groups(outstanding))
        for batch in self._on_the_way:
            ahead.subtract(batch.counts)
        return dict(ahead)

    def _groups(self, samples: Mapping[str, int]) -> dict[str, int]:
        return {name: count // self._size for name, count in samples.items()}

    def _observe(self, quota: DriftQuota, consumed: Sequence[Group]) -> None:
        """Cost = engine seconds per trained sample; drift = mean distance of a sample's reward from its group's."""
        by: dict[str, list[Group]] = {}
        for group in consumed:
            by.setdefault(group.domain, []).append(group)
        for name, groups in by.items():
            cost = self._spent.pop(name, 0.0) / (len(groups) * self._size)
            if cost > 0:
                quota.observe(name, cost=cost, drift=math.fsum(map(_mean_absolute_advantage, groups)) / len(groups))
        self._next = quota.step()
        self._move()

    def _move(self) -> None:
        """Apply changed shares, unless a batch is growing."""
        if self._next is not None and not self.growing.total():
            self._fair.shares, self._next = self._next, None

    def _report(self, version: int) -> None:
        now, total = asyncio.get_running_loop().time(), sum(self._fair.served.values())
        for d in self.settings.domains:
            n = d.domain
            fields: dict[str, str | int | float | bool | None] = {
                "version": version,
                "weight": d.weight,
                "floor": d.floor,
                "cap": d.cap,
                "wanted": self._fair.shares[n],
                "served": self._fair.served[n],
                "due": self._fair.due[n],
                "share": self._fair.served[n] / total if total else None,
                "worst": self._fair.worst[n],
            }
            self.recorder.event(RunEvent(now, DOMAIN_SHARE, n, fields))


class FairAdmission(PromptAdmission):
    """Starts the domain whose share of the batches to come is used least, in place of windows per domain."""

    def __init__(
        self,
        domains: Sequence[Domain],
        settings: SchedulerSettings,
        recorder: Recorder,
        strategies: Sequence[RolloutStrategy],
        *,
        shares: DomainShareTracker,
    ) -> None:
        super().__init__(domains, settings, recorder, strategies)
        self._shares = shares

    def full(self, domain: Domain) -> Sequence[Domain]:
        return tuple(self._domains.values()) if self._batch_is_full() else ()

    def remaining(self, extra: Mapping[str, int]) -> dict[str, int]:
        return self._shares.remaining(self.slots.outstanding)

    def _next_domain(self, deferring: Collection[str]) -> str | None:
        extra = {} if self._batch_is_full() else self._extra({}, batches=False)
        return self._shares.next_domain(self.slots.outstanding, extra)

    def _batch_is_full(self) -> bool:
        return not self._rules.windowed and self._shares.quotas(self._shares.ready) is not None

    def _defers(self, domain: Domain) -> bool:
        return False


def _mean_absolute_advantage(group: Group) -> float:
    """Mean absolute advantage before it is normalised."""
    scores = [s.score for s in group.samples]
    mean = math.fsum(scores) / len(scores)
    return math.fsum(abs(s - mean) for s in scores) / len(scores)
