"""The ledger without a disk: same rules, for tests and simulations. Passes the ledger's own contract tests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from rollart.errors import RunFailed
from rollart.model import AbortReason, Group, TrainSample, TrajectoryId
from rollart.ports import FINISHED, Charge, Interval, Recovered, RunEvent
from serverless.meter import Saving, TokenBill, WorkerSpan
from serverless.types import Invocation


@dataclass(slots=True)
class StoredGroup:
    domain: str
    seed: int
    state: str = "live"


@dataclass(slots=True)
class MemoryRecorder:
    """`Recorder` and `Journal` in lists and dicts; tests may read all records."""

    intervals: list[Interval] = field(default_factory=list)
    events: list[RunEvent] = field(default_factory=list)
    charges: list[Charge] = field(default_factory=list)
    invocations: list[Invocation] = field(default_factory=list)
    savings: list[Saving] = field(default_factory=list)
    spans: list[WorkerSpan] = field(default_factory=list)
    token_bills: list[TokenBill] = field(default_factory=list)
    versions: list[tuple[int, int, Mapping[str, float]]] = field(default_factory=list)
    stamps: dict[int, str] = field(default_factory=dict)
    dropped: dict[str, str] = field(default_factory=dict)
    groups: dict[str, StoredGroup] = field(default_factory=dict)
    _samples: dict[str, TrainSample] = field(default_factory=dict)
    gone: dict[str, str] = field(default_factory=dict)

    def interval(self, interval: Interval) -> None:
        self.intervals.append(interval)

    def event(self, event: RunEvent) -> None:
        self.events.append(event)

    def invocation(self, invocation: Invocation) -> None:
        self.invocations.append(invocation)

    def saving(self, saving: Saving) -> None:
        self.savings.append(saving)

    def tokens(self, bill: TokenBill) -> None:
        self.token_bills.append(bill)

    def worker(self, span: WorkerSpan) -> None:
        self.spans.append(span)

    def charge(self, charge: Charge) -> None:
        self.charges.append(charge)

    async def admit(self, group: str, domain: str, seed: int) -> None:
        known = self.groups.setdefault(group, StoredGroup(domain, seed))
        if (known.domain, known.seed, known.state) != (domain, seed, "live"):
            raise RunFailed(f"group {group} was admitted before, as {known} (rule: a group's id is used once)")

    async def finish(self, sample: TrainSample, charge: Charge) -> None:
        if sample.id in self.gone:
            raise RunFailed(f"sample {sample.id} finished after it was {self.gone[sample.id]}")
        if sample.id in self._samples:
            await self.outdate(sample.id)
        self.charge(charge)
        group = self.groups.get(sample.group)
        if group is not None and group.state != "live":
            self.gone[sample.id] = "dropped"
            self._samples.pop(sample.id, None)
            return
        self._samples[sample.id] = sample

    async def outdate(self, trajectory: TrajectoryId) -> None:
        for i, charge in enumerate(self.charges):
            if (charge.trajectory, charge.outcome) == (trajectory, FINISHED):
                self.charges[i] = replace(charge, outcome=str(AbortReason.STALE))

    async def drop(self, group: str, reason: str) -> None:
        known = self.groups.get(group)
        if known is None:
            raise RunFailed(f"group {group} is dropped but was never admitted")
        if known.state == "consumed":
            raise RunFailed(f"group {group} is dropped after it was trained (rule: consumed or dropped, once)")
        if known.state == "live":
            known.state = "dropped"
            self.dropped[group] = reason
            for sample in [s for s in self._samples.values() if s.group == group]:
                self.gone[sample.id] = "dropped"
                del self._samples[sample.id]

    async def commit(
        self, *, version: int, step: int, consumed: Sequence[Group], metrics: Mapping[str, float], stamp: str = ""
    ) -> None:
        if self.versions and version <= self.versions[-1][0]:
            raise RunFailed(f"version {version} is committed after version {self.versions[-1][0]}")
        ids = [sample.id for group in consumed for sample in group.samples]
        groups = [group.id for group in consumed]
        for id_ in ids:
            if id_ not in self._samples:
                raise RunFailed(f"sample {id_} is to be trained, but it was {self.gone.get(id_, 'never finished')}")
        for group in groups:
            if group not in self.groups or self.groups[group].state != "live":
                raise RunFailed(f"group {group} is to be trained, but it is not live")
        if len(set(ids)) != len(ids) or len(set(groups)) != len(groups):
            raise RunFailed("a sample or group is twice in the batch (rule: none is trained twice)")
        for id_ in ids:
            del self._samples[id_]
            self.gone[id_] = "trained"
        for group in groups:
            self.groups[group].state = "consumed"
        self.versions.append((version, step, dict(metrics)))
        if stamp:
            self.stamps[version] = stamp

    async def recover(self) -> Recovered | None:
        if not self.versions:
            return None
        drawn: dict[str, int] = {}
        for group in self.groups.values():
            drawn[group.domain] = drawn.get(group.domain, 0) + 1
        live = {name for name, group in self.groups.items() if group.state == "live"}
        times = [i.t1 for i in self.intervals] + [e.t for e in self.events] + [c.t1 for c in self.charges]
        return Recovered(
            version=self.versions[-1][0],
            step=self.versions[-1][1],
            samples=tuple(s for s in self._samples.values() if s.group in live or s.group not in self.groups),
            pending=tuple((name, g.domain, g.seed) for name, g in self.groups.items() if g.state == "live"),
            seeds_drawn=drawn,
            clock=max(times, default=0.0),
            consumed=Counter(g.domain for g in self.groups.values() if g.state == "consumed"),
            stamps=dict(self.stamps),
        )
