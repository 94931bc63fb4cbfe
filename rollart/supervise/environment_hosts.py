"""Environments on hosts: supervision of the hosts, and assignment of each episode to a slot on a healthy one.

An episode on a host is behind the same port as an environment in the controller (`HostedEnvironment`). Before its reset
it waits for a slot on a host, and for the container images that it needs: the hosts name these, once per prompt.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from rollart.errors import EnvironmentFault
from rollart.hosted import EnvironmentCreation, EnvironmentHost, EnvironmentOrigin, EpisodeImages, HostHealth
from rollart.leases import Expiry, Leases
from rollart.ledger.events import ENVIRONMENTS_MADE, PLACES
from rollart.ledger.intervals import ResourceState
from rollart.model import Observation, Step
from rollart.policy.host_slots import PlacementPriority, PlacementQueue, PlacementRequest
from rollart.policy.hosts import HostSelector, MemoryAction, MemoryRules, MemoryWatch
from rollart.policy.incidents import IncidentTracker
from rollart.ports import Environment, EnvironmentFactory, Recorder, RunEvent
from rollart.supervise.supervisor import HostLimits, HostProcess, HostState, HostSupervisor, loop_time

T = TypeVar("T")


class HostPart(HostProcess, Protocol):
    """An environment host's process."""

    async def start(self) -> EnvironmentHost:
        """Start the process and complete the handshake; a process left from before is killed first. `PartDied` or
        `EnvironmentFault` if that fails, `SpecError` if the host can create none of the run's environments."""


@dataclass(slots=True)
class EnvironmentHostState(HostState[HostPart, EnvironmentHost]):
    """An environment host through all of its restarts (lives)."""

    live: int = 0
    """Held slots of its latest life."""
    memory: MemoryWatch = field(default_factory=lambda: MemoryWatch(MemoryRules()))
    """The memory of that life."""
    calls: int = 0
    taken: int | None = None
    """Number of episodes at its end, counted when the first of them fails."""
    draining: bool = False
    """True if the present life gets no more episodes."""
    faults: int = 0
    episodes: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    images: frozenset[str] = frozenset()
    """Images present on the host, as far as is known."""
    making: dict[str, EnvironmentCreation] = field(default_factory=dict)
    """The environments constructed on it, by domain."""

    @property
    def load(self) -> int:
        return self.live

    @property
    def up(self) -> bool:
        """True if it accepts episodes. A host with a broken connection does not, although it has room."""
        return self.link is not None and self.link.alive and not self.leaving

    async def emptied(self) -> None:
        while self.live or not self.leaving:
            self.changed.clear()
            await self.changed.wait()


@dataclass(slots=True, eq=False)
class HostSlot:
    """An episode's slot on one life of a host, held until `free`. `give_up` ends a prefetched episode; None if the
    episode must not be ended."""

    host: EnvironmentHostState
    link: EnvironmentHost
    request: PlacementRequest
    give_up: Callable[[], None] | None = None
    going: bool = False
    """True if it is being reclaimed and will be free."""


@dataclass(slots=True)
class _Waiter:
    request: PlacementRequest
    wanted: frozenset[str]
    give_up: Callable[[], None] | None
    got: asyncio.Future[HostSlot]
    queued: bool = True


@dataclass(slots=True)
class _WaitTotals:
    """Wait totals of one priority."""

    places: int = 0
    waited: int = 0
    wait_s: float = 0.0
    longest_s: float = 0.0
    given_up: int = 0


