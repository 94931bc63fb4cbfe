"""The supervisor's state of one environment host."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from rollart.hosted import EnvironmentCreation, EnvironmentHost
from rollart.runtime.hostwatch import HostPart

__all__ = ["EnvironmentHostState"]


@dataclass(slots=True)
class EnvironmentHostState:
    """A host through all of its restarts (lives). Only its supervisor changes it."""

    part: HostPart
    link: EnvironmentHost | None = None
    """Its connection while it serves."""
    life: EnvironmentHost | None = None
    """Its latest life, current or ended."""
    live: int = 0
    """Held slots of that life."""
    calls: int = 0
    taken: int | None = None
    """Number of episodes at its end, counted when the first of them fails."""
    resting: bool = False
    """It gets an episode only if every other host is full or rests too: it is restarted once it is empty."""
    draining: bool = False
    """True if the present life gets no more episodes."""
    leaving: bool = False
    """True if the host is retired: it gets no more episodes."""
    kept: bool = False
    """True once its supervising task has begun: a task that is cancelled before would not end it."""
    restarts: int = 0
    faults: int = 0
    episodes: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    images: frozenset[str] = frozenset()
    """Images present on the host, as far as is known."""
    making: dict[str, EnvironmentCreation] = field(default_factory=dict)
    """The environments constructed on it, by domain."""

    @property
    def id(self) -> str:
        return self.part.id

    @property
    def up(self) -> bool:
        """True if it accepts episodes. A host with a broken connection does not, although it has room."""
        return self.link is not None and self.link.alive and not self.leaving

    @property
    def stays(self) -> bool:
        """True if it serves, or if it is starting and not retired."""
        return self.link is not None or not self.leaving

    async def emptied(self) -> None:
        while self.live or not self.leaving:
            self.changed.clear()
            await self.changed.wait()
