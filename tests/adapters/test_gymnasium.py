"""Gymnasium's environments as text: observations, legal actions, lost turns and faults."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest

from rollart.adapters.envs.gymnasium import GymnasiumText
from rollart.adapters.envs.split import held_out_item
from rollart.errors import SpecError
from rollart.model import Step
from rollart.ports import EVAL_SEEDS_FROM
from rollart.settings.run import DomainSpec

gymnasium = pytest.importorskip("gymnasium")

T = TypeVar("T")
WORLDS = "tests.adapters.gym_worlds"
LAKE = {"id": "FrozenLake-v1", "make_args": {"is_slippery": False}, "actions": ["left", "down", "right", "up"]}


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(coroutine)


async def played(env: GymnasiumText, seed: int, *actions: str) -> tuple[list[str], Step]:
    """The observations, and the last step."""
    texts = [(await env.reset(seed)).text]
    step: Step | None = None
    for action in actions:
        step = await env.step(action)
        texts.append(step.observation.text)
    await env.close()
    assert step is not None
    return texts, step


@pytest.mark.parametrize("threaded", [True, False])
def test_a_lake_is_walked_in_words(threaded: bool) -> None:
    env = GymnasiumText(**LAKE, success_at=1, threaded=threaded)
    texts, step = run(played(env, 1, "down", "down", "right", "right", "down", "right"))
    assert texts == ["0", "4", "8", "9", "10", "14", "15"]
    assert step.done
    assert step.reward == 1.0
    assert step.success is True
    assert step.metadata["env_rewards"] == [0.0] * 5 + [1.0]
    assert step.metadata["truncated"] is False


def test_legal_actions_are_words_of_one_token() -> None:
    env = GymnasiumText(**LAKE)
    shown = run(env.reset(1))
    assert shown.actions == ("left", "down", "right", "up")
    assert shown.max_tokens == 1
    numbers = GymnasiumText("FrozenLake-v1")
    assert run(numbers.reset(1)).actions == ("0", "1", "2", "3")
    free = run(GymnasiumText(**LAKE, restrict=False, max_tokens=20).reset(1))
    assert free.actions is None
    assert free.max_tokens == 20


def test_an_invalid_action_is_a_lost_turn() -> None:
    texts, step = run(played(GymnasiumText(**LAKE, invalid_reward=-0.5), 1, "down", "fly"))
    assert texts == ["0", "4", "4"]
    assert step.reward == -0.5
    assert not step.done
    assert step.observation.actions == ("left", "down", "right", "up")
    texts, _ = run(played(GymnasiumText(**LAKE, invalid_text="that is no move"), 1, "fly"))
    assert texts[1] == "that is no move"


def test_turns_lost_count_towards_the_end() -> None:
    arguments = {**LAKE, "make_args": {"is_slippery": False, "max_episode_steps": 2}}
    _, step = run(played(GymnasiumText(**arguments, success_at=1), 1, "fly", "fly"))
    assert step.done
    assert step.success is False
    assert step.metadata["truncated"] is True


def test_truncation_ends_the_episode_without_success() -> None:
    arguments = {**LAKE, "make_args": {"is_slippery": False, "max_episode_steps": 2}}
    _, step = run(played(GymnasiumText(**arguments, success_at=1), 1, "left", "left"))
    assert step.done
    assert step.success is False
    assert step.metadata["truncated"] is True


def test_the_environments_own_rendering_keeps_its_cursor() -> None:
    texts, _ = run(played(GymnasiumText(**LAKE, render="ansi", preamble="walk:"), 1, "down"))
    assert texts[0] == "walk:\n[S]FFF\nFHFH\nFFFH\nHFFG\n"
    assert "[F]HFH" in texts[1]


def test_the_same_seed_shows_the_same_episode() -> None:
    def once(seed: int) -> list[str]:
        return run(played(GymnasiumText("CartPole-v1"), seed, "0", "1"))[0]

    assert once(3) == once(3) != once(4)


def test_held_out_seeds_show_observations_that_no_training_seed_shows() -> None:
    env = GymnasiumText("CartPole-v1", held_out="observations", threaded=False)
    for seed in range(20):
        assert not held_out_item(run(env.reset(seed)).text)
        assert held_out_item(run(env.reset(EVAL_SEEDS_FROM + seed)).text)
    lake = GymnasiumText(**LAKE, held_out="observations")
    shown = {held_out_item("0")}  # it always begins in the same corner: only one side of the split has an episode
    with pytest.raises(ValueError, match=r"first observation of FrozenLake-v1 in 200 resets.*held_out: seeds"):
        run(lake.reset(0 if True in shown else EVAL_SEEDS_FROM))


def test_a_text_game_needs_no_spaces() -> None:
    env = GymnasiumText(make=f"{WORLDS}:GuessText", make_args={"most": 4})
    texts, step = run(played(env, 6, "1", "2"))
    assert texts == ["guess 0 to 3", "no", "yes"]
    assert step.done
    assert step.reward == 1.0
    assert step.success is True
    assert step.metadata["info"] == {"success": True}


def test_spaces_without_words_take_a_parser_and_a_renderer() -> None:
    make = f"{WORLDS}:Bits"
    env = GymnasiumText(make=make, parse=f"{WORLDS}:bits_of")
    texts, step = run(played(env, 5, "1 x 0", "0 0 0"))
    assert texts[0] == texts[1]
    assert texts[0].startswith("at:0.5 -0.123 want:")
    zeros = texts[0].split("want:")[1].split().count("0")
    assert step.done
    assert step.reward == zeros
    told, _ = run(played(GymnasiumText(make=make, parse=f"{WORLDS}:bits_of", render=f"{WORLDS}:told"), 5, "1 1 1"))
    assert told[0].startswith("told {")


def test_the_environments_own_mask_narrows_legal_actions() -> None:
    async def play() -> list[tuple[str, ...] | None]:
        env = GymnasiumText(make=f"{WORLDS}:Masked", actions=["a", "b", "c"])
        seen = [(await env.reset(0)).actions]
        for action in ("b", "a"):
            seen.append((await env.step(action)).observation.actions)
        await env.close()
        return seen

    assert run(play()) == [("a", "b", "c"), ("a", "c"), ("c",)]


@pytest.mark.parametrize("threaded", [True, False])
def test_errors_are_raised_and_invalid_results_reported(threaded: bool) -> None:
    with pytest.raises(RuntimeError, match="the game broke"):
        run(played(GymnasiumText(make=f"{WORLDS}:GuessText", threaded=threaded), 1, "explode"))
    with pytest.raises(TypeError, match="answered a step with 4 values"):
        run(played(GymnasiumText(make=f"{WORLDS}:Liar", threaded=threaded), 1, "x"))


def test_a_step_that_hangs_holds_up_neither_the_loop_nor_its_close() -> None:
    from tests.adapters.gym_worlds import Stuck

    Stuck.let_go.clear()

    async def play() -> None:
        env = GymnasiumText(make=Stuck)
        Stuck.closed.clear()  # one was made for a look at its spaces, and closed
        await env.reset(0)
        step = asyncio.get_running_loop().create_future()

        async def stepping() -> None:
            step.set_result(None)
            await env.step("x")

        async with asyncio.TaskGroup() as tasks:
            hangs = tasks.create_task(stepping())
            await step  # the loop lives while the step hangs
            hangs.cancel()
        await env.close()

    run(play())
    assert not Stuck.closed.is_set()
    Stuck.let_go.set()
    assert Stuck.closed.wait(60)  # closed by its own thread, once the step returned


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"id": "FrozenLak-v1"}, r"Gymnasium has no 'FrozenLak-v1'; did you mean 'FrozenLake-v1'\?"),
        ({"id": "FrozenLake-v99"}, "FrozenLake-v99"),
        ({"id": "no_such_package:X-v1"}, r"no_such_package.*pip install 'rollart\[envs\]'"),
        ({**LAKE, "actions": ["a", "b"]}, "2 names for 4 actions"),
        ({**LAKE, "actions": ["a", "a", "b", "c"]}, "different words"),
        ({"id": "Pendulum-v1"}, r"actions are Box.*needs a `parse`"),
        ({"id": "Pendulum-v1", "parse": f"{WORLDS}:nothing"}, "has no 'nothing'"),
        ({"make": f"{WORLDS}:GuessText", "make_args": {"few": 1}}, "unexpected keyword argument 'few'"),
        ({"make": "GuessText"}, "package.module:attribute"),
        ({}, "either `id`"),
        ({**LAKE, "held_out": "none"}, "held_out is 'none'"),
        ({**LAKE, "nonsense": 1}, "unexpected keyword argument 'nonsense'"),
    ],
)
def test_what_cannot_be_is_refused_before_the_run(arguments: dict[str, Any], message: str) -> None:
    from rollart.launch.prepare import environment_factory

    spec = DomainSpec(name="x", environment="rollart.adapters.envs.gymnasium:GymnasiumText", environment_args=arguments)
    with pytest.raises(SpecError, match=message):
        environment_factory(spec)