@dataclass(slots=True)
class HostSlotPool:
    """Owns the queue for slots and the slots of prefetched episodes. Any task may call `take`, which waits for a slot,
    and holds the slot until `free`. `take` is unblocked by a slot that becomes free or by a host that starts
    (`assign`), in the order of `policy.host_slots`.

    The wait has no lease: it lasts as long as the episodes that hold the slots, and each of their calls has a lease. It
    always ends while any host serves or comes back: prefetched episodes yield their slots, and a running episode never
    waits for anything that requires another episode to get a slot. Invariant: no more slots of a host's present life
    are held than it has, and each is freed once.
    """

    choose: Callable[[frozenset[str]], EnvironmentHostState | None]
    """A host with a free slot for an episode that needs these images; None if all hosts are full."""
    leases: Leases
    recorder: Recorder
    queue: PlacementQueue[_Waiter] = field(default_factory=PlacementQueue)
    ahead: dict[HostSlot, None] = field(default_factory=dict)
    """Slots of prefetched episodes, oldest first."""
    going: int = 0
    sums: dict[PlacementPriority, _WaitTotals] = field(default_factory=dict)

    async def take(
        self,
        request: PlacementRequest,
        owner: str,
        *,
        wanted: frozenset[str] = frozenset(),
        give_up: Callable[[], None] | None = None,
    ) -> HostSlot:
        """Wait for a slot for an episode, which holds the slot from then on."""
        waiter, began = _Waiter(request, wanted, give_up, asyncio.get_running_loop().create_future()), loop_time()
        number = self.queue.add(request, waiter)
        self.assign()
        if waiter.got.done():
            self._count(request.claim, None)
            return waiter.got.result()
        try:
            with self.leases.note(owner, "a place on an environment host"):
                slot = await waiter.got
        except asyncio.CancelledError:
            if waiter.queued:
                self.queue.leave(number, request)
            elif not waiter.got.cancelled():
                self.free(waiter.got.result())
            raise
        self._count(request.claim, loop_time() - began)
        return slot

    def keep(self, slot: HostSlot) -> None:
        """The episode's trajectory has been admitted: its slot may no longer be reclaimed."""
        slot.give_up = None
        self.ahead.pop(slot, None)

    def free(self, slot: HostSlot) -> None:
        """The slot's episode is over. A slot of a host life that is over was lost with that life."""
        self.ahead.pop(slot, None)
        self.going -= slot.going
        if slot.host.life is slot.link:
            slot.host.live -= 1
        self.assign()

    def assign(self) -> None:
        """Slots may be free: assign free slots, and preempt prefetched episodes for urgent waiters."""
        while (first := self.queue.first()) is not None:
            host = None if first.got.cancelled() else self.choose(first.wanted)
            if host is None and not first.got.cancelled():
                break
            self.queue.pop()
            first.queued = False
            if host is None:
                continue
            assert host.link is not None, "a host with room serves"
            host.live += 1
            slot = HostSlot(host, host.link, first.request, first.give_up)
            if first.give_up is not None:
                self.ahead[slot] = None
            first.got.set_result(slot)
        pressing = self.queue.pressing
        if pressing > self.going and self.ahead:
            # One per pressing request, the newest first, less the slots that are being freed already.
            for slot in list(reversed(self.ahead))[: pressing - self.going]:
                self._give_up(slot)

    def lost(self, host: EnvironmentHostState) -> None:
        """The host's life is over, or it takes no more episodes: its prefetched episodes are useless."""
        for slot in [slot for slot in self.ahead if slot.host is host]:
            self._give_up(slot, free=False)

    def _give_up(self, slot: HostSlot, *, free: bool = True) -> None:
        """End a prefetched episode. `free`: its slot becomes free for another episode."""
        assert slot.give_up is not None
        del self.ahead[slot]
        slot.going = free
        self.going += free
        self.sums.setdefault(slot.request.claim, _WaitTotals()).given_up += 1
        slot.give_up()

    def _count(self, claim: PlacementPriority, seconds: float | None) -> None:
        """Count an assigned slot and its wait (None: no wait). Emits an event at the 1st, 2nd, 4th, ... wait."""
        totals = self.sums.setdefault(claim, _WaitTotals())
        totals.places += 1
        if seconds is not None:
            totals.waited, totals.wait_s = totals.waited + 1, totals.wait_s + seconds
            totals.longest_s = max(totals.longest_s, seconds)
            if not totals.waited & (totals.waited - 1):
                self.emit(claim)

    def emit(self, claim: PlacementPriority) -> None:
        """Emit the current totals of a priority."""
        totals = self.sums[claim]
        if totals.waited or totals.given_up:
            self.recorder.event(RunEvent(loop_time(), PLACES, claim.name.lower(), dataclasses.asdict(totals)))


