"""Preparation of an episode before its reset: the wait for a slot on a host, separate from the wait for the reset."""

from __future__ import annotations

from collections.abc import Callable

from rollart.policy.places import PlacementRequest
from rollart.ports import Environment
from rollart.runtime.hosting import HostedEnvironment

__all__ = ["has_host_slot", "mark_in_use", "prepare_environment"]


async def prepare_environment(
    environment: Environment,
    seed: int,
    owner: str,
    wish: PlacementRequest | None = None,
    give_up: Callable[[], None] | None = None,
) -> None:
    """Wait until the episode has a slot on a host, with its images. Returns at once for environments in the controller.
    The wait for a slot has no deadline; the wait for images has its own lease. `give_up`: see
    `HostedEnvironment.prepare`."""
    if isinstance(environment, HostedEnvironment):
        await environment.prepare(seed, owner, wish or PlacementRequest(), give_up)


def has_host_slot(environment: Environment) -> bool:
    """True if the reset of the environment can begin."""
    return not isinstance(environment, HostedEnvironment) or environment.host != ""


def mark_in_use(environment: Environment) -> None:
    """Mark the environment in use by its trajectory: its host slot is no longer reclaimed for other episodes."""
    if isinstance(environment, HostedEnvironment):
        environment.keep()
