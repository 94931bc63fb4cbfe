"""Supervision: the parts of a run are started, watched, restarted with back-off, given up or retired.

`Supervisor` keeps single parts alive, such as engines (`engines`). `HostSupervisor` also keeps a number of hosts, each
a process that serves a connection: hosts of environments (`environment_hosts`) and of function workers
(`function_hosts`). A part type adds how its parts are started, what their loss means for its users, and which of them
can be spared.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from rollart.errors import EnvironmentFault, LeaseExpired, NoPlace, PartDied, RollartError
from rollart.hosted import HostHealth
from rollart.leases import Expiry, Leases
from rollart.ledger.intervals import ResourceClock, ResourceState
from rollart.policy.hosts import MemoryRules
from rollart.ports import Recorder, RunEvent
from serverless.retries import PART_START

HOST_DOWN, HOST_RESTART = "host_down", "host_restart"
"""Causes of a host's lost time: it is down, or it restarts."""

REAP_S = 2.0
"""Seconds to wait for a process's exit after its connection broke: the exit gives the better cause."""

MAX_HUNG_THREADS = 64
"""Number of hung threads at which a host is restarted regardless of its episodes: each keeps its stack and its open
files and sockets."""

HEALTH_CHECKS_PER_LIMIT = 4
"""Number of health checks within the silence that counts as the end of a host."""


@dataclass(slots=True)
class SupervisedPart:
    """A part through all of its restarts. Only its supervisor changes it."""

    leaving: bool = False
    """True if the part is retired: it is not restarted."""
    restarts: int = 0
    """Consecutive restarts without a sign of success."""


P = TypeVar("P", bound=SupervisedPart)


class Supervisor(ABC, Generic[P]):
    """Keeps parts alive: `keep` starts a part, watches it and restarts it, until it retires or is given up.

    Bounds: after `max_restarts` consecutive restarts a part is given up if another one stays; the last part is tried
    again as long as `check_patience` allows.
    """

    failures: tuple[type[RollartError], ...] = (PartDied, LeaseExpired)
    """Errors of `start` and `watch` that a restart may repair. Any other ends `keep`."""
    max_restarts: int

    async def keep(self, part: P) -> None:
        cause, failed, since = "", None, loop_time()
        while not part.leaving:
            try:
                await self.start(part, restart=bool(cause))
                if part.restarts > self.max_restarts:  # earlier starts failed for lack of a node
                    part.restarts = 0
                cause = await self.watch(part)
                failed, since = None, loop_time()
            except self.failures as error:
                cause, failed = self.cause(part, error), error
            if not cause:
                break
            await self.lose(part, cause)
            part.restarts += 1
            if part.restarts > self.max_restarts:
                if self.spare(part):
                    self.give_up(part, cause)
                    return
                self.check_patience(part, cause, failed, loop_time() - since)
        self.retired(part)

    @abstractmethod
    async def start(self, part: P, *, restart: bool) -> None:
        """Start the part, after a back-off. Raises one of `failures` if that fails."""

    @abstractmethod
    async def watch(self, part: P) -> str:
        """Returns the cause to restart the part, as text; '' once it is retired and no longer used."""

    @abstractmethod
    def cause(self, part: P, error: RollartError) -> str:
        """The cause of a failed start, as text."""

    @abstractmethod
    async def lose(self, part: P, cause: str) -> None:
        """The part is down. Also called after a start that failed."""

    @abstractmethod
    def spare(self, part: P) -> bool:
        """True if the run can do without the part."""

    @abstractmethod
    def check_patience(self, part: P, cause: str, failed: Exception | None, seconds: float) -> None:
        """The last part is down for `seconds`, because its start failed with `failed` unless None. Raises `PartDied` if
        it is not tried again."""

    @abstractmethod
    def give_up(self, part: P, cause: str) -> None: ...

    def retired(self, part: P) -> None:
        """The part has been retired and is no longer used."""


