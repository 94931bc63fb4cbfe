"""Fake processes of hosts on virtual time, for the fleets of environment hosts and of function hosts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Generic, Protocol, TypeVar

from rollart.errors import NoPlace, PartDied
from rollart.leases import Leases
from rollart.ledger.intervals import ResourceClock
from rollart.sim import loop as virtual
from rollart.supervise.supervisor import HostSupervisor
from rollart.testing.ledger import MemoryRecorder


class Life(Protocol):
    async def aclose(self) -> None: ...


L = TypeVar("L", bound=Life)


class HostProcess(Generic[L]):
    """A host's process: starts in a second, unless it cannot."""

    role = "host"

    def __init__(self, name: str, recorder: MemoryRecorder, broken: set[str]) -> None:
        self.id = name
        self.node = ""
        self.clock = ResourceClock(
            role=self.role, resource=name, recorder=recorder, clock=asyncio.get_running_loop().time
        )
        self._broken = broken
        self.lives: list[L] = []
        self.ended = asyncio.Event()
        self.closed = self.homeless = False
        self.start_s = 1.0

    async def begin(self, make: Callable[[], L]) -> L:
        await asyncio.sleep(self.start_s)
        if self.homeless:
            raise NoPlace(self.id, "no node could ever hold it")
        if self.id in self._broken:
            raise PartDied(self.id, "ended with status 1 before it was ready")
        self.ended = asyncio.Event()
        self.lives.append(make())
        return self.lives[-1]

    async def wait(self) -> str:
        await self.ended.wait()
        return "its process was killed by SIGKILL"

    async def close(self) -> None:
        self.closed = True

    async def die(self) -> None:
        await self.lives[-1].aclose()
        self.ended.set()


P = TypeVar("P", bound=HostProcess[Any])


class HostBench(Generic[P]):
    """Hosts by name, and what their fleet recorded."""

    fleet: HostSupervisor[Any, Any]

    def __init__(self, part: type[P]) -> None:
        self._part = part
        self.recorder = MemoryRecorder()
        self.parts: dict[str, P] = {}
        self.broken: set[str] = set()
        self.leases = Leases(self.recorder)

    async def part(self, name: str) -> P:
        self.parts[name] = self._part(name, self.recorder, self.broken)
        return self.parts[name]

    def events(self, kind: str) -> list[tuple[str, dict[str, Any]]]:
        return [(e.subject, dict(e.fields)) for e in self.recorder.events if e.kind == kind]


@asynccontextmanager
async def running(bench: HostBench[Any]) -> AsyncIterator[None]:
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(bench.fleet.run())
        await bench.fleet.ready()
        yield
        task.cancel()


def play(scenario: Callable[[], Awaitable[None]], seed: int | None = None) -> None:
    virtual.run(scenario(), seed=seed)  # type: ignore[arg-type]
