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

    seat: EnvironmentLoop
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
    maker: DomainFactory
    seat: Callable[[str], EnvironmentLoop]
    size: int = 0
    reuse: int = 1
    kept: deque[IdleEnvironment] = field(default_factory=deque)
    making: int = 0
    out: int = 0
    """Episodes whose environment may come back."""
    failing: bool = False
    tasks: asyncio.TaskGroup | None = None

    def open(self, tasks: asyncio.TaskGroup) -> None:
        """Start making environments, in tasks of the connection."""
        self.tasks = tasks
        self.fill()

    def fill(self) -> None:
        """Make environments until the pool is full."""
        while self.tasks is not None and not self.failing and self._have() < self.size:
            self.making += 1
            self.tasks.create_task(self._make())

    def take(self) -> IdleEnvironment | None:
        """The environment that has been idle longest; None if there is none."""
        if not self.kept:
            return None
        kept = self.kept.popleft()
        self.began(kept.environment)
        return kept

    def began(self, environment: Environment) -> None:
        """An episode uses this environment, from the pool or not."""
        self.failing = False
        if self._comes_back(environment):
            self.out += 1
        self.fill()

    def give_back(self, kept: IdleEnvironment, *, well: bool) -> bool:
        """The episode of this environment is over. True if the pool keeps it; else the caller closes it."""
        if not self._comes_back(kept.environment):
            return False
        self.out -= 1
        keep = well and self.tasks is not None and kept.played < self.reuse
        if keep and len(self.kept) + self.making < self.size:
            self.kept.append(kept)
            return True
        self.fill()
        return False

    async def close(self) -> None:
        """Stop making environments and close the idle ones."""
        self.tasks = None
        while self.kept:
            kept = self.kept.popleft()
            with contextlib.suppress(Exception):
                await run_on_loop(
                    kept.seat.loop, run_timed(f"close of {self.name}", asyncio.Lock(), kept.environment.close)
                )
            kept.seat.leave()

    def _have(self) -> int:
        return len(self.kept) + self.making + self.out

    def _comes_back(self, environment: Environment) -> bool:
        return self.reuse > 1 and self.size > 0 and reusable(environment)

    async def _make(self) -> None:
        make = self.maker.make
        seat = self.seat(f"{self.name} ahead")
        try:
            if make is None:
                raise AssertionError("a domain that cannot be made has no pool")
            work = run_timed(f"make of {self.name}", asyncio.Lock(), lambda: start_environment(make))
            told, value, seconds = await run_on_loop(seat.loop, work)
        except BaseException:
            seat.leave()
            raise
        finally:
            self.making -= 1
        if told is not CallStatus.OK:
            self.failing = True
            seat.leave()
            return
        self.kept.append(IdleEnvironment(seat, value, seconds))