class EnvironmentHostSupervisor(HostSupervisor[EnvironmentHostState, HostPart]):
    """The hosts of environments, and the slots of episodes on them.

    `environment` gives environments to trajectories, whose `prepare` waits for a slot, without a lease
    (`HostSlotPool`); the end of an episode or the start of a host unblocks it. If a host dies, hangs or violates the
    protocol, each of its episodes ends in an `EnvironmentFault` that names the host, and no other host is affected.

    Invariant: an episode holds a slot on exactly one host, from before its first reset until its close.
    """

    def __init__(
        self,
        make: Callable[[str], Awaitable[HostPart]],
        count: int,
        *,
        leases: Leases,
        recorder: Recorder,
        limits: HostLimits,
        later: int = 0,
    ) -> None:
        """`make`: makes the part of a given name. The initial hosts are numbered from 0, as before a resume. Added
        hosts are numbered from `later` on: no host of the run has had those numbers."""

        numbers = itertools.chain(range(count), itertools.count(max(count, later)))
        names = (f"environment-{number}" for number in numbers)
        super().__init__(make, names, count, leases=leases, recorder=recorder, limits=limits)
        self._policy = HostSelector()
        self._episodes = itertools.count()
        self.slots = HostSlotPool(self._choose, leases, recorder)
        self._images = ImageResolver(leases, limits.pull_s, self._note_images)
        self._ends = IncidentTracker()

    def environment(self, domain: str) -> EnvironmentFactory:
        return lambda: HostedEnvironment(self, domain, f"{domain}-{next(self._episodes)}")

    def faults(self) -> dict[str, int]:
        """Number of episodes that ended in a fault, by host."""
        return {name: host.faults for name, host in self.hosts.items()}

    def _choose(self, wanted: frozenset[str]) -> EnvironmentHostState | None:
        """A host with room for an episode, preferably with the `wanted` images. Resting hosts come last."""
        most, fresh, resting = self.limits.per_host, dict[str, tuple[int, int]](), dict[str, tuple[int, int]]()
        for name, host in self.hosts.items():
            if host.up and not host.draining:
                (resting if host.resting else fresh)[name] = host.live, most
        for room in (fresh, resting):
            missing = {name: len(wanted - self.hosts[name].images) for name in room} if wanted else None
            if (chosen := self._policy.choose(room, loop_time(), missing)) is not None:
                return self.hosts[chosen]
        return None

    async def call(self, host: EnvironmentHostState, link: EnvironmentHost, work: Awaitable[tuple[T, float]]) -> T:
        """Await a call of the host: record its overhead and the host's busy time, and attribute its fault."""
        began = loop_time()
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
        if self.hosts.get(host.id) is host:
            self._left_alone(host, self._policy.called(host.id, max(0.0, loop_time() - began - env_s), loop_time()))
        return result

    def made(self, host: EnvironmentHostState, domain: str, made: EnvironmentOrigin) -> None:
        """Count an episode's environment. Totals are emitted at the 1st, 2nd, 4th ... one and when the host ends."""
        making = host.making.setdefault(domain, EnvironmentCreation())
        making.add(made)
        if made.how != "again" and not making.episodes & (making.episodes - 1):
            self._emit_creation(host, domain, making)

    def _emit_creation(self, host: EnvironmentHostState, domain: str, making: EnvironmentCreation) -> None:
        self.emit(ENVIRONMENTS_MADE, host.id, domain=domain, **dataclasses.asdict(making))

    def known(self, host: EnvironmentHostState, link: EnvironmentHost, fault: EnvironmentFault) -> EnvironmentFault:
        """The fault with its incident: the end of a host belongs to its node's incident if other hosts ended too."""
        if not fault.incident:
            return fault
        if host.taken is None and host.link is link:
            host.taken = host.live
        return EnvironmentFault(fault.host, fault.what, incident=self._ended(host, link))

    def _ended(self, host: EnvironmentHostState, link: EnvironmentHost) -> str:
        return self._ends.of(link.life, host.id, link.node, loop_time())

    async def wanted(self, domain: str, seed: int, owner: str) -> frozenset[str]:
        """Images that an episode needs on its host before its reset; usually none."""
        links = [host.link for host in self.hosts.values() if host.up and host.link is not None]
        return await self._images.wanted(links, domain, seed, owner)

    def _note_images(self, link: EnvironmentHost, answer: EpisodeImages) -> None:
        if (host := self.hosts.get(link.id)) is not None:
            host.images = answer.there

    async def pull(
        self, host: EnvironmentHostState, link: EnvironmentHost, episode: str, domain: str, seed: int, owner: str
    ) -> None:
        """Pull the episode's images to the host, under a separate lease, since the lease of a reset is too short."""
        with self.leases.hold(owner, f"images of its environment on {host.id}", self.limits.pull_s, Expiry.GAP_FILL):
            try:
                answer, seconds = await link.images(episode, domain, seed, pull=True)
            except EnvironmentFault as fault:
                raise self.known(host, link, fault) from None
        host.images = answer.there
        making = host.making.setdefault(domain, EnvironmentCreation())
        making.pulled, making.pull_s = making.pulled + answer.pulled, making.pull_s + seconds * bool(answer.pulled)

    def leave(self, slot: HostSlot, *, fault: bool) -> None:
        """Free the slot of an ended episode, and count the episode."""
        host, alive = slot.host, slot.link.alive
        host.episodes += 1
        host.faults += fault
        host.restarts = 0 if alive and not fault else host.restarts
        if self.hosts.get(host.id) is host:
            self._left_alone(host, self._policy.ended(host.id, fault=fault, now=loop_time()))
        self.slots.free(slot)
        host.changed.set()

    def _left_alone(self, host: EnvironmentHostState, cause: str | None) -> None:
        if cause is not None:
            self.emit("host_quarantined", host.id, cause=cause, seconds=self._policy.standing[host.id].back_off_s)

    def adopt(self, part: HostPart) -> EnvironmentHostState:
        self._policy.join(part.id)
        return EnvironmentHostState(part=part)

    async def connect(self, host: EnvironmentHostState) -> EnvironmentHost:
        link = await host.part.start()
        host.live, host.taken, host.draining = 0, None, False
        host.memory = MemoryWatch(self.limits.memory)
        return link

    def started(self, host: EnvironmentHostState) -> None:
        super().started(host)
        self._policy.restarted(host.id)

    def drain(self, host: EnvironmentHostState) -> None:
        self.slots.lost(host)
        host.changed.set()

    def down(self, host: EnvironmentHostState, *, served: bool) -> dict[str, int]:
        """The episodes are notified by the end of the connection."""
        if served and host.life is not None:
            self._ended(host, host.life)
        self.slots.lost(host)
        taken = host.live if host.taken is None else host.taken
        return {"episodes": taken if served else 0}

    def removed(self, host: EnvironmentHostState) -> None:
        self._policy.leave(host.id, loop_time())
        for domain, making in host.making.items():
            self._emit_creation(host, domain, making)

    def stopped(self) -> None:
        for claim in self.slots.sums:
            self.slots.emit(claim)

    def changed(self) -> None:
        self.slots.assign()

    def totals(self, host: EnvironmentHostState) -> dict[str, int]:
        return {"episodes": host.episodes, "faults": host.faults}

    def memory_cause(self, host: EnvironmentHostState, health: HostHealth) -> str:
        """The reason to restart the host for its memory; '' if there is none, or if it drains first."""
        node, watch = "" if host.life is None else host.life.node, host.memory
        here = sum(other.life is not None and other.life.node == node for other in self.hosts.values())
        bound = watch.rules.bound(health.machine, here)
        verdict = watch.check(health.memory, bound, host.live, loop_time())
        if verdict is MemoryAction.KEEP:
            return ""
        figures = f"its memory is {health.memory / 1e9:.2f} GB, its bound {bound / 1e9:.2f} GB"
        played = f"; it played {', '.join(sorted(host.making))}" if host.making else ""
        cause = f"{figures} ({watch.rules.describe(health.machine, here)}){played}"
        if verdict is MemoryAction.RESTART:
            return cause
        host.draining = True
        self.emit("host_draining", host.id, cause=cause, episodes=host.live)
        self.slots.lost(host)
        return ""


