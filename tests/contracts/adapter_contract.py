"""The contract of every environment adapter that comes with rollart, whether it runs in this process or on a host."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from rollart.model import Observation, Step
from rollart.ports import EVAL_SEEDS_FROM, Environment
from rollart.user_code import checked_observation, checked_step
from tests.contracts.environment_contract import Played, play

__all__ = ["CONTRACT", "Case", "Make"]

LIMIT_S = 60.0
"""Deadline of scenarios that must end: only a failure waits so long."""

NONSENSE = '½ no such thing \x00 {"guess": [] '
"""Text that a policy may generate and no environment accepts as an action."""


@dataclass(frozen=True, slots=True)
class Case:
    """An environment by import path, and how it is played. `actions` are tried in turn until the episode is over,
    `turns` at most."""

    path: str
    actions: Sequence[str]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    turns: int = 50

    def script(self, shift: int = 0) -> list[str]:
        """So many actions, in an order of its own for every `shift`."""
        return [self.actions[(turn + shift) % len(self.actions)] for turn in range(self.turns)]

    def here(self) -> Environment:
        """One in this process."""
        from rollart.adapters.envs.lookup import attribute_at

        made: Environment = attribute_at(self.path, "environment")(**self.arguments)
        return made


Make = Callable[[], Environment]
"""One where it lives."""


async def an_episode_is_that_of_its_seed(case: Case, make: Make) -> None:
    """Two environments give the same as the class in this process, to the last bit; seeds differ."""
    seen: list[Played] = []
    for seed in (0, 1, 2**31 + 5, EVAL_SEEDS_FROM + 3):
        one = await play(make(), seed, case.script())
        assert one == await play(make(), seed, case.script()) == await play(case.here(), seed, case.script())
        seen.append(one)
    assert any(one[0] != seen[0][0] or one[1:] != seen[0][1:] for one in seen[1:])


async def an_episode_ends_and_says_how(case: Case, make: Make) -> None:
    """All values have the right types; only the last step is done."""
    begun, *steps = await play(make(), 11, case.script())
    assert isinstance(begun, Observation)
    assert checked_observation(begun) == begun
    assert steps, "it was played"
    for step in steps:
        assert isinstance(step, Step)
        checked_step(step)
        assert step.success is None or step.done
    assert [step.done for step in steps if isinstance(step, Step)] == [False] * (len(steps) - 1) + [True]
    last = steps[-1]
    assert isinstance(last, Step)
    assert last.success is not None


async def many_at_a_time_do_not_mix(case: Case, make: Make) -> None:
    async def one(seed: int) -> Played:
        return await play(make(), seed, case.script(seed))

    together = await asyncio.gather(*(one(seed) for seed in range(12)))
    assert together == [await one(seed) for seed in range(12)]


async def a_reset_starts_over(case: Case, make: Make) -> None:
    """In the middle of an episode as at its end."""
    environment = make()
    whole = await play(make(), 3, case.script())
    assert await environment.reset(3) == whole[0]
    await environment.step(case.actions[0])
    assert await environment.reset(3) == whole[0]
    for action, expected in zip(case.script(), whole[1:], strict=False):
        assert await environment.step(action) == expected
    assert await environment.reset(3) == whole[0]
    await environment.close()


async def held_out_seeds_are_episodes_that_training_does_not_play(case: Case, make: Make) -> None:
    """Seeds alone are checked: each adapter promises itself which items are held out."""
    environment = make()
    trained = [await environment.reset(seed) for seed in range(8)]
    held_out = [await environment.reset(EVAL_SEEDS_FROM + seed) for seed in range(8)]
    await environment.close()
    assert len(trained) == len(held_out) == 8
    again = case.here()
    assert held_out == [await again.reset(EVAL_SEEDS_FROM + seed) for seed in range(8)]
    await again.close()


async def nonsense_is_the_policys_matter(case: Case, make: Make) -> None:
    """A turn like another: no fault, and a finite reward."""
    environment = make()
    await environment.reset(4)
    step = await environment.step(NONSENSE)
    checked_step(step)
    assert step.reward <= 0.0 or step.done
    await environment.close()


async def a_step_before_the_reset_is_an_error(case: Case, make: Make) -> None:
    environment = make()
    with pytest.raises(Exception, match="reset"):
        await environment.step(case.actions[0])
    await environment.close()


async def it_can_be_closed_at_any_time(case: Case, make: Make) -> None:
    """Unused, twice, in the middle, and with a call that was given up."""
    async with asyncio.timeout(LIMIT_S):
        unused, twice, given_up = make(), make(), make()
        await unused.close()
        await twice.reset(5)
        await twice.step(case.actions[0])
        await twice.close()
        await twice.close()
        await given_up.reset(6)
        step = asyncio.get_running_loop().create_task(given_up.step(case.actions[0]))
        await asyncio.sleep(0)
        step.cancel()
        await asyncio.gather(step, return_exceptions=True)
        await given_up.close()


CONTRACT: list[Callable[[Case, Make], Any]] = [
    an_episode_is_that_of_its_seed,
    an_episode_ends_and_says_how,
    many_at_a_time_do_not_mix,
    a_reset_starts_over,
    held_out_seeds_are_episodes_that_training_does_not_play,
    nonsense_is_the_policys_matter,
    a_step_before_the_reset_is_an_error,
    it_can_be_closed_at_any_time,
]
