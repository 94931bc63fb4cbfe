"""Admission: which prompts start next, and the slots of their samples."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from rollart.control.domain import Domain, training_seed
from rollart.control.groups import GroupLaunch, GroupRun, PendingPrompt
from rollart.control.strategy import RolloutStrategy
from rollart.model import GroupId, TrainSample
from rollart.policy.admission import AdmissionWindow, DomainQuota
from rollart.policy.release import SlotLedger
from rollart.policy.schedules import Schedule
from rollart.ports import Recorder


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """`rules` bound the lead of rollout and define the treatment of stale groups; `steps`: the total number of training
    steps; `max_attempts` per group before its prompt is given up; a fault rate above `max_fault_rate` ends the run once
    there are `min_faults` faults."""

    seed: int
    steps: int
    rules: Schedule
    max_attempts: int = 3
    max_fault_rate: float = 0.05
    min_faults: int = 20


class PromptAdmission:
    """Owns the slots and the order of prompts. Synchronous; the scheduler calls it between two awaits.

    `drawn` and `consumed` count per domain and survive a resume, which counts whole batches. `short`, a view of the
    buffer's count, is the number of samples that batches since then lacked. Invariant: samples that hold a slot never
    exceed (alpha + 1) x batch, plus the samples of redundant groups (I4).
    """

    round = ""
    """The kind of the current round, for an admission in rounds."""

    def __init__(
        self,
        domains: Sequence[Domain],
        settings: SchedulerSettings,
        recorder: Recorder,
        strategies: Sequence[RolloutStrategy],
    ) -> None:
        self._domains = {d.name: d for d in domains}
        self._settings = settings
        self._rules = rules = settings.rules
        self._recorder = recorder
        quotas = tuple(DomainQuota(d.name, d.quota, d.group_size) for d in domains)
        self._window = AdmissionWindow(quotas, rules.alpha if rules.windowed else 0)
        self._strategies = strategies
        self._widened = any(s.by_groups for s in strategies)
        self.slots = SlotLedger()
        self.drawn = dict.fromkeys(self._domains, 0)
        self.consumed = dict.fromkeys(self._domains, 0)
        self.short: Mapping[str, int] = dict.fromkeys(self._domains, 0)

    def reserve(self) -> list[GroupLaunch]:
        """Take slots for every group that may start now."""
        fresh: list[GroupLaunch] = []
        deferring: set[str] = set()
        while (name := self._next_domain(deferring)) is not None:
            domain = self._domains[name]
            if self._defers(domain):
                deferring.add(name)
                continue
            (prompt,) = self.draw(domain, 1)
            self.slots.admit(prompt.group, name, domain.group_size)
            fresh.append(GroupLaunch(prompt, self.members(domain)))
        return fresh

    def readmit(
        self, pending: Sequence[PendingPrompt], samples: Sequence[TrainSample]
    ) -> tuple[list[GroupLaunch], list[GroupId]]:
        """Take slots for the groups that were admitted before a crash, in that order, with their surviving `samples`.
        Returns the launches and the groups that the caller must drop."""
        by_group: dict[str, list[TrainSample]] = {}
        for sample in samples:
            by_group.setdefault(sample.group, []).append(sample)
        launches = []
        for prompt in pending:
            domain = prompt.domain
            self.slots.admit(prompt.group, domain.name, domain.group_size)
            launches.append(GroupLaunch(prompt, self.members(domain), tuple(by_group.get(prompt.group, ()))))
        return launches, []

    def members(self, domain: Domain) -> int:
        """Members that a group of the domain starts with."""
        return domain.group_size + sum(s.extra_members(domain) for s in self._strategies)

    def completed(self, run: GroupRun) -> Sequence[PendingPrompt]:
        """The group is complete. Returns the prompts that are deferred thereby, whose launches the caller ends."""
        return ()

    def dropped(self, run: GroupRun) -> Sequence[PendingPrompt]:
        """The group was dropped. Returns the prompts that are deferred thereby, whose launches the caller ends."""
        return ()

    def withdraw(self, prompt: PendingPrompt) -> None:
        """The prompt was deferred before its launch began."""

    def full(self, domain: Domain) -> Sequence[Domain]:
        """Domains whose batch needs no more groups, now that a group of `domain` is complete. A window of groups has no
        surplus."""
        if self._rules.windowed or not self._widened:
            return ()
        return (domain,) if self.slots.ready[domain.name] >= domain.quota else ()

    def remaining(self, extra: Mapping[str, int]) -> dict[str, int]:
        """Samples per domain that the run may still start: the last step needs only its batch and the redundant samples
        (`extra`)."""
        found = dict.fromkeys(self._domains, 0)
        for name, domain in self._domains.items():
            needed = self._settings.steps * domain.quota - self.consumed[name] - self.short[name]
            if needed > 0:
                found[name] = needed + extra.get(name, 0) - self.slots.outstanding.get(name, 0)
        return found

    def draw(self, domain: Domain, count: int) -> list[PendingPrompt]:
        """Draw the domain's next prompts."""
        prompts = self.next(domain, count)
        self.drawn[domain.name] += count
        return prompts

    def next(self, domain: Domain, count: int) -> list[PendingPrompt]:
        """The prompts that `draw` would return."""
        first = self.drawn[domain.name]
        return [
            PendingPrompt(f"{domain.name}-{i}", domain, training_seed(self._settings.seed, domain.name, i))
            for i in range(first, first + count)
        ]

    def _next_domain(self, deferring: Collection[str]) -> str | None:
        extra = self._extra(self.slots.ready, batches=not self._rules.windowed)
        left = {name: 0 if name in deferring else count for name, count in self.remaining(extra).items()}
        return self._window.next_domain(self.slots.ahead, left, extra)

    def _extra(self, ready: Mapping[str, int], *, batches: bool) -> dict[str, int]:
        """Samples per domain by which its window is wider now. With whole `batches` the number is 0 once a batch is
        ready: a group started then would be dropped."""
        if not self._widened:
            return {}
        return {
            name: 0
            if batches and ready.get(name, 0) >= d.quota
            else sum(s.extra_groups(d) for s in self._strategies) * d.group_size
            for name, d in self._domains.items()
        }

    def _defers(self, domain: Domain) -> bool:
        """True if the domain's next prompt waits for the next publish."""
        if not self._strategies:
            return False
        whole = all(self.slots.outstanding[d.name] >= d.quota for d in self._domains.values())
        (prompt,) = self.next(domain, 1)
        return any(s.defers(prompt, whole=whole) for s in self._strategies)
