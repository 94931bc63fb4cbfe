"""What was said in one session, token by token: a tree of turns in which every path is a trajectory.

A harness sends the whole conversation with every request. Re-tokenising it would give other ids than those that were
sampled, so a request is matched against the turns that are here: if it goes on from one of them, the tokens of that
turn and all before it are reused as they are, and only what is new is encoded. Whatever does not go on from a turn
begins a path of its own, with the reason. Nothing is ever merged by likeness.

No await, no clock: values in, values out.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rollart.adapters.proxy.chat import ChatFormat
from rollart.adapters.proxy.messages import Message, PromptInput
from rollart.model import Completion, FinishReason, Segment, SegmentKind

__all__ = ["TurnRelation", "Branch", "SessionCapture", "PlannedTurn", "CapturedTurn"]


REFERENCE_BYTES, INTEGER_BYTES, LOGPROB_BYTES = 8, 32, 32
"""Bytes in CPython: of an entry in a tuple, of an id, of a log-probability with its entry."""


class TurnRelation(enum.StrEnum):
    """How a turn stands to what was there."""

    START = "start"
    """The session's first."""
    EXTENDS = "extends"
    """It goes on from the latest turn of a branch."""
    FORK = "fork"
    """It goes on from a turn that another one went on from before."""
    DIVERGED = "diverged"
    """It goes on from nothing that was captured: its tokens are encoded anew, in a branch of its own."""


@dataclass(frozen=True, slots=True)
class PlannedTurn:
    """A request's tokens before it is answered: `shown`, after those of the turn `after` (None: of no turn)."""

    prompt: PromptInput
    token_ids: tuple[int, ...]
    shown: tuple[int, ...]
    text: str
    after: int | None
    begun: TurnRelation
    reason: str = ""


@dataclass(frozen=True, slots=True)
class CapturedTurn:
    """One answered request. `depth` counts the turns before it in its branch, `segments` are its own."""

    number: int
    planned: PlannedTurn
    answer: Message
    token_ids: tuple[int, ...]
    segments: tuple[Segment, ...]
    depth: int
    stopped: bool
    """Whether the last sampled token is one of the model's stop tokens."""

    @property
    def sampled(self) -> int:
        return sum(len(s.token_ids) for s in self.segments if s.kind is SegmentKind.ACTION)


@dataclass(frozen=True, slots=True)
class Branch:
    """A path from a first turn to one that nothing goes on from. The first `shared` tokens are those of an earlier
    branch: whoever trains on several would count them twice."""

    turns: tuple[CapturedTurn, ...]
    shared: int

    @property
    def last(self) -> int:
        return self.turns[-1].number

    @property
    def segments(self) -> tuple[Segment, ...]:
        return tuple(s for t in self.turns for s in t.segments)

    @property
    def sampled(self) -> int:
        return sum(t.sampled for t in self.turns)


