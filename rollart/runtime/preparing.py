"""What an episode's host must have before its reset can begin, waited for apart from the reset."""

from __future__ import annotations

from rollart.ports import Environment
from rollart.runtime.hosting import HostedEnvironment

__all__ = ["prepared"]


async def prepared(environment: Environment, seed: int, owner: str) -> None:
    """The episode has a host with its images; at once for every environment that needs none."""
    if isinstance(environment, HostedEnvironment):
        await environment.prepare(seed, owner)
