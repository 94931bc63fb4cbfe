"""Groups whose members stay together on one engine, as one unit of admission (`num_return_sequences`).

What ROLL Flash's prompt replication (§2.1) is set against: there a prompt with n responses is n tasks, placed anywhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from rollart.runtime.members import RegisteredEngine

__all__ = ["GroupColocation", "ColocatedGroup"]


@dataclass(slots=True)
class ColocatedGroup:
    """A group under way. `seats` were taken on its home; members are known by their number in the group."""

    group: str
    members: set[str]
    """Those that may still need an engine."""
    home: RegisteredEngine | None = None
    preferred: bool = True
    """Whether its domain prefers to be there."""
    wanted: int = 0
    """Tokens that a member is expected to end with."""
    seats: int = 0
    here: set[str] = field(default_factory=set)
    """Members that took their seats."""
    over: set[str] = field(default_factory=set)
    """Of those, the ones that are done; their seats are kept until all are."""
    kept: int = 0
    """Seats that its home knows to be taken and free."""
    asking: asyncio.Event | None = None
    """Set once the member that waits for room for all of them waits no more."""
    age: int | None = None

    @property
    def free(self) -> int:
        """Seats that are taken and nobody sits on."""
        return max(self.seats - len(self.here) + len(self.over), 0)

    @property
    def needed(self) -> int:
        """Seats that a home of its own would have to have."""
        return max(len(self.members - self.here), 1)


class GroupColocation:
    """Owns the units. Synchronous; told by the scheduler of groups, by `Ways` of homes.

    A group's first member that is placed chooses the engine, with seats for all that have not ended; the others take
    theirs whenever they come, at once. The room is free when the last of them is done. Where the home is lost, the next
    that is placed chooses again for those that have none; one that lost its KV, or failed there, is placed by itself.
    Nothing waits here but members for the one of them that stands in line, and if that is gone another does.
    """

    def __init__(self) -> None:
        self._units: dict[str, ColocatedGroup] = {}
        self.on_room: Callable[[], None] = lambda: None
        """Told when an engine has room that it had not."""

    def open(self, group: str, members: Iterable[int]) -> None:
        """The group begins, with these members to run."""
        self._units[group] = ColocatedGroup(group, {str(m) for m in members})

    def left(self, group: str, member: int) -> None:
        """The member needs no engine any more, however it ended."""
        unit = self._units.get(group)
        if unit is not None:
            self._done(unit, str(member))
            unit.members.discard(str(member))
            self._look(unit)

    def unit(self, session: str) -> ColocatedGroup | None:
        """The group that this trajectory is held together with; None if it is placed by itself."""
        group, member = _split(session)
        unit = self._units.get(group)
        return None if unit is None or member not in unit.members else unit

    def seat(self, session: str, serves: Callable[[RegisteredEngine], bool]) -> ColocatedGroup | None:
        """The group whose home has a seat for the trajectory. A home that does not serve it is one no more."""
        unit = self.unit(session)
        if unit is None or unit.home is None or _split(session)[1] in unit.here - unit.over:
            return None
        if not serves(unit.home):
            self._leave(unit)
            return None
        return unit if unit.free else None

    def needed(self, session: str) -> int:
        """Seats that an engine must have for the trajectory to be placed there: its group's, if it is the first."""
        unit = self.unit(session)
        return unit.needed if unit is not None and unit.home is None else 1

    def settled(self, session: str, member: RegisteredEngine, *, preferred: bool, wanted: int) -> None:
        """The trajectory lives there from now on; it is expected to end with `wanted` tokens."""
        unit, number = self.unit(session), _split(session)[1]
        if unit is None:
            return
        if unit.home is None:
            unit.seats, unit.home, unit.preferred, unit.wanted = unit.needed, member, preferred, wanted
        if member is unit.home:
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
        """The engine has nothing of anybody any more: who lived there goes elsewhere, together."""
        for unit in [u for u in self._units.values() if u.home is member]:
            unit.members -= unit.over
            unit.here.clear()
            self._leave(unit)
            self._look(unit)

    def _done(self, unit: ColocatedGroup, number: str) -> None:
        if number in unit.here:
            unit.over.add(number)

    def _look(self, unit: ColocatedGroup) -> None:
        """Keep the seats that are free, or give all back if nobody comes any more."""
        if unit.members <= unit.over:
            del self._units[unit.group]
            self._leave(unit)
            self.on_room()
        elif unit.home is not None:
            self._keep(unit, unit.free)

    def _leave(self, unit: ColocatedGroup) -> None:
        """It has no home; who lives there and goes on is placed by itself from now on."""
        if unit.home is not None:
            self._keep(unit, 0)
        unit.members -= unit.here
        unit.here.clear()
        unit.over.clear()
        unit.home, unit.seats = None, 0

    def _keep(self, unit: ColocatedGroup, seats: int) -> None:
        assert unit.home is not None
        unit.home.awaited += seats - unit.kept
        unit.home.kv.keep(unit.group, seats, unit.wanted)
        unit.kept = seats


def _split(session: str) -> tuple[str, str]:
    """The group and the number in it of a trajectory: of 'lake-12.3r2', 'lake-12' and '3'."""
    group, _, member = session.rpartition(".")
    return group, member.partition("r")[0]
