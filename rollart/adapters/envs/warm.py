"""Environments that a host makes before anybody asks for one, and those it resets again in place of making another."""

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
    """An environment that is made and plays no episode, on its seat. It took `make_s` to make and has played `played`
    episodes."""

    seat: EnvironmentLoop
    environment: Environment
    make_s: float = 0.0
    played: int = 0


def reusable(environment: Environment | None) -> bool:
    """Whether it says itself that a reset leaves nothing of the episode before."""
    return getattr(environment, "reusable", False) is True


async def start_environment(make: Callable[[], Environment]) -> Environment:
    """Made, and brought as far as it can be without a seed: its own `async start()`, if it has one (a container, a
    browser). What fails half-way is closed."""
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
    """The environments of one domain that wait for an episode. Lives on the loop of its host's front; `open` until
    `close`, `take` and `give_back` by the front's calls, none of which wait.

    Bounds: never more than `size` wait or are being made; an environment plays at most `reuse` episodes. One that may
    be used again is not made ahead while others of its kind are out, as they come back. An environment of which a call
    failed is never kept. Making ahead stops at the first failure, until an episode's own try went well: it says
    what is wrong, in the name of its episode.
    """

    name: str
    maker: DomainFactory
    seat: Callable[[str], EnvironmentLoop]
    size: int = 0
    reuse: int = 1
    kept: deque[IdleEnvironment] = field(default_factory=deque)
    making: int = 0
    out: int = 0
    """Episodes that have an environment which may come back."""
    failing: bool = False
    tasks: asyncio.TaskGroup | None = None

    def open(self, tasks: asyncio.TaskGroup) -> None:
        """Begin to make: the tasks are the connection's."""
        self.tasks = tasks
        self.fill()

    def fill(self) -> None:
        """Make as many as are wanted ahead."""
        while self.tasks is not None and not self.failing and self._have() < self.size:
            self.making += 1
            self.tasks.create_task(self._make())

    def take(self) -> IdleEnvironment | None:
        """One that waits, the one that waits longest; None if there is none."""
        if not self.kept:
            return None
        kept = self.kept.popleft()
        self.began(kept.environment)
        return kept

    def began(self, environment: Environment) -> None:
        """An episode has it, made ahead or by itself."""
        self.failing = False
        if self._comes_back(environment):
            self.out += 1
        self.fill()

    def give_back(self, kept: IdleEnvironment, *, well: bool) -> bool:
        """Its episode is over: True if it is kept for another, else the caller closes it."""
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
        """Nothing is made or kept any more."""
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
