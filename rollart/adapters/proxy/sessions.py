"""Sessions of the proxy: every response is captured token by token before its text is sent to the harness."""

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
"""Receives the final part of a response's text as it grows."""


class SessionPolicy(Protocol):
    """The generator behind a session: engines, or a trajectory of a run. Errors: `EngineError`."""

    @property
    def context(self) -> int:
        """Maximum tokens of prompt and response together."""

    async def generate(
        self, token_ids: tuple[int, ...], sampling: Sampling, on_chunk: Callable[[CompletionChunk], None] | None = None
    ) -> Completion:
        """Generate one response; cancelling the call aborts the request. A policy that streams calls `on_chunk` with
        each token once; those tokens are always a prefix of the completion."""

    async def release(self) -> None:
        """End the session and free its resources."""


@dataclass(frozen=True, slots=True)
class SessionOutcome:
    """The harness's report about its session: a reward, and whether the goal was reached; None if unknown."""

    reward: float | None = None
    success: bool | None = None


class ProxySession:
    """One session. Any number of requests may be in flight; each waits only for the policy.

    `on_turn` is called with every turn before its response is sent.
    """

    def __init__(
        self,
        name: str,
        form: ChatFormat,
        policy: SessionPolicy,
        *,
        on_turn: Callable[[ProxySession, CapturedTurn], None],
    ) -> None:
        self.name = name
        self.capture = SessionCapture(form)
        self.policy = policy
        self.busy = 0
        """Requests in flight."""
        self.ending = SessionOutcome()
        self.ended = False
        """True once the harness has ended the session."""
        self.used = 0.0
        """Loop time of the latest arrival or completion of a request."""
        self.full = False
        """True once a prompt left no room for a response within the context."""
        self.abandoned = 0
        """Requests whose client disconnected before the response; nothing of them was captured."""
        self._asked = 0
        self._turns: dict[int, int] = {}
        """Turn number by request number."""
        self._truncated: dict[str, PolicyResponse] = {}
        """Responses with a truncated call, by the ids of their calls."""
        self._form = form
        self._on_turn = on_turn

    async def answer(
        self, ask: CompletionRequest, *, created: int, streamed: DeltaCallback | None = None
    ) -> PolicyResponse:
        """Generate and capture one response. On BadRequest or EngineError nothing is captured, even if part of the
        response was streamed."""
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
        decoder = IncrementalDecoder(self._form, stops=ask.stop, tools=bool(ask.prompt.tools))

        def on_chunk(piece: CompletionChunk) -> None:
            delta = decoder.push(piece)
            if delta is not None and streamed is not None:
                streamed(head, delta)

        self.busy += 1
        try:
            completion = await self.policy.generate(
                planned.token_ids, self._sampling(ask, room), None if streamed is None else on_chunk
            )
        except asyncio.CancelledError:
            self.abandoned += 1
            raise
        finally:
            self.busy -= 1
            self.used = asyncio.get_running_loop().time()
        if completion.finish is FinishReason.ABORT:
            raise EngineError("the engine ended the generation", retryable=True)
        return self._captured(ask, head, planned, truncate_at_stops(completion, ask.stop, self._form.text), decoder)

    def plan(self, prompt: PromptInput) -> PlannedTurn:
        """The tokens to send to the policy. BadRequest if the messages cannot be rendered."""
        return self.capture.plan(replace(prompt, messages=tuple(map(self._as_captured, prompt.messages))))

    def _as_captured(self, message: Message) -> Message:
        """The message as it was captured. A response with a truncated call is sent to the harness with that call but
        captured as plain text."""
        answer = next((self._truncated[c.id] for c in message.calls if c.id in self._truncated), None)
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
        """The messages up to the response to a request, without system messages; None for an unknown request."""
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

    def _captured(
        self,
        ask: CompletionRequest,
        head: ResponseHeader,
        planned: PlannedTurn,
        completion: Completion,
        decoder: IncrementalDecoder,
    ) -> PolicyResponse:
        ids = completion.token_ids
        ended = completion.finish is FinishReason.STOP and ids and ids[-1] in self._form.stops
        text = self._form.text(ids[:-1] if ended else ids)
        emitted = decoder.text[: decoder.emitted]
        if not text.startswith(emitted):  # some decoders change earlier text as more tokens follow: it is already sent
            text = emitted + text[len(emitted) :]
        parts, rest = _with_call_ids(head, *decoder.finish(text))
        content, _ = self._form.parse(text) if ask.prompt.tools else (text, ())
        calls = tuple(p for p in parts if isinstance(p, ToolCall))
        message = Message("assistant", content, tuple(c for c in calls if c.whole))
        turn = self.capture.keep(planned, completion, message)
        try:
            self._on_turn(self, turn)
        except BaseException:  # the response is not sent, so a retry must find no trace of this turn
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
            min(decoder.shown, len(ids)),
        )
        if not all(c.whole for c in calls):
            self._truncated.update(dict.fromkeys((c.id for c in calls), answer))
        return answer


def _with_call_ids(
    head: ResponseHeader, parts: tuple[OutputPart, ...], rest: tuple[OutputEvent, ...]
) -> tuple[tuple[OutputPart, ...], tuple[OutputEvent, ...]]:
    """The output with the call ids that the harness receives."""
    number = itertools.count()
    named = tuple(replace(p, id=head.call_id(next(number))) if isinstance(p, ToolCall) else p for p in parts)
    named_rest = (
        replace(s, call=replace(s.call, id=head.call_id(s.index))) if isinstance(s, ToolCallEnd) else s for s in rest
    )
    return named, tuple(named_rest)


def truncate_at_stops(completion: Completion, stops: Sequence[str], text: Callable[[Sequence[int]], str]) -> Completion:
    """The completion up to the first stop text, in whole tokens. The cut tokens were sampled but are neither shown nor
    trained on. Engines stop at single tokens; this finds stop texts that span several."""
    whole = text(completion.token_ids)
    found = [at for at in (whole.find(stop) for stop in stops) if at >= 0]
    if not found:
        return completion
    end, low, high = min(found), 0, len(completion.token_ids)
    while low < high:  # largest number of tokens whose text ends before the stop text
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
