"""Sessions of the proxy: every response is captured token by token before its text is sent to the harness. The cache
that holds them bounds their number and size, and evicts those that have ended or are idle."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Protocol

from rollart.adapters.proxy.api import RequestBody, rule
from rollart.adapters.proxy.capture import CapturedTurn, PlannedTurn, SessionCapture
from rollart.adapters.proxy.chat import ChatFormat, IncrementalDecoder
from rollart.adapters.proxy.messages import (
    BadRequest,
    CompletionRequest,
    Message,
    OutputDelta,
    PolicyResponse,
    PromptInput,
    ResponseHeader,
    ToolCall,
)
from rollart.errors import EngineError
from rollart.model import Completion, CompletionChunk, FinishReason, Sampling, VersionSpan

RETRY_AFTER_S = 5
"""Value of `Retry-After`, seconds, when the cache is full."""

GROWTH_RESERVE = 1.25
"""Existing sessions may grow to this multiple of the token and byte limits, so new sessions are refused first."""

MAX_EVICTED_NAMES = 65_536
"""Maximum remembered names of evicted sessions; a request for one gets an error that explains the eviction."""

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


def _is_finite(value: Any) -> bool:
    """False for NaN too, and for an integer beyond the range of float."""
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


class SessionOutcome(RequestBody):
    """The harness's report about its session, the body of `POST /sessions/SESSION/end`: a reward, and whether the goal
    was reached; None if unknown."""

    reward: Annotated[float | None, rule(_is_finite, "a number")] = None
    success: Annotated[bool | None, rule(lambda value: isinstance(value, bool), "true or false")] = None


@dataclass(eq=False)
class ProxySession:
    """One session. Any number of requests may be in flight; each waits only for the policy.

    `on_turn` is called with every turn before its response is sent.
    """

    name: str
    form: ChatFormat
    policy: SessionPolicy
    on_turn: Callable[[ProxySession, CapturedTurn], None]
    busy: int = 0
    """Requests in flight."""
    ending: SessionOutcome = field(default_factory=SessionOutcome)
    ended: bool = False
    """True once the harness has ended the session."""
    used: float = 0.0
    """Loop time of the latest arrival or completion of a request."""
    full: bool = False
    """True once a prompt left no room for a response within the context."""
    abandoned: int = 0
    """Requests whose client disconnected before the response; nothing of them was captured."""

    def __post_init__(self) -> None:
        self.capture = SessionCapture(self.form)
        self._asked = 0
        self._turns: dict[int, int] = {}
        """Turn number by request number."""
        self._truncated: dict[str, PolicyResponse] = {}
        """Responses with a truncated call, by the ids of their calls."""

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
        decoder = IncrementalDecoder(self.form, stops=ask.stop, tools=bool(ask.prompt.tools), call_id=head.call_id)
        single_token_stops = [ids[0] for ids in map(self.form.encode, ask.stop) if len(ids) == 1]
        sampling = Sampling(
            max_tokens=min(ask.max_tokens or room, room),
            temperature=ask.temperature,
            top_p=ask.top_p,
            seed=ask.seed,
            stop_token_ids=tuple(dict.fromkeys((*self.form.stop_ids, *single_token_stops))),
        )

        def on_chunk(piece: CompletionChunk) -> None:
            delta = decoder.push(piece)
            if delta is not None and streamed is not None:
                streamed(head, delta)

        self.busy += 1
        try:
            completion = await self.policy.generate(planned.token_ids, sampling, None if streamed is None else on_chunk)
        except asyncio.CancelledError:
            self.abandoned += 1
            raise
        finally:
            self.busy -= 1
            self.used = asyncio.get_running_loop().time()
        if completion.finish is FinishReason.ABORT:
            raise EngineError("the engine ended the generation", retryable=True)
        return self._captured(head, planned, truncate_at_stops(completion, ask.stop, self.form.text), decoder)

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

    def conversation(self, response: str) -> tuple[Message, ...] | None:
        """The messages up to a response of `/v1/responses`, without system messages; None for an unknown id."""
        number = response.removeprefix(f"resp-{self.name}-")
        if not number.isdecimal() or int(number) not in self._turns:
            return None
        turn = self.capture.turns[self._turns[int(number)]]
        return tuple(m for m in (*turn.planned.prompt.messages, turn.answer) if m.role != "system")

    def _captured(
        self, head: ResponseHeader, planned: PlannedTurn, completion: Completion, decoder: IncrementalDecoder
    ) -> PolicyResponse:
        ids = completion.token_ids
        ended = completion.finish is FinishReason.STOP and ids and ids[-1] in self.form.stops
        text = self.form.text(ids[:-1] if ended else ids)
        content, parts, rest = decoder.finish(text)
        calls = tuple(p for p in parts if isinstance(p, ToolCall))
        message = Message("assistant", content, tuple(c for c in calls if c.whole))
        turn = self.capture.keep(planned, completion, message)
        try:
            self.on_turn(self, turn)
        except BaseException:  # the response is not sent, so a retry must find no trace of this turn
            self.capture.undo(turn)
            raise
        self._turns[head.number] = turn.number
        tokens = tuple(map(self.form.token, ids))
        n = decoder.shown
        unsent = OutputDelta(rest, ids[n:], completion.logprobs[n:], tokens[n:])
        answer = PolicyResponse(head, message, completion, tokens, turn.number, parts, unsent)
        if not all(c.whole for c in calls):
            self._truncated.update(dict.fromkeys((c.id for c in calls), answer))
        return answer


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


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """Limits on sessions, and on the tokens and bytes of all their turns. A turn counts with all earlier tokens of its
    path, because it stores them. Bytes are an estimate. Sessions that have ended, or were idle for `idle_s`, may be
    evicted."""

    sessions: int = 4096
    tokens: int = 100_000_000
    size: int = 4 * 2**30
    idle_s: float = 3600.0


class SessionCache:
    """Owns the sessions, most recently used last. Invariant: no session is evicted while it is busy, or before it has
    ended or was idle for `idle_s`."""

    def __init__(self, limits: SessionLimits) -> None:
        self.limits = limits
        self.sessions: OrderedDict[str, ProxySession] = OrderedDict()
        self.counts: Counter[str] = Counter()
        self.tokens = self.size = 0
        self.evicted: OrderedDict[str, str] = OrderedDict()
        """Reasons for the evictions of sessions, by name; the oldest are forgotten."""

    def count(self, turn: CapturedTurn) -> None:
        """Add a session's new turn to the totals."""
        self.tokens += len(turn.token_ids)
        self.size += turn.size

    def remove(self, name: str) -> ProxySession | None:
        """Remove a session without ending it."""
        session = self.sessions.pop(name, None)
        if session is not None:
            self.tokens -= sum(len(turn.token_ids) for turn in session.capture.turns)
            self.size -= sum(turn.size for turn in session.capture.turns)
        return session

    async def make_room(self, *, begins: bool) -> None:
        """Evict sessions until a request of an existing session, or of a new one (`begins`), has room. BadRequest (503;
        429 for an existing session) if nothing more may be evicted."""
        now = asyncio.get_running_loop().time()
        # Ended sessions before those idle too long; least recently used first within each.
        free = [s for s in self.sessions.values() if not s.busy]
        idle = [s for s in free if not s.ended and now - s.used >= self.limits.idle_s]
        for session, why in [*((s, "ended") for s in free if s.ended), *((s, "idle") for s in idle)]:
            if self._full_reason(1.0, begins) is None:
                break
            if session.busy or self.sessions.get(session.name) is not session:
                continue  # changed while another eviction was awaited
            self.remove(session.name)
            self.evicted[session.name] = why
            self.evicted.move_to_end(session.name)
            if len(self.evicted) > MAX_EVICTED_NAMES:
                self.evicted.popitem(last=False)
            self.counts[why] += 1
            await session.policy.release()
        reason = self._full_reason(1.0 if begins else GROWTH_RESERVE, begins)
        if reason is not None:
            self.counts["refused"] += 1
            raise BadRequest(
                f"the proxy is full: {reason} (rule: end sessions with POST /sessions/ID/end, or DELETE them, or name "
                "more room)",
                status=503 if begins else 429,
                retry_after=RETRY_AFTER_S,
            )

    def metrics(self) -> str:
        """Prometheus text."""
        states = Counter("busy" if s.busy else "ended" if s.ended else "idle" for s in self.sessions.values())
        lines = [f'rollart_proxy_sessions{{state="{state}"}} {states[state]}' for state in ("busy", "idle", "ended")]
        lines += [f"rollart_proxy_tokens {self.tokens}", f"rollart_proxy_bytes {self.size}"]
        limits = (("sessions", self.limits.sessions), ("tokens", self.limits.tokens), ("bytes", self.limits.size))
        lines += [f'rollart_proxy_limit{{of="{resource}"}} {most}' for resource, most in limits]
        lines += [f'rollart_proxy_given_up_total{{why="{why}"}} {self.counts[why]}' for why in ("ended", "idle")]
        lines += [f"rollart_proxy_refused_total {self.counts['refused']}"]
        return "\n".join(lines) + "\n"

    def _full_reason(self, share: float, begins: bool) -> str | None:
        if begins and len(self.sessions) >= self.limits.sessions:
            return f"it holds {len(self.sessions)} sessions, of which none has ended or was idle long enough"
        checks = (("tokens", self.tokens, self.limits.tokens), ("bytes", self.size, self.limits.size))
        for resource, held, most in checks:
            if held >= most * share:
                return f"its sessions hold {held} {resource} (rule: below {int(most * share)})"
        return None
