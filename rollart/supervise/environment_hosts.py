"""Environments on hosts: supervision of the hosts, and assignment of each episode to a healthy host.

One episode on an environment host, behind the same port as an environment in the controller.

Container images that an episode needs: the environment hosts name them, once per prompt.

Preparation of an episode before its reset: the wait for a slot on a host, separate from the wait for the reset.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import itertools
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
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
from rollart.leases import Expiry, Leases
from rollart.ledger.intervals import ResourceClock, ResourceState
from rollart.model import Observation, Step
from rollart.policy.host_slots import PlacementRequest
from rollart.policy.hosts import HostRules, HostSelector, MemoryAction, MemoryWatch
from rollart.policy.incidents import IncidentTracker
from rollart.ports import Environment, EnvironmentFactory, Recorder, RunEvent
from rollart.supervise.host_slots import EnvironmentHostState, HostSlot, HostSlotPool
from rollart.supervise.supervisor import HostLimits, HostPart, gather_or_cancel, wait_for_restart_cause

R = TypeVar("R")

DEFAULT_PLACEMENT_REQUEST = PlacementRequest()
"""The request of an environment that is reset without `prepare`."""


class HostedEnvironment:
    """Implements `ports.Environment`: one episode on one host, chosen before its first reset and kept until its
    close."""

    __slots__ = ("_domain", "_episode", "_fault", "_fleet", "_place")

    def __init__(self, fleet: EnvironmentHostSupervisor, domain: str, episode: str) -> None:
        self._fleet, self._domain, self._episode = fleet, domain, episode
        self._place: HostSlot | None = None
        self._fault = False

    @property
    def host(self) -> str:
        """The host of the episode; '' before it has a slot and after its close."""
        return "" if self._place is None else self._place.host.id

    async def prepare(
        self,
        seed: int,
        owner: str,
        wish: PlacementRequest = DEFAULT_PLACEMENT_REQUEST,
        give_up: Callable[[], None] | None = None,
    ) -> None:
        """Wait for a slot on a host, and for the episode's images there, if it needs any. This precedes the reset and
        is not part of its time. `give_up` is for prefetched episodes: it is called, at most once and not after `keep`,
        when the episode must close to free its slot for another."""
        if self._place is not None:
            return
        wanted = await self._fleet.wanted(self._domain, seed, owner)
        place = self._place = await self._fleet.places.take(wish, owner, wanted=wanted, give_up=give_up)
        if not wanted and not await self._fleet.wanted(self._domain, seed, owner):  # first: perhaps no host was up
            return
        try:
            await self._fleet.pull(place.host, place.link, self._episode, self._domain, seed, owner)
        except Exception:
            self._fault = True
            raise

    def keep(self) -> None:
        """Mark the episode in use: its trajectory runs."""
        if self._place is not None:
            self._fleet.places.keep(self._place)

    async def reset(self, seed: int) -> Observation:
        if self._place is None:
            self._place = await self._fleet.places.take(DEFAULT_PLACEMENT_REQUEST, self._episode)
        place = self._place
        shown, made = await self._call(place, place.link.reset(self._episode, self._domain, seed))
        self._fleet.made(place.host, self._domain, made)
        return shown

    async def step(self, action: str) -> Step:
        if self._place is None:
            raise RuntimeError("step before reset")
        return await self._call(self._place, self._place.link.step(self._episode, action))

    async def close(self) -> None:
        place, self._place = self._place, None
        if place is None:
            return
        try:
            await place.link.close(self._episode)
        except EnvironmentFault as fault:
            if not fault.incident:  # with an incident, the episode ended with its host
                raise
        finally:
            self._fleet.leave(place, fault=self._fault)

    async def _call(self, place: HostSlot, work: Awaitable[tuple[R, float]]) -> R:
        began = _episode_now()
        try:
            return await self._fleet.call(place.host, place.link, work)
        except EnvironmentFault:
            self._fault = True
            raise
        except asyncio.CancelledError:
            self._fault = self._fault or self._fleet.hangs(began)
            raise


def host_of(environment: object) -> str:
    """The host of an environment; '' for an environment in the controller."""
    return environment.host if isinstance(environment, HostedEnvironment) else ""


def _episode_now() -> float:
    return asyncio.get_running_loop().time()


REMEMBERED_PROMPTS = 4096
"""Number of prompts whose images are cached: those of a few batches."""

MAX_CONCURRENT_QUERIES = 16
"""Maximum concurrent queries, over all hosts. An environment names its images on its host's event loop, and blocks the
host's other episodes meanwhile."""


