"""Environments that live on hosts: the hosts are kept alive, and each episode goes to one that does well."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

from rollart.errors import EnvironmentFault, LeaseExpired, PartDied, RollartError
from rollart.hosted import ENVIRONMENTS_MADE, EnvironmentHost, Made, Making
from rollart.ledger.clock import ResourceClock
from rollart.ledger.intervals import State
from rollart.model import Observation, Step
from rollart.policy.hosting import Hosting, HostRules
from rollart.policy.lease import Expiry
from rollart.ports import EnvironmentFactory, Recorder, RunEvent
from rollart.runtime.hostwatch import HostLimits, HostPart, trouble
from rollart.runtime.leases import Leases

__all__ = ["HostFleet", "HostedEnvironment", "host_of"]

T = TypeVar("T")

HOST_DOWN, HOST_RESTART = "host_down", "host_restart"
"""Why a host's time is lost: it is gone, or it starts once more."""


@dataclass(slots=True)
class _Host:
    part: HostPart
    link: EnvironmentHost | None = None
    """While it serves."""
    live: int = 0
    calls: int = 0
    taken: int | None = None
    """Episodes that it held when it ended, as the first of them learned."""
    resting: bool = False
    """It gets none while another does not rest either: it is to be started again once it is empty."""
    leaving: bool = False
    """It gets no more episodes."""
    restarts: int = 0
    faults: int = 0
    episodes: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    images: frozenset[str] = frozenset()
    """That it has, as far as is known."""
    making: dict[str, Making] = field(default_factory=dict)
    """By domain."""

    @property
    def id(self) -> str:
        return self.part.id

    @property
    def up(self) -> bool:
        """Whether it takes episodes. One that broke is none that is empty."""
        return self.link is not None and self.link.alive and not self.leaving

    async def emptied(self) -> None:
        while self.live or not self.leaving:
            self.changed.clear()
            await self.changed.wait()


