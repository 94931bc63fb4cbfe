"""Group colocation: the members of a group stay on one engine, as one unit of admission (`num_return_sequences`).

The baseline for the prompt replication of ROLL Flash (§2.1), which runs a prompt with n responses as n independent
tasks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from rollart.serving.engine_registry import RegisteredEngine


@dataclass(slots=True)
class ColocatedGroup:
    """A live group. `seats`: slots reserved on its engine, occupied or not. Members are identified by their index in
    the group."""

    group: str
    members: set[str]
    """Members that may still need an engine."""
    sticky: RegisteredEngine | None = None
    preferred: bool = True
    """True if the engine is in its domain's preferred pool."""
    wanted: int = 0
    """Expected final length of a member in tokens."""
    seats: int = 0
    here: set[str] = field(default_factory=set)
    """Members that occupy or occupied a slot."""
    over: set[str] = field(default_factory=set)
    """Members of `here` that are done; their slots stay reserved until all are."""
    kept: int = 0
    """Free reserved slots, as counted on the engine."""
    asking: asyncio.Event | None = None
    """Set once the member that queues for the whole group stops waiting."""
    age: int | None = None

    @property
    def free(self) -> int:
        """Reserved slots that no member occupies."""
        return max(self.seats - len(self.here) + len(self.over), 0)

    @property
    def needed(self) -> int:
        """Slots that a new engine for the group must have."""
        return max(len(self.members - self.here), 1)


class GroupColocation:
    """Owns the colocated groups. Synchronous; the scheduler reports groups, `TurnRouter` reports assignments.

    The first member that is assigned chooses the engine and reserves slots for all members that have not ended; the
    others occupy their slots at once whenever they arrive. The slots are released when the last member is done. If the
    engine is lost, the next assigned member chooses an engine for all members without one. A member whose KV was
    evicted, or that failed on the engine, is assigned individually. Members wait only for the one member that queues
    for the group; if that member stops waiting, another one queues.
    """

    def __init__(self) -> None:
        self.units: dict[str, ColocatedGroup] = {}
        self.on_room: Callable[[], None] = lambda: None
        """Called when an engine gained free slots."""

    def open(self, group: str, members: Iterable[int]) -> None:
        """The group begins, with these members."""
        self.units[group] = ColocatedGroup(group, {str(m) for m in members})

    def left(self, group: str, member: int) -> None:
        """The member no longer needs an engine, however it ended."""
        unit = self.units.get(group)
        if unit is not None:
            self._done(unit, str(member))
            unit.members.discard(str(member))
            self._look(unit)

    def unit(self, session: str) -> ColocatedGroup | None:
        """The colocated group of this trajectory; None if it is assigned individually."""
        group, member = _split(session)
        unit = self.units.get(group)
        return None if unit is None or member not in unit.members else unit

    def seat(self, session: str, serves: Callable[[RegisteredEngine], bool]) -> ColocatedGroup | None:
        """The trajectory's group, if its engine has a free slot. An engine that cannot serve it is given up."""
        unit = self.unit(session)
        if unit is None or unit.sticky is None or _split(session)[1] in unit.here - unit.over:
            return None
        if not serves(unit.sticky):
            self._leave(unit)
            return None
        return unit if unit.free else None

    def needed(self, session: str) -> int:
        """Slots that an engine needs for the trajectory: those of the whole group for its first member."""
        unit = self.unit(session)
        return unit.needed if unit is not None and unit.sticky is None else 1

    def assigned(self, session: str, member: RegisteredEngine, *, preferred: bool, wanted: int) -> None:
        """The trajectory was assigned to the engine; its expected final length is `wanted` tokens."""
        unit, number = self.unit(session), _split(session)[1]
        if unit is None:
            return
        if unit.sticky is None:
            unit.seats, unit.sticky, unit.preferred, unit.wanted = unit.needed, member, preferred, wanted
        if member is unit.sticky:
            unit.here.add(number)
            unit.over.discard(number)
        else:
            unit.seats -= number in unit.here
            unit.members.discard(number)
            unit.here.discard(number)
            unit.over.discard(number)
        self._look(unit)

    def ended(self, session: str) -> None:
        """The trajectory is over."""
        unit = self.unit(session)
        if unit is not None:
            self._done(unit, _split(session)[1])
            self._look(unit)

    def lost(self, member: RegisteredEngine) -> None:
        """The engine lost all KV: its groups move to other engines, each as a whole."""
        for unit in [u for u in self.units.values() if u.sticky is member]:
            unit.members -= unit.over
            unit.here.clear()
            self._leave(unit)
            self._look(unit)

    def _done(self, unit: ColocatedGroup, number: str) -> None:
        if number in unit.here:
            unit.over.add(number)

    def _look(self, unit: ColocatedGroup) -> None:
        """Keep the free slots reserved, or release all if no member can come any more."""
        if unit.members <= unit.over:
            del self.units[unit.group]
            self._leave(unit)
            self.on_room()
        elif unit.sticky is not None:
            self._keep(unit, unit.free)

    def _leave(self, unit: ColocatedGroup) -> None:
        """Give up its engine; members that continue there are assigned individually from now on."""
        if unit.sticky is not None:
            self._keep(unit, 0)
        unit.members -= unit.here
        unit.here.clear()
        unit.over.clear()
        unit.sticky, unit.seats = None, 0

    def _keep(self, unit: ColocatedGroup, seats: int) -> None:
        assert unit.sticky is not None
        unit.sticky.awaited += seats - unit.kept
        unit.sticky.kv.keep(unit.group, seats, unit.wanted)
        unit.kept = seats


def _split(session: str) -> tuple[str, str]:
    """The group of a trajectory and its index there: 'lake-12' and '3' for 'lake-12.3r2'."""
    group, _, member = session.rpartition(".")
    return group, member.partition("r")[0]
