"""One turn as the gateway sees it, and for how long the gateway waits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from rollart.model import Completion, Sampling, VersionSpan

__all__ = ["Again", "Failed", "GatewayLimits", "Turn"]


ODD = 6364136223846793005
"""Knuth's multiplier: seeds that follow each other have nothing in common."""


class Failed(Exception):
    """An attempt failed and another engine may succeed."""


class Again(Exception):
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


@dataclass(slots=True)
class Turn:
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
    """What an engine that was lent meanwhile had generated of it."""

    def keep(self, part: Completion) -> None:
        """It goes on elsewhere: what is there already becomes part of the prompt, which is prefilled again."""
        if not part.sampled:
            return
        self.kept = self.whole(part)
        self.token_ids += part.token_ids
        self.length += part.sampled
        left, seed = self.sampling.max_tokens - part.sampled, self.sampling.seed
        # Of the same seed the rest would be drawn with the numbers that drew the beginning.
        fresh = None if seed is None else (seed * ODD + 1) & (2**63 - 1)
        self.sampling = dataclasses.replace(self.sampling, max_tokens=left, seed=fresh)

    def whole(self, rest: Completion) -> Completion:
        """The answer in one piece; what was prefilled anew counts."""
        if (kept := self.kept) is None:
            return rest
        n = len(kept.token_ids)
        spans = kept.spans + tuple(VersionSpan(s.version, s.start + n, s.end + n) for s in rest.spans)
        return dataclasses.replace(
            rest,
            token_ids=kept.token_ids + rest.token_ids,
            logprobs=kept.logprobs + rest.logprobs,
            spans=spans,
            prompt_tokens=kept.prompt_tokens + rest.prompt_tokens,
            cached_tokens=kept.cached_tokens + rest.cached_tokens,
            output_tokens=kept.sampled + rest.sampled,
        )
