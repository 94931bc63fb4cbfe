"""The seam to hosts: places that hold many episodes, or many function workers, each. Part of the ports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from rollart.model import Observation, Step

__all__ = [
    "ENVIRONMENTS_MADE",
    "PLACES",
    "EnvironmentHost",
    "FunctionHost",
    "HostHealth",
    "EpisodeImages",
    "EnvironmentOrigin",
    "EnvironmentCreation",
]


ENVIRONMENTS_MADE = "environments_made"
"""The event that tells what a host made for a domain so far (`EnvironmentCreation`)."""

PLACES = "environment_places"
"""The event that tells what episodes waited for a place on a host so far, by what they are for (`policy.places`)."""


@dataclass(frozen=True, slots=True)
class EnvironmentOrigin:
    """How an episode came to its environment: `cold`, made in its reset; `ahead`, before it; `reused`, another episode
    had it; `again`, its own. `make_s` seconds it took to make, ahead or now."""

    how: str
    make_s: float

    def values(self) -> list[str | float]:
        return [self.how, self.make_s]


@dataclass(frozen=True, slots=True)
class HostHealth:
    """What a host says of itself: the episodes that it holds, for how long one call (and which) has blocked all of
    them, closed episodes whose calls never ended and hold a thread, and the bytes of its resident memory and of its
    machine's, 0 if unknown."""

    live: int
    stuck_s: float = 0.0
    stuck_in: str = ""
    left: tuple[str, ...] = ()
    memory: int = 0
    machine: int = 0


@dataclass(frozen=True, slots=True)
class EpisodeImages:
    """Images that an episode needs, all that its host has, and how many were brought for it."""

    wanted: tuple[str, ...]
    there: frozenset[str]
    pulled: int = 0


@dataclass(slots=True)
class EnvironmentCreation:
    """What a domain's environments cost a host to make. `cold_s` was waited for in resets, `ahead_s` was not."""

    cold: int = 0
    ahead: int = 0
    reused: int = 0
    cold_s: float = 0.0
    ahead_s: float = 0.0
    pulled: int = 0
    """Images that were brought, and the seconds that episodes waited for them before their reset."""
    pull_s: float = 0.0

    @property
    def episodes(self) -> int:
        return self.cold + self.ahead + self.reused

    def add(self, made: EnvironmentOrigin) -> None:
        match made.how:
            case "cold":
                self.cold, self.cold_s = self.cold + 1, self.cold_s + made.make_s
            case "ahead":
                self.ahead, self.ahead_s = self.ahead + 1, self.ahead_s + made.make_s
            case "reused":
                self.reused += 1


class EnvironmentHost(Protocol):
    """A host's client. Calls of one episode come one after the other; `EnvironmentFault`, which names the host, for
    whatever goes wrong with one. A call that is cancelled is cancelled there."""

    @property
    def id(self) -> str: ...

    @property
    def alive(self) -> bool:
        """Whether it can be asked at all, as far as is known."""

    @property
    def life(self) -> str:
        """This life of the host, which no other has: what its end is called (`EnvironmentFault.incident`)."""

    @property
    def node(self) -> str:
        """The machine that it runs on; hosts with the same one may fall together."""

    async def reset(self, episode: str, domain: str, seed: int) -> tuple[tuple[Observation, EnvironmentOrigin], float]:
        """What the episode shows first and how its environment was made, which it is at its first reset or before; and
        the seconds that the call took there."""

    @property
    def pictured(self) -> frozenset[str]:
        """Domains whose episodes need images that it can bring."""

    async def images(self, episode: str, domain: str, seed: int, *, pull: bool) -> tuple[EpisodeImages, float]:
        """Which images the episode needs, and those that are there; with `pull` all of them are, until it is closed.
        And the seconds of that."""

    async def step(self, episode: str, action: str) -> tuple[Step, float]: ...

    async def close(self, episode: str) -> None: ...

    async def health(self) -> HostHealth: ...

    async def lost(self) -> str:
        """Returns when nothing more can be asked of it, with the cause in words."""

    async def aclose(self) -> None: ...


class FunctionHost(Protocol):
    """A machine that runs function workers, while it is connected. Calls reach them without it: here it is watched."""

    resting: bool

    @property
    def id(self) -> str: ...

    @property
    def live(self) -> int:
        """Calls that its workers are in."""

    @property
    def answered(self) -> int:
        """Calls that were answered there since it started."""

    @property
    def workers(self) -> int: ...

    async def health(self) -> HostHealth:
        """`EnvironmentFault` with an incident if it is gone."""

    async def lost(self) -> str:
        """Returns when it is gone, with the cause in words."""

    def leave(self) -> None:
        """It gets no more workers; those that it has end with their calls."""

    async def emptied(self) -> None:
        """Returns once it is to leave and has no worker."""

    async def aclose(self) -> None:
        """Let go of it; calls of its workers are made again elsewhere."""