class ImageResolver:
    """Any task may call `wanted`. It waits for a host's response, or for a pending query of the same prompt, under a
    lease of the calling episode. Queries rotate over the hosts; if a host ends, the next one is queried. Invariant: a
    prompt has at most one query at a time, and none while it is cached."""

    def __init__(self, leases: Leases, pull_s: float, seen: Callable[[EnvironmentHost, EpisodeImages], None]) -> None:
        """`seen` is called with each host and its answer, which includes the images that it has."""
        self._leases = leases
        self._pull_s = pull_s
        self._seen = seen
        self._known: OrderedDict[tuple[str, int], frozenset[str]] = OrderedDict()
        self._asking: dict[tuple[str, int], asyncio.Event] = {}
        self._room = asyncio.Semaphore(MAX_CONCURRENT_QUERIES)
        self._turn = 0

    async def wanted(self, links: Sequence[EnvironmentHost], domain: str, seed: int, owner: str) -> frozenset[str]:
        """Images that an episode needs; none if no host can pull images for its domain. `links`: serving hosts."""
        able = [link for link in links if domain in link.image_domains]
        if not able:
            return frozenset()
        key = domain, seed
        with self._leases.hold(owner, "a host to name the images of its environment", self._pull_s, Expiry.GAP_FILL):
            while (event := self._asking.get(key)) is not None:
                await event.wait()
            if (found := self._known.get(key)) is not None:
                self._known.move_to_end(key)
                return found
            event = self._asking[key] = asyncio.Event()
            try:
                async with self._room:
                    found = self._known[key] = await self._ask(able, domain, seed)
            finally:
                del self._asking[key]
                event.set()
            while len(self._known) > REMEMBERED_PROMPTS:
                self._known.popitem(last=False)
            return found

    async def _ask(self, links: Sequence[EnvironmentHost], domain: str, seed: int) -> frozenset[str]:
        self._turn += 1
        for number in range(len(links)):
            link = links[(self._turn + number) % len(links)]
            try:
                (said, _) = await link.images("", domain, seed, pull=False)
            except EnvironmentFault as fault:
                if not fault.incident or number == len(links) - 1:
                    raise
            else:
                self._seen(link, said)
                return frozenset(said.wanted)
        raise AssertionError("somebody was asked")


T = TypeVar("T")

HOST_DOWN, HOST_RESTART = "host_down", "host_restart"
"""Causes of a host's lost time: it is down, or it restarts."""


