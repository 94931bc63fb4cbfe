"""Environments that live on hosts: the hosts are kept alive, and each episode goes to one that does well."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

from rollart.errors import EnvironmentFault, LeaseExpired, PartDied, RollartError
from rollart.hosted import (
    ENVIRONMENTS_MADE,
    EnvironmentCreation,
    EnvironmentHost,
    EnvironmentOrigin,
    EpisodeImages,
    HostHealth,
)
from rollart.ledger.clock import ResourceClock
from rollart.ledger.intervals import ResourceState
from rollart.policy.hosting import HostRules, HostSelector
from rollart.policy.incidents import IncidentTracker
from rollart.policy.lease import Expiry
from rollart.policy.memory import MemoryAction, MemoryWatch
from rollart.ports import EnvironmentFactory, Recorder, RunEvent
from rollart.runtime.hosted_environment import HostedEnvironment, host_of
from rollart.runtime.hostlife import EnvironmentHostState
from rollart.runtime.hostwatch import HostLimits, HostPart, gather_or_cancel, wait_for_restart_cause
from rollart.runtime.leases import Leases
from rollart.runtime.pictures import ImageResolver
from rollart.runtime.places import HostSlot, HostSlotPool

__all__ = ["EnvironmentHostSupervisor", "HostedEnvironment", "host_of"]

T = TypeVar("T")

HOST_DOWN, HOST_RESTART = "host_down", "host_restart"
"""Why a host's time is lost: it is gone, or it starts once more."""