class SessionCapture:
    """The turns of one session. `plan` a request, then `keep` its answer; several may be planned at once."""

    def __init__(self, form: ChatFormat) -> None:
        self._form = form
        self.turns: list[CapturedTurn] = []
        self.tokens = 0
        """Of all turns; each counts with those before it, which it holds."""
        self.size = 0
        """Bytes that the turns take, about."""
        self._by_messages: dict[str, list[int]] = {}
        """Turns by a digest of the conversation up to their answer."""

    def plan(self, prompt: PromptInput) -> PlannedTurn:
        """The tokens to send. BadRequest if the template refuses the messages."""
        if prompt.chat:
            return self._plan_chat(prompt)
        return self._plan_bare(prompt)

    def keep(self, planned: PlannedTurn, completion: Completion, answer: Message) -> CapturedTurn:
        """An answer becomes a turn; `answer` is the message that the harness is given. What was answered while this
        one was generated is taken into account."""
        planned = self._settled(planned)
        before = None if planned.after is None else self.turns[planned.after]
        depth = 0 if before is None else before.depth + 1
        kind = SegmentKind.PROMPT if before is None else SegmentKind.OBSERVATION
        segments = [Segment(kind, depth, planned.shown)]
        for span in completion.spans:
            at = slice(span.start, span.end)
            segments.append(
                Segment(SegmentKind.ACTION, depth, completion.token_ids[at], span.version, completion.logprobs[at])
            )
        stopped = completion.finish is FinishReason.STOP and completion.token_ids[-1:] != ()
        turn = CapturedTurn(
            len(self.turns),
            planned,
            answer,
            planned.token_ids + completion.token_ids,
            tuple(segments),
            depth,
            stopped and completion.token_ids[-1] in self._form.stops,
        )
        self.turns.append(turn)
        self.tokens += len(turn.token_ids)
        self.size += _turn_bytes(turn)
        if planned.prompt.chat:
            *_, digest = _prefix_digests((*planned.prompt.messages, answer))
            self._by_messages.setdefault(digest, []).append(turn.number)
        return turn

    def undo(self, turn: CapturedTurn) -> None:
        """Take back the turn that was kept last: its answer was not given out."""
        assert turn is self.turns[-1]
        self.turns.pop()
        self.tokens -= len(turn.token_ids)
        self.size -= _turn_bytes(turn)
        if turn.planned.prompt.chat:
            *_, digest = _prefix_digests((*turn.planned.prompt.messages, turn.answer))
            self._by_messages[digest].remove(turn.number)

    def branches(self) -> tuple[Branch, ...]:
        """Every path, in the order of their last turns."""
        followed = {t.planned.after for t in self.turns}
        seen: set[int] = set()
        found = []
        for turn in self.turns:
            if turn.number in followed:
                continue
            path = self.path(turn)
            shared = [t for t in path if t.number in seen]
            found.append(Branch(path, len(shared[-1].token_ids) if shared else 0))
            seen.update(t.number for t in path)
        return tuple(found)

    def path(self, turn: CapturedTurn) -> tuple[CapturedTurn, ...]:
        """The turn and all before it, the first one first."""
        path = [turn]
        while path[-1].planned.after is not None:
            path.append(self.turns[path[-1].planned.after])
        return tuple(reversed(path))

    def _plan_chat(self, prompt: PromptInput) -> PlannedTurn:
        text = self._form.render(prompt.messages, prompt.tools, prompt=True)
        reason = ""
        for turn in self._known(prompt.messages):
            delta = self._delta(turn, prompt, text)
            if delta.text is not None:
                return self._onwards(turn, prompt, self._form.encode(delta.text), text, reason)
            reason = reason or delta.reason
        return self._anew(prompt, self._form.encode(text), text, reason or "no captured turn holds its first messages")

    def _known(self, messages: Sequence[Message]) -> list[CapturedTurn]:
        """Turns whose conversation is the beginning of this one, the longest first, the latest first among equals."""
        found = [n for digest in _prefix_digests(messages)[:-1] for n in self._by_messages.get(digest, ())]
        return [self.turns[n] for n in reversed(found)]

    def _delta(self, turn: CapturedTurn, prompt: PromptInput, text: str) -> _Continuation:
        """What follows the turn's last token in the conversation's text. Three things must hold: the text begins as
        the turn's own did, it shows the answer as it was given, and what follows changes nothing of both."""
        held = len(turn.planned.prompt.messages) + 1
        before = self._form.render(prompt.messages[:held], prompt.tools, prompt=False)
        if not before.startswith(turn.planned.text):
            return _Continuation(None, "the template writes what was shown before in another way now")
        if not text.startswith(before):
            return _Continuation(None, "the template writes earlier answers in another way once more follows")
        said, closing = self._parted(turn, before[len(turn.planned.text) :])
        content, calls = self._form.parse(said) if prompt.tools else (said, ())
        if (content.strip(), calls) != (turn.answer.content.strip(), turn.answer.calls):
            return _Continuation(None, "the template writes the answer in another way than it was said")
        return _Continuation(closing + text[len(before) :], "")

    def _parted(self, turn: CapturedTurn, written: str) -> tuple[str, str]:
        """An answer as the template writes it: what was said, and what is to be shown after it, a stop token that was
        not sampled included."""
        stops = [self._form.stops[turn.token_ids[-1]]] if turn.stopped else list(self._form.stops.values())
        at, stop = max(((written.rfind(stop), stop) for stop in stops), default=(-1, ""))
        if at < 0:
            said = written.rstrip()
            return said, written[len(said) :]
        return written[:at], written[at + len(stop) :] if turn.stopped else written[at:]

    def _plan_bare(self, prompt: PromptInput) -> PlannedTurn:
        """Text or ids: the longest turn that they begin with, character by character or id by id."""
        ids, text = prompt.token_ids, prompt.text or ""
        best: CapturedTurn | None = None
        for turn in self.turns:
            if turn.planned.prompt.chat or (ids is None) != (turn.planned.prompt.token_ids is None):
                continue
            goes_on = text.startswith(self._bare(turn)) if ids is None else ids[: len(turn.token_ids)] == turn.token_ids
            if goes_on and (best is None or len(turn.token_ids) >= len(best.token_ids)):
                best = turn
        if best is not None:
            rest = self._form.encode(text[len(self._bare(best)) :]) if ids is None else ids[len(best.token_ids) :]
            return self._onwards(best, prompt, rest, text, "")
        whole = self._form.encode(text) if ids is None else ids
        return self._anew(prompt, whole, text, "no captured turn is its beginning")

    def _bare(self, turn: CapturedTurn) -> str:
        return turn.planned.text + turn.answer.content

    def _settled(self, planned: PlannedTurn) -> PlannedTurn:
        if planned.after is not None and any(t.planned.after == planned.after for t in self.turns):
            return replace(planned, begun=TurnRelation.FORK)
        if planned.begun is TurnRelation.START and self.turns:
            return replace(planned, begun=TurnRelation.DIVERGED, reason="another first turn was under way")
        return planned

    def _onwards(
        self, turn: CapturedTurn, prompt: PromptInput, shown: tuple[int, ...], text: str, reason: str
    ) -> PlannedTurn:
        """Whether it forks is known once it is answered (`keep`)."""
        return PlannedTurn(prompt, turn.token_ids + shown, shown, text, turn.number, TurnRelation.EXTENDS, reason)

    def _anew(self, prompt: PromptInput, ids: tuple[int, ...], text: str, reason: str) -> PlannedTurn:
        if not self.turns:
            return PlannedTurn(prompt, ids, ids, text, None, TurnRelation.START)
        return PlannedTurn(prompt, ids, ids, text, None, TurnRelation.DIVERGED, reason)


@dataclass(frozen=True, slots=True)
class _Continuation:
    text: str | None
    reason: str


def _turn_bytes(turn: CapturedTurn) -> int:
    fresh = sum(len(s.token_ids) for s in turn.segments)
    taken = (
        REFERENCE_BYTES * len(turn.token_ids) + (REFERENCE_BYTES + INTEGER_BYTES) * fresh + LOGPROB_BYTES * turn.sampled
    )
    return taken + len(turn.planned.text) + len(turn.answer.content)


def _prefix_digests(messages: Sequence[Message]) -> list[str]:
    """One per prefix, the shortest first."""
    running = hashlib.blake2b(digest_size=16)
    found = []
    for message in messages:
        key = message.key.encode()
        running.update(len(key).to_bytes(8, "big") + key)
        found.append(running.hexdigest())
    return found
