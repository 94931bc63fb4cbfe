"""Adapts an agent program's episode to the common form: the sampling of its requests, and its turns as text."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Coroutine, Sequence
from typing import Any

from rollart.border import checked_step
from rollart.episodes import HarnessEpisode, HarnessFactory, HarnessRequest
from rollart.errors import LeaseExpired, one_line
from rollart.model import AbortReason, Completion, Sampling, Segment, SegmentKind, Step, Turn
from rollart.ports import Tokenizer
from rollart.runtime.aborted import TrajectoryAborted
from rollart.runtime.domain import Domain

__all__ = [
    "begin_harness_episode",
    "final_harness_step",
    "harness_fault",
    "harness_sampling",
    "harness_turns",
    "await_unless_disconnected",
]


def harness_sampling(domain: Domain, wanted: HarnessRequest, seed: int, room: int, *, greedy: bool) -> Sampling:
    """The domain's sampling. The temperature that the program requests is ignored, since the trainer assumes the
    domain's. `room`: tokens left in the context; values below 1 count as 1."""
    most = min(domain.max_tokens, wanted.max_tokens or domain.max_tokens, max(room, 1))
    sampling = domain.sampling(seed=seed, max_tokens=most, allowed=None, greedy=greedy)
    stops = tuple(dict.fromkeys((*sampling.stop_token_ids, *wanted.stop_token_ids)))
    return dataclasses.replace(sampling, stop_token_ids=stops)


def harness_turns(
    segments: Sequence[Segment], tokenizer: Tokenizer, stops: Sequence[int], reward: float
) -> tuple[Turn, ...]:
    """The turns as text, for rewards and for people. The last turn has the program's own reward."""
    shown: dict[int, list[int]] = {}
    said: dict[int, list[int]] = {}
    for segment in segments:
        (said if segment.kind is SegmentKind.ACTION else shown).setdefault(segment.turn, []).extend(segment.token_ids)
    turns = []
    for index, ids in shown.items():
        answer = said.get(index, [])
        text = tokenizer.decode(answer[:-1] if answer and answer[-1] in stops else answer)
        tokens = tuple(map(tokenizer.token, answer))
        turns.append(Turn(index, tokenizer.decode(ids), text, tokens, 0.0))
    if turns:
        turns[-1] = dataclasses.replace(turns[-1], env_reward=reward)
    return tuple(turns)


def begin_harness_episode(begin: HarnessFactory, session: str, seed: int) -> HarnessEpisode:
    """Start the episode. `TrajectoryAborted` if that fails."""
    try:
        return begin(session, seed)
    except Exception as error:
        raise TrajectoryAborted(AbortReason.INFRA_FAULT, harness_fault(error)) from None


async def await_unless_disconnected(
    gone: asyncio.Future[None] | None, answer: Coroutine[Any, Any, Completion]
) -> Completion | None:
    """Await the completion. If the client disconnects before (`gone`), cancel the generation and return None. A
    `TrajectoryAborted` of the generation is raised."""
    if gone is None:
        return await answer
    found: list[Completion | TrajectoryAborted] = []

    async def wait() -> None:
        try:
            found.append(await answer)
        except TrajectoryAborted as error:
            found.append(error)

    async with asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(wait(), name="an answer")
        gone.add_done_callback(lambda _: waiting.cancel())
    if found and isinstance(found[0], TrajectoryAborted):
        raise found[0]
    return found[0] if found else None  # type: ignore[return-value]


def final_harness_step(episode: HarnessEpisode) -> Step:
    """The final step with the program's own reward. `TrajectoryAborted` if it is not a valid step."""
    try:
        return checked_step(episode.ending())
    except Exception as error:
        raise TrajectoryAborted(AbortReason.INFRA_FAULT, harness_fault(error)) from None


def harness_fault(error: Exception) -> str:
    """One line about the exception; of an expired lease, its object and duration."""
    return error.cause if isinstance(error, LeaseExpired) else f"harness raised {one_line(error, 500)}"
