"""Trajectories for the ledger, by the run spec's `keep`: the content of each attempt, and the routes of its turns."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable

from rollart.control.trajectory import UNTRACED, AttemptTrace, TrajectoryState, harness_turns
from rollart.ledger.kept import KeptTrajectory, RoutedTurn
from rollart.model import EngineId, Trajectory, Turn
from rollart.ports import Tokenizer
from rollart.settings.run import KeepSpec


class TrajectoryKeeper:
    """Passes every chosen attempt to `sink` when it ends. A sample of the prompts has all attempts of their
    trajectories, the same prompts in every life of a run; evaluations count like prompts."""

    def __init__(self, keep: KeepSpec, sink: Callable[[KeptTrajectory], None]) -> None:
        self._share, self._sink = keep.share, sink

    def __call__(self, state: TrajectoryState) -> AttemptTrace:
        return KeptAttempt(state, self._sink) if in_share(state.group, self._share) else UNTRACED


def in_share(group: str, share: float) -> bool:
    """True if the prompt of this group is in the share of all prompts. Pure."""
    if share >= 1.0:
        return True
    return int.from_bytes(hashlib.blake2b(group.encode(), digest_size=4).digest(), "big") < share * 2**32


class KeptAttempt(AttemptTrace):
    """Notes one attempt: two clock readings and a tuple per turn."""

    __slots__ = ("_asked", "_routes", "_sink", "_state", "_trajectory")

    def __init__(self, state: TrajectoryState, sink: Callable[[KeptTrajectory], None]) -> None:
        self._state, self._sink = state, sink
        self._asked = 0.0
        self._routes: list[tuple[float, float, float, str, str, str, int, int]] = []
        self._trajectory: Trajectory | None = None

    def asked(self) -> None:
        self._asked = asyncio.get_running_loop().time() - self._state.started

    def routed(self, why: str, engine: EngineId, prefill: EngineId | None, running: int) -> None:
        state, now = self._state, asyncio.get_running_loop().time() - self._state.started
        spent, prefilled = state.engine_seconds, state.prompt_tokens
        self._routes.append((self._asked, now, spent, engine, prefill or "", why, running, prefilled))

    def finished(self, trajectory: Trajectory) -> None:
        self._trajectory = trajectory

    def closed(self, tokenizer: Tokenizer) -> None:
        trajectory = self._trajectory or unfinished_trajectory(self._state, tokenizer)
        notes = self._routes
        # The spending of each attempt is the difference to the next one, or to the end.
        ends = [(spent, prefilled) for _, _, spent, *_, prefilled in notes[1:]]
        ends.append((self._state.engine_seconds, self._state.prompt_tokens))
        routes = [
            RoutedTurn(asked, routed, end[0] - spent, engine, first, why, running, end[1] - prefilled)
            for (asked, routed, spent, engine, first, why, running, prefilled), end in zip(notes, ends, strict=False)
        ]
        self._sink(KeptTrajectory(trajectory, tuple(routes)))


def unfinished_trajectory(state: TrajectoryState, tokenizer: Tokenizer) -> Trajectory:
    """The part of an aborted episode that exists: the last turn may have no action, and no environment's reward."""
    turns: list[Turn] = list(state.turns)
    last = [segment for segment in state.segments if segment.turn >= len(turns)]
    turns += harness_turns(last, tokenizer, state.domain.stop_token_ids, 0.0)
    return Trajectory(
        id=state.id,
        group=state.group,
        domain=state.domain.name,
        seed=state.seed,
        purpose=state.purpose,
        v0=-1 if state.begun is None else state.begun,
        segments=tuple(state.segments),
        turns=tuple(turns),
        success=None,
        final_observation="",
        metadata={},
        engine_seconds=state.engine_seconds,
        truncated=state.truncated,
    )
