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
from dataclasses import dataclass, field
from typing import Any

from rollart.control.admission import PromptAdmission
from rollart.control.domain import Domain
from rollart.control.groups import GroupLaunch, GroupRun, PendingPrompt
from rollart.control.strategy import RolloutStrategy
from rollart.model import GroupId, TrainSample
from rollart.policy.schedules import Schedule
from rollart.ports import RELAUNCH_MARK, Recorder, RunEvent
from rollart.settings.rollout import TailBatchingSpec
from rollart.shares import DomainShare
from rollart.strategies.fairness import Apportionment


class RoundKind(enum.StrEnum):
    SHORT = "short"
    LONG = "long"


@dataclass(frozen=True, slots=True, order=True)
class Response:
    """A running response. `launch` counts the launches of its prompt: it distinguishes late responses of an earlier
    launch."""

    prompt: str
    launch: int
    index: int


@dataclass(frozen=True, slots=True)
class TailDomain:
    """A step trains `prompts` prompts (P0) of the domain with `responses` responses (R0) each."""

    domain: str
    prompts: int
    responses: int

    def __post_init__(self) -> None:
        if self.prompts < 1 or self.responses < 1:
            raise ValueError(
                f"domain {self.domain}: prompts {self.prompts} and responses {self.responses} must be positive"
            )


@dataclass(frozen=True, slots=True)
class TailRound:
    """The responses to launch now. `target` = prompts per domain that end the round; less than P0 only when the prompts
    run out."""

    number: int
    kind: RoundKind
    launch: tuple[Response, ...]
    target: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class CompletedPrompt:
    """A prompt's training sample: exactly its first R0 responses, in the order they finished."""

    prompt: str
    domain: str
    responses: tuple[Response, ...]


@dataclass(frozen=True, slots=True)
class RoundEffect:
    """The actions after an event. `late`: the event's response is no longer wanted, and nothing changes."""

    abort: tuple[Response, ...] = ()
    launch: tuple[Response, ...] = ()
    completed: CompletedPrompt | None = None
    deferred: tuple[str, ...] = ()
    round_over: bool = False
    late: bool = False


@dataclass(slots=True)
class _Active:
    """A prompt of the current round. `next` is the index of its next response."""

    domain: str
    launch: int
    live: list[int]
    next: int
    finished: list[int] = field(default_factory=list)


