"""What an episode must have before its reset can begin, waited for apart from the reset: a place on a host."""

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
    """The episode has a place on a host, with its images; at once for every environment that lives in the controller.
    The wait for a place has no deadline, the one for images a lease of its own. `give_up`: see
    `HostedEnvironment.prepare`."""
    if isinstance(environment, HostedEnvironment):
        await environment.prepare(seed, owner, wish or PlacementRequest(), give_up)


def has_host_slot(environment: Environment) -> bool:
    """Whether its reset could begin."""
    return not isinstance(environment, HostedEnvironment) or environment.host != ""


def mark_in_use(environment: Environment) -> None:
    """Its trajectory runs: its host slot is no longer given to other episodes."""
    if isinstance(environment, HostedEnvironment):
        environment.keep()
