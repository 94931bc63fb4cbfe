"""Which engine takes a turn.

A trajectory stays with the engine that holds its prefix KV while that engine is healthy; otherwise, and for its first
turn, the engine with the lowest load takes it. Ties go to the engine with fewer sessions, then to the lower id.
Engines that have not loaded the current version are not eligible (version fence).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["EngineView", "choose_engine"]


@dataclass(frozen=True, slots=True)
class EngineView:
    """What routing knows of an engine: identity, load, health, version. Nothing of the request's content."""

    id: str
    running: int
    sessions: int
    healthy: bool
    version: int


def choose_engine(engines: Sequence[EngineView], *, sticky: str | None, version: int) -> str | None:
    """The id of the engine to use, or None when none is eligible (the caller waits for one)."""
    eligible = [e for e in engines if e.healthy and e.version == version]
    if sticky is not None and any(e.id == sticky for e in eligible):
        return sticky
    if not eligible:
        return None
    return min(eligible, key=lambda e: (e.running, e.sessions, e.id)).id
