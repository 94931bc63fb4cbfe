"""Supervision of the hosts of function workers: start, watch, and restart each host wherever a node has room."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from rollart.errors import LeaseExpired, PartDied, RollartError
from rollart.hosted import FunctionHost
from rollart.leases import Expiry, Leases
from rollart.ledger.intervals import ResourceClock, ResourceState
from rollart.ports import Recorder, RunEvent
from rollart.supervise.environment_hosts import HOST_DOWN, HOST_RESTART
from rollart.supervise.supervisor import HostLimits, gather_or_cancel, wait_for_restart_cause


class FunctionPart(Protocol):
    """A host's process, as its supervisor uses it. Its clock runs from its construction to `close`."""

    @property
    def id(self) -> str: ...

    @property
    def clock(self) -> ResourceClock: ...

    @property
    def node(self) -> str:
        """The node that it runs on; '' if it has none yet."""

    async def start(self, notify: Callable[[], None]) -> FunctionHost:
        """Start the process and connect to it; a process left over from before is killed first. The host then accepts
        workers. `notify` is called when a call or a worker there begins or ends. `PartDied` if the start fails."""

    async def wait(self) -> str:
        """Returns when the process ends, with the cause as text."""

    async def close(self) -> None:
        """End the process for good and free its slot on the node."""


@dataclass(slots=True)
class _FunctionHostState:
    part: FunctionPart
    link: FunctionHost | None = None
    """Its connection while it serves."""
    leaving: bool = False
    restarts: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def stays(self) -> bool:
        """True if it serves, or if it is starting and not retired."""
        return self.link is not None or not self.leaving