class HostFleet:
    """Owns the hosts, the task that keeps each alive, and the places of episodes.

    `run` starts the hosts and lives as long as they are wanted; `environment` gives environments to trajectories, whose
    `reset` waits for a place (unblocked by an episode's end or a host's start, bounded by the caller's lease);
    `resize`, `spawn` and `retire` may be called by one task at a time while `run` runs. A host that dies, hangs or lies
    is started again; every episode that it held is an `EnvironmentFault` that names it, and no other host is touched.

    Invariant: an episode holds a place on exactly one host, from its first reset to its close; a host that is `leaving`
    gets none.
    """

    def __init__(
        self,
        make: Callable[[str], Awaitable[HostPart]],
        count: int,
        *,
        leases: Leases,
        recorder: Recorder,
        limits: HostLimits,
        rules: HostRules | None = None,
        later: int = 0,
    ) -> None:
        """`make`: the part of a name. The first hosts are numbered from 0, as in the run's earlier lives; those that
        come later from `later` on, which none had."""
        self._make = make
        self._count = count
        self._leases = leases
        self._recorder = recorder
        self._limits = limits
        self._policy = Hosting(rules or HostRules())
        self._hosts: dict[str, _Host] = {}
        self._numbers = itertools.chain(range(count), itertools.count(max(count, later)))
        self._episodes = itertools.count()
        self._changed = asyncio.Event()
        self._ready = asyncio.Event()
        self._tasks: asyncio.TaskGroup | None = None

    async def run(self) -> None:
        """Start the hosts and keep them, for ever. Raises what says that they cannot be kept."""
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
        """Returns once every host of the start serves."""
        await self._ready.wait()

    def environment(self, domain: str) -> EnvironmentFactory:
        return lambda: HostedEnvironment(self, domain, f"{domain}-{next(self._episodes)}")

    @property
    def size(self) -> int:
        """Hosts that are wanted, whether they serve or are on their way."""
        return sum(not host.leaving for host in self._hosts.values())

    @property
    def clocks(self) -> list[ResourceClock]:
        return [host.part.clock for host in self._hosts.values()]

    def faults(self) -> dict[str, int]:
        """Episodes that ended in a fault, by host."""
        return {name: host.faults for name, host in self._hosts.items()}

    async def resize(self, count: int) -> None:
        """As many hosts as that, at least one: new ones are started, or those with the fewest episodes retired."""
        await asyncio.gather(*(self.spawn() for _ in range(max(1, count) - self.size)))
        while self.size > max(1, count):
            staying = [host for host in self._hosts.values() if not host.leaving]
            self.retire(min(reversed(staying), key=lambda host: host.live).id)

    async def spawn(self) -> str:
        """One host more; its name. It takes episodes once it has started."""
        assert self._tasks is not None, "hosts are added while `run` runs"
        part = await self._make(f"environment-{next(self._numbers)}")
        host = self._hosts[part.id] = _Host(part)
        self._policy.join(part.id)
        self._tasks.create_task(self._keep(host), name=f"keep {part.id}")
        return part.id

    def retire(self, name: str) -> None:
        """It gets no more episodes, and ends when its last one has."""
        host = self._hosts[name]
        host.leaving = True
        host.changed.set()

    def tell(self, kind: str, host: str, **fields: str | int | float | None) -> None:
        self._recorder.event(RunEvent(_now(), kind, host, fields))

    async def place(self, wanted: frozenset[str] = frozenset()) -> _Host:
        """The host of a new episode, which holds a place there from now on: one that has the `wanted` images, rather
        than another."""
        while True:
            up = [host for host in self._hosts.values() if host.up]
            missing = {host.id: len(wanted - host.images) for host in up} if wanted else None
            name = None
            for hosts in ([host for host in up if not host.resting], up):
                room = {host.id: (host.live, self._limits.per_host) for host in hosts}
                name = name or self._policy.choose(room, _now(), missing)
            if name is not None:
                self._hosts[name].live += 1
                return self._hosts[name]
            changed = self._changed
            await changed.wait()

    async def call(self, host: _Host, work: Awaitable[tuple[T, float]]) -> T:
        """What the host answers; its overhead and its silence are counted."""
        began = _now()
        if not host.calls and host.link is not None:
            host.part.clock.enter(State.BUSY)
        host.calls += 1
        try:
            result, env_s = await work
        except EnvironmentFault as fault:
            if fault.incident and host.taken is None:
                host.taken = host.live
            raise
        finally:
            host.calls -= 1
            if not host.calls and host.link is not None:
                host.part.clock.enter(State.IDLE)
        if self._hosts.get(host.id) is host:
            self._left_alone(host, self._policy.called(host.id, max(0.0, _now() - began - env_s), _now()))
        return result

    def made(self, host: _Host, domain: str, made: Made) -> None:
        """An episode has its environment: told in sums, at the 1st, 2nd, 4th ... and when the host ends."""
        making = host.making.setdefault(domain, Making())
        making.add(made)
        if made.how != "again" and not making.episodes & (making.episodes - 1):
            self._tell_making(host, domain, making)

    def _tell_making(self, host: _Host, domain: str, making: Making) -> None:
        self.tell(ENVIRONMENTS_MADE, host.id, domain=domain, **dataclasses.asdict(making))

    def pictured(self, domain: str) -> bool:
        """Whether its episodes need images that hosts bring."""
        return any(host.link is not None and domain in host.link.pictured for host in self._hosts.values())

    async def placed(self, domain: str, seed: int, owner: str) -> _Host | None:
        """The host of an episode that needs images, which holds a place there from now on; None if it needs none."""
        with self._leases.hold(owner, "a host for its environment", self._limits.pull_s, Expiry.GAP_FILL):
            wanted = await self._wanted(domain, seed)
            return await self.place(wanted) if wanted else None

    async def _wanted(self, domain: str, seed: int) -> frozenset[str] | None:
        """Images that an episode needs; None where none are brought. Any host knows."""
        host = next((host for host in self._hosts.values() if host.up), None)
        if host is None or host.link is None or domain not in host.link.pictured:
            return None
        (said, _) = await host.link.images("", domain, seed, pull=False)
        host.images = said.there
        return frozenset(said.wanted)

    async def pull(self, host: _Host, link: EnvironmentHost, episode: str, domain: str, seed: int, owner: str) -> None:
        """The host has the episode's images. Bounded by a lease of its own: a reset's is too short for it."""
        with self._leases.hold(owner, f"images of its environment on {host.id}", self._limits.pull_s, Expiry.GAP_FILL):
            said, seconds = await link.images(episode, domain, seed, pull=True)
        host.images = said.there
        making = host.making.setdefault(domain, Making())
        making.pulled, making.pull_s = making.pulled + said.pulled, making.pull_s + seconds * bool(said.pulled)

    def hangs(self, began: float) -> bool:
        """Whether a call that is given up now was given up because it took too long."""
        return _now() - began >= self._limits.call_s * (1 - 1e-6)

    def leave(self, host: _Host, *, fault: bool, alive: bool) -> None:
        """An episode is over: its place is free. `alive`: its life of the host is not."""
        host.live -= 1
        host.episodes += 1
        host.faults += fault
        host.restarts = 0 if alive and not fault else host.restarts
        if self._hosts.get(host.id) is host:
            self._left_alone(host, self._policy.ended(host.id, fault=fault, now=_now()))
        host.changed.set()
        self._notify()

    def _left_alone(self, host: _Host, cause: str | None) -> None:
        if cause is not None:
            self.tell("host_quarantined", host.id, cause=cause, seconds=self._policy.standing[host.id].back_off_s)

    async def _keep(self, host: _Host) -> None:
        """Start the host, watch it, start it again; until it retires or is given up."""
        cause = ""
        try:
            while not host.leaving:
                try:
                    await self._start(host, HOST_RESTART if cause else "")
                    assert host.link is not None
                    cause = await trouble(host, host.part, host.link, self._leases, self._limits)
                except (PartDied, LeaseExpired, EnvironmentFault) as error:
                    cause = error.message.removeprefix(f"{host.id}: ")
                if not cause:
                    break
                await self._lose(host, cause)
                host.restarts += 1
                if host.restarts > self._limits.max_restarts:
                    if not any(h.link for h in self._hosts.values()):
                        raise PartDied(host.id, f"{cause}, after {self._limits.max_restarts} restarts",
                                       remedy=f"rollart logs --role {host.id}")  # fmt: skip
                    self.tell("host_given_up", host.id, cause=cause, restarts=self._limits.max_restarts)
                    return
                if host.restarts > 1:
                    await asyncio.sleep(min(0.25 * 2**host.restarts, 5.0))
            self.tell("host_retired", host.id, episodes=host.episodes, faults=host.faults)
        finally:
            await self._end(host)

    async def _start(self, host: _Host, cause: str) -> None:
        host.part.clock.enter(State.STARTUP, cause)
        async with self._leases.hold(host.id, "its start", self._limits.start_s, Expiry.RESTART_PART):
            host.link = await host.part.start()
        host.taken, host.resting = None, False
        host.part.clock.enter(State.IDLE)
        self._policy.restarted(host.id)
        self.tell("host_started", host.id, restarts=host.restarts)
        self._notify()

    async def _lose(self, host: _Host, cause: str) -> None:
        """Its episodes learn of it from the connection's end."""
        host.part.clock.enter(State.DOWN, HOST_DOWN)
        link, host.link = host.link, None
        self.tell("host_lost", host.id, cause=cause, episodes=host.live if host.taken is None else host.taken)
        if link is not None:
            await link.aclose()

    async def _end(self, host: _Host) -> None:
        """It is gone for good."""
        if self._hosts.pop(host.id, None) is None:
            return
        self._policy.leave(host.id, _now())
        for domain, making in host.making.items():
            self._tell_making(host, domain, making)
        link, host.link = host.link, None
        try:
            if link is not None:
                await link.aclose()
            await host.part.close()
        finally:
            host.part.clock.close()
            self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class HostedEnvironment:
    """Implements `ports.Environment`: one episode on one host, chosen at its first reset and kept until its close."""

    __slots__ = ("_domain", "_episode", "_fault", "_fleet", "_host", "_link")

    def __init__(self, fleet: HostFleet, domain: str, episode: str) -> None:
        self._fleet, self._domain, self._episode = fleet, domain, episode
        self._host: _Host | None = None
        self._link: EnvironmentHost | None = None
        self._fault = False

    @property
    def host(self) -> str:
        """Where it lives; '' before its first reset and after its close."""
        return "" if self._host is None else self._host.id

    async def prepare(self, seed: int, owner: str) -> None:
        """It has a host with its images, if it needs any: before the reset, whose time that is not."""
        if self._host is not None or not self._fleet.pictured(self._domain):
            return
        if (host := await self._fleet.placed(self._domain, seed, owner)) is None:
            return
        self._host, self._link = host, host.link
        assert self._link is not None
        try:
            await self._fleet.pull(host, self._link, self._episode, self._domain, seed, owner)
        except Exception:
            self._fault = True
            raise

    async def reset(self, seed: int) -> Observation:
        if self._host is None:
            self._host = await self._fleet.place()
            self._link = self._host.link
        assert self._link is not None
        shown, made = await self._call(self._host, self._link.reset(self._episode, self._domain, seed))
        self._fleet.made(self._host, self._domain, made)
        return shown

    async def step(self, action: str) -> Step:
        if self._host is None or self._link is None:
            raise RuntimeError("step before reset")
        return await self._call(self._host, self._link.step(self._episode, action))

    async def close(self) -> None:
        host, link = self._host, self._link
        self._host = self._link = None
        if host is None or link is None:
            return
        try:
            await link.close(self._episode)
        except EnvironmentFault as fault:
            if not fault.incident:  # else it is gone with its host
                raise
        finally:
            self._fleet.leave(host, fault=self._fault, alive=link.alive)

    async def _call(self, host: _Host, work: Awaitable[tuple[T, float]]) -> T:
        began = _now()
        try:
            return await self._fleet.call(host, work)
        except EnvironmentFault:
            self._fault = True
            raise
        except asyncio.CancelledError:
            self._fault = self._fault or self._fleet.hangs(began)
            raise


def host_of(environment: object) -> str:
    """The host that an environment lives on; '' in the controller."""
    return environment.host if isinstance(environment, HostedEnvironment) else ""


def _now() -> float:
    return asyncio.get_running_loop().time()
