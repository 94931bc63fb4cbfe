"""The seam to environment hosts: places that hold many episodes each and serve their calls. Part of the ports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from rollart.model import Observation, Step

__all__ = ["EnvironmentHost", "HostHealth"]


@dataclass(frozen=True, slots=True)
class HostHealth:
    """What a host says of itself: the episodes that it holds, for how long one call (and which) has blocked all of
    them, and closed episodes whose calls never ended and hold a thread."""

    live: int
    stuck_s: float = 0.0
    stuck_in: str = ""
    left: tuple[str, ...] = ()


class EnvironmentHost(Protocol):
    """A host's client. Calls of one episode come one after the other; `EnvironmentFault`, which names the host, for
    whatever goes wrong with one. A call that is cancelled is cancelled there."""

    @property
    def id(self) -> str: ...

    @property
    def alive(self) -> bool:
        """Whether it can be asked at all, as far as is known."""

    async def reset(self, episode: str, domain: str, seed: int) -> tuple[Observation, float]:
        """What the episode shows first, and the seconds that its environment took. Made when it is reset first."""

    async def step(self, episode: str, action: str) -> tuple[Step, float]: ...

    async def close(self, episode: str) -> None: ...

    async def health(self) -> HostHealth: ...

    async def lost(self) -> str:
        """Returns when nothing more can be asked of it, with the cause in words."""

    async def aclose(self) -> None: ...
