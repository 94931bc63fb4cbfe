"""Engines behind a proxy of their own: sessions stay where their prefix is."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

from rollart.adapters.engines.http import HttpEngine
from rollart.errors import EngineError
from rollart.model import Completion, GenerateRequest, Sampling

__all__ = ["EnginePool"]


class EnginePool:
    """Gives every session an engine, the one with the fewest; `open` once, then any number of sessions."""

    def __init__(self, engines: Sequence[HttpEngine]) -> None:
        self._engines = tuple(engines)
        self._sessions = {e.id: 0 for e in self._engines}
        self.context = 0

    async def open(self) -> None:
        """Ask how much the engines take. EngineError: one does not answer."""
        self.context = min(await asyncio.gather(*(e.context() for e in self._engines)))

    async def paused(self) -> bool:
        """Whether an engine stands still, as for new weights."""
        return any(await asyncio.gather(*(e.paused() for e in self._engines)))

    def session(self, name: str) -> PooledSession:
        engine = min(self._engines, key=lambda e: (self._sessions[e.id], e.id))
        self._sessions[engine.id] += 1
        return PooledSession(self, engine, name)

    async def close(self) -> None:
        for engine in self._engines:
            await engine.close()

    def left(self, engine: HttpEngine) -> None:
        self._sessions[engine.id] -= 1


class PooledSession:
    """A session's engine. Implements `Policy`."""

    def __init__(self, pool: EnginePool, engine: HttpEngine, name: str) -> None:
        self._pool, self._engine, self._name = pool, engine, name
        self._requests = 0

    @property
    def context(self) -> int:
        return self._pool.context

    async def generate(self, token_ids: tuple[int, ...], sampling: Sampling) -> Completion:
        self._requests += 1
        return await self._engine.generate(
            GenerateRequest(f"{self._name}-{self._requests}", self._name, token_ids, sampling)
        )

    async def release(self) -> None:
        self._pool.left(self._engine)
        with contextlib.suppress(EngineError):
            await self._engine.release(self._name)