@dataclass(frozen=True, slots=True)
class HostLimits:
    """`per_host` episodes at a time. A host that is silent or blocked for `health_s` is restarted (infinite: no health
    checks), as is a host that has not started after `start_s`. A call that takes `call_s` counts as hung: its caller
    waits no longer."""

    per_host: int = 512
    health_s: float = 15.0
    start_s: float = 60.0
    call_s: float = 30.0
    pull_s: float = 600.0
    """Longest wait for an episode's images."""
    max_restarts: int = 5
    """Consecutive restarts of a host without a successful episode: the bound is against crash loops."""
    patience_s: float = 0.0
    """How long the last host keeps looking for a node beyond `max_restarts`, while no node can hold it."""
    memory: MemoryRules = field(default_factory=MemoryRules)


class HostClient(Protocol):
    """A host's connection as its supervisor uses it."""

    @property
    def id(self) -> str: ...

    async def health(self) -> HostHealth: ...

    async def lost(self) -> str: ...

    async def aclose(self) -> None: ...


class HostProcess(Protocol):
    """A host's process as its supervisor uses it. Its clock runs from its creation to `close`."""

    @property
    def id(self) -> str: ...

    @property
    def clock(self) -> ResourceClock: ...

    @property
    def node(self) -> str:
        """The node on which it runs; '' before it has one."""

    async def wait(self) -> str:
        """Returns when the process ends, with the cause as text."""

    async def close(self) -> None:
        """The host is no longer needed: end the process and free its placement."""


Q = TypeVar("Q", bound=HostProcess)

L = TypeVar("L", bound=HostClient)


@dataclass(slots=True)
class HostState(SupervisedPart, Generic[Q, L]):
    """A host through all of its restarts (lives)."""

    part: Q = field(kw_only=True)
    link: L | None = None
    """Its connection while it serves."""
    life: L | None = None
    """Its latest connection, current or ended."""
    kept: bool = False
    """True once its supervising task has begun: a task that is cancelled before would not end it."""
    resting: bool = False
    """It gets work only if every other host is full or rests too: it is restarted once it is empty."""

    @property
    def id(self) -> str:
        return self.part.id

    @property
    def load(self) -> int:
        """Episodes or calls that it holds."""
        raise NotImplementedError

    @property
    def up(self) -> bool:
        """True if it accepts work."""
        return self.link is not None and not self.leaving

    async def emptied(self) -> None:
        """Returns when the host is retiring and holds no work."""
        raise NotImplementedError


H = TypeVar("H", bound=HostState[Any, Any])