DEFAULT_PLACEMENT_REQUEST = PlacementRequest()
"""The request of an environment that is reset without `prepare`."""


@dataclass(slots=True, eq=False)
class HostedEnvironment:
    """Implements `ports.Environment`: one episode on one host, chosen before its first reset and kept until its
    close."""

    fleet: EnvironmentHostSupervisor
    domain: str
    episode: str
    _slot: HostSlot | None = field(default=None, init=False)
    _fault: bool = field(default=False, init=False)

    @property
    def host(self) -> str:
        """The host of the episode; '' before it has a slot and after its close."""
        return "" if self._slot is None else self._slot.host.id

    async def prepare(
        self,
        seed: int,
        owner: str,
        request: PlacementRequest = DEFAULT_PLACEMENT_REQUEST,
        give_up: Callable[[], None] | None = None,
    ) -> None:
        """Wait for a slot on a host, and for the episode's images there, if it needs any. This precedes the reset and
        is not part of its time. `give_up` is for prefetched episodes: it is called, at most once and not after `keep`,
        when the episode must close to free its slot for another."""
        if self._slot is not None:
            return
        wanted = await self.fleet.wanted(self.domain, seed, owner)
        slot = self._slot = await self.fleet.slots.take(request, owner, wanted=wanted, give_up=give_up)
        if not wanted and not await self.fleet.wanted(self.domain, seed, owner):  # first: perhaps no host was up
            return
        try:
            await self.fleet.pull(slot.host, slot.link, self.episode, self.domain, seed, owner)
        except Exception:
            self._fault = True
            raise

    def keep(self) -> None:
        """Mark the episode in use: its trajectory runs."""
        if self._slot is not None:
            self.fleet.slots.keep(self._slot)

    async def reset(self, seed: int) -> Observation:
        if self._slot is None:
            self._slot = await self.fleet.slots.take(DEFAULT_PLACEMENT_REQUEST, self.episode)
        slot = self._slot
        shown, made = await self._call(slot, slot.link.reset(self.episode, self.domain, seed))
        self.fleet.made(slot.host, self.domain, made)
        return shown

    async def step(self, action: str) -> Step:
        if self._slot is None:
            raise RuntimeError("step before reset")
        return await self._call(self._slot, self._slot.link.step(self.episode, action))

    async def close(self) -> None:
        slot, self._slot = self._slot, None
        if slot is None:
            return
        try:
            await slot.link.close(self.episode)
        except EnvironmentFault as fault:
            if not fault.incident:  # with an incident, the episode ended with its host
                raise
        finally:
            self.fleet.leave(slot, fault=self._fault)

    async def _call(self, slot: HostSlot, work: Awaitable[tuple[T, float]]) -> T:
        began = loop_time()
        try:
            return await self.fleet.call(slot.host, slot.link, work)
        except EnvironmentFault:
            self._fault = True
            raise
        except asyncio.CancelledError:
            hung = loop_time() - began >= self.fleet.limits.call_s * (1 - 1e-6)
            self._fault = self._fault or hung
            raise


