"""Tail batching: long prompts are deferred and run together, so that most rounds have no long tail (RollPacker §3.1).

A SHORT round launches eta times the prompts and eta times the responses that a step needs. A prompt is done with its
first R0 responses, a domain with its first P0 prompts; prompts that are not done by then are aborted, deferred, and
generated afresh by a later policy. Once as many prompts are deferred as a step needs, a LONG round runs them to their
end without speculation. Only the order of prompts changes: every prompt is trained once, on policy, with R0 responses.

Cadence. A short round defers floor(eta * P0) - P0 prompts, so a long round follows every P0 / (floor(eta * P0) - P0)
short ones: 4 : 1 at eta = 1.25 and P0 a multiple of 4.

Domains. Each round trains exactly P0 prompts of each domain. The extra prompts of a short round are apportioned in
proportion to P0 with carried debt; a long round takes a domain's deferred prompts first and fresh ones for the rest.
When a domain has no fresh prompts left to speculate with, rounds are long until its queue is empty.

`TailBatching` is the pure state machine; `TailBatchAdmission` maps it to the groups of a run.
"""

from __future__ import annotations

import asyncio
import enum
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rollart.control.admission import PromptAdmission, SchedulerSettings
from rollart.control.domain import Domain
from rollart.control.groups import GroupLaunch, GroupRun, PendingPrompt
from rollart.control.strategy import RolloutStrategy
from rollart.model import GroupId, TrainSample
from rollart.policy.admission import DomainQuota
from rollart.ports import RELAUNCH_MARK, Recorder, RunEvent
from rollart.settings.rollout import TailBatchingSpec
from rollart.shares import DomainShare
from rollart.strategies.fairness import Apportionment


class RoundKind(enum.StrEnum):
    SHORT = "short"
    LONG = "long"


@dataclass(frozen=True, slots=True)
class TailRound:
    """A round to launch now. `responses`: the number of responses to run, by prompt."""

    number: int
    kind: RoundKind
    responses: Mapping[str, int]


