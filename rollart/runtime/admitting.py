"""Admission of prompts: slots of the window, rounds of tail batching, and redundant groups."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence

from rollart.policy.admission import AdmissionWindow, DomainQuota
from rollart.policy.redundancy import Redundancy
from rollart.policy.release import SlotLedger
from rollart.policy.schedules import Schedule
from rollart.policy.tailbatch import TailSettings
from rollart.ports import Recorder, RunEvent
from rollart.runtime.domain import Domain, training_seed
from rollart.runtime.pacing import StartPace
from rollart.runtime.redundant import RedundancyController
from rollart.runtime.rounds import GroupLaunch, PendingPrompt, TailBatchRounds
from rollart.runtime.sharing import DomainShareTracker

__all__ = ["PromptAdmission"]


class PromptAdmission:
    """Owns the slots and the order of prompts. Synchronous; the scheduler calls it between two awaits.

    `drawn` and `consumed` count per domain and survive a resume, which counts whole batches. `short`, a view of the
    buffer's count, is the number of samples that batches since then lacked. Invariant: samples that hold a slot never
    exceed (alpha + 1) x batch, plus the samples of redundant groups (I4).
    """

    def __init__(
        self,
        domains: Sequence[Domain],
        rules: Schedule,
        recorder: Recorder,
        *,
        seed: int,
        steps: int,
        redundancy: Redundancy,
        additional: Mapping[str, int],
        tail: TailSettings | None,
        shares: DomainShareTracker | None = None,
        pace: StartPace | None = None,
    ) -> None:
        self._domains = {d.name: d for d in domains}
        self._rules = rules
        self._recorder = recorder
        self._seed = seed
        self._steps = steps
        quotas = tuple(DomainQuota(d.name, d.quota, d.group_size) for d in domains)
        self._window = AdmissionWindow(quotas, rules.alpha if rules.windowed else 0)
        self._shares = shares
        self._pace = pace if shares is None else None
        self.slots = SlotLedger()
        self.redundant = RedundancyController(domains, redundancy, additional)
        self.rounds = None if tail is None else TailBatchRounds(self._domains, tail, self.draw)
        self.drawn = dict.fromkeys(self._domains, 0)
        self.consumed = dict.fromkeys(self._domains, 0)
        self.short: Mapping[str, int] = dict.fromkeys(self._domains, 0)

    def reserve(self) -> list[GroupLaunch]:
        """Take slots for every group that may start now."""
        if self.rounds is not None:
            return self._next_round(self.rounds)
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

    def _defers(self, domain: Domain) -> bool:
        """True if the domain's next prompt waits for the next publish. That publish must be certain: a batch is in
        training, or every domain has a whole batch outstanding."""
        if self._pace is None:
            return False
        outstanding = self.slots.outstanding
        if not self._pace.training and any(outstanding[d.name] < d.quota for d in self._domains.values()):
            return False
        (prompt,) = self.next(domain, 1)
        now = asyncio.get_running_loop().time()
        return not self._pace.starts(prompt.group, str(prompt.seed), domain.name, now)

    def _next_domain(self, deferring: Collection[str] = ()) -> str | None:
        batches = not self._rules.windowed
        if self._shares is not None:
            full = batches and self._shares.quotas(self._shares.ready) is not None
            extra = {} if full else self.redundant.slots({}, self._domains, batches=False)
            return self._shares.next_domain(self.slots.outstanding, extra)
        extra = self.redundant.slots(self.slots.ready, self._domains, batches=batches)
        left = {name: 0 if name in deferring else count for name, count in self.remaining(extra).items()}
        return self._window.next_domain(self.slots.ahead, left, extra)

    def members(self, domain: Domain) -> int:
        """Members that a group of the domain starts with."""
        return domain.group_size + self.redundant.extra(domain).members

    def full(self, domain: Domain) -> Sequence[Domain]:
        """Domains whose batch needs no more groups, now that a group of `domain` is complete. A window of groups has no
        surplus."""
        if self._rules.windowed:
            return ()
        if self._shares is not None:
            return () if self._shares.quotas(self._shares.ready) is None else tuple(self._domains.values())
        return (domain,) if self.slots.ready[domain.name] >= domain.quota else ()

    def remaining(self, extra: Mapping[str, int]) -> dict[str, int]:
        """Samples per domain that the run may still start: the last step needs only its batch and the redundant samples
        (`extra`)."""
        if self._shares is not None:
            return self._shares.remaining(self.slots.outstanding)
        found = dict.fromkeys(self._domains, 0)
        for name, domain in self._domains.items():
            needed = self._steps * domain.quota - self.consumed[name] - self.short[name]
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
            PendingPrompt(f"{domain.name}-{i}", domain, training_seed(self._seed, domain.name, i))
            for i in range(first, first + count)
        ]

    def _next_round(self, rounds: TailBatchRounds) -> list[GroupLaunch]:
        """The next round of tail batching once the last batch is trained; before that, replacements of dropped ones."""
        fresh, rounds.replacements = rounds.replacements, []
        left = {n: v // self._domains[n].group_size for n, v in self.remaining({}).items()}
        if not fresh and any(left.values()) and not any(self.slots.outstanding.values()):
            fresh = rounds.begin(left)
            fields = {"number": rounds.number, "prompts": len(fresh), "deferred": rounds.deferred()}
            self._recorder.event(RunEvent(asyncio.get_running_loop().time(), "tail_round", rounds.kind, fields))
        for launch in fresh:
            domain = launch.prompt.domain
            self.slots.admit(launch.prompt.group, domain.name, domain.group_size)
        return fresh
