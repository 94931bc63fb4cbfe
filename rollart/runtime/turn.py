"""One turn as the gateway sees it, and for how long the gateway waits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rollart.model import Sampling

__all__ = ["Again", "Failed", "GatewayLimits", "Turn"]


class Failed(Exception):
    """An attempt failed and another engine may succeed."""


class Again(Exception):
    """Nothing failed, but the way is no more: weights changed or an engine drains. Routed anew, as often as that is."""


@dataclass(frozen=True, slots=True)
class GatewayLimits:
    """Seconds that the gateway waits, and how often a turn is tried on another engine. `engine_s` is for an engine
    that may serve: as long as a restart and a weight update may take, however short a generation is.

    `handoff_s` bounds what a prefill elsewhere may take, and for how long its KV may then be on the way: short, since
    prefilling at home is always possible.
    """

    generate_s: float = 120.0
    engine_s: float = 240.0
    sync_s: float = 60.0
    attempts: int = 4
    slots: int = 1_000_000
    """Requests that one engine generates at a time; more wait inside it."""
    handoff_s: float = 10.0


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
