"""The gateway's state of one turn, and the gateway's time limits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from rollart.errors import WrongAnswer
from rollart.model import Completion, CompletionChunk, Sampling
from rollart.policy.answers import wrong_tokens
from rollart.policy.continuing import completion_from_chunks, continuation_sampling, join_completions

__all__ = ["RerouteTurn", "AttemptFailed", "GatewayLimits", "TurnRequest"]


class AttemptFailed(Exception):
    """An attempt failed and another engine may succeed."""


class RerouteTurn(Exception):
    """Nothing failed, but the route is invalid: weights changed or an engine drains. The turn is routed again, without
    a limit on attempts."""


@dataclass(frozen=True, slots=True)
class GatewayLimits:
    """Seconds that the gateway waits, and the attempts per turn. `engine_s` bounds the wait for an eligible engine: the
    longest restart plus a weight update, independent of the length of a generation.

    `handoff_s` bounds a remote prefill, and the transfer of its KV afterwards: short, since prefilling on the decode
    engine is always possible. `handoffs` = concurrent hand-offs to a decode engine: a fixed number, the look-ahead rule
    (None), or unbounded (0).
    """

    generate_s: float = 120.0
    engine_s: float = 240.0
    sync_s: float = 60.0
    attempts: int = 4
    slots: int = 1_000_000
    """Requests that one engine generates at a time; more wait inside it."""
    handoff_s: float = 10.0
    handoffs: int | None = 0
    vocab: int | None = None
    """Size of the model's vocabulary; None: ids are not token ids (simulations), and are not checked."""


@dataclass(slots=True)
class TurnRequest:
    """One call of `generate`: the request and its progress."""

    id: str
    session: str
    token_ids: tuple[int, ...]
    sampling: Sampling
    spend: Callable[[float], None]
    sent: Callable[[int], None]
    domain: str = ""
    length: int = 0
    handing: bool = False
    """True if it holds a slot in the hand-off queue of its sticky engine."""
    at_home: bool = False
    """True if its hand-off failed: no further hand-off is tried."""
    last: bool = False
    """True if no turn of its trajectory can follow."""
    prompt: str = ""
    """The prompt of its trajectory, for length statistics."""
    long: bool = False
    """True if its trajectory is predicted to be long."""
    begun: bool = False
    """True if an earlier turn of its trajectory was sent."""
    sent_at: float = 0.0
    """Time at which it was sent to the generating engine."""
    sends: int = 0
    told: int | None = None
    spent: float = 0.0
    kept: Completion | None = None
    """Kept tokens of an earlier attempt: generated on an engine that was then lent, or already streamed."""
    listener: Callable[[CompletionChunk], None] | None = None
    heard: list[CompletionChunk] = field(default_factory=list)
    """Chunks that the current attempt has streamed."""
    unsure: bool = False
    """True if weights changed during the attempt and its engine reports the versions of tokens only at the end."""
    avoided: set[str] = field(default_factory=set)
    """Engines that answered it wrongly: not used for it while another engine serves."""
    vocab: int | None = None

    def begins(self, version: int) -> None:
        """Report the version of its first token, unless older tokens are kept. Each version is reported once: all
        attempts belong to one turn, and any of them may sample the first token."""
        if self.kept is None and self.told != version:
            self.told = version
            self.sent(version)

    def keep(self, part: Completion) -> None:
        """Continue on another engine: the tokens so far are appended to the prompt, which is prefilled again."""
        if not part.sampled:
            return
        if self.kept is None and part.spans:
            self.begins(part.spans[0].version)
        self.kept = self.whole(part)
        self.token_ids += part.token_ids
        self.length += part.sampled
        self.sampling = continuation_sampling(self.sampling, part.sampled)

    def whole(self, rest: Completion) -> Completion:
        """The kept tokens and the rest as one completion; the repeated prefill counts."""
        return join_completions(self.kept, rest)

    def hear(self, piece: CompletionChunk) -> None:
        """Stream tokens to the listener: whatever the outcome of the attempt, the completion begins with them. Tokens
        of an unknown version are withheld until the attempt ends, since they may have to be sampled again. WrongAnswer
        for invalid tokens, which ends the attempt."""
        if wrong := wrong_tokens(piece.token_ids, piece.logprobs, self.vocab):
            raise WrongAnswer(wrong)
        self.unsure = self.unsure or piece.version is None
        if self.unsure:
            return
        self.heard.append(piece)
        if self.listener is not None:
            self.listener(piece)

    def go_on(self, part: Completion | None = None, *, lent: bool = False) -> None:
        """The attempt is over and another one continues after the streamed tokens. `part` is the engine's partial
        completion. Without a listener the turn starts over, unless the engine was `lent`."""
        if self.listener is None:
            if part is not None and lent:
                self.keep(part)
            return
        heard, self.heard, self.unsure = completion_from_chunks(self.heard), [], False
        for span in () if part is None else part.spans:
            at = slice(max(heard.sampled, span.start), span.end)
            if part is not None and at.start < at.stop:
                self.listener(CompletionChunk(part.token_ids[at], part.logprobs[at], span.version))
        self.keep(heard if part is None or part.sampled < heard.sampled else part)
