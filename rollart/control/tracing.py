"""Turns of a share of the trajectories as events, for traces and spans."""

from __future__ import annotations

import asyncio
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from rollart.control.trajectory import TrajectoryRunner, TrajectoryState
from rollart.ledger.events import TURN
from rollart.model import Completion, Step, Trajectory, TrajectoryId
from rollart.ports import Recorder, RunEvent
from rollart.settings.telemetry import is_traced


@dataclass(slots=True)
class _TracedTurns:
    """The turns of one trajectory: how many began, and the one whose environment has not answered yet."""

    begun: int = 0
    engine: str = ""
    open: tuple[float, float, Completion] | None = None


@dataclass(eq=False)
class TracedTrajectoryRunner(TrajectoryRunner):
    """Runs episodes, and records the turns of `share` of the prompts. A turn of an agent program is one request of it
    and the time until its next one."""

    _: KW_ONLY
    recorder: Recorder
    share: float
    traced: dict[TrajectoryId, _TracedTurns] = field(default_factory=dict)

    async def run(self, state: TrajectoryState) -> Trajectory:
        if not is_traced(state.group, self.share):
            return await super().run(state)
        self.traced[state.id] = _TracedTurns()
        try:
            return await super().run(state)
        finally:
            self._end_turn(state)
            del self.traced[state.id]

    async def _generate(self, state: TrajectoryState, *args: Any, **kwargs: Any) -> Completion:
        turns = self.traced.get(state.id)
        if turns is None:
            return await super()._generate(state, *args, **kwargs)
        self._end_turn(state)  # of an agent program
        now = asyncio.get_running_loop().time
        t0 = now()
        completion = await super()._generate(state, *args, **kwargs)
        turns.open = t0, now(), completion
        turns.begun += 1
        turns.engine = self.gateway.engine_of(state.id) or turns.engine
        return completion

    async def _step(self, state: TrajectoryState, *args: Any, **kwargs: Any) -> Step:
        try:
            return await super()._step(state, *args, **kwargs)
        finally:
            self._end_turn(state)

    def _end_turn(self, state: TrajectoryState) -> None:
        turns = self.traced.get(state.id)
        if turns is None or turns.open is None:
            return
        t0, acted, completion = turns.open
        turns.open = None
        t1 = asyncio.get_running_loop().time()
        fields: dict[str, str | int | float | bool | None] = {
            "turn": turns.begun - 1,
            "generation_s": acted - t0,
            "environment_s": t1 - acted,
            "engine": turns.engine,
            "version": completion.spans[-1].version,
            "tokens": completion.sampled,
            "prompt_tokens": completion.prompt_tokens,
            "cached_tokens": completion.cached_tokens,
        }
        self.recorder.event(RunEvent(t1, TURN, state.id, fields))
