"""The contract of environments, in this process or on a host: the same episodes, the same errors, the same ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from rollart.model import Observation, Step
from rollart.ports import Environment
from tests.contracts.worlds import Tale

Make = Callable[[str], Environment]
"""An environment of a domain: `tale`, `told`, `lake` or `spell`."""

Played = list[Observation | Step]


async def play(environment: Environment, seed: int, actions: list[str]) -> Played:
    """An episode, closed at its end."""
    seen: Played = []
    try:
        seen.append(await environment.reset(seed))
        for action in actions:
            step = await environment.step(action)
            seen.append(step)
            if step.done:
                break
    finally:
        await environment.close()
    return seen


async def an_episode_is_that_of_its_seed(make: Make) -> None:
    """Observations, rewards and metadata equal those of the class itself, to the last bit and type."""
    for seed in (0, 1, 2**62):
        assert await play(make("tale"), seed, ["left"] * 5) == await play(Tale(), seed, ["left"] * 5)


async def many_at_a_time_do_not_mix(make: Make) -> None:
    async def one(seed: int) -> bool:
        actions = [f"{seed}.{turn}" for turn in range(5)]
        return await play(make("tale"), seed, actions) == await play(Tale(), seed, actions)

    assert all(await asyncio.gather(*(one(seed) for seed in range(64))))


async def a_reset_starts_over(make: Make) -> None:
    environment = make("tale")
    first = await environment.reset(3)
    await environment.step("left")
    assert await environment.reset(3) == first
    await environment.close()


async def an_exception_is_its_episodes_alone(make: Make) -> None:
    bad, good = make("told"), make("told")
    await bad.reset(0)
    await good.reset(0)
    with pytest.raises(Exception, match="spoon"):
        await bad.step("raise spoon")
    assert (await good.step("go on")).observation.text.startswith("go on")
    await bad.close()
    await good.close()


async def a_cancelled_step_ends_and_its_episode_can_be_closed(make: Make) -> None:
    environment = make("told")
    await environment.reset(0)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await environment.step("hang")
    await environment.close()


async def closed_environments_are_gone(make: Make) -> None:
    one, two = make("told"), make("told")
    await one.reset(0)
    await two.reset(0)
    await two.close()
    assert (await one.step("count")).observation.text.split()[1] == "1"
    await one.close()


async def closing_twice_or_unused_is_nothing(make: Make) -> None:
    unused, twice = make("tale"), make("tale")
    await unused.close()
    await twice.reset(0)
    await twice.close()
    await twice.close()


async def the_quickstarts_episodes_are_the_same(make: Make) -> None:
    from rollart.adapters.envs.frozen_lake import FrozenLakeText

    lake = await play(make("lake"), 7, ["down", "right", "left", "nonsense"] * 2)
    assert lake == await play(FrozenLakeText(), 7, ["down", "right", "left", "nonsense"] * 2)


CONTRACT: list[Callable[[Make], Any]] = [
    an_episode_is_that_of_its_seed,
    many_at_a_time_do_not_mix,
    a_reset_starts_over,
    an_exception_is_its_episodes_alone,
    a_cancelled_step_ends_and_its_episode_can_be_closed,
    closed_environments_are_gone,
    closing_twice_or_unused_is_nothing,
    the_quickstarts_episodes_are_the_same,
]
