"""OpenEnv's client against the real server of `openenv`, which has an environment of its own (`make openenv`)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollart.adapters.envs.openenv import OpenEnv
from rollart.errors import EnvironmentFault
from rollart.ports import EVAL_SEEDS_FROM
from tests.adapters.openenv_process import PYTHON, serve, served

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path(PYTHON).exists(), reason="openenv has an environment of its own: `make openenv`"),
]

LIMIT_S = 60.0
"""Only a failure waits so long."""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with served(64) as address:
        yield address


def env(url: Any, **more: Any) -> OpenEnv:
    limits = {"connect_s": LIMIT_S, "capacity_s": LIMIT_S, "reset_s": LIMIT_S, "step_s": LIMIT_S}
    return OpenEnv(url, **{**limits, **more})


def test_an_episode_over_the_wire(url: str) -> None:
    async def play() -> None:
        one = env(url)  # the action's field is asked of the server
        shown = await one.reset(11)
        assert shown.text == "train: guess 0 to 7"
        step = await one.step("1")
        assert (step.observation.text, step.reward, step.done) == ("no", 0.0, False)
        lost = await one.step("three")  # no number: the policy's own matter
        assert (lost.observation.text, lost.done) == ("no", False)
        step = await one.step("3")
        assert step.done
        assert (step.reward, step.success) == (1.0, True)
        assert step.metadata["env_rewards"] == [0.0, 0.0, 1.0]
        await one.close()

    asyncio.run(play())


def test_many_episodes_at_once_share_nothing(url: str) -> None:
    async def play(seed: int) -> bool | None:
        one = env(url, action="guess", held_out_args={"split": "test"})
        shown = await one.reset(seed)
        assert shown.text.startswith("test" if seed >= EVAL_SEEDS_FROM else "train")
        step = await one.step(str(seed % 8))
        await one.close()
        return step.success

    async def all_of_them() -> list[bool | None]:
        return await asyncio.gather(*(play(seed) for seed in [*range(20), EVAL_SEEDS_FROM + 1]))

    assert asyncio.run(all_of_them()) == [True] * 21


def test_a_session_may_be_reset_for_another_episode(url: str) -> None:
    async def play() -> None:
        one = env(url, action="guess", reuse=True)
        for seed in (1, 2):
            await one.reset(seed)
            assert (await one.step(str(seed))).done
        await one.close()

    asyncio.run(play())


@pytest.mark.parametrize(
    ("arguments", "action", "message"),
    [
        ({}, "99", "EXECUTION_ERROR at its step: the game broke on 127.0.0.1:"),
        ({"action": "word"}, "1", "VALIDATION_ERROR at its step: its actions have other fields"),
        ({"reset_args": {"split": "broken"}}, "1", "EXECUTION_ERROR at its reset: no such split on 127.0.0.1:"),
        (
            {"text": "word"},
            "1",
            r"an observation without the field that it is read by \(KeyError\('word'\)\) on 127.0.0.1:",
        ),
        ({"step_s": 0.1}, "98", "no answer to a step within 0.1 s on 127.0.0.1:"),
    ],
)
def test_an_error_of_a_server_is_a_fault_with_its_host(
    url: str, arguments: dict[str, Any], action: str, message: str
) -> None:
    async def play() -> None:
        one = env(url, **arguments)
        try:
            await one.reset(1)
            await one.step(action)
        finally:
            await one.close()

    with pytest.raises(EnvironmentFault, match=message):
        asyncio.run(play())


def test_a_full_server_is_skipped_waited_for_and_reported(url: str) -> None:
    server, small = serve(1)

    async def play() -> None:
        first = env(small, action="guess")
        await first.reset(1)
        with pytest.raises(EnvironmentFault, match="CAPACITY_REACHED at its reset: Server at capacity: 1/1"):
            await env(small, capacity_s=0).reset(1)
        beside = env([small, url], action="guess")  # the other has room
        await beside.reset(2)
        assert (await beside.step("2")).done
        await beside.close()
        waiting = env(small, action="guess")
        async with asyncio.TaskGroup() as tasks:
            reset = tasks.create_task(waiting.reset(3))
            assert (await first.step("1")).done
            await first.close()  # makes room
        assert reset.result().text
        server.kill()
        server.wait()
        with pytest.raises(EnvironmentFault, match=r"(closed|gone) at its step .* on 127.0.0.1:"):
            await waiting.step("1")
        with pytest.raises(EnvironmentFault, match="no connection"):
            await env(small, capacity_s=0).reset(1)
        await waiting.close()

    try:
        asyncio.run(play())
    finally:
        server.kill()
        server.wait()
