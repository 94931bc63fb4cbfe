"""The captured tokens of one session: a tree of turns in which every path is a trajectory.

A harness sends the whole conversation with every request. Re-tokenising it could give other ids than the sampled
ones, so each request is matched against the captured turns. If it continues one of them, the tokens of that turn and
its predecessors are reused unchanged, and only the new text is encoded. Otherwise it starts a new path, with the reason
recorded. Turns are never merged because they are similar.

This module has no await and no clock: values in, values out.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rollart.adapters.proxy.chat import ChatFormat
from rollart.adapters.proxy.messages import Message, PromptInput
from rollart.adapters.proxy.tool_calls import parse_answer
from rollart.model import Completion, FinishReason, Segment, SegmentKind

REFERENCE_BYTES, INTEGER_BYTES, LOGPROB_BYTES = 8, 32, 32
"""Bytes in CPython: of a tuple entry, of a token id, of a log-probability with its entry."""


class TurnRelation(enum.StrEnum):
    """Relation of a turn to the turns captured before it."""

    START = "start"
    """The first turn of the session."""
    EXTENDS = "extends"
    """Continues the latest turn of a branch."""
    FORK = "fork"
    """Continues a turn that already has a successor."""
    DIVERGED = "diverged"
    """Continues no captured turn: its tokens are encoded from scratch and start a new branch."""


@dataclass(frozen=True, slots=True)
class PlannedTurn:
    """The prompt tokens of a request: those of the turn number `after` (None: no turn), followed by `shown`."""

    prompt: PromptInput
    token_ids: tuple[int, ...]
    shown: tuple[int, ...]
    text: str
    after: int | None
    relation: TurnRelation
    reason: str = ""


@dataclass(frozen=True, slots=True)
class CapturedTurn:
    """One answered request. `depth` is the number of earlier turns in its branch; `segments` are this turn's only."""

    number: int
    planned: PlannedTurn
    answer: Message
    token_ids: tuple[int, ...]
    segments: tuple[Segment, ...]
    depth: int
    stopped: bool
    """True if the last sampled token is one of the model's stop tokens."""

    @property
    def sampled(self) -> int:
        return sum(len(s.token_ids) for s in self.segments if s.kind is SegmentKind.ACTION)

    @property
    def size(self) -> int:
        """Estimated bytes."""
        new = sum(len(s.token_ids) for s in self.segments)
        ids = REFERENCE_BYTES * len(self.token_ids) + (REFERENCE_BYTES + INTEGER_BYTES) * new
        return ids + LOGPROB_BYTES * self.sampled + len(self.planned.text) + len(self.answer.content)


