"""The port for agent programs: a harness requests completions from the policy, where an environment is asked for
steps."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from rollart.model import Completion, CompletionChunk, Segment, Step

__all__ = ["HarnessEpisode", "HarnessFactory", "HarnessRequest"]


@dataclass(frozen=True, slots=True)
class HarnessRequest:
    """A harness's request: a completion of these tokens. Its sampling is the domain's, which also limits its length."""

    token_ids: tuple[int, ...]
    max_tokens: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    on_chunk: Callable[[CompletionChunk], None] | None = field(default=None, compare=False)
    """Called with tokens as they are drawn."""
    gone: asyncio.Future[None] | None = field(default=None, compare=False)
    """Done when the harness no longer waits for the completion."""


class HarnessEpisode(Protocol):
    """An agent program at work on one episode: it requests completions instead of being asked for steps. Used by one
    task.

    An exception is an InfraFault, as an environment's is.
    """

    async def wanted(self) -> HarnessRequest | None:
        """The next request, after the last one was answered; None: the episode is over."""

    def answer(self, completion: Completion) -> None:
        """Supply the completion of the last request."""

    def exhaust(self) -> None:
        """The episode had all of its turns: further requests are refused."""

    def segments(self) -> tuple[Segment, ...]:
        """The branch of the conversation to be trained, by turn; other branches did not contribute to its context."""

    def ending(self) -> Step:
        """The episode's own reward and success, once it is over."""

    async def close(self) -> None: ...


HarnessFactory = Callable[[str, int], HarnessEpisode]
"""Starts an episode from a session's name and a seed."""
