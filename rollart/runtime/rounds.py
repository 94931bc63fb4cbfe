"""Rounds of tail batching: the prompts that a round starts, and the deferred prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rollart.model import GroupId, TrainSample
from rollart.policy.tailbatch import Response, RoundEffect, TailBatching, TailDomain, TailSettings
from rollart.runtime.domain import Domain

__all__ = ["RELAUNCH_MARK", "GroupLaunch", "PendingPrompt", "TailBatchRounds"]

RELAUNCH_MARK = "~"
"""Marks a repeated launch: prompt `lake-7` is group `lake-7` at first and `lake-7~2` when it is generated again. The
journal counts repeated groups under the domain `lake~`, so that its count of a domain is the count of its prompts."""


@dataclass(slots=True)
class PendingPrompt:
    """A prompt that is not trained yet. Its seed stays the same, however often it is launched."""

    name: str
    domain: Domain
    seed: int
    launch: int = 1

    @property
    def group(self) -> GroupId:
        return GroupId(self.name if self.launch == 1 else f"{self.name}{RELAUNCH_MARK}{self.launch}")

    @property
    def journal_domain(self) -> str:
        return self.domain.name if self.launch == 1 else f"{self.domain.name}{RELAUNCH_MARK}"


@dataclass(frozen=True, slots=True)
class GroupLaunch:
    """A group to start now, with its number of members. `samples`: its samples that survived a crash."""

    prompt: PendingPrompt
    members: int
    samples: tuple[TrainSample, ...] = ()


@dataclass(slots=True)
class TailBatchRounds:
    """Owns the prompts of a run from draw to training. Synchronous; the scheduler calls it between two awaits.

    `draw` makes a domain's next fresh prompts. Invariant: each drawn prompt is waiting, deferred, active, trained or
    dropped (`TailBatching`). The state need not be stored: of the prompts that the journal holds as admitted, first
    launches are waiting and repeated launches are deferred. So a resume begins its round again and loses no prompt.
    """

    domains: Mapping[str, Domain]
    settings: TailSettings
    draw: Callable[[Domain, int], list[PendingPrompt]]
    replacements: list[GroupLaunch] = field(default_factory=list)
    """Prompts that replace dropped prompts in the round."""
    number: int = 0
    kind: str = ""
    _prompts: dict[str, PendingPrompt] = field(default_factory=dict)
    _survived: dict[str, list[TrainSample]] = field(default_factory=dict)
    _tail: TailBatching = field(init=False)

    def __post_init__(self) -> None:
        self._tail = self._fresh()

    def deferred(self) -> int:
        """The number of deferred prompts."""
        return sum(map(len, self._tail.deferred().values()))

    def begin(self, left: Mapping[str, int]) -> list[GroupLaunch]:
        """The next round. `left`: prompts per domain that the run still trains, an upper bound on the drawn prompts."""
        held = {d: len(q) + len(self._tail.waiting()[d]) for d, q in self._tail.deferred().items()}
        fresh = {
            name: self._draw(name, min(n, max(left[name] - held[name], 0))) for name, n in self._tail.demand().items()
        }
        started = self._tail.next_round(fresh)
        if started is None:
            return []
        self.number, self.kind = started.number, str(started.kind)
        return self._launches(started.launch)

    def completed(self, prompt: PendingPrompt) -> list[PendingPrompt]:
        """Mark a prompt complete. Returns the prompts that are deferred thereby, to a later launch."""
        effect, launch = RoundEffect(), self._tail.launch_of(prompt.name)
        for index in range(prompt.domain.group_size):
            effect = self._tail.finished(Response(prompt.name, launch, index))
        del self._prompts[prompt.name]
        return [self._prompts[name] for name in effect.deferred]

    def dropped(self, prompt: PendingPrompt) -> list[PendingPrompt]:
        """Mark a prompt dropped and add another to `replacements`. Returns the prompts that are deferred thereby."""
        name = prompt.domain.name
        kept = self._tail.deferred()[name] or self._tail.waiting()[name]
        effect = self._tail.dropped(prompt.name, () if kept else self._draw(name, 1))
        del self._prompts[prompt.name]
        self.replacements += self._launches(effect.launch)
        return [self._prompts[name] for name in effect.deferred]

    def prompt(self, group_id: str) -> PendingPrompt:
        """The prompt of a group."""
        return self._prompts[group_id.partition(RELAUNCH_MARK)[0]]

    def resume(self, pending: Iterable[tuple[str, Domain, int]], samples: Sequence[TrainSample]) -> list[GroupId]:
        """Restore the prompts that were admitted at a crash, given in the order of admission. Returns groups replaced
        by a later launch of the same prompt: the caller must drop them."""
        replaced: list[GroupId] = []
        for group_id, domain, seed in pending:
            name, _, launch = group_id.partition(RELAUNCH_MARK)
            prompt = PendingPrompt(name, domain, seed, int(launch or 1))
            known = self._prompts.pop(name, prompt)
            older, newer = sorted((known, prompt), key=lambda p: p.launch)
            if older is not newer:
                replaced.append(older.group)
            self._prompts[name] = newer
        groups = {p.group for p in self._prompts.values()}
        for sample in samples:
            if sample.group in groups:
                self._survived.setdefault(sample.group, []).append(sample)
        state = self._tail.state()
        for prompt in self._prompts.values():
            queue = "waiting" if prompt.launch == 1 else "deferred"
            state[queue][prompt.domain.name].append(prompt.name)
            if prompt.launch > 1:
                state["launches"][prompt.name] = prompt.launch - 1
        self._tail.restore(state)
        return replaced

    def _fresh(self) -> TailBatching:
        return TailBatching(
            [TailDomain(d.name, d.quota // d.group_size, d.group_size) for d in self.domains.values()],
            eta_prompts=self.settings.eta_prompts,
            eta_responses=self.settings.eta_responses,
        )

    def _draw(self, domain: str, count: int) -> list[str]:
        drawn = self.draw(self.domains[domain], count)
        self._prompts.update({p.name: p for p in drawn})
        return [p.name for p in drawn]

    def _launches(self, responses: Sequence[Response]) -> list[GroupLaunch]:
        members: dict[str, int] = {}
        for response in responses:
            members[response.prompt] = members.get(response.prompt, 0) + 1
        found = []
        for name, count in members.items():
            prompt = self._prompts[name]
            found.append(GroupLaunch(prompt, count, tuple(self._survived.pop(prompt.group, ()))))
        return found
