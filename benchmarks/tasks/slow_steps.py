"""Environments whose steps take as long as those of RollArt's evaluation, in units of a turn's generation."""

from __future__ import annotations

import asyncio
import random
from typing import Any

from rollart.adapters.envs.lookup import attribute_at
from rollart.model import Observation, Step

MEAN, DEVIATION = 10.0, 10.0
"""Of the seconds of a step, in units of the mean generation time of a turn (arXiv:2512.22560, section 7.4)."""


class SlowSteps:
    """Another environment, each of whose steps first waits max(0, N(10, 10)) × `turn_s` seconds. The waits depend on
    the episode's seed alone."""

    def __init__(self, *, of: str, turn_s: float, **arguments: Any) -> None:
        self._environment = attribute_at(of, "of")(**arguments)
        self._turn_s, self._waits = turn_s, random.Random()

    async def reset(self, seed: int) -> Observation:
        self._waits.seed(seed)
        return await self._environment.reset(seed)

    async def step(self, action: str) -> Step:
        await asyncio.sleep(self._turn_s * max(0.0, self._waits.gauss(MEAN, DEVIATION)))
        return await self._environment.step(action)

    async def close(self) -> None:
        await self._environment.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._environment, name)  # worked examples, and what else it offers
