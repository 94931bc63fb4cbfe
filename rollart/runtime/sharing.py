"""Domain shares of a running job: samples per batch, outstanding debt, and shares that follow measurements."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rollart.model import Group
from rollart.policy.fairness import DOMAIN_SHARE, DomainShare, DriftQuota, DriftSettings, FairBatches
from rollart.ports import Recorder, RunEvent
from rollart.runtime.domain import Domain

__all__ = ["FairnessSettings", "DomainShareTracker"]


@dataclass(frozen=True, slots=True)
class FairnessSettings:
    """The configured shares of the domains. `slack`: groups that a domain may lag behind its share before a batch waits
    for it. `follow`: shares adapt to measured cost and learning."""

    domains: tuple[DomainShare, ...]
    slack: int = 0
    follow: DriftSettings | None = None


@dataclass(slots=True)
class _BatchInTraining:
    """A batch between its selection and its publish."""

    groups: frozenset[str]
    counts: Mapping[str, int]
    shares: Mapping[str, float]


@dataclass(slots=True)
class DomainShareTracker:
    """Owns the debt to each domain. Synchronous: the buffer asks for the quotas of a batch and reports the batch; the
    scheduler asks which domain starts a group, and reports published and refused groups and engine time.

    Counts are in groups, which all have the same size. Invariants: those of `policy.fairness.FairBatches`. A batch
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
        self._quota = (
            None
            if follow is None
            else DriftQuota(
                self.settings.domains, sensitivity=follow.sensitivity, memory=follow.memory, max_step=follow.max_step
            )
        )

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

    def told(self) -> None:
        """Record that the scheduler was notified of the last batch."""
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

    def spent(self, domain: Domain, seconds: float) -> None:
        """Add the engine seconds of an attempt with any outcome: lost attempts raise the cost of a domain's samples."""
        self._spent[domain.name] = self._spent.get(domain.name, 0.0) + seconds

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

    def resume(self, step: int, served: Mapping[str, int]) -> None:
        """Continue from the journal's count of trained groups per domain. The debt at that moment can be computed only
        for constant weights, so impossible debts are forgiven."""
        fair, total = self._fair, sum(served.values())
        self._batches = step
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


def _mean_absolute_advantage(group: Group) -> float:
    """Mean absolute advantage before it is normalised."""
    scores = [s.score for s in group.samples]
    mean = math.fsum(scores) / len(scores)
    return math.fsum(abs(s - mean) for s in scores) / len(scores)
