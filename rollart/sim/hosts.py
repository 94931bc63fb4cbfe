"""Environment hosts on virtual time: the parts of the product's own fleet (`runtime.hosting`), which selects among
them, keeps them alive and counts the losses of their failures as in a run."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from rollart.errors import EnvironmentFault, one_line
from rollart.hosted import EnvironmentOrigin, EpisodeImages, HostHealth
from rollart.ledger.clock import ResourceClock
from rollart.model import Observation, Step
from rollart.ports import Environment, Recorder
from rollart.runtime.crews import HostAutoscaler
from rollart.runtime.hosting import EnvironmentHostSupervisor
from rollart.runtime.hostwatch import HostLimits
from rollart.runtime.leases import Leases
from rollart.sim.environments import SimulatedHost
from rollart.sim.machines import HostReservation

__all__ = ["START_S", "ModelledHost", "ModelledHosts", "ModelledHostInstance", "run_autoscaled_hosts"]

T = TypeVar("T")

DOWN_CAUSE = "its machine went down"

START_S = 1e6
"""Longest wait for a machine that is down, in virtual seconds."""

COLD_START = EnvironmentOrigin("cold", 0.0)

HostedEnvironmentFactory = Callable[[SimulatedHost], Environment]
"""An environment on a host."""


class ModelledHostInstance:
    """Implements `EnvironmentHost`: a host from one start to its end. The end unblocks its calls."""

    image_domains: frozenset[str] = frozenset()

    def __init__(
        self, host: SimulatedHost, make: Mapping[str, HostedEnvironmentFactory], number: int, *, node: str = ""
    ) -> None:
        self._host, self._make = host, make
        self._node = node or host.node or host.name
        self.life = f"{host.name} of life {number}"
        self.episodes: dict[str, Environment] = {}
        self.most = 0
        """The most episodes that it held at a time."""
        self._calls: dict[asyncio.Task[object], None] = {}  # the order of a set differs between runs
        self._over: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    @property
    def id(self) -> str:
        return self._host.name

    @property
    def node(self) -> str:
        return self._node

    @property
    def alive(self) -> bool:
        return not self._over.done()

    async def reset(self, episode: str, domain: str, seed: int) -> tuple[tuple[Observation, EnvironmentOrigin], float]:
        if self.alive and episode not in self.episodes:
            self.episodes[episode] = self._make[domain](self._host)
            self.most = max(self.most, len(self.episodes))
        began = _now()
        shown = await self._call(lambda: self.episodes[episode].reset(seed))
        return (shown, COLD_START), _now() - began

    async def step(self, episode: str, action: str) -> tuple[Step, float]:
        began = _now()
        step = await self._call(lambda: self.episodes[episode].step(action))
        return step, _now() - began

    async def close(self, episode: str) -> None:
        try:
            if (environment := self.episodes.get(episode)) is not None:
                await environment.close()
        finally:
            self.episodes.pop(episode, None)
        if not self.alive:
            raise self._error()

    async def images(self, episode: str, domain: str, seed: int, *, pull: bool) -> tuple[EpisodeImages, float]:
        raise EnvironmentFault(self.id, f"no images of domain '{domain}' here")

    async def health(self) -> HostHealth:
        return HostHealth(len(self.episodes))

    async def lost(self) -> str:
        return await asyncio.shield(self._over)

    async def aclose(self) -> None:
        self.end("its connection was closed")

    def end(self, cause: str) -> None:
        """End the host: its calls fail with `cause`."""
        if self.alive:
            self._over.set_result(cause)
            for task in list(self._calls):
                task.cancel()

    async def _call(self, work: Callable[[], Awaitable[T]]) -> T:
        if not self.alive:
            raise self._error()
        task = asyncio.current_task()
        assert task is not None
        before = task.cancelling()
        self._calls[task] = None
        try:
            return await work()
        except asyncio.CancelledError:
            # A cancellation of the task itself, or by a lease, in the same instant stays a cancellation.
            if not self._over.done() or task.uncancel() > before:
                raise
            raise self._error() from None
        except Exception as error:
            if self._over.done():
                raise self._error() from None
            raise EnvironmentFault(self.id, f"raised {one_line(error, 500)}") from None
        finally:
            self._calls.pop(task, None)

    def _error(self) -> EnvironmentFault:
        return EnvironmentFault(self.id, self._over.result(), incident=self.life)


class ModelledHost:
    """Implements `hostwatch.HostPart`: a process that runs whenever its machine is up; with a `room`, on any machine
    with free devices."""

    def __init__(
        self,
        host: SimulatedHost,
        make: Mapping[str, HostedEnvironmentFactory],
        clock: ResourceClock,
        *,
        start_s: float = 0.0,
        room: HostReservation | None = None,
    ) -> None:
        self.host, self._make, self._clock, self._start_s = host, make, clock, start_s
        self.lives: list[ModelledHostInstance] = []
        self._changed = asyncio.Event()
        host.on_change = self._watch
        self._room = room
        if room is not None:
            room.on_change = self._watch

    @property
    def id(self) -> str:
        return self.host.name

    @property
    def clock(self) -> ResourceClock:
        return self._clock

    @property
    def node(self) -> str:
        return self.host.node if self._room is None else self._room.machine

    async def start(self) -> ModelledHostInstance:
        while True:
            while not self._there():
                self._changed.clear()
                await self._changed.wait()
            await asyncio.sleep(self._start_s)
            if self._there():
                break
        self.lives.append(ModelledHostInstance(self.host, self._make, len(self.lives), node=self.node))
        return self.lives[-1]

    async def wait(self) -> str:
        return await self.lives[-1].lost()

    async def close(self) -> None:
        self.host.on_change = None
        if self._room is not None:
            self._room.on_change = lambda _: None
            self._room.leave()

    def _there(self) -> bool:
        return self.host.up and (self._room is None or self._room.take())

    def _watch(self, up: bool) -> None:
        if not up and self.lives:
            self.lives[-1].end(DOWN_CAUSE)
        self._changed.set()


@dataclass
class ModelledHosts:
    """The hosts of one simulated run. `environment` returns a domain's environment factory; call `open` once the run's
    leases exist. A fleet that grows beyond `hosts` gets additional machines, or with `room` the machines with free
    devices."""

    hosts: Sequence[SimulatedHost]
    make: dict[str, HostedEnvironmentFactory]
    """By domain; it may be filled until the run begins."""
    limits: HostLimits
    start_s: float = 0.0
    count: int | None = None
    """The initial number, if not all of `hosts`."""
    later: int = 0
    """The first number of hosts that are added later."""
    room: Callable[[str], Awaitable[HostReservation]] | None = None
    """Reserves devices on a machine. `RollartError` if none are found in time."""
    fleet: EnvironmentHostSupervisor = field(init=False)
    parts: dict[str, ModelledHost] = field(default_factory=dict)

    def environment(self, domain: str) -> Callable[[], Environment]:
        return lambda: self.fleet.environment(domain)()

    def open(self, leases: Leases, recorder: Recorder) -> EnvironmentHostSupervisor:
        """The fleet, not running yet. Its hosts have the names of these machines."""
        given = {f"environment-{n}": host for n, host in enumerate(self.hosts)}

        async def part(name: str) -> ModelledHost:
            host = given.get(name) or SimulatedHost(name)
            room = None if self.room is None else await self.room(name)
            now = asyncio.get_running_loop().time
            clock = ResourceClock(role="environment", resource=host.name, recorder=recorder, clock=now)
            made = self.parts[host.name] = ModelledHost(host, self.make, clock, start_s=self.start_s, room=room)
            return made

        count = len(self.hosts) if self.count is None else self.count
        self.fleet = EnvironmentHostSupervisor(
            part, count, leases=leases, recorder=recorder, limits=self.limits, later=self.later
        )
        return self.fleet


async def run_autoscaled_hosts(
    fleet: EnvironmentHostSupervisor, keepers: Callable[[EnvironmentHostSupervisor], Sequence[HostAutoscaler]]
) -> None:
    """Run the hosts and, once the initial hosts serve, the tasks that keep their number. These tasks end first: a host
    that is starting needs the fleet."""
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(fleet.run(), name="hosts of environments")
        await fleet.ready()
        async with asyncio.TaskGroup() as keeping:
            for keeper in keepers(fleet):
                keeping.create_task(keeper.run(), name="keep the number of hosts")


def _now() -> float:
    return asyncio.get_running_loop().time()
