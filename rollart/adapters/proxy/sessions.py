"""Sessions of the proxy: a request in, an answer out, every token kept before anybody sees its text."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from rollart.adapters.proxy.capture import CapturedTurn, PlannedTurn, SessionCapture
from rollart.adapters.proxy.chat import ChatFormat
from rollart.adapters.proxy.messages import (
    BadRequest,
    CompletionRequest,
    Message,
    OutputEvent,
    OutputPart,
    PolicyResponse,
    PromptInput,
    ResponseHeader,
    ToolCall,
    ToolCallEnd,
)
from rollart.adapters.proxy.unfolding import IncrementalDecoder, OutputDelta
from rollart.errors import EngineError
from rollart.model import Completion, CompletionChunk, FinishReason, Sampling, VersionSpan

__all__ = ["SessionPolicy", "ProxySession", "truncate_at_stops"]


DeltaCallback = Callable[[ResponseHeader, OutputDelta], None]
"""Told of an answer's text as far as it is certain."""


class SessionPolicy(Protocol):
    """Who generates for a session: engines, or a run's trajectory. Errors: `EngineError`."""

    @property
    def context(self) -> int:
        """Tokens of prompt and answer together at most."""

    async def generate(
        self, token_ids: tuple[int, ...], sampling: Sampling, told: Callable[[CompletionChunk], None] | None = None
    ) -> Completion:
        """Cancelling it aborts the request. `told` gets tokens as they are drawn, from policies that can: each once,
        and never other ones than those that the answer begins with."""

    async def release(self) -> None:
        """The session is over."""


@dataclass(frozen=True, slots=True)
class SessionOutcome:
    """What a harness said of its session: a reward, and whether it reached its goal, if it knows."""

    reward: float | None = None
    success: bool | None = None


