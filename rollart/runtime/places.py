"""Slots of episodes on environment hosts: assignment, waiting, and preemption of prefetched episodes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from rollart.hosted import PLACES, EnvironmentHost
from rollart.policy.places import PlacementPriority, PlacementQueue, PlacementRequest, slots_to_reclaim
from rollart.ports import Recorder, RunEvent
from rollart.runtime.hostlife import EnvironmentHostState
from rollart.runtime.leases import Leases

__all__ = ["HostSlot", "HostSlotPool"]

SLOT_WAIT = "a place on an environment host"


@dataclass(slots=True, eq=False)
class HostSlot:
    """One episode's, on one life of one host, until it is `free`d. `give_up`: what ends an episode that is ahead of
    need; None where nothing may."""

    host: EnvironmentHostState
    link: EnvironmentHost
    wish: PlacementRequest
    give_up: Callable[[], None] | None = None
    going: bool = False
    """It was given up, and will be free."""


@dataclass(slots=True)
class _Waiter:
    wish: PlacementRequest
    wanted: frozenset[str]
    give_up: Callable[[], None] | None
    got: asyncio.Future[HostSlot]
    in_line: bool = True


@dataclass(slots=True)
class _WaitTotals:
    """Wait totals of one claim."""

    places: int = 0
    waited: int = 0
    wait_s: float = 0.0
    longest_s: float = 0.0
    given_up: int = 0


@dataclass(slots=True)
class HostSlotPool:
    """Owns the line and the places that are held ahead of need. Any task may `take`, which waits for a place, and holds
    it until `free`; it is unblocked by a place that gets free, or by a host that starts (`look`), in the order of
    `policy.places`.

    The wait is under no lease: it is nobody's fault and takes as long as those take that hold the places, each of
    whose calls has a lease. It always ends while any host serves or comes back: what is ahead of need gives its place
    up, and an episode that runs waits for nothing that another episode must have a place for. Invariant: of a host's
    present life never more places are held than it has; each is freed once.
    """

    choose: Callable[[frozenset[str]], EnvironmentHostState | None]
    """A host with room, for an episode that needs these images; None if all are full."""
    leases: Leases
    recorder: Recorder
    line: PlacementQueue[_Waiter] = field(default_factory=PlacementQueue)
    ahead: dict[HostSlot, None] = field(default_factory=dict)
    """Held ahead of need, oldest first."""
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
        """A place for an episode, which holds it from now on."""
        loop = asyncio.get_running_loop()
        waiter, began = _Waiter(wish, wanted, give_up, loop.create_future()), loop.time()
        number = self.line.add(wish, waiter)
        self.look()
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
        self._count(wish.claim, loop.time() - began)
        return place

    def keep(self, place: HostSlot) -> None:
        """Its trajectory runs: it is ahead of need no more."""
        place.give_up = None
        self.ahead.pop(place, None)

    def free(self, place: HostSlot) -> None:
        """Its episode is over. The place of a life that is over was lost with that."""
        self.ahead.pop(place, None)
        self.going -= place.going
        if place.host.life is place.link:
            place.host.live -= 1
        self.look()

    def look(self) -> None:
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

    def tell(self) -> None:
        """All sums, as they stand."""
        for claim in self.sums:
            self._tell(claim)

    def _give_up(self, place: HostSlot, *, free: bool = True) -> None:
        """`free`: it will be, for another."""
        assert place.give_up is not None
        del self.ahead[place]
        place.going = free
        self.going += free
        self.sums.setdefault(place.wish.claim, _WaitTotals()).given_up += 1
        place.give_up()

    def _count(self, claim: PlacementPriority, seconds: float | None) -> None:
        """Emit an event at the 1st, 2nd, 4th ... wait, and at the end. None: no wait."""
        own = self.sums.setdefault(claim, _WaitTotals())
        own.places += 1
        if seconds is not None:
            own.waited, own.wait_s = own.waited + 1, own.wait_s + seconds
            own.longest_s = max(own.longest_s, seconds)
            if not own.waited & (own.waited - 1):
                self._tell(claim)

    def _tell(self, claim: PlacementPriority) -> None:
        own, now = self.sums[claim], asyncio.get_running_loop().time()
        if own.waited or own.given_up:
            fields = {
                "places": own.places,
                "waited": own.waited,
                "wait_s": own.wait_s,
                "longest_s": own.longest_s,
                "given_up": own.given_up,
            }
            self.recorder.event(RunEvent(now, PLACES, claim.name.lower(), fields))
