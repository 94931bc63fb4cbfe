"""The ports to hosts: processes or machines that hold many episodes, or many function workers, each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from rollart.model import Observation, Step


@dataclass(frozen=True, slots=True)
class EnvironmentOrigin:
    """The origin of an episode's environment. `how`: `cold`, constructed in its reset; `ahead`, constructed before it;
    `reused`, from another episode; `again`, from the same episode. `make_s`: seconds of the construction."""

    how: str
    make_s: float


@dataclass(frozen=True, slots=True)
class HostHealth:
    """A host's health report: its live episodes; for how long one call (and which) has blocked all of them; closed
    episodes whose calls never ended and hold a thread; the bytes of its resident memory and of its machine's, 0 if
    unknown."""

    live: int
    stuck_s: float = 0.0
    stuck_in: str = ""
    left: tuple[str, ...] = ()
    memory: int = 0
    machine: int = 0


@dataclass(frozen=True, slots=True)
class EpisodeImages:
    """Images that an episode needs, all images of its host, and the number pulled for the episode."""

    wanted: tuple[str, ...]
    there: frozenset[str]
    pulled: int = 0


@dataclass(slots=True)
class EnvironmentCreation:
    """The cost of constructing a domain's environments on a host. Resets waited for `cold_s`, not for `ahead_s`."""

    cold: int = 0
    ahead: int = 0
    reused: int = 0
    cold_s: float = 0.0
    ahead_s: float = 0.0
    pulled: int = 0
    """Pulled images; `pull_s`: seconds that episodes waited for them before their reset."""
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
    """A host's client. Calls of one episode are sequential; any failure raises `EnvironmentFault`, which names the
    host. Cancelling a call cancels it on the host."""

    @property
    def id(self) -> str: ...

    @property
    def alive(self) -> bool:
        """True if the host is reachable, as far as is known."""

    @property
    def life(self) -> str:
        """A unique identifier of this life of the host, which also identifies its end (`EnvironmentFault.incident`)."""

    @property
    def node(self) -> str:
        """The host's machine; hosts of one machine may fail together."""

    async def reset(self, episode: str, domain: str, seed: int) -> tuple[tuple[Observation, EnvironmentOrigin], float]:
        """The episode's first observation and the origin of its environment, which is constructed at its first reset or
        before; and the seconds of the call on the host."""

    @property
    def image_domains(self) -> frozenset[str]:
        """Domains whose episodes need container images that the host can pull."""

    async def images(self, episode: str, domain: str, seed: int, *, pull: bool) -> tuple[EpisodeImages, float]:
        """The images that the episode needs and the images present, with the seconds of the call; `pull` makes all
        needed images present until the episode is closed."""

    async def step(self, episode: str, action: str) -> tuple[Step, float]: ...

    async def close(self, episode: str) -> None: ...

    async def health(self) -> HostHealth: ...

    async def lost(self) -> str:
        """Returns when the host is no longer reachable, with the cause as text."""

    async def aclose(self) -> None: ...


class FunctionHost(Protocol):
    """A machine that runs function workers, while it is connected. Calls reach the workers directly: this port monitors
    it."""

    @property
    def id(self) -> str: ...

    @property
    def live(self) -> int:
        """Calls that its workers execute."""

    @property
    def answered(self) -> int:
        """Calls that were answered there since it started."""

    @property
    def workers(self) -> int: ...

    async def health(self) -> HostHealth:
        """`EnvironmentFault` with an incident if it is gone."""

    async def lost(self) -> str:
        """Returns when it is gone, with the cause as text."""

    def leave(self) -> None:
        """Drain the host: it gets no more workers; existing ones end with their calls."""

    async def emptied(self) -> None:
        """Returns once the host drains and has no worker."""

    async def aclose(self) -> None:
        """Disconnect from the host; calls of its workers are repeated elsewhere."""