@dataclass(eq=False)
class HostSupervisor(Supervisor[H], Generic[H, Q]):
    """Owns the hosts of one kind and the supervising task of each host.

    `run` starts the hosts and runs until it is cancelled. `ready` waits until the initial hosts serve. `resize`,
    `spawn` and `retire` may be called by one task at a time while `run` runs. A host that dies, hangs or violates the
    protocol is restarted wherever the runtime finds room. Invariant: a host that is `leaving` gets no work.
    """

    failures = (PartDied, LeaseExpired, EnvironmentFault)

    make: Callable[[str], Awaitable[Q]]
    """Places and makes the part of a given name."""
    new_names: Iterator[str]
    """The names of the hosts in their order, without end."""
    count: int
    """The number of initial hosts."""
    _: KW_ONLY
    leases: Leases
    recorder: Recorder
    limits: HostLimits

    def __post_init__(self) -> None:
        self.max_restarts = self.limits.max_restarts
        self.hosts: dict[str, H] = {}
        self._changed = asyncio.Event()
        self._ready = asyncio.Event()
        self._tasks: asyncio.TaskGroup | None = None
        self._keeping: dict[str, asyncio.Task[None]] = {}
        self.on_change: Callable[[], None] = lambda: None
        """Called when a host has started or restarted, and when it is removed."""

    async def run(self) -> None:
        """Start and supervise the hosts until cancelled. Raises the error of a host that cannot be kept alive."""
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                await self.resize(self.count)
                while not all(host.link for host in self.hosts.values()):
                    await self._changed.wait()
                self._ready.set()
                try:
                    await asyncio.Event().wait()
                finally:  # in order of start: a TaskGroup cancels in the order of a set
                    for task in list(self._keeping.values()):
                        task.cancel()
        finally:
            self._tasks = None
            self.stopped()
            with contextlib.suppress(RollartError):
                await asyncio.gather(*(self._end(host) for host in list(self.hosts.values())))

    async def ready(self) -> None:
        """Returns once every initial host serves."""
        await self._ready.wait()

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the hosts that are not retired, both serving and starting."""
        return tuple(name for name, host in self.hosts.items() if not host.leaving)

    @property
    def clocks(self) -> list[ResourceClock]:
        return [host.part.clock for host in self.hosts.values()]

    def where(self) -> Mapping[str, str]:
        """The node of each host that is not retired ('' if it has none), the most dispensable host first."""
        return {host.id: host.part.node for host in self._by_use()}

    def up(self) -> frozenset[str]:
        """Hosts that accept work now."""
        return frozenset(name for name, host in self.hosts.items() if host.up)

    async def resize(self, count: int) -> None:
        """Change the number of hosts to `count` (at least 1): start new ones, or retire the most dispensable ones."""
        async with asyncio.TaskGroup() as spawning:
            for _ in range(max(1, count) - len(self.names)):
                spawning.create_task(self.spawn())
        while len(self.names) > max(1, count):
            self.retire(self._by_use()[0].id)

    async def spawn(self) -> str:
        """Add a host and return its name. It accepts work once it has started."""
        assert self._tasks is not None, "hosts are added while `run` runs"
        host = self.adopt(await self.make(next(self.new_names)))
        self.hosts[host.id] = host
        self._keeping[host.id] = self._tasks.create_task(self._keep(host), name=f"keep {host.id}")
        return host.id

    def retire(self, name: str) -> None:
        """Retire a host: it gets no more work, and ends with its last."""
        host = self.hosts[name]
        host.leaving = True
        self.drain(host)
        if host.kept and host.link is None:  # it is starting, perhaps for ever
            self.retired(host)
            self._keeping[name].cancel()

    def emit(self, kind: str, host: str, **fields: str | int | float | None) -> None:
        self.recorder.event(RunEvent(loop_time(), kind, host, fields))

    @abstractmethod
    def adopt(self, part: Q) -> H:
        """The state of a new host."""

    @abstractmethod
    async def connect(self, host: H) -> HostClient:
        """Start the host's process and connect to it."""

    @abstractmethod
    def drain(self, host: H) -> None:
        """The host retires."""

    @abstractmethod
    def down(self, host: H, *, served: bool) -> dict[str, int]:
        """The host is down; fields of the event. `served`: false if it failed to start."""

    def started(self, host: H) -> None:
        """The host serves."""
        host.part.clock.enter(ResourceState.IDLE)

    def removed(self, host: H) -> None:
        """The host was removed for good."""

    def stopped(self) -> None:
        """`run` ends."""

    def changed(self) -> None:
        """A host has started or was removed."""

    def totals(self, host: H) -> dict[str, int]:
        """Fields of a retired host's event."""
        return {}

    def memory_cause(self, host: H, health: HostHealth) -> str:
        """The cause if the host's memory demands a restart, '' otherwise."""
        return ""

    async def start(self, part: H, *, restart: bool) -> None:
        if part.restarts > 1:
            await asyncio.sleep(PART_START.pause_s(part.restarts))
        part.part.clock.enter(ResourceState.STARTUP, HOST_RESTART if restart else "")
        async with self.leases.hold(part.id, "its start", self.limits.start_s, Expiry.RESTART_PART):
            part.link = part.life = await self.connect(part)
        part.resting = False
        self.started(part)
        self.emit("host_started", part.id, restarts=part.restarts)
        self._notify()

    async def watch(self, part: H) -> str:
        """Wait for the end of the process or of the connection, for bad health, or for the last work of a retired
        host."""
        link = part.link
        assert link is not None, "it has started"
        causes: dict[str, str] = {}
        over = asyncio.Event()

        async def note(what: str, work: Awaitable[str | None]) -> None:
            causes[what] = await work or ""
            over.set()

        async with asyncio.TaskGroup() as tasks:
            process = tasks.create_task(note("process", part.part.wait()), name=f"end of {part.id}")
            watches = [
                tasks.create_task(note("connection", link.lost()), name=f"connection of {part.id}"),
                tasks.create_task(note("health", self._bad_health(part, link)), name=f"health of {part.id}"),
                tasks.create_task(note("emptied", part.emptied()), name=f"last work of {part.id}"),
            ]
            await over.wait()
            if "connection" in causes:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(REAP_S):
                        await asyncio.shield(process)
            for watch in (process, *watches):
                watch.cancel()
        return next(causes[what] for what in ("emptied", "process", "health", "connection") if what in causes)

    def cause(self, part: H, error: RollartError) -> str:
        return error.message.removeprefix(f"{part.id}: ")

    async def lose(self, part: H, cause: str) -> None:
        part.part.clock.enter(ResourceState.DOWN, HOST_DOWN)
        link, part.link = part.link, None
        self.emit("host_lost", part.id, cause=cause, **self.down(part, served=link is not None))
        if link is not None:
            await link.aclose()

    def spare(self, part: H) -> bool:
        return any(other.link or not other.leaving for other in self.hosts.values() if other is not part)

    def check_patience(self, part: H, cause: str, failed: Exception | None, seconds: float) -> None:
        if not isinstance(failed, NoPlace) or seconds >= self.limits.patience_s:
            cause = f"{cause}, after {part.restarts - 1} restarts"
            raise PartDied(part.id, cause, remedy=f"rollart logs --role {part.id}")

    def give_up(self, part: H, cause: str) -> None:
        self.emit("host_given_up", part.id, cause=cause, restarts=self.limits.max_restarts)

    def retired(self, part: H) -> None:
        self.emit("host_retired", part.id, **self.totals(part))

    def _by_use(self) -> list[H]:
        """The hosts that are not retired, the most dispensable first."""
        staying = [host for host in reversed(self.hosts.values()) if not host.leaving]
        return sorted(staying, key=lambda host: (host.up, host.load))

    async def _keep(self, host: H) -> None:
        host.kept = True
        try:
            await self.keep(host)
        finally:
            await self._end(host)

    async def _bad_health(self, host: H, link: HostClient) -> str:
        """Check the host's health periodically until it is bad; returns the cause."""
        limit = self.limits.health_s
        if limit == math.inf:
            await asyncio.Event().wait()
        while True:
            await asyncio.sleep(limit / HEALTH_CHECKS_PER_LIMIT)
            try:
                async with self.leases.hold(link.id, "its health check", limit, Expiry.RESTART_PART):
                    health = await link.health()
            except LeaseExpired:
                return f"it was silent for {limit:g} s"
            except EnvironmentFault as error:
                if error.incident:  # the host ended: its connection and its process give a better cause
                    await asyncio.Event().wait()
                return error.message
            if health.stuck_s >= limit:
                return f"{health.stuck_in or 'something'} blocked all of its episodes for {health.stuck_s:.1f} s"
            if cause := self.memory_cause(host, health):
                return cause
            host.resting = bool(health.left)
            if health.left and (not host.load or len(health.left) >= MAX_HUNG_THREADS):
                many = len(health.left)
                calls = "1 call never ended and holds a thread"
                if many > 1:
                    calls = f"{many} calls never ended and hold its threads"
                return f"{calls} ({health.left[0]})"

    async def _end(self, host: H) -> None:
        """Remove the host for good."""
        if self.hosts.pop(host.id, None) is None:
            return
        self._keeping.pop(host.id, None)
        self.removed(host)
        link, host.link = host.link, None
        try:
            if link is not None:
                await link.aclose()
            await host.part.close()
        finally:
            host.part.clock.close()
            self._notify()

    def _notify(self) -> None:
        self.changed()
        self._changed.set()
        self._changed = asyncio.Event()
        self.on_change()


def loop_time() -> float:
    return asyncio.get_running_loop().time()