class ProxySession:
    """One session. Any number of requests may be under way; each waits for the policy alone.

    `kept` is told of every turn before its answer is given out.
    """

    def __init__(
        self, name: str, form: ChatFormat, policy: SessionPolicy, *, kept: Callable[[ProxySession, CapturedTurn], None]
    ) -> None:
        self.name = name
        self.capture = SessionCapture(form)
        self.policy = policy
        self.busy = 0
        """Requests under way."""
        self.ending = SessionOutcome()
        self.over = False
        """The harness said that it ended."""
        self.used = 0.0
        """When the last request came or was answered."""
        self.full = False
        """A request found no room for an answer."""
        self.abandoned = 0
        """Requests whose client went away before it had its answer: nothing of them was captured."""
        self._asked = 0
        self._turns: dict[int, int] = {}
        """The turn that a request became, by its number."""
        self._broken: dict[str, PolicyResponse] = {}
        """By the ids of their calls: answers with one that broke off."""
        self._form = form
        self._kept = kept

    async def answer(
        self, ask: CompletionRequest, *, created: int, streamed: DeltaCallback | None = None
    ) -> PolicyResponse:
        """BadRequest, or EngineError: then nothing was captured, whatever was streamed."""
        planned = self.plan(ask.prompt)
        room = self.policy.context - len(planned.token_ids)
        if room < 1 or not planned.token_ids:
            self.full = room < 1
            raise BadRequest(
                f"the prompt has {len(planned.token_ids)} tokens (rule: at least 1, and room for an answer within "
                f"{self.policy.context})",
                code="context_length_exceeded",
                field="messages",
            )
        head = ResponseHeader(planned.token_ids, self.name, self._asked, ask.model, created)
        self._asked += 1
        unfolding = IncrementalDecoder(self._form, stops=ask.stop, tools=bool(ask.prompt.tools))

        def told(piece: CompletionChunk) -> None:
            delta = unfolding.push(piece)
            if delta is not None and streamed is not None:
                streamed(head, delta)

        self.busy += 1
        try:
            completion = await self.policy.generate(
                planned.token_ids, self._sampling(ask, room), None if streamed is None else told
            )
        except asyncio.CancelledError:
            self.abandoned += 1
            raise
        finally:
            self.busy -= 1
            self.used = asyncio.get_running_loop().time()
        if completion.finish is FinishReason.ABORT:
            raise EngineError("the engine ended the generation", retryable=True)
        return self._answered(ask, head, planned, truncate_at_stops(completion, ask.stop, self._form.text), unfolding)

    def plan(self, prompt: PromptInput) -> PlannedTurn:
        """The tokens to send. BadRequest if they are none."""
        return self.capture.plan(replace(prompt, messages=tuple(map(self._as_said, prompt.messages))))

    def _as_said(self, message: Message) -> Message:
        """An answer with a call that broke off is given out with that call, and captured as the text that it is."""
        answer = next((self._broken[c.id] for c in message.calls if c.id in self._broken), None)
        if (
            answer is not None
            and [c.id for c in message.calls] == [c.id for c in answer.calls]
            and message.content.strip() == answer.content.strip()
        ):
            return answer.message
        broken = next((c for c in message.calls if not c.whole), None)
        if broken is not None:
            raise BadRequest(f"the arguments of {broken.name} must be a JSON object", field="messages")
        return message

    def conversation(self, number: int) -> tuple[Message, ...] | None:
        """What was said up to the answer of a request, without system messages; None: there is none."""
        if number not in self._turns:
            return None
        turn = self.capture.turns[self._turns[number]]
        return tuple(m for m in (*turn.planned.prompt.messages, turn.answer) if m.role != "system")

    def _sampling(self, ask: CompletionRequest, room: int) -> Sampling:
        ends = [ids[0] for ids in map(self._form.encode, ask.stop) if len(ids) == 1]
        return Sampling(
            max_tokens=min(ask.max_tokens or room, room),
            temperature=ask.temperature,
            top_p=ask.top_p,
            seed=ask.seed,
            stop_token_ids=tuple(dict.fromkeys((*self._form.stop_ids, *ends))),
        )

    def _answered(
        self,
        ask: CompletionRequest,
        head: ResponseHeader,
        planned: PlannedTurn,
        completion: Completion,
        unfolding: IncrementalDecoder,
    ) -> PolicyResponse:
        ids = completion.token_ids
        ended = completion.finish is FinishReason.STOP and ids and ids[-1] in self._form.stops
        text = self._form.text(ids[:-1] if ended else ids)
        given = unfolding.text[: unfolding.given]
        if not text.startswith(given):  # some decoders write a text otherwise once more follows: it is said already
            text = given + text[len(given) :]
        parts, rest = _with_call_ids(head, *unfolding.finish(text))
        content, _ = self._form.parse(text) if ask.prompt.tools else (text, ())
        calls = tuple(p for p in parts if isinstance(p, ToolCall))
        message = Message("assistant", content, tuple(c for c in calls if c.whole))
        turn = self.capture.keep(planned, completion, message)
        try:
            self._kept(self, turn)
        except BaseException:  # it is not given out: asked again, it is the first of its kind
            self.capture.undo(turn)
            raise
        self._turns[head.number] = turn.number
        tokens = tuple(map(self._form.token, ids))
        answer = PolicyResponse(
            head.prompt_ids,
            head.session,
            head.number,
            head.model,
            head.created,
            message,
            completion,
            tokens,
            turn.number,
            parts,
            rest,
            min(unfolding.shown, len(ids)),
        )
        if not all(c.whole for c in calls):
            self._broken.update(dict.fromkeys((c.id for c in calls), answer))
        return answer


def _with_call_ids(
    head: ResponseHeader, parts: tuple[OutputPart, ...], rest: tuple[OutputEvent, ...]
) -> tuple[tuple[OutputPart, ...], tuple[OutputEvent, ...]]:
    """Calls with the ids that the harness is given."""
    number = itertools.count()
    named = tuple(replace(p, id=head.call_id(next(number))) if isinstance(p, ToolCall) else p for p in parts)
    told = (
        replace(s, call=replace(s.call, id=head.call_id(s.index))) if isinstance(s, ToolCallEnd) else s for s in rest
    )
    return named, tuple(told)


def truncate_at_stops(completion: Completion, stops: Sequence[str], text: Callable[[Sequence[int]], str]) -> Completion:
    """The completion up to where one of the texts begins, whole tokens only: what is cut was sampled, but is neither
    shown nor trained. Engines stop at tokens; texts that lie across several are found here."""
    whole = text(completion.token_ids)
    found = [at for at in (whole.find(stop) for stop in stops) if at >= 0]
    if not found:
        return completion
    end, low, high = min(found), 0, len(completion.token_ids)
    while low < high:  # the most tokens whose text ends before it
        middle = (low + high + 1) // 2
        low, high = (middle, high) if len(text(completion.token_ids[:middle])) <= end else (low, middle - 1)
    spans = tuple(VersionSpan(s.version, s.start, min(s.end, low)) for s in completion.spans if s.start < low)
    return replace(
        completion,
        token_ids=completion.token_ids[:low],
        logprobs=completion.logprobs[:low],
        spans=spans,
        finish=FinishReason.STOP,
    )
