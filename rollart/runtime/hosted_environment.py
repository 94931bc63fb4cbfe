"""One episode on an environment host, behind the same port as an environment in the controller."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

from rollart.errors import EnvironmentFault
from rollart.model import Observation, Step
from rollart.policy.places import PlacementRequest
from rollart.runtime.places import HostSlot

if TYPE_CHECKING:
    from rollart.runtime.hosting import EnvironmentHostSupervisor

__all__ = ["HostedEnvironment", "host_of"]

R = TypeVar("R")

DEFAULT_PLACEMENT_REQUEST = PlacementRequest()
"""The request of an environment that is reset without `prepare`."""


class HostedEnvironment:
    """Implements `ports.Environment`: one episode on one host, chosen before its first reset and kept until its
    close."""

    __slots__ = ("_domain", "_episode", "_fault", "_fleet", "_place")

    def __init__(self, fleet: EnvironmentHostSupervisor, domain: str, episode: str) -> None:
        self._fleet, self._domain, self._episode = fleet, domain, episode
        self._place: HostSlot | None = None
        self._fault = False

    @property
    def host(self) -> str:
        """The host of the episode; '' before it has a slot and after its close."""
        return "" if self._place is None else self._place.host.id

    async def prepare(
        self,
        seed: int,
        owner: str,
        wish: PlacementRequest = DEFAULT_PLACEMENT_REQUEST,
        give_up: Callable[[], None] | None = None,
    ) -> None:
        """Wait for a slot on a host, and for the episode's images there, if it needs any. This precedes the reset and
        is not part of its time. `give_up` is for prefetched episodes: it is called, at most once and not after `keep`,
        when the episode must close to free its slot for another."""
        if self._place is not None:
            return
        wanted = await self._fleet.wanted(self._domain, seed, owner)
        place = self._place = await self._fleet.places.take(wish, owner, wanted=wanted, give_up=give_up)
        if not wanted and not await self._fleet.wanted(self._domain, seed, owner):  # first: perhaps no host was up
            return
        try:
            await self._fleet.pull(place.host, place.link, self._episode, self._domain, seed, owner)
        except Exception:
            self._fault = True
            raise

    def keep(self) -> None:
        """Mark the episode in use: its trajectory runs."""
        if self._place is not None:
            self._fleet.places.keep(self._place)

    async def reset(self, seed: int) -> Observation:
        if self._place is None:
            self._place = await self._fleet.places.take(DEFAULT_PLACEMENT_REQUEST, self._episode)
        place = self._place
        shown, made = await self._call(place, place.link.reset(self._episode, self._domain, seed))
        self._fleet.made(place.host, self._domain, made)
        return shown

    async def step(self, action: str) -> Step:
        if self._place is None:
            raise RuntimeError("step before reset")
        return await self._call(self._place, self._place.link.step(self._episode, action))

    async def close(self) -> None:
        place, self._place = self._place, None
        if place is None:
            return
        try:
            await place.link.close(self._episode)
        except EnvironmentFault as fault:
            if not fault.incident:  # with an incident, the episode ended with its host
                raise
        finally:
            self._fleet.leave(place, fault=self._fault)

    async def _call(self, place: HostSlot, work: Awaitable[tuple[R, float]]) -> R:
        began = _now()
        try:
            return await self._fleet.call(place.host, place.link, work)
        except EnvironmentFault:
            self._fault = True
            raise
        except asyncio.CancelledError:
            self._fault = self._fault or self._fleet.hangs(began)
            raise


def host_of(environment: object) -> str:
    """The host of an environment; '' for an environment in the controller."""
    return environment.host if isinstance(environment, HostedEnvironment) else ""


def _now() -> float:
    return asyncio.get_running_loop().time()
