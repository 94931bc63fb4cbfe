"""One turn as the gateway sees it, and for how long the gateway waits."""

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
    """Nothing failed, but the way is no more: weights changed or an engine drains. Routed anew, as often as that is."""


@dataclass(frozen=True, slots=True)
class GatewayLimits:
    """Seconds that the gateway waits, and how often a turn is tried on another engine. `engine_s` is for an engine
    that may serve: as long as a restart and a weight update may take, however short a generation is.

    `handoff_s` bounds what a prefill elsewhere may take, and for how long its KV may then be on the way: short, since
    prefilling at home is always possible. `handoffs` may be under way to a decode engine: so many, what the look-ahead
    rule says (None), or any number (0).
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
    """Token ids of the model; None: ids are no token ids (simulations), and are not checked."""


@dataclass(slots=True)
class TurnRequest:
    """One call of `generate`: what was asked, and how far it got."""

    id: str
    session: str
    token_ids: tuple[int, ...]
    sampling: Sampling
    spend: Callable[[float], None]
    sent: Callable[[int], None]
    domain: str = ""
    length: int = 0
    handing: bool = False
    """It has a place in the queue of hand-offs before its home."""
    at_home: bool = False
    """Its hand-off failed: no other is tried."""
    last: bool = False
    """No turn of its trajectory can follow."""
    prompt: str = ""
    """Which prompt its trajectory answers, for what is learned of lengths."""
    long: bool = False
    """Its trajectory is taken to be one of the long ones."""
    begun: bool = False
    """A turn of its trajectory was sent before: it is under way."""
    sent_at: float = 0.0
    """When it was sent to the engine that generates."""
    sends: int = 0
    told: int | None = None
    spent: float = 0.0
    kept: Completion | None = None
    """What an engine that was lent meanwhile, or that somebody heard, had generated of it."""
    listener: Callable[[CompletionChunk], None] | None = None
    heard: list[CompletionChunk] = field(default_factory=list)
    """Of the attempt that is under way."""
    unsure: bool = False
    """Weights changed under the attempt, and its engine says only at its end what drew what."""
    avoided: set[str] = field(default_factory=set)
    """Engines that gave a wrong answer to it: it goes elsewhere while another engine serves."""
    vocab: int | None = None

    def begins(self, version: int) -> None:
        """Its first token is of this version, if nothing of it is kept that is older. Told once per version: the turn
        is one turn, whichever attempt of it samples the first token."""
        if self.kept is None and self.told != version:
            self.told = version
            self.sent(version)

    def keep(self, part: Completion) -> None:
        """It goes on elsewhere: what is there already becomes part of the prompt, which is prefilled again."""
        if not part.sampled:
            return
        if self.kept is None and part.spans:
            self.begins(part.spans[0].version)
        self.kept = self.whole(part)
        self.token_ids += part.token_ids
        self.length += part.sampled
        self.sampling = continuation_sampling(self.sampling, part.sampled)

    def whole(self, rest: Completion) -> Completion:
        """The answer in one piece; what was prefilled anew counts."""
        return join_completions(self.kept, rest)

    def hear(self, piece: CompletionChunk) -> None:
        """Tokens that somebody reads already: whatever becomes of the attempt, the answer begins with them. Those whose
        version nobody knows yet are not shown before it is over: they may have to be drawn anew. WrongAnswer for tokens
        that cannot be used, which ends the attempt."""
        if wrong := wrong_tokens(piece.token_ids, piece.logprobs, self.vocab):
            raise WrongAnswer(wrong)
        self.unsure = self.unsure or piece.version is None
        if self.unsure:
            return
        self.heard.append(piece)
        if self.listener is not None:
            self.listener(piece)

    def go_on(self, part: Completion | None = None, *, lent: bool = False) -> None:
        """The attempt is over and another follows: it goes on after what was heard. `part` is what its engine gave it
        up with. Where nobody listens it begins anew, unless the engine was `lent`."""
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