class TailBatching:
    """The state machine of the rounds. The caller supplies fresh prompts and reports the ends of responses.

    Call `demand`, then `next_round` with that many fresh prompts (fewer: the epoch ends), then `finished`, `failed` or
    `dropped` for each event until an effect has `round_over`. Invariant, in every state: each supplied prompt is in
    exactly one of waiting, deferred, active, trained, dropped. Ties: deferred prompts keep the order in which they were
    deferred; prompts of one domain that are deferred together keep the order of their launch.
    """

    def __init__(
        self, domains: Sequence[TailDomain], *, eta_prompts: float = 1.25, eta_responses: float = 1.25
    ) -> None:
        if not domains or len({d.domain for d in domains}) != len(domains):
            raise ValueError("tail batching needs at least one domain, each named once")
        if eta_prompts < 1 or eta_responses < 1:
            raise ValueError(f"eta must be at least 1, got {eta_prompts} for prompts, {eta_responses} for responses")
        self._domains = {d.domain: d for d in domains}
        self._eta = (eta_prompts, eta_responses)
        self._batch = sum(d.prompts for d in domains)
        self._spread = Apportionment(tuple(DomainShare(d.domain, float(d.prompts)) for d in domains))
        self._extra: dict[str, int] | None = None
        self._waiting: dict[str, deque[str]] = {d.domain: deque() for d in domains}
        self._deferred: dict[str, deque[str]] = {d.domain: deque() for d in domains}
        self._active: dict[str, _Active] = {}
        self._round: tuple[RoundKind, dict[str, int]] | None = None
        self._number = 0
        self._launches: dict[str, int] = {}
        """Number of launches of each prompt that is not done."""

    def deferred(self) -> dict[str, tuple[str, ...]]:
        """The long-prompt queue, oldest first, per domain."""
        return {d: tuple(q) for d, q in self._deferred.items()}

    def waiting(self) -> dict[str, tuple[str, ...]]:
        """Prompts that were supplied and never launched, per domain."""
        return {d: tuple(q) for d, q in self._waiting.items()}

    def live(self) -> tuple[Response, ...]:
        """Responses that should be running. After a resume, exactly these are to be launched again."""
        return tuple(Response(p, a.launch, i) for p, a in self._active.items() for i in a.live)

    def launch_of(self, prompt: str) -> int:
        """The number of an active prompt's launch; KeyError for any other."""
        return self._active[prompt].launch

    def demand(self) -> dict[str, int]:
        """Fresh prompts per domain that the next round needs beyond the waiting ones."""
        return {d: max(n - len(self._waiting[d]), 0) for d, n in self._fresh_wanted().items()}

    def next_round(self, fresh: Mapping[str, Sequence[str]]) -> TailRound | None:
        """Start a round. None once no prompt is waiting or deferred. ValueError while a round is running, or if a fresh
        prompt is active already: a prompt that recurs in a later epoch needs a new id."""
        if self._round is not None:
            raise ValueError(f"round {self._number} is not over: {len(self._active)} prompts are active")
        self._accept(fresh)
        wanted = self._fresh_wanted()
        speculate = not self._due_long() and all(len(self._waiting[d]) >= n for d, n in wanted.items())
        kind = RoundKind.SHORT if speculate else RoundKind.LONG
        target: dict[str, int] = {}
        launch: list[Response] = []
        for name, domain in self._domains.items():
            picked = self._pick(name, wanted[name] if speculate else domain.prompts, fresh_only=speculate)
            target[name] = min(domain.prompts, len(picked))
            responses = _floor(self._eta[1] * domain.responses) if speculate else domain.responses
            for prompt in picked:
                launch += self._launch(prompt, name, responses)
        if not launch:
            return None
        if speculate:
            self._extra = None
        self._round = (kind, target)
        self._number += 1
        return TailRound(self._number, kind, tuple(launch), dict(target))

    def finished(self, response: Response) -> RoundEffect:
        """A response is complete and scored."""
        active = self._find(response)
        if active is None:
            return RoundEffect(late=True)
        active.live.remove(response.index)
        active.finished.append(response.index)
        if len(active.finished) < self._domains[active.domain].responses:
            return RoundEffect()
        abort = [Response(response.prompt, active.launch, i) for i in active.live]
        kept = tuple(Response(response.prompt, active.launch, i) for i in active.finished)
        del self._active[response.prompt], self._launches[response.prompt]
        target = self._targets()
        target[active.domain] -= 1
        more, deferred = self._close(active.domain)
        completed = CompletedPrompt(response.prompt, active.domain, kept)
        return RoundEffect((*abort, *more), (), completed, deferred, round_over=self._over())

    def failed(self, response: Response, *, defer: bool = False) -> RoundEffect:
        """An attempt failed because of the infrastructure. It is launched again, unless the redundant responses of its
        prompt still suffice. With `defer` the whole prompt is deferred instead, where the round can spare it."""
        active = self._find(response)
        if active is None:
            return RoundEffect(late=True)
        if defer and self._spare(active.domain) > 0:
            abort = self._abort(response.prompt, besides=response.index)
            self._deferred[active.domain].append(response.prompt)
            return RoundEffect(abort, deferred=(response.prompt,))
        active.live.remove(response.index)
        if len(active.live) + len(active.finished) >= self._domains[active.domain].responses:
            return RoundEffect()
        active.live.append(active.next)
        active.next += 1
        return RoundEffect(launch=(Response(response.prompt, active.launch, active.live[-1]),))

    def dropped(self, prompt: str, fresh: Sequence[str] = ()) -> RoundEffect:
        """The caller gives an active prompt up for good (its data are broken). Another prompt of its domain replaces it
        where the round cannot end without it: a deferred one, a waiting one, or one of `fresh`, which are added. With
        none left, the round trains one prompt less."""
        active = self._active.get(prompt)
        if active is None:
            return RoundEffect(late=True)
        self._accept({active.domain: fresh})
        short = self._spare(active.domain) <= 0
        abort = self._abort(prompt)
        del self._launches[prompt]
        domain = self._domains[active.domain]
        launch: tuple[Response, ...] = ()
        if short:
            picked = self._pick(active.domain, 1, fresh_only=False)
            if picked:
                launch = self._launch(picked[0], active.domain, domain.responses)
            else:
                self._targets()[active.domain] -= 1
        more, deferred = self._close(active.domain)
        return RoundEffect((*abort, *more), launch, None, deferred, round_over=self._over())

    def state(self) -> dict[str, Any]:
        """The complete state as JSON values, for `restore`."""
        return {
            "version": 1,
            "number": self._number,
            "round": None if self._round is None else [str(self._round[0]), dict(self._round[1])],
            "waiting": {d: list(q) for d, q in self._waiting.items()},
            "deferred": {d: list(q) for d, q in self._deferred.items()},
            "active": {
                p: [a.domain, a.launch, list(a.live), a.next, list(a.finished)] for p, a in self._active.items()
            },
            "launches": dict(self._launches),
            "extra": None if self._extra is None else dict(self._extra),
            "debt": dict(self._spread.debt),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`. Its live responses are no longer running: launch `live()` again."""
        if state.get("version") != 1 or set(state["waiting"]) != set(self._domains):
            raise ValueError(
                f"state of other domains {sorted(state['waiting'])}: resume with the spec it was saved under"
            )
        self._number = state["number"]
        saved = state["round"]
        self._round = None if saved is None else (RoundKind(saved[0]), dict(saved[1]))
        self._waiting = {d: deque(state["waiting"][d]) for d in self._domains}
        self._deferred = {d: deque(state["deferred"][d]) for d in self._domains}
        self._active = {p: _Active(d, n, list(v), k, list(f)) for p, (d, n, v, k, f) in state["active"].items()}
        self._launches = dict(state["launches"])
        self._extra = None if state["extra"] is None else dict(state["extra"])
        self._spread.debt = dict(state["debt"])

    def _fresh_wanted(self) -> dict[str, int]:
        """Never-launched prompts per domain for the kind of round that is due."""
        if self._due_long():
            return {n: max(d.prompts - len(self._deferred[n]), 0) for n, d in self._domains.items()}
        if self._extra is None:
            self._extra = self._spread.step(_floor(self._eta[0] * self._batch) - self._batch)
        return {n: d.prompts + self._extra[n] for n, d in self._domains.items()}

    def _due_long(self) -> bool:
        return sum(map(len, self._deferred.values())) >= self._batch

    def _accept(self, fresh: Mapping[str, Sequence[str]]) -> None:
        known = {*self._launches, *(p for q in self._waiting.values() for p in q)}
        for domain, prompts in fresh.items():
            if domain not in self._domains:
                raise ValueError(f"unknown domain {domain}: the domains are {', '.join(self._domains)}")
            for prompt in prompts:
                if prompt in known:
                    raise ValueError(
                        f"prompt {prompt} is under way already: give each epoch's prompts ids of their own"
                    )
                known.add(prompt)
        for domain, prompts in fresh.items():
            self._waiting[domain].extend(prompts)

    def _pick(self, domain: str, count: int, *, fresh_only: bool) -> list[str]:
        picked: list[str] = []
        for queue in (self._waiting[domain],) if fresh_only else (self._deferred[domain], self._waiting[domain]):
            while queue and len(picked) < count:
                picked.append(queue.popleft())
        return picked

    def _launch(self, prompt: str, domain: str, responses: int) -> tuple[Response, ...]:
        number = self._launches[prompt] = self._launches.get(prompt, 0) + 1
        self._active[prompt] = _Active(domain, number, list(range(responses)), responses)
        return tuple(Response(prompt, number, i) for i in range(responses))

    def _find(self, response: Response) -> _Active | None:
        """The response's prompt, if the response is still wanted. Reporting a response twice is the caller's error."""
        active = self._active.get(response.prompt)
        if active is None or active.launch != response.launch:
            return None
        if response.index in active.finished or response.index >= active.next:
            raise ValueError(f"{response} cannot end: it ended before, or was never launched")
        return active if response.index in active.live else None

    def _targets(self) -> dict[str, int]:
        """Prompts per domain that the round still waits for; changed in place."""
        assert self._round is not None, "an active prompt without a round"
        return self._round[1]

    def _spare(self, domain: str) -> int:
        """Active prompts of the domain beyond its target."""
        return sum(a.domain == domain for a in self._active.values()) - self._targets()[domain]

    def _abort(self, prompt: str, *, besides: int | None = None) -> tuple[Response, ...]:
        active = self._active.pop(prompt)
        return tuple(Response(prompt, active.launch, i) for i in active.live if i != besides)

    def _close(self, domain: str) -> tuple[tuple[Response, ...], tuple[str, ...]]:
        """Defer the remaining prompts of a domain whose target is reached, at once: this frees their engine slots."""
        if self._targets()[domain] > 0:
            return (), ()
        rest = tuple(p for p, a in self._active.items() if a.domain == domain)
        abort = tuple(r for p in rest for r in self._abort(p))
        self._deferred[domain].extend(rest)
        return abort, rest

    def _over(self) -> bool:
        if any(self._targets().values()):
            return False
        assert not self._active, "a round that is over has no active prompt"
        self._round = None
        return True


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
        rules: Schedule,
        recorder: Recorder,
        *,
        settings: TailBatchingSpec,
        seed: int,
        steps: int,
        strategies: Sequence[RolloutStrategy] = (),
    ) -> None:
        super().__init__(domains, rules, recorder, seed=seed, steps=steps, strategies=strategies)
        self._tail = TailBatching(
            [TailDomain(d.name, d.quota // d.group_size, d.group_size) for d in domains],
            eta_prompts=settings.eta_prompts,
            eta_responses=settings.eta_responses,
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
        state = self._tail.state()
        for prompt in self._prompts.values():
            queue = "waiting" if prompt.launch == 1 else "deferred"
            state[queue][prompt.domain.name].append(prompt.name)
            if prompt.launch > 1:
                state["launches"][prompt.name] = prompt.launch - 1
        self._tail.restore(state)
        return [], replaced

    def completed(self, run: GroupRun) -> Sequence[PendingPrompt]:
        prompt = self._prompt(run.id)
        effect, launch = RoundEffect(), self._tail.launch_of(prompt.name)
        for index in range(prompt.domain.group_size):
            effect = self._tail.finished(Response(prompt.name, launch, index))
        del self._prompts[prompt.name]
        return [self._prompts[name] for name in effect.deferred]

    def dropped(self, run: GroupRun) -> Sequence[PendingPrompt]:
        prompt, name = self._prompt(run.id), run.domain.name
        kept = self._tail.deferred()[name] or self._tail.waiting()[name]
        effect = self._tail.dropped(prompt.name, () if kept else self._draw(name, 1))
        del self._prompts[prompt.name]
        self._replacements += self._launches(effect.launch)
        return [self._prompts[name] for name in effect.deferred]

    def withdraw(self, prompt: PendingPrompt) -> None:
        self._replacements = [r for r in self._replacements if r.prompt is not prompt]

    def full(self, domain: Domain) -> Sequence[Domain]:
        return ()

    def _begin(self, left: Mapping[str, int]) -> list[GroupLaunch]:
        """The next round. `left`: prompts per domain that the run still trains, an upper bound on the drawn prompts."""
        held = {d: len(q) + len(self._tail.waiting()[d]) for d, q in self._tail.deferred().items()}
        fresh = {
            name: self._draw(name, min(n, max(left[name] - held[name], 0))) for name, n in self._tail.demand().items()
        }
        started = self._tail.next_round(fresh)
        launches: list[GroupLaunch] = []
        if started is not None:
            self.round, self._number = str(started.kind), started.number
            launches = self._launches(started.launch)
        deferred = sum(map(len, self._tail.deferred().values()))
        fields = {"number": self._number, "prompts": len(launches), "deferred": deferred}
        self._recorder.event(RunEvent(asyncio.get_running_loop().time(), "tail_round", self.round, fields))
        return launches

    def _prompt(self, group: GroupId) -> PendingPrompt:
        return self._prompts[group.partition(RELAUNCH_MARK)[0]]

    def _draw(self, domain: str, count: int) -> list[str]:
        drawn = self.draw(self._domains[domain], count)
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