class EnvironmentHostSupervisor:
    """Owns the hosts, the task that keeps each alive, and the places of episodes.

    `run` starts the hosts and lives as long as they are wanted; `environment` gives environments to trajectories, whose
    `prepare` waits for a place (unblocked by an episode's end or a host's start, under no lease: `runtime.places`);
    `resize`, `spawn` and `retire` may be called by one task at a time while `run` runs. A host that dies, hangs or lies
    is started again; every episode that it held is an `EnvironmentFault` that names it, and no other host is touched.

    Invariant: an episode holds a place on exactly one host, from before its first reset to its close; a host that is
    `leaving` gets none.
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
        self._policy = HostSelector(rules or HostRules())
        self._hosts: dict[str, EnvironmentHostState] = {}
        self._numbers = itertools.chain(range(count), itertools.count(max(count, later)))
        self._episodes = itertools.count()
        self.places: HostSlotPool = HostSlotPool(self._choose, leases, recorder)
        self._pictures = ImageResolver(leases, limits.pull_s, self._seen)
        self._pictured = False
        """Whether any host brings images."""
        self._ends = IncidentTracker()
        self._changed = asyncio.Event()
        self._ready = asyncio.Event()
        self._tasks: asyncio.TaskGroup | None = None
        self._keeping: dict[str, asyncio.Task[None]] = {}
        self.heard: Callable[[], None] = lambda: None
        """Called when a host comes up, goes, or an episode ends."""

    async def run(self) -> None:
        """Start the hosts and keep them alive, for ever. Raises the error of a host that cannot be kept alive."""
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                await self.resize(self._count)
                while not all(host.link for host in self._hosts.values()):
                    await self._changed.wait()
                self._ready.set()
                try:
                    await asyncio.Event().wait()
                finally:  # in their order: a group's own is that of a set
                    for task in list(self._keeping.values()):
                        task.cancel()
        finally:
            self._tasks = None
            self.places.tell()
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

    def where(self) -> Mapping[str, str]:
        """The node of each host that is wanted, '' of one that has none, those that would be missed least first."""
        wanted = [host for host in reversed(self._hosts.values()) if not host.leaving]
        return {host.id: host.part.node for host in sorted(wanted, key=lambda host: (host.up, host.live))}

    def up(self) -> frozenset[str]:
        """Those that take episodes now."""
        return frozenset(name for name, host in self._hosts.items() if host.up)

    async def resize(self, count: int) -> None:
        """As many hosts as that, at least one: new ones are started, or those with the fewest episodes retired."""
        await gather_or_cancel(self.spawn() for _ in range(max(1, count) - self.size))
        while self.size > max(1, count):
            staying = [host for host in self._hosts.values() if not host.leaving]
            self.retire(min(reversed(staying), key=lambda host: host.live).id)

    async def spawn(self) -> str:
        """One host more; its name. It takes episodes once it has started."""
        assert self._tasks is not None, "hosts are added while `run` runs"
        part = await self._make(f"environment-{next(self._numbers)}")
        host = self._hosts[part.id] = EnvironmentHostState(part)
        self._policy.join(part.id)
        self._keeping[part.id] = self._tasks.create_task(self._keep(host), name=f"keep {part.id}")
        return part.id

    def retire(self, name: str) -> None:
        """It gets no more episodes, and ends when its last one has."""
        host = self._hosts[name]
        host.leaving = True
        self.places.lost(host)
        host.changed.set()
        if host.kept and host.link is None:  # it is on its way, perhaps for ever
            self.tell("host_retired", host.id, episodes=host.episodes, faults=host.faults)
            self._keeping[name].cancel()

    def tell(self, kind: str, host: str, **fields: str | int | float | None) -> None:
        self._recorder.event(RunEvent(_now(), kind, host, fields))

    def _choose(self, wanted: frozenset[str]) -> EnvironmentHostState | None:
        """A host with room for an episode: one that has the `wanted` images, rather than another."""
        most, fresh, resting = self._limits.per_host, dict[str, tuple[int, int]](), dict[str, tuple[int, int]]()
        for name, host in self._hosts.items():
            if host.up and not host.draining:
                (resting if host.resting else fresh)[name] = host.live, most
        for room in (fresh, resting):
            missing = {name: len(wanted - self._hosts[name].images) for name in room} if wanted else None
            if (chosen := self._policy.choose(room, _now(), missing)) is not None:
                return self._hosts[chosen]
        return None

    async def call(self, host: EnvironmentHostState, link: EnvironmentHost, work: Awaitable[tuple[T, float]]) -> T:
        """What the host answers; its overhead and its silence are counted."""
        began = _now()
        if not host.calls and host.link is not None:
            host.part.clock.enter(ResourceState.BUSY)
        host.calls += 1
        try:
            result, env_s = await work
        except EnvironmentFault as fault:
            raise self.known(host, link, fault) from None
        finally:
            host.calls -= 1
            if not host.calls and host.link is not None:
                host.part.clock.enter(ResourceState.IDLE)
        if self._hosts.get(host.id) is host:
            self._left_alone(host, self._policy.called(host.id, max(0.0, _now() - began - env_s), _now()))
        return result

    def made(self, host: EnvironmentHostState, domain: str, made: EnvironmentOrigin) -> None:
        """An episode has its environment: events have sums, at the 1st, 2nd, 4th ... and when the host ends."""
        making = host.making.setdefault(domain, EnvironmentCreation())
        making.add(made)
        if made.how != "again" and not making.episodes & (making.episodes - 1):
            self._tell_making(host, domain, making)

    def _tell_making(self, host: EnvironmentHostState, domain: str, making: EnvironmentCreation) -> None:
        self.tell(ENVIRONMENTS_MADE, host.id, domain=domain, **dataclasses.asdict(making))

    def known(self, host: EnvironmentHostState, link: EnvironmentHost, fault: EnvironmentFault) -> EnvironmentFault:
        """The fault as others are to know it: the end of a host is its node's, where that took others too."""
        if not fault.incident:
            return fault
        if host.taken is None and host.link is link:
            host.taken = host.live
        return EnvironmentFault(fault.host, fault.what, incident=self._ended(host, link))

    def _ended(self, host: EnvironmentHostState, link: EnvironmentHost) -> str:
        return self._ends.of(link.life, host.id, link.node, _now())

    async def wanted(self, domain: str, seed: int, owner: str) -> frozenset[str]:
        """Images that an episode needs on its host before it is reset; none, mostly."""
        if not self._pictured:
            return frozenset()
        links = [host.link for host in self._hosts.values() if host.up and host.link is not None]
        return await self._pictures.wanted(links, domain, seed, owner)

    def _seen(self, link: EnvironmentHost, said: EpisodeImages) -> None:
        if (host := self._hosts.get(link.id)) is not None:
            host.images = said.there

    async def pull(
        self, host: EnvironmentHostState, link: EnvironmentHost, episode: str, domain: str, seed: int, owner: str
    ) -> None:
        """The host has the episode's images. Bounded by a lease of its own: a reset's is too short for it."""
        with self._leases.hold(owner, f"images of its environment on {host.id}", self._limits.pull_s, Expiry.GAP_FILL):
            try:
                said, seconds = await link.images(episode, domain, seed, pull=True)
            except EnvironmentFault as fault:
                raise self.known(host, link, fault) from None
        host.images = said.there
        making = host.making.setdefault(domain, EnvironmentCreation())
        making.pulled, making.pull_s = making.pulled + said.pulled, making.pull_s + seconds * bool(said.pulled)

    def hangs(self, began: float) -> bool:
        """Whether a call that is given up now was given up because it took too long."""
        return _now() - began >= self._limits.call_s * (1 - 1e-6)

    def leave(self, place: HostSlot, *, fault: bool) -> None:
        """An episode is over: its place is free."""
        host, alive = place.host, place.link.alive
        host.episodes += 1
        host.faults += fault
        host.restarts = 0 if alive and not fault else host.restarts
        if self._hosts.get(host.id) is host:
            self._left_alone(host, self._policy.ended(host.id, fault=fault, now=_now()))
        self.places.free(place)
        host.changed.set()

    def _left_alone(self, host: EnvironmentHostState, cause: str | None) -> None:
        if cause is not None:
            self.tell("host_quarantined", host.id, cause=cause, seconds=self._policy.standing[host.id].back_off_s)

    async def _keep(self, host: EnvironmentHostState) -> None:
        """Start the host, watch it, start it again; until it retires or is given up."""
        host.kept = True
        cause, failed, since = "", None, _now()
        try:
            while not host.leaving:
                try:
                    await self._start(host, HOST_RESTART if cause else "")
                    assert host.link is not None
                    if host.restarts > self._limits.max_restarts:  # what it lacked was a node
                        host.restarts = 0
                    memory = functools.partial(self._heavy, host, MemoryWatch(self._limits.memory))
                    cause = await wait_for_restart_cause(host, host.part, host.link, self._leases, self._limits, memory)
                    failed, since = None, _now()
                except (PartDied, LeaseExpired, EnvironmentFault) as error:
                    cause, failed = error.message.removeprefix(f"{host.id}: "), error
                if not cause:
                    break
                await self._lose(host, cause)
                host.restarts += 1
                if host.restarts > self._limits.max_restarts:
                    if any(other.stays for other in self._hosts.values() if other is not host):
                        self.tell("host_given_up", host.id, cause=cause, restarts=self._limits.max_restarts)
                        return
                    if not self._limits.waits(failed, _now() - since):
                        raise PartDied(
                            host.id,
                            f"{cause}, after {host.restarts - 1} restarts",
                            remedy=f"rollart logs --role {host.id}",
                        )
                if host.restarts > 1:
                    await asyncio.sleep(min(0.25 * 2 ** min(host.restarts, 8), 5.0))
            self.tell("host_retired", host.id, episodes=host.episodes, faults=host.faults)
        finally:
            await self._end(host)

    async def _start(self, host: EnvironmentHostState, cause: str) -> None:
        host.part.clock.enter(ResourceState.STARTUP, cause)
        async with self._leases.hold(host.id, "its start", self._limits.start_s, Expiry.RESTART_PART):
            host.link = host.life = await host.part.start()
        self._pictured = self._pictured or bool(host.link.image_domains)
        host.live, host.taken, host.resting, host.draining = 0, None, False, False
        host.part.clock.enter(ResourceState.IDLE)
        self._policy.restarted(host.id)
        self.tell("host_started", host.id, restarts=host.restarts)
        self._notify()

    def _heavy(self, host: EnvironmentHostState, watch: MemoryWatch, health: HostHealth) -> str:
        """Why the host is to be started again for its memory, in words; '' if it is not, or not yet."""
        node = "" if host.life is None else host.life.node
        here = sum(other.life is not None and other.life.node == node for other in self._hosts.values())
        bound = watch.rules.bound(health.machine, here)
        verdict = watch.check(health.memory, bound, host.live, _now())
        if verdict is MemoryAction.KEEP:
            return ""
        figures = f"its memory is {health.memory / 1e9:.2f} GB, its bound {bound / 1e9:.2f} GB"
        played = f"; it played {', '.join(sorted(host.making))}" if host.making else ""
        cause = f"{figures} ({watch.rules.describe(health.machine, here)}){played}"
        if verdict is MemoryAction.RESTART:
            return cause
        host.draining = True
        self.tell("host_draining", host.id, cause=cause, episodes=host.live)
        self.places.lost(host)
        return ""

    async def _lose(self, host: EnvironmentHostState, cause: str) -> None:
        """Its episodes learn of it from the connection's end."""
        host.part.clock.enter(ResourceState.DOWN, HOST_DOWN)
        link, host.link = host.link, None
        if link is not None:
            self._ended(host, link)
        self.places.lost(host)
        taken = 0 if link is None else host.live if host.taken is None else host.taken
        self.tell("host_lost", host.id, cause=cause, episodes=taken)
        if link is not None:
            await link.aclose()

    async def _end(self, host: EnvironmentHostState) -> None:
        """It is gone for good."""
        if self._hosts.pop(host.id, None) is None:
            return
        self._keeping.pop(host.id, None)
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
        self.places.look()
        self._changed.set()
        self._changed = asyncio.Event()
        self.heard()


def _now() -> float:
    return asyncio.get_running_loop().time()
