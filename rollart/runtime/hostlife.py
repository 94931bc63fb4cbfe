"""What the fleet of environment hosts knows of one of them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from rollart.hosted import EnvironmentCreation, EnvironmentHost
from rollart.runtime.hostwatch import HostPart

__all__ = ["EnvironmentHostState"]


@dataclass(slots=True)
class EnvironmentHostState:
    """A host of the fleet, through all of its lives. The fleet's alone to change."""

    part: HostPart
    link: EnvironmentHost | None = None
    """While it serves."""
    life: EnvironmentHost | None = None
    """Its last life, over or not."""
    live: int = 0
    """Places of that life that are held."""
    calls: int = 0
    taken: int | None = None
    """Episodes that it held when it ended, as the first of them learned."""
    resting: bool = False
    """It gets none while another does not rest either: it is to be started again once it is empty."""
    draining: bool = False
    """This life gets no more episodes."""
    leaving: bool = False
    """It gets no more episodes."""
    kept: bool = False
    """True once its supervising task has begun: a task that is cancelled before would not end it."""
    restarts: int = 0
    faults: int = 0
    episodes: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    images: frozenset[str] = frozenset()
    """That it has, as far as is known."""
    making: dict[str, EnvironmentCreation] = field(default_factory=dict)
    """By domain."""

    @property
    def id(self) -> str:
        return self.part.id

    @property
    def up(self) -> bool:
        """Whether it takes episodes. One that broke is none that is empty."""
        return self.link is not None and self.link.alive and not self.leaving

    @property
    def stays(self) -> bool:
        """Whether it serves, or is on its way and not to go."""
        return self.link is not None or not self.leaving

    async def emptied(self) -> None:
        while self.live or not self.leaving:
            self.changed.clear()
            await self.changed.wait()
