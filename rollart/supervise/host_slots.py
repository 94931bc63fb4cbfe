"""Slots of episodes on environment hosts: assignment, waiting, and preemption of prefetched episodes."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from rollart.hosted import EnvironmentCreation, EnvironmentHost
from rollart.leases import Leases
from rollart.ledger.events import PLACES
from rollart.policy.host_slots import PlacementPriority, PlacementQueue, PlacementRequest, slots_to_reclaim
from rollart.policy.hosts import MemoryRules, MemoryWatch
from rollart.ports import Recorder, RunEvent
from rollart.supervise.supervisor import HostProcess, HostState, loop_time


class HostPart(HostProcess, Protocol):
    """An environment host's process."""

    async def start(self) -> EnvironmentHost:
        """Start the process and complete the handshake; a process left from before is killed first. `PartDied` or
        `EnvironmentFault` if that fails, `SpecError` if the host can create none of the run's environments."""


@dataclass(slots=True)
class EnvironmentHostState(HostState):
    """An environment host through all of its restarts (lives)."""

    part: HostPart = field(kw_only=True)
    link: EnvironmentHost | None = None
    life: EnvironmentHost | None = None
    """Its latest life, current or ended."""
    live: int = 0
    """Held slots of that life."""
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


SLOT_WAIT = "a place on an environment host"


@dataclass(slots=True, eq=False)
class HostSlot:
    """An episode's slot on one life of a host, held until `free`. `give_up` ends a prefetched episode; None if the
    episode must not be ended."""

    host: EnvironmentHostState
    link: EnvironmentHost
    wish: PlacementRequest
    give_up: Callable[[], None] | None = None
    going: bool = False
    """True if it is being reclaimed and will be free."""


@dataclass(slots=True)
class _Waiter:
    wish: PlacementRequest
    wanted: frozenset[str]
    give_up: Callable[[], None] | None
    got: asyncio.Future[HostSlot]
    in_line: bool = True


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
    line: PlacementQueue[_Waiter] = field(default_factory=PlacementQueue)
    ahead: dict[HostSlot, None] = field(default_factory=dict)
    """Slots of prefetched episodes, oldest first."""
    going: int = 0
    sums: dict[PlacementPriority, _WaitTotals] = field(default_factory=dict)

    async def take(
        self,
        wish: PlacementRequest,
        owner: str,
        *,
        wanted: frozenset[str] = frozenset(),
        give_up: Callable[[], None] | None = None,
    ) -> HostSlot:
        """Wait for a slot for an episode, which holds the slot from then on."""
        waiter, began = _Waiter(wish, wanted, give_up, asyncio.get_running_loop().create_future()), loop_time()
        number = self.line.add(wish, waiter)
        self.assign()
        if waiter.got.done():
            self._count(wish.claim, None)
            return waiter.got.result()
        try:
            with self.leases.note(owner, SLOT_WAIT):
                place = await waiter.got
        except asyncio.CancelledError:
            if waiter.in_line:
                self.line.leave(number, wish)
            elif not waiter.got.cancelled():
                self.free(waiter.got.result())
            raise
        self._count(wish.claim, loop_time() - began)
        return place

    def keep(self, place: HostSlot) -> None:
        """The episode's trajectory has been admitted: its slot may no longer be reclaimed."""
        place.give_up = None
        self.ahead.pop(place, None)

    def free(self, place: HostSlot) -> None:
        """The slot's episode is over. A slot of a host life that is over was lost with that life."""
        self.ahead.pop(place, None)
        self.going -= place.going
        if place.host.life is place.link:
            place.host.live -= 1
        self.assign()

    def assign(self) -> None:
        """Slots may be free: assign free slots, and preempt prefetched episodes for urgent waiters."""
        while (first := self.line.first()) is not None:
            host = None if first.got.cancelled() else self.choose(first.wanted)
            if host is None and not first.got.cancelled():
                break
            self.line.pop()
            first.in_line = False
            if host is None:
                continue
            assert host.link is not None, "a host with room serves"
            host.live += 1
            place = HostSlot(host, host.link, first.wish, first.give_up)
            if first.give_up is not None:
                self.ahead[place] = None
            first.got.set_result(place)
        pressing = self.line.pressing
        if pressing > self.going and self.ahead:
            count = slots_to_reclaim(pressing=pressing, going=self.going, held=len(self.ahead))
            for place in list(reversed(self.ahead))[:count]:
                self._give_up(place)

    def lost(self, host: EnvironmentHostState) -> None:
        """The host's life is over, or it takes no more episodes: its prefetched episodes are useless."""
        for place in [place for place in self.ahead if place.host is host]:
            self._give_up(place, free=False)

    def emit_totals(self) -> None:
        """Emit the current totals of all priorities."""
        for claim in self.sums:
            self._emit(claim)

    def _give_up(self, place: HostSlot, *, free: bool = True) -> None:
        """End a prefetched episode. `free`: its slot becomes free for another episode."""
        assert place.give_up is not None
        del self.ahead[place]
        place.going = free
        self.going += free
        self.sums.setdefault(place.wish.claim, _WaitTotals()).given_up += 1
        place.give_up()

    def _count(self, claim: PlacementPriority, seconds: float | None) -> None:
        """Count an assigned slot and its wait (None: no wait). Emits an event at the 1st, 2nd, 4th, ... wait."""
        own = self.sums.setdefault(claim, _WaitTotals())
        own.places += 1
        if seconds is not None:
            own.waited, own.wait_s = own.waited + 1, own.wait_s + seconds
            own.longest_s = max(own.longest_s, seconds)
            if not own.waited & (own.waited - 1):
                self._emit(claim)

    def _emit(self, claim: PlacementPriority) -> None:
        own = self.sums[claim]
        if own.waited or own.given_up:
            self.recorder.event(RunEvent(loop_time(), PLACES, claim.name.lower(), dataclasses.asdict(own)))