def host_of(environment: object) -> str:
    """The host of an environment; '' for an environment in the controller."""
    return environment.host if isinstance(environment, HostedEnvironment) else ""


async def prepare_environment(
    environment: Environment,
    seed: int,
    owner: str,
    request: PlacementRequest | None = None,
    give_up: Callable[[], None] | None = None,
) -> None:
    """Wait until the episode has a slot on a host, with its images. Returns at once for environments in the controller.
    The wait for a slot has no deadline; the wait for images has its own lease. `give_up`: see
    `HostedEnvironment.prepare`."""
    if isinstance(environment, HostedEnvironment):
        await environment.prepare(seed, owner, request or PlacementRequest(), give_up)


def has_host_slot(environment: Environment) -> bool:
    """True if the reset of the environment can begin."""
    return not isinstance(environment, HostedEnvironment) or environment.host != ""


def mark_in_use(environment: Environment) -> None:
    """Mark the environment in use by its trajectory: its host slot is no longer reclaimed for other episodes."""
    if isinstance(environment, HostedEnvironment):
        environment.keep()


REMEMBERED_PROMPTS = 4096
"""Number of prompts whose images are cached: those of a few batches."""

MAX_CONCURRENT_QUERIES = 16
"""Maximum concurrent queries, over all hosts. An environment names its images on its host's event loop, and blocks the
host's other episodes meanwhile."""


@dataclass(eq=False)
class ImageResolver:
    """Any task may call `wanted`. It waits for a host's response, or for a pending query of the same prompt, under a
    lease of the calling episode. Queries rotate over the hosts; if a host ends, the next one is queried. Invariant: a
    prompt has at most one query at a time, and none while it is cached."""

    leases: Leases
    pull_s: float
    on_answer: Callable[[EnvironmentHost, EpisodeImages], None]
    """Called with each host and its answer, which includes the images that it has."""

    def __post_init__(self) -> None:
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
        with self.leases.hold(owner, "a host to name the images of its environment", self.pull_s, Expiry.GAP_FILL):
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
                (answer, _) = await link.images("", domain, seed, pull=False)
            except EnvironmentFault as fault:
                if not fault.incident or number == len(links) - 1:
                    raise
            else:
                self.on_answer(link, answer)
                return frozenset(answer.wanted)
        raise AssertionError("a host was queried")