class EnvironmentHostSupervisor:
    """Owns the hosts, the supervising task of each host, and the slots of episodes.

    `run` starts the hosts and runs until it is cancelled. `environment` gives environments to trajectories, whose
    `prepare` waits for a slot, without a lease (`supervise.host_slots`); the end of an episode or the start of a host
    unblocks it. `resize`, `spawn` and `retire` may be called by one task at a time while `run` runs. A host that dies,
    hangs or violates the protocol is restarted: each of its episodes ends in an `EnvironmentFault` that names the host,
    and no other host is affected.

    Invariant: an episode holds a slot on exactly one host, from before its first reset until its close. A host that is
    `leaving` gets no episodes.
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
        """`make`: makes the part of a given name. The initial hosts are numbered from 0, as before a resume. Added
        hosts are numbered from `later` on: no host of the run has had those numbers."""
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
        """True if any host has domains with images."""
        self._ends = IncidentTracker()
        self._changed = asyncio.Event()
        self._ready = asyncio.Event()
        self._tasks: asyncio.TaskGroup | None = None
        self._keeping: dict[str, asyncio.Task[None]] = {}
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
                try:
                    await asyncio.Event().wait()
                finally:  # in order of start: a TaskGroup cancels in the order of a set
                    for task in list(self._keeping.values()):
                        task.cancel()
        finally:
            self._tasks = None
            self.places.tell()
            with contextlib.suppress(RollartError):
                await asyncio.gather(*(self._end(host) for host in list(self._hosts.values())))

    async def ready(self) -> None:
        """Returns once every initial host serves."""
        await self._ready.wait()

    def environment(self, domain: str) -> EnvironmentFactory:
        return lambda: HostedEnvironment(self, domain, f"{domain}-{next(self._episodes)}")

    @property
    def size(self) -> int:
        """Number of hosts that are not retired, both serving and starting."""
        return sum(not host.leaving for host in self._hosts.values())

    @property
    def clocks(self) -> list[ResourceClock]:
        return [host.part.clock for host in self._hosts.values()]

    def faults(self) -> dict[str, int]:
        """Number of episodes that ended in a fault, by host."""
        return {name: host.faults for name, host in self._hosts.items()}

    def where(self) -> Mapping[str, str]:
        """The node of each host that is not retired ('' if it has none), the most dispensable host first."""
        wanted = [host for host in reversed(self._hosts.values()) if not host.leaving]
        return {host.id: host.part.node for host in sorted(wanted, key=lambda host: (host.up, host.live))}

    def up(self) -> frozenset[str]:
        """Hosts that accept episodes now."""
        return frozenset(name for name, host in self._hosts.items() if host.up)

    async def resize(self, count: int) -> None:
        """Change the number of hosts to `count` (at least 1): start new ones, or retire those with fewest episodes."""
        await gather_or_cancel(self.spawn() for _ in range(max(1, count) - self.size))
        while self.size > max(1, count):
            staying = [host for host in self._hosts.values() if not host.leaving]
            self.retire(min(reversed(staying), key=lambda host: host.live).id)

    async def spawn(self) -> str:
        """Add a host and return its name. It accepts episodes once it has started."""
        assert self._tasks is not None, "hosts are added while `run` runs"
        part = await self._make(f"environment-{next(self._numbers)}")
        host = self._hosts[part.id] = EnvironmentHostState(part)
        self._policy.join(part.id)
        self._keeping[part.id] = self._tasks.create_task(self._keep(host), name=f"keep {part.id}")
        return part.id

    def retire(self, name: str) -> None:
        """Retire a host: it gets no more episodes, and ends with its last episode."""
        host = self._hosts[name]
        host.leaving = True
        self.places.lost(host)
        host.changed.set()
        if host.kept and host.link is None:  # it is starting, perhaps for ever
            self.tell("host_retired", host.id, episodes=host.episodes, faults=host.faults)
            self._keeping[name].cancel()

    def tell(self, kind: str, host: str, **fields: str | int | float | None) -> None:
        self._recorder.event(RunEvent(_now(), kind, host, fields))

    def _choose(self, wanted: frozenset[str]) -> EnvironmentHostState | None:
        """A host with room for an episode, preferably with the `wanted` images. Resting hosts come last."""
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
        """Await a call of the host: record its overhead and the host's busy time, and attribute its fault."""
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
        """Count an episode's environment. Totals are emitted at the 1st, 2nd, 4th ... one and when the host ends."""
        making = host.making.setdefault(domain, EnvironmentCreation())
        making.add(made)
        if made.how != "again" and not making.episodes & (making.episodes - 1):
            self._tell_making(host, domain, making)

    def _tell_making(self, host: EnvironmentHostState, domain: str, making: EnvironmentCreation) -> None:
        self.tell(ENVIRONMENTS_MADE, host.id, domain=domain, **dataclasses.asdict(making))

    def known(self, host: EnvironmentHostState, link: EnvironmentHost, fault: EnvironmentFault) -> EnvironmentFault:
        """The fault with its incident: the end of a host belongs to its node's incident if other hosts ended too."""
        if not fault.incident:
            return fault
        if host.taken is None and host.link is link:
            host.taken = host.live
        return EnvironmentFault(fault.host, fault.what, incident=self._ended(host, link))

    def _ended(self, host: EnvironmentHostState, link: EnvironmentHost) -> str:
        return self._ends.of(link.life, host.id, link.node, _now())

    async def wanted(self, domain: str, seed: int, owner: str) -> frozenset[str]:
        """Images that an episode needs on its host before its reset; usually none."""
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
        """Pull the episode's images to the host, under a separate lease, since the lease of a reset is too short."""
        with self._leases.hold(owner, f"images of its environment on {host.id}", self._limits.pull_s, Expiry.GAP_FILL):
            try:
                said, seconds = await link.images(episode, domain, seed, pull=True)
            except EnvironmentFault as fault:
                raise self.known(host, link, fault) from None
        host.images = said.there
        making = host.making.setdefault(domain, EnvironmentCreation())
        making.pulled, making.pull_s = making.pulled + said.pulled, making.pull_s + seconds * bool(said.pulled)

    def hangs(self, began: float) -> bool:
        """True if a call that started at `began` and is cancelled now has exceeded its limit."""
        return _now() - began >= self._limits.call_s * (1 - 1e-6)

    def leave(self, place: HostSlot, *, fault: bool) -> None:
        """Free the slot of an ended episode, and count the episode."""
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
        """Start, watch and restart the host, until it retires or is given up."""
        host.kept = True
        cause, failed, since = "", None, _now()
        try:
            while not host.leaving:
                try:
                    await self._start(host, HOST_RESTART if cause else "")
                    assert host.link is not None
                    if host.restarts > self._limits.max_restarts:  # earlier starts failed for lack of a node
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
        """The reason to restart the host for its memory, as text; '' if there is none, or if it drains first."""
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
        """Mark the host down. Its episodes are notified by the end of the connection."""
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
        """Remove the host for good."""
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


async def prepare_environment(
    environment: Environment,
    seed: int,
    owner: str,
    wish: PlacementRequest | None = None,
    give_up: Callable[[], None] | None = None,
) -> None:
    """Wait until the episode has a slot on a host, with its images. Returns at once for environments in the controller.
    The wait for a slot has no deadline; the wait for images has its own lease. `give_up`: see
    `HostedEnvironment.prepare`."""
    if isinstance(environment, HostedEnvironment):
        await environment.prepare(seed, owner, wish or PlacementRequest(), give_up)


def has_host_slot(environment: Environment) -> bool:
    """True if the reset of the environment can begin."""
    return not isinstance(environment, HostedEnvironment) or environment.host != ""


def mark_in_use(environment: Environment) -> None:
    """Mark the environment in use by its trajectory: its host slot is no longer reclaimed for other episodes."""
    if isinstance(environment, HostedEnvironment):
        environment.keep()