class FunctionHostSupervisor:
    """Owns the hosts of a run's function workers and the supervising task of each host. The backend assigns calls to
    workers.

    `run` starts the hosts and runs until it is cancelled. `ready` waits until the initial hosts serve. `resize`,
    `spawn` and `retire` may be called by one task at a time while `run` runs. A host that dies or hangs is restarted
    wherever the runtime finds room. The calls of its workers are repeated by workers of other hosts; if there is no
    other host, they wait for this one.

    Bounds: a host that answers no call is restarted at most `limits.max_restarts` times in a row, then given up. If the
    last host is given up, `run` ends with `PartDied`.
    """

    def __init__(
        self,
        make: Callable[[str], Awaitable[FunctionPart]],
        names: Iterator[str],
        count: int,
        *,
        leases: Leases,
        recorder: Recorder,
        limits: HostLimits,
    ) -> None:
        """`make`: makes the part of a given name. `names`: an endless iterator of the hosts' names, in their order."""
        self._make = make
        self._names = names
        self._count = count
        self._leases = leases
        self._recorder = recorder
        self._limits = limits
        self._hosts: dict[str, _FunctionHostState] = {}
        self._changed = asyncio.Event()
        self._ready = asyncio.Event()
        self._tasks: asyncio.TaskGroup | None = None
        self.heard: Callable[[], None] = lambda: None
        """Called when a host has started or restarted, and when it is removed."""

    async def run(self) -> None:
        """Start and supervise the hosts until cancelled. Raises the error of a host that cannot be kept alive."""
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                await self.resize(self._count)
                while not all(host.link for host in self._hosts.values()):
                    await self._changed.wait()
                self._ready.set()
                await asyncio.Event().wait()
        finally:
            self._tasks = None
            with contextlib.suppress(RollartError):
                await asyncio.gather(*(self._end(host) for host in list(self._hosts.values())))

    async def ready(self) -> None:
        """Returns once every initial host serves."""
        await self._ready.wait()

    @property
    def size(self) -> int:
        """Number of hosts that are not retired, both serving and starting."""
        return sum(not host.leaving for host in self._hosts.values())

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the hosts that are not retired."""
        return tuple(name for name, host in self._hosts.items() if not host.leaving)

    @property
    def clocks(self) -> list[ResourceClock]:
        return [host.part.clock for host in self._hosts.values()]

    def where(self) -> Mapping[str, str]:
        """The node of each host that is not retired ('' if it has none), the most dispensable host first."""
        wanted = [host for host in reversed(self._hosts.values()) if not host.leaving]
        wanted.sort(key=lambda host: -1 if host.link is None else host.link.workers)
        return {host.part.id: host.part.node for host in wanted}

    def up(self) -> frozenset[str]:
        """Hosts that accept workers now."""
        return frozenset(name for name, host in self._hosts.items() if host.link is not None and not host.leaving)

    async def resize(self, count: int) -> None:
        """Change the number of hosts to `count` (at least 1): start new ones, or retire those with fewest workers."""
        await gather_or_cancel(self.spawn() for _ in range(max(1, count) - self.size))
        while self.size > max(1, count):
            staying = [host for host in self._hosts.values() if not host.leaving]
            self.retire(min(reversed(staying), key=lambda host: 0 if host.link is None else host.link.workers).part.id)

    async def spawn(self) -> str:
        """Add a host and return its name. It accepts workers once it has started."""
        assert self._tasks is not None, "hosts are added while `run` runs"
        part = await self._make(next(self._names))
        host = self._hosts[part.id] = _FunctionHostState(part)
        self._tasks.create_task(self._keep(host), name=f"keep {part.id}")
        return part.id

    def retire(self, name: str) -> None:
        """Retire a host: it gets no more workers, and ends with its last call."""
        host = self._hosts[name]
        host.leaving = True
        if host.link is not None:
            host.link.leave()

    async def _keep(self, host: _FunctionHostState) -> None:
        """Start, watch and restart the host, until it retires or is given up."""
        now = asyncio.get_running_loop().time
        cause, failed, since = "", None, now()
        try:
            while not host.leaving:
                try:
                    link = await self._start(host, HOST_RESTART if cause else "")
                    if host.restarts > self._limits.max_restarts:  # earlier starts failed for lack of a node
                        host.restarts = 0
                    cause = await wait_for_restart_cause(link, host.part, link, self._leases, self._limits)
                    failed, since = None, now()
                except (PartDied, LeaseExpired) as error:
                    cause, failed = error.message.removeprefix(f"{host.part.id}: "), error
                if not cause:
                    break
                if await self._lose(host, cause):
                    host.restarts = 0
                host.restarts += 1
                if host.restarts > self._limits.max_restarts:
                    if any(other.stays for other in self._hosts.values() if other is not host):
                        self._tell("host_given_up", host, cause=cause, restarts=self._limits.max_restarts)
                        return
                    if not self._limits.waits(failed, now() - since):
                        raise PartDied(
                            host.part.id,
                            f"{cause}, after {host.restarts - 1} restarts",
                            remedy=f"rollart logs --role {host.part.id}",
                        )
                if host.restarts > 1:
                    await asyncio.sleep(min(0.25 * 2 ** min(host.restarts, 8), 5.0))
            self._tell("host_retired", host)
        finally:
            await self._end(host)

    async def _start(self, host: _FunctionHostState, cause: str) -> FunctionHost:
        host.part.clock.enter(ResourceState.STARTUP, cause)
        async with self._leases.hold(host.part.id, "its start", self._limits.start_s, Expiry.RESTART_PART):
            link = host.link = await host.part.start(lambda: self._at_work(host))
        if host.leaving:
            link.leave()
        self._at_work(host)
        self._tell("host_started", host, restarts=host.restarts)
        self._notify()
        return link

    def _at_work(self, host: _FunctionHostState) -> None:
        """Update the clock after a call or a worker of the host has begun or ended."""
        if host.link is not None:
            host.part.clock.enter(ResourceState.BUSY if host.link.live else ResourceState.IDLE)

    async def _lose(self, host: _FunctionHostState, cause: str) -> bool:
        """Mark the host down. The calls of its workers are repeated elsewhere. True if this life answered any call."""
        host.part.clock.enter(ResourceState.DOWN, HOST_DOWN)
        link, host.link = host.link, None
        self._tell("host_lost", host, cause=cause, calls=0 if link is None else link.live)
        if link is None:
            return False
        await link.aclose()
        return link.answered > 0

    async def _end(self, host: _FunctionHostState) -> None:
        """Remove the host for good."""
        if self._hosts.pop(host.part.id, None) is None:
            return
        link, host.link = host.link, None
        try:
            if link is not None:
                await link.aclose()
            await host.part.close()
        finally:
            host.part.clock.close()
            self._notify()

    def _tell(self, kind: str, host: _FunctionHostState, **fields: str | int | float | None) -> None:
        self._recorder.event(RunEvent(asyncio.get_running_loop().time(), kind, host.part.id, fields))

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
        self.heard()
