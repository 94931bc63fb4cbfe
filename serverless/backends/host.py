"""The pools of one backend by function name, and the task group of their starts."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from serverless.backends.base import WorkerLoad
from serverless.backends.pool import Launcher, WorkerPool
from serverless.deploy.package import Package
from serverless.errors import BackendFailed, UnknownFunction
from serverless.meter import MeterSink

__all__ = ["PoolRegistry"]

S = TypeVar("S")


class PoolRegistry:
    """Owns the current pool of every function, and drained ones until their calls have ended.

    `open` and `close` belong to one task; the task that opened it is cancelled if a start ends unexpectedly.
    """

    def __init__(
        self,
        launcher: Launcher,
        *,
        provider: str,
        meter: MeterSink,
        room: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """`room`: see `WorkerPool`."""
        self._launcher = launcher
        self._room = room
        self._provider = provider
        self._meter = meter
        self._group: asyncio.TaskGroup | None = None
        self._pools: dict[str, WorkerPool] = {}
        self._old: list[WorkerPool] = []
        self._states: dict[str, Any] = {}

    async def open(self) -> None:
        self._group = asyncio.TaskGroup()
        await self._group.__aenter__()

    async def close(self) -> None:
        for pool in (*self._pools.values(), *self._old):
            pool.close()
        self._pools.clear()
        self._old.clear()
        if self._group is not None:
            group, self._group = self._group, None
            await group.__aexit__(None, None, None)

    def deploy(self, package: Package) -> bool:
        """Make the package current; False if it already was."""
        if self._group is None:
            raise BackendFailed(f"the {self._provider} backend is not open", remedy="use `async with`")
        current = self._pools.get(package.spec.name)
        if current is not None and current.package.version == package.version and current.package.spec == package.spec:
            return False
        self._old = [pool for pool in self._old if pool.size]
        if current is not None:
            current.close(drain=True)
            self._old.append(current)
        pool = WorkerPool(
            package,
            launcher=self._launcher,
            meter=self._meter,
            provider=self._provider,
            spawn=self._spawn,
            room=self._room,
        )
        self._pools[package.spec.name] = pool
        pool.warm_up()
        return True

    def pool(self, function: str) -> WorkerPool:
        try:
            return self._pools[function]
        except KeyError:
            known = ", ".join(self._pools) or "none"
            raise UnknownFunction(f"no function {function!r} is deployed", remedy=f"deployed: {known}") from None

    def load(self, function: str) -> WorkerLoad:
        return self.pool(function).load()

    def keep(self, function: str, workers: int, keep_alive_s: float | None) -> int:
        """See `ScalableBackend.keep`. A new version of the function starts from its own settings again."""
        pool = self.pool(function)
        if keep_alive_s is not None:
            pool.keep_alive(keep_alive_s)
        return pool.keep(workers)

    def state(self, function: str, make: Callable[[], S]) -> S:
        """The launcher's state per function."""
        if function not in self._states:
            self._states[function] = make()
        state: S = self._states[function]
        return state

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        assert self._group is not None
        return self._group.create_task(work)