class TailBatching:
    """The state machine of the rounds. A step trains P0 = quota / group_size prompts of each domain with R0 =
    group_size responses each. The caller supplies fresh prompts and reports the ends of prompts.

    Call `demand`, then `next_round` with that many fresh prompts (fewer: the epoch ends), then `completed` or `dropped`
    for each prompt that ends, until none is active. Invariant, in every state: each supplied prompt is in exactly one
    of waiting, deferred, active, trained, dropped. Ties: deferred prompts keep the order in which they were deferred;
    prompts of one domain that are deferred together keep the order of their launch.
    """

    def __init__(
        self, domains: Sequence[DomainQuota], *, eta_prompts: float = 1.25, eta_responses: float = 1.25
    ) -> None:
        self._prompts = {d.domain: d.quota // d.group_size for d in domains}
        self._responses = {d.domain: d.group_size for d in domains}
        self._eta = (eta_prompts, eta_responses)
        self._batch = sum(self._prompts.values())
        self._spread = Apportionment(tuple(DomainShare(d, float(n)) for d, n in self._prompts.items()))
        self._extra: dict[str, int] | None = None
        self.waiting: dict[str, deque[str]] = {d.domain: deque() for d in domains}
        """Prompts that were supplied and never launched, by domain."""
        self.deferred: dict[str, deque[str]] = {d.domain: deque() for d in domains}
        """The queue of long prompts by domain, oldest first."""
        self.active: dict[str, str] = {}
        """The prompts of the current round, with their domains."""
        self._targets: dict[str, int] = {}
        """Prompts per domain that the round still waits for."""
        self._number = 0

    def demand(self) -> dict[str, int]:
        """Fresh prompts per domain that the next round needs beyond the waiting ones."""
        return {d: max(n - len(self.waiting[d]), 0) for d, n in self._fresh_wanted().items()}

    def next_round(self, fresh: Mapping[str, Sequence[str]]) -> TailRound | None:
        """Start a round, while none is running. None once no prompt is waiting or deferred. A prompt that recurs in a
        later epoch has a new id."""
        self._accept(fresh)
        wanted = self._fresh_wanted()
        speculate = not self._due_long() and all(len(self.waiting[d]) >= n for d, n in wanted.items())
        launched: dict[str, int] = {}
        for name, prompts in self._prompts.items():
            picked = self._pick(name, wanted[name] if speculate else prompts, fresh_only=speculate)
            self._targets[name] = min(prompts, len(picked))
            self.active |= dict.fromkeys(picked, name)
            responses = self._responses[name]
            launched |= dict.fromkeys(picked, _floor(self._eta[1] * responses) if speculate else responses)
        if not launched:
            return None
        if speculate:
            self._extra = None
        self._number += 1
        return TailRound(self._number, RoundKind.SHORT if speculate else RoundKind.LONG, launched)

    def completed(self, prompt: str) -> tuple[str, ...]:
        """The active prompt has its responses. Returns the prompts that are deferred thereby."""
        domain = self.active.pop(prompt)
        self._targets[domain] -= 1
        return self._close(domain)

    def dropped(self, prompt: str, fresh: Sequence[str] = ()) -> tuple[str | None, tuple[str, ...]]:
        """The caller gives an active prompt up for good (its data are broken). Another prompt of its domain replaces it
        where the round cannot end without it: a deferred one, a waiting one, or one of `fresh`, which are added. With
        none left, the round trains one prompt less. Returns the replacement, which runs R0 responses, and the prompts
        that are deferred thereby."""
        domain = self.active[prompt]
        self._accept({domain: fresh})
        replaced = sum(d == domain for d in self.active.values()) <= self._targets[domain]
        del self.active[prompt]
        picked = self._pick(domain, 1, fresh_only=False) if replaced else []
        self.active |= dict.fromkeys(picked, domain)
        if replaced and not picked:
            self._targets[domain] -= 1
        return picked[0] if picked else None, self._close(domain)

    def _fresh_wanted(self) -> dict[str, int]:
        """Never-launched prompts per domain for the kind of round that is due."""
        if self._due_long():
            return {d: max(n - len(self.deferred[d]), 0) for d, n in self._prompts.items()}
        if self._extra is None:
            self._extra = self._spread.step(_floor(self._eta[0] * self._batch) - self._batch)
        return {d: n + self._extra[d] for d, n in self._prompts.items()}

    def _due_long(self) -> bool:
        return sum(map(len, self.deferred.values())) >= self._batch

    def _accept(self, fresh: Mapping[str, Sequence[str]]) -> None:
        for domain, prompts in fresh.items():
            self.waiting[domain].extend(prompts)

    def _pick(self, domain: str, count: int, *, fresh_only: bool) -> list[str]:
        picked: list[str] = []
        for queue in (self.waiting[domain],) if fresh_only else (self.deferred[domain], self.waiting[domain]):
            while queue and len(picked) < count:
                picked.append(queue.popleft())
        return picked

    def _close(self, domain: str) -> tuple[str, ...]:
        """Defer the remaining prompts of a domain whose target is reached, at once: this frees their engine slots."""
        if self._targets[domain] > 0:
            return ()
        rest = tuple(p for p, d in self.active.items() if d == domain)
        for prompt in rest:
            del self.active[prompt]
        self.deferred[domain].extend(rest)
        return rest


def _floor(value: float) -> int:
    """Floor of a product of short decimals: 1.15 * 20 is 23."""
    return math.floor(value + 1e-9)


class TailBatchAdmission(PromptAdmission):
    """Starts the prompts of a round together, once the last round is trained. Owns the prompts of a run from draw to
    training.

    Invariant: each drawn prompt is waiting, deferred, active, trained or dropped (`TailBatching`). The state need not
    be stored: of the prompts that the journal holds as admitted, first launches are waiting and repeated launches are
    deferred. So a resume begins its round again and loses no prompt.
    """

    def __init__(
        self,
        domains: Sequence[Domain],
        settings: SchedulerSettings,
        recorder: Recorder,
        strategies: Sequence[RolloutStrategy],
        *,
        tail: TailBatchingSpec,
    ) -> None:
        super().__init__(domains, settings, recorder, strategies)
        self._tail = TailBatching(
            [DomainQuota(d.name, d.quota, d.group_size) for d in domains],
            eta_prompts=tail.eta_prompts,
            eta_responses=tail.eta_responses,
        )
        self._replacements: list[GroupLaunch] = []
        """Prompts that replace dropped prompts in the round."""
        self._prompts: dict[str, PendingPrompt] = {}
        self._survived: dict[str, list[TrainSample]] = {}
        self._number = 0

    def reserve(self) -> list[GroupLaunch]:
        """The next round once the last batch is trained; before that, replacements of dropped prompts."""
        fresh, self._replacements = self._replacements, []
        left = {n: v // self._domains[n].group_size for n, v in self.remaining({}).items()}
        if not fresh and any(left.values()) and not any(self.slots.outstanding.values()):
            fresh = self._begin(left)
        for launch in fresh:
            domain = launch.prompt.domain
            self.slots.admit(launch.prompt.group, domain.name, domain.group_size)
        return fresh

    def readmit(
        self, pending: Sequence[PendingPrompt], samples: Sequence[TrainSample]
    ) -> tuple[list[GroupLaunch], list[GroupId]]:
        """Restore the prompts; none starts before its round. The groups that the caller must drop are those replaced by
        a later launch of the same prompt."""
        replaced: list[GroupId] = []
        for prompt in pending:
            known = self._prompts.pop(prompt.name, prompt)
            older, newer = sorted((known, prompt), key=lambda p: p.launch)
            if older is not newer:
                replaced.append(older.group)
            self._prompts[prompt.name] = newer
        groups = {p.group for p in self._prompts.values()}
        for sample in samples:
            if sample.group in groups:
                self._survived.setdefault(sample.group, []).append(sample)
        for prompt in self._prompts.values():
            queues = self._tail.waiting if prompt.launch == 1 else self._tail.deferred
            queues[prompt.domain.name].append(prompt.name)
        return [], replaced

    def completed(self, run: GroupRun) -> Sequence[PendingPrompt]:
        name = self._forget(run.id)
        return [self._prompts[deferred] for deferred in self._tail.completed(name)]

    def dropped(self, run: GroupRun) -> Sequence[PendingPrompt]:
        name, domain = self._forget(run.id), run.domain.name
        kept = self._tail.deferred[domain] or self._tail.waiting[domain]
        replacement, deferred = self._tail.dropped(name, () if kept else self._draw(domain, 1))
        if replacement is not None:
            self._replacements.append(self._launch(replacement, run.domain.group_size))
        return [self._prompts[name] for name in deferred]

    def withdraw(self, prompt: PendingPrompt) -> None:
        self._replacements = [r for r in self._replacements if r.prompt is not prompt]

    def full(self, domain: Domain) -> Sequence[Domain]:
        return ()

    def _begin(self, left: Mapping[str, int]) -> list[GroupLaunch]:
        """The next round. `left`: prompts per domain that the run still trains, an upper bound on the drawn prompts."""
        held = {d: len(q) + len(self._tail.waiting[d]) for d, q in self._tail.deferred.items()}
        fresh = {
            name: self._draw(name, min(n, max(left[name] - held[name], 0))) for name, n in self._tail.demand().items()
        }
        started = self._tail.next_round(fresh)
        launches: list[GroupLaunch] = []
        if started is not None:
            self.round, self._number = str(started.kind), started.number
            launches = [self._launch(name, count) for name, count in started.responses.items()]
        deferred = sum(map(len, self._tail.deferred.values()))
        fields = {"number": self._number, "prompts": len(launches), "deferred": deferred}
        self._recorder.event(RunEvent(asyncio.get_running_loop().time(), "tail_round", self.round, fields))
        return launches

    def _forget(self, group: GroupId) -> str:
        """The name of the group's prompt, which is over."""
        return self._prompts.pop(group.partition(RELAUNCH_MARK)[0]).name

    def _draw(self, domain: str, count: int) -> list[str]:
        drawn = self.draw(self._domains[domain], count)
        self._prompts.update({p.name: p for p in drawn})
        return [p.name for p in drawn]

    def _launch(self, name: str, members: int) -> GroupLaunch:
        prompt = self._prompts[name]
        return GroupLaunch(prompt, members, tuple(self._survived.pop(prompt.group, ())))
