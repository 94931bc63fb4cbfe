"""Causes for restarting a host: its process ended, its connection broke, or its health is bad."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from rollart.errors import EnvironmentFault, LeaseExpired, NoPlace
from rollart.hosted import EnvironmentHost, HostHealth
from rollart.leases import Expiry, Leases
from rollart.ledger.intervals import ResourceClock
from rollart.policy.hosts import MemoryRules

REAP_S = 2.0
"""Seconds to wait for a process's exit after its connection broke: the exit gives the better cause."""

MAX_HUNG_THREADS = 64
"""Number of hung threads at which a host is restarted regardless of its episodes: each keeps its stack and its open
files and sockets."""

HEALTH_CHECKS_PER_LIMIT = 4
"""Number of health checks within the silence that counts as the end of a host."""


class WatchedHost(Protocol):
    """A host's connection as the health watch uses it."""

    @property
    def id(self) -> str: ...

    async def health(self) -> HostHealth: ...

    async def lost(self) -> str: ...


class HostProcess(Protocol):
    """A host's process as the health watch uses it."""

    @property
    def id(self) -> str: ...

    async def wait(self) -> str: ...


class HostPart(Protocol):
    """A host's process as the fleet sees it. Its clock runs from its creation to `close`."""

    @property
    def id(self) -> str: ...

    @property
    def clock(self) -> ResourceClock: ...

    @property
    def node(self) -> str:
        """The node on which it runs; '' before it has one."""

    async def start(self) -> EnvironmentHost:
        """Start the process and complete the handshake; a process left from before is killed first. `PartDied` or
        `EnvironmentFault` if that fails, `SpecError` if the host can create none of the run's environments."""

    async def wait(self) -> str:
        """Returns when the process ends, with the cause as text."""

    async def close(self) -> None:
        """The host is no longer needed: end the process and free its placement."""


@dataclass(frozen=True, slots=True)
class HostLimits:
    """`per_host` episodes at a time. A host that is silent or blocked for `health_s` is restarted (infinite: no health
    checks), as is a host that has not started after `start_s`. A call that takes `call_s` counts as hung: its caller
    waits no longer."""

    per_host: int = 512
    health_s: float = 15.0
    start_s: float = 60.0
    call_s: float = 30.0
    close_s: float = 5.0
    pull_s: float = 600.0
    """Longest wait for an episode's images."""
    max_restarts: int = 5
    """Consecutive restarts of a host without a successful episode: the bound is against crash loops."""
    patience_s: float = 0.0
    """How long the last host keeps looking for a node beyond `max_restarts`, while no node can hold it."""
    memory: MemoryRules = field(default_factory=MemoryRules)

    def waits(self, cause: Exception | None, seconds: float) -> bool:
        """True if the last host, down for `seconds` because its start failed with `cause`, tries again."""
        return isinstance(cause, NoPlace) and seconds < self.patience_s


class HostOccupancy(Protocol):
    """A host's episodes as the health watch sees them. `resting`: the host gets no episode while another host can take
    it, so that it becomes empty and can be restarted."""

    resting: bool

    @property
    def live(self) -> int: ...

    async def emptied(self) -> None:
        """Returns when the host is retiring and holds no episode."""


async def gather_or_cancel(works: Iterable[Coroutine[Any, Any, Any]]) -> None:
    """Run all coroutines concurrently. The first error is raised once the others have been cancelled and have ended."""
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
    """Wait for a cause to restart the host, as text; '' once the host is retiring and empty. `memory` returns the cause
    if the host's memory demands a restart, '' otherwise."""
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
    """Check the host's health periodically until it is bad; returns the cause."""
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
            if error.incident:  # the host ended: its connection and its process give a better cause
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
