"""The seam to agent programs: a harness that asks the policy for answers, in the place of an environment that is asked
for steps. Part of the ports."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from rollart.model import Completion, CompletionChunk, Segment, Step

__all__ = ["HarnessEpisode", "HarnessFactory", "HarnessRequest"]


@dataclass(frozen=True, slots=True)
class HarnessRequest:
    """What a harness asks for: an answer to these tokens. Its sampling is the domain's, and its answer no longer than
    that allows."""

    token_ids: tuple[int, ...]
    max_tokens: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    told: Callable[[CompletionChunk], None] | None = field(default=None, compare=False)
    """Called with tokens as they are drawn."""
    gone: asyncio.Future[None] | None = field(default=None, compare=False)
    """Done when nobody waits for the answer any more."""


class HarnessEpisode(Protocol):
    """An agent program at work on one episode: it asks for answers instead of being asked for steps. Used by one task.

    An exception is an InfraFault, as an environment's is."""

    async def wanted(self) -> HarnessRequest | None:
        """What it asks for next, once the last was answered; None: it is over."""

    def answer(self, completion: Completion) -> None:
        """What it asked for last."""

    def exhaust(self) -> None:
        """It had all of its turns: further requests are refused."""

    def segments(self) -> tuple[Segment, ...]:
        """The branch of its conversation to be trained, by turn; the others were context it did without."""

    def ending(self) -> Step:
        """Its own reward and success, once it is over."""

    async def close(self) -> None: ...


HarnessFactory = Callable[[str, int], HarnessEpisode]
"""Starts an episode: a session's name, and a seed."""