@dataclass(frozen=True, slots=True)
class Branch:
    """A path from a first turn to a turn without a successor. Its first `shared` tokens also belong to an earlier
    branch: training on both branches would count them twice."""

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
    """The turns of one session. `plan` a request, then `keep` its response; several requests may be planned at once."""

    def __init__(self, form: ChatFormat) -> None:
        self._form = form
        self.turns: list[CapturedTurn] = []
        self._by_messages: dict[str, list[int]] = {}
        """Turn numbers by the digest of the conversation up to and including their response."""

    def plan(self, prompt: PromptInput) -> PlannedTurn:
        """The tokens to send to the policy. BadRequest if the template refuses the messages."""
        if not prompt.chat:
            return self._plan_plain(prompt)
        text = self._form.render(prompt.messages, prompt.tools, prompt=True)
        reason = ""
        # Turns whose conversation is a prefix of this one, longest first; among equals, latest first.
        known = [n for digest in _prefix_digests(prompt.messages)[:-1] for n in self._by_messages.get(digest, ())]
        for turn in (self.turns[n] for n in reversed(known)):
            try:
                shown = self._form.encode(self._text_after(turn, prompt, text))
                return self._planned(prompt, shown, text, reason, after=turn)
            except _RendersDifferently as error:
                reason = reason or str(error)
        return self._planned(
            prompt, self._form.encode(text), text, reason or "no captured turn holds its first messages"
        )

    def keep(self, planned: PlannedTurn, completion: Completion, answer: Message) -> CapturedTurn:
        """Add the response as a turn; `answer` is the message sent to the harness. Turns that were added since `plan`
        are taken into account."""
        if planned.after is not None and any(t.planned.after == planned.after for t in self.turns):
            planned = replace(planned, relation=TurnRelation.FORK)
        elif planned.relation is TurnRelation.START and self.turns:
            planned = replace(planned, relation=TurnRelation.DIVERGED, reason="another first turn was under way")
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
        if planned.prompt.chat:
            *_, digest = _prefix_digests((*planned.prompt.messages, answer))
            self._by_messages.setdefault(digest, []).append(turn.number)
        return turn

    def undo(self, turn: CapturedTurn) -> None:
        """Remove the latest turn, whose response was not sent to the harness."""
        assert turn is self.turns[-1]
        self.turns.pop()
        if turn.planned.prompt.chat:
            *_, digest = _prefix_digests((*turn.planned.prompt.messages, turn.answer))
            self._by_messages[digest].remove(turn.number)

    def branches(self) -> tuple[Branch, ...]:
        """All branches, ordered by their last turns."""
        followed = {t.planned.after for t in self.turns}
        seen: set[int] = set()
        found = []
        for turn in self.turns:
            if turn.number in followed:
                continue
            path = [turn]
            while path[-1].planned.after is not None:
                path.append(self.turns[path[-1].planned.after])
            path.reverse()
            shared = [t for t in path if t.number in seen]
            found.append(Branch(tuple(path), len(shared[-1].token_ids) if shared else 0))
            seen.update(t.number for t in path)
        return tuple(found)

    def _text_after(self, turn: CapturedTurn, prompt: PromptInput, text: str) -> str:
        """The text that follows the turn's last token in the rendered conversation. _RendersDifferently unless the text
        starts with the turn's own prompt text, it renders the response as it was sent, and later messages change
        neither."""
        held = len(turn.planned.prompt.messages) + 1
        before = self._form.render(prompt.messages[:held], prompt.tools, prompt=False)
        if not before.startswith(turn.planned.text):
            raise _RendersDifferently("the template now renders the earlier prompt differently")
        if not text.startswith(before):
            raise _RendersDifferently("the template renders earlier answers differently once more messages follow")
        sampled_text, closing = self._split_answer(turn, before[len(turn.planned.text) :])
        content, calls = parse_answer(self._form.spelling, sampled_text) if prompt.tools else (sampled_text, ())
        if (content.strip(), calls) != (turn.answer.content.strip(), turn.answer.calls):
            raise _RendersDifferently("the template renders the answer differently than it was sampled")
        return closing + text[len(before) :]

    def _split_answer(self, turn: CapturedTurn, written: str) -> tuple[str, str]:
        """Split a rendered response into the sampled text and the text that the template appends to it. An appended
        stop token that was not sampled belongs to the second part."""
        stops = [self._form.stops[turn.token_ids[-1]]] if turn.stopped else list(self._form.stops.values())
        at, stop = max(((written.rfind(stop), stop) for stop in stops), default=(-1, ""))
        if at < 0:
            sampled_text = written.rstrip()
            return sampled_text, written[len(sampled_text) :]
        return written[:at], written[at + len(stop) :] if turn.stopped else written[at:]

    def _plan_plain(self, prompt: PromptInput) -> PlannedTurn:
        """Plan a text or token-id prompt: continue the longest turn that is its exact prefix."""
        ids, text = prompt.token_ids, prompt.text or ""
        if ids is None:
            texts = [t for t in self.turns if t.planned.prompt.text is not None]
            continued = [t for t in texts if text.startswith(self._plain_text(t))]
        else:
            given_ids = [t for t in self.turns if t.planned.prompt.token_ids is not None]
            continued = [t for t in given_ids if ids[: len(t.token_ids)] == t.token_ids]
        best = max(continued, key=lambda t: (len(t.token_ids), t.number), default=None)
        if best is not None:
            rest = self._form.encode(text[len(self._plain_text(best)) :]) if ids is None else ids[len(best.token_ids) :]
            return self._planned(prompt, rest, text, "", after=best)
        whole = self._form.encode(text) if ids is None else ids
        return self._planned(prompt, whole, text, "no captured turn is its beginning")

    def _plain_text(self, turn: CapturedTurn) -> str:
        return turn.planned.text + turn.answer.content

    def _planned(
        self, prompt: PromptInput, shown: tuple[int, ...], text: str, reason: str, after: CapturedTurn | None = None
    ) -> PlannedTurn:
        """A continuation of `after`, or a new branch. `keep` decides later whether a continuation forks."""
        if after is not None:
            token_ids = after.token_ids + shown
            return PlannedTurn(prompt, token_ids, shown, text, after.number, TurnRelation.EXTENDS, reason)
        if not self.turns:
            return PlannedTurn(prompt, shown, shown, text, None, TurnRelation.START)
        return PlannedTurn(prompt, shown, shown, text, None, TurnRelation.DIVERGED, reason)


class _RendersDifferently(Exception):
    """The template renders an earlier turn in other words; the message says which part."""


def _prefix_digests(messages: Sequence[Message]) -> list[str]:
    """One digest per prefix of the messages, shortest first."""
    running = hashlib.blake2b(digest_size=16)
    found = []
    for message in messages:
        key = message.key.encode()
        running.update(len(key).to_bytes(8, "big") + key)
        found.append(running.hexdigest())
    return found
