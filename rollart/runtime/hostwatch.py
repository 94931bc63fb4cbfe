"""When a host must be started again: its process ended, its connection broke, or its health is bad."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from rollart.errors import EnvironmentFault, LeaseExpired, NoPlace
from rollart.hosted import EnvironmentHost, HostHealth
from rollart.ledger.clock import ResourceClock
from rollart.policy.lease import Expiry
from rollart.policy.memory import MemoryRules
from rollart.runtime.leases import Leases

__all__ = ["HostLimits", "HostPart", "HostOccupancy", "WatchedHost", "gather_or_cancel", "wait_for_restart_cause"]

REAP_S = 2.0
"""How long the end of a dead process may take to be known, seconds: it says more than the connection that it broke."""

MAX_HUNG_THREADS = 64
"""Threads that hang at which a host is started again whatever it holds: each keeps its stack and what it had open."""

HEALTH_CHECKS_PER_LIMIT = 4
"""Health checks in the time after which silence counts as a host's end."""


class WatchedHost(Protocol):
    """Of a host's connection, what is watched."""

    @property
    def id(self) -> str: ...

    async def health(self) -> HostHealth: ...

    async def lost(self) -> str: ...


class HostProcess(Protocol):
    """Of a host's process, what is watched."""

    @property
    def id(self) -> str: ...

    async def wait(self) -> str: ...


class HostPart(Protocol):
    """A host's process as the fleet sees it. Its clock runs from its making to `close`."""

    @property
    def id(self) -> str: ...

    @property
    def clock(self) -> ResourceClock: ...

    @property
    def node(self) -> str:
        """Where it runs; '' if nowhere yet."""

    async def start(self) -> EnvironmentHost:
        """Start the process and greet it; one left from before is killed first. `PartDied` or `EnvironmentFault` if it
        fails, `SpecError` if it can make no environment of the run's."""

    async def wait(self) -> str:
        """Returns when the process ends, with the cause in words."""

    async def close(self) -> None:
        """It is wanted no more: end the process, and its place is free."""


@dataclass(frozen=True, slots=True)
class HostLimits:
    """`per_host` episodes at a time; a host that is silent or blocked for `health_s` is started again (infinite: it is
    never asked), and so is one that has not started after `start_s`. A call that takes `call_s` hangs: its caller does
    not wait longer."""

    per_host: int = 512
    health_s: float = 15.0
    start_s: float = 60.0
    call_s: float = 30.0
    close_s: float = 5.0
    pull_s: float = 600.0
    """Longest wait for an episode's images."""
    max_restarts: int = 5
    """Of a host in a row without an episode that went well: the bound is against crash loops."""
    patience_s: float = 0.0
    """How long the last host goes on looking for a node beyond that, while none could hold it."""
    memory: MemoryRules = field(default_factory=MemoryRules)

    def waits(self, cause: Exception | None, seconds: float) -> bool:
        """Whether the last host, which has been down for so long and could not start because of that, tries again."""
        return isinstance(cause, NoPlace) and seconds < self.patience_s


class HostOccupancy(Protocol):
    """A host's episodes as the watch sees them. `resting`: it should get no more while others serve, so that it can be
    started again."""

    resting: bool

    @property
    def live(self) -> int: ...

    async def emptied(self) -> None:
        """Returns when it is to end and holds no episode any more."""


async def gather_or_cancel(works: Iterable[Coroutine[Any, Any, Any]]) -> None:
    """Do all of it at a time; of the rest nothing is under way any more when the first error is raised."""
    loop = asyncio.get_running_loop()
    tasks = [loop.create_task(work) for work in works]
    try:
        await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


async def wait_for_restart_cause(
    host: HostOccupancy,
    part: HostProcess,
    link: WatchedHost,
    leases: Leases,
    limits: HostLimits,
    memory: Callable[[HostHealth], str] = lambda _: "",
) -> str:
    """Wait for a reason to start the host again, in words; '' once it is to end and is empty. `memory`: why its memory
    is one, '' if it is not."""
    causes: dict[str, str] = {}
    over = asyncio.Event()

    async def note(what: str, work: Awaitable[str]) -> None:
        causes[what] = await work
        over.set()

    async def emptied() -> str:
        await host.emptied()
        return ""

    async with asyncio.TaskGroup() as tasks:
        process = tasks.create_task(note("process", part.wait()), name=f"end of {part.id}")
        watches = [
            tasks.create_task(note("connection", link.lost()), name=f"connection of {part.id}"),
            tasks.create_task(
                note("health", _wait_for_bad_health(host, link, leases, limits, memory)), name=f"health of {part.id}"
            ),
            tasks.create_task(note("emptied", emptied()), name=f"last episode of {part.id}"),
        ]
        await over.wait()
        if "connection" in causes:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(REAP_S):
                    await asyncio.shield(process)
        for watch in (process, *watches):
            watch.cancel()
    return next(causes[what] for what in ("emptied", "process", "health", "connection") if what in causes)


async def _wait_for_bad_health(
    host: HostOccupancy, link: WatchedHost, leases: Leases, limits: HostLimits, memory: Callable[[HostHealth], str]
) -> str:
    """Ask for its health until that is bad; why."""
    limit = limits.health_s
    if limit == math.inf:
        await asyncio.Event().wait()
    while True:
        await asyncio.sleep(limit / HEALTH_CHECKS_PER_LIMIT)
        try:
            async with leases.hold(link.id, "its health check", limit, Expiry.RESTART_PART):
                health = await link.health()
        except LeaseExpired:
            return f"it was silent for {limit:g} s"
        except EnvironmentFault as error:
            if error.incident:  # its end, of which the connection and the process tell more
                await asyncio.Event().wait()
            return error.message
        if health.stuck_s >= limit:
            return f"{health.stuck_in or 'something'} blocked all of its episodes for {health.stuck_s:.1f} s"
        if cause := memory(health):
            return cause
        host.resting = bool(health.left)
        if health.left and (not host.live or len(health.left) >= MAX_HUNG_THREADS):
            calls = (
                "1 call never ended and holds a thread"
                if len(health.left) == 1
                else (f"{len(health.left)} calls never ended and hold its threads")
            )
            return f"{calls} ({health.left[0]})"
