"""Environments that a host makes in advance, and environments that it resets for another episode."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rollart.adapters.envs.seats import DomainFactory, EnvironmentLoop, run_on_loop, run_timed
from rollart.adapters.envs.wire import CallStatus
from rollart.ports import Environment

__all__ = ["IdleEnvironment", "WarmPool", "reusable", "start_environment"]


@dataclass(slots=True)
class IdleEnvironment:
    """An environment that plays no episode, and its loop. It took `make_s` seconds to make and has played `played`
    episodes."""

    env_loop: EnvironmentLoop
    environment: Environment
    make_s: float = 0.0
    played: int = 0


def reusable(environment: Environment | None) -> bool:
    """True if the environment declares that a reset removes all state of the episode before."""
    return getattr(environment, "reusable", False) is True


async def start_environment(make: Callable[[], Environment]) -> Environment:
    """Make an environment and run its own `async start()`, if it has one (a container, a browser): all work that needs
    no seed. An environment whose start fails is closed."""
    environment = make()
    start: Callable[[], Any] | None = getattr(environment, "start", None)
    if start is not None:
        try:
            await start()
        except BaseException:
            with contextlib.suppress(Exception):
                await environment.close()
            raise
    return environment


@dataclass(slots=True)
class WarmPool:
    """The idle environments of one domain. Used on the loop of the host's server, from `open` to `close`; `take` and
    `give_back` do not wait.

    Bounds: at most `size` environments are idle or being made; an environment plays at most `reuse` episodes. Reusable
    environments that are in use count towards `size`, since they come back. An environment of which a call failed is
    never kept. The first failure stops making in advance until an episode has made its own environment: an episode
    reports the error in its own name.
    """

    name: str
    factory: DomainFactory
    new_loop: Callable[[str], EnvironmentLoop]
    size: int = 0
    reuse: int = 1
    idle: deque[IdleEnvironment] = field(default_factory=deque)
    making: int = 0
    in_use: int = 0
    """Episodes whose environment may come back."""
    failing: bool = False
    tasks: asyncio.TaskGroup | None = None

    def open(self, tasks: asyncio.TaskGroup) -> None:
        """Start making environments, in tasks of the connection."""
        self.tasks = tasks
        self.fill()

    def fill(self) -> None:
        """Make environments until the pool is full."""
        while self.tasks is not None and not self.failing and self._committed() < self.size:
            self.making += 1
            self.tasks.create_task(self._make())

    def take(self) -> IdleEnvironment | None:
        """The environment that has been idle longest; None if there is none."""
        if not self.idle:
            return None
        idle = self.idle.popleft()
        self.mark_in_use(idle.environment)
        return idle

    def mark_in_use(self, environment: Environment) -> None:
        """An episode uses this environment, from the pool or not."""
        self.failing = False
        if self._is_reusable(environment):
            self.in_use += 1
        self.fill()

    def give_back(self, idle: IdleEnvironment, *, healthy: bool) -> bool:
        """The episode of this environment is over. True if the pool keeps it; else the caller closes it."""
        if not self._is_reusable(idle.environment):
            return False
        self.in_use -= 1
        keep = healthy and self.tasks is not None and idle.played < self.reuse
        if keep and len(self.idle) + self.making < self.size:
            self.idle.append(idle)
            return True
        self.fill()
        return False

    async def close(self) -> None:
        """Stop making environments and close the idle ones."""
        self.tasks = None
        while self.idle:
            idle = self.idle.popleft()
            with contextlib.suppress(Exception):
                await run_on_loop(
                    idle.env_loop.loop, run_timed(f"close of {self.name}", asyncio.Lock(), idle.environment.close)
                )
            idle.env_loop.stop()

    def _committed(self) -> int:
        return len(self.idle) + self.making + self.in_use

    def _is_reusable(self, environment: Environment) -> bool:
        return self.reuse > 1 and self.size > 0 and reusable(environment)

    async def _make(self) -> None:
        make = self.factory.make
        env_loop = self.new_loop(f"{self.name} ahead")
        try:
            if make is None:
                raise AssertionError("a domain that cannot be made has no pool")
            work = run_timed(f"make of {self.name}", asyncio.Lock(), lambda: start_environment(make))
            status, value, seconds = await run_on_loop(env_loop.loop, work)
        except BaseException:
            env_loop.stop()
            raise
        finally:
            self.making -= 1
        if status is not CallStatus.OK:
            self.failing = True
            env_loop.stop()
            return
        self.idle.append(IdleEnvironment(env_loop, value, seconds))
