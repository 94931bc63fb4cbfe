"""The quickstart's environments: determinism by seed, legal actions, and a split that no seed crosses."""

from __future__ import annotations

import ast
import asyncio
import subprocess
import sys
from collections.abc import Awaitable
from typing import Any, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.adapters.envs import reasoning_gym
from rollart.adapters.envs.frozen_lake import ACTIONS, FrozenLakeText, distances, draw_lake, lake_words
from rollart.adapters.envs.reasoning_gym import PlainFormat, ReasoningGymEnv
from rollart.adapters.envs.split import held_out_item
from rollart.model import Step
from rollart.ports import EVAL_SEEDS_FROM, Environment
from rollart.quickstart.spelling import SpellSteps

T = TypeVar("T")
seeds = st.integers(0, EVAL_SEEDS_FROM + 10_000)
WORDS = ["twas", "Kobus", "piny", "ham", "level", "abbey", "zeal", "quip", "onyx", "mud", "ax1e"]


def now(awaitable: Awaitable[T]) -> T:
    """These environments never wait: run to the end without a loop."""
    try:
        awaitable.__await__().send(None)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
    raise AssertionError("the environment waited")


def play(env: FrozenLakeText, seed: int, actions: list[str]) -> tuple[list[str], Step]:
    texts = [now(env.reset(seed)).text]
    for action in actions:
        step = now(env.step(action))
        texts.append(step.observation.text)
        if step.done:
            return texts, step
    raise AssertionError("an episode ends within its turns")


class WordList:
    """Stands for a reasoning-gym dataset of `spell_backward`: same items, no two seconds of import."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        word = WORDS[index % len(WORDS)]
        return {"question": f"Spell this word backward: {word}", "answer": word[::-1], "metadata": {"word": word}}

    def score_answer(self, answer: str, entry: dict[str, Any]) -> float:
        return float(answer.lower() == entry["answer"].lower())


@pytest.fixture
def spelling(monkeypatch: pytest.MonkeyPatch) -> ReasoningGymEnv:
    monkeypatch.setattr(reasoning_gym, "load_dataset", lambda name, config: WordList())
    return ReasoningGymEnv("spell_backward", worked_format="rollart.quickstart.spelling:SpellSteps", max_tokens=24)


@pytest.mark.slow
def test_environments_implement_the_port() -> None:
    environments: list[Environment] = [FrozenLakeText(), ReasoningGymEnv("chain_sum")]
    for env in environments:
        asyncio.run(env.close())


@settings(max_examples=40, deadline=None)
@given(seed=seeds, choices=st.lists(st.sampled_from(ACTIONS), min_size=8, max_size=8))
def test_a_lake_episode_is_a_function_of_seed_and_actions(seed: int, choices: list[str]) -> None:
    texts, last = play(FrozenLakeText(), seed, choices)
    again, _ = play(FrozenLakeText(), seed, choices)
    assert texts == again
    assert len(texts) <= 9
    assert last.observation.actions is None
    assert last.metadata["observations"] == texts
    assert last.metadata["success"] is last.success is (last.reward == 1.0)
    words = set(lake_words())
    assert all(word in words for text in texts for word in text.split())


@settings(max_examples=40, deadline=None)
@given(seed=seeds)
def test_every_lake_can_be_solved_in_its_turns(seed: int) -> None:
    env, lake = FrozenLakeText(), draw_lake(seed)
    text = now(env.reset(seed)).text
    assert text.split()[1:17] == list("".join(lake.rows))
    left = distances(lake)
    assert 2 <= (left[lake.start] or 0) <= 8
    cell, step = lake.start, None
    while cell != lake.goal:
        moves = {"left": -1, "down": 4, "right": 1, "up": -4}
        edges = {"left": cell % 4 > 0, "right": cell % 4 < 3, "up": cell > 3, "down": cell < 12}
        action = next(a for a in ACTIONS if edges[a] and left[cell + moves[a]] == (left[cell] or 0) - 1)
        cell += moves[action]
        step = now(env.step(action))
    assert step is not None
    assert step.done
    assert step.success


def test_a_word_that_is_no_action_costs_a_turn() -> None:
    env = FrozenLakeText(max_turns=2)
    first = now(env.reset(1)).text
    step = now(env.step("please go left"))
    assert first.endswith(step.observation.text)
    assert not step.done
    assert now(env.step("")).done


def test_a_hole_ends_the_episode_without_success() -> None:
    texts, last = play(FrozenLakeText(), *_into_a_hole())
    assert texts[-1].endswith("on:hole")
    assert last.success is False


@settings(max_examples=100, deadline=None)
@given(seed=seeds)
def test_training_never_shows_a_held_out_lake(seed: int) -> None:
    assert held_out_item("".join(draw_lake(seed).rows)) is (seed >= EVAL_SEEDS_FROM)


@pytest.mark.parametrize(
    "options", [{"size": 1}, {"holes": 15}, {"min_distance": 0}, {"min_distance": 9}, {"max_turns": 1}]
)
def test_impossible_lakes_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must"):
        FrozenLakeText(**options)


def test_lakes_without_a_path_are_an_error_and_not_a_hang() -> None:
    with pytest.raises(ValueError, match="fewer holes"):
        draw_lake(0, size=2, holes=2, min_distance=2)


def test_a_worked_answer_is_a_success(spelling: ReasoningGymEnv) -> None:
    for seed in range(20):
        prompt, answer = spelling.worked_example(seed)
        observation = now(spelling.reset(seed))
        assert observation.text == prompt
        assert observation.max_tokens == 24
        step = now(spelling.step(answer))
        assert step.done
        assert step.success
        assert step.reward == 1.0
        assert " ".join(step.metadata["derivation"]) == answer  # type: ignore[arg-type]
        assert not now(spelling.step(answer.replace("=", ""))).success


def test_training_never_shows_a_held_out_word(spelling: ReasoningGymEnv) -> None:
    steps = SpellSteps()
    train = {steps.prompt(spelling.draw(seed)) for seed in range(200)}
    held_out = {steps.prompt(spelling.draw(EVAL_SEEDS_FROM + seed)) for seed in range(200)}
    worked = {spelling.worked_example(EVAL_SEEDS_FROM + seed)[0] for seed in range(50)}
    assert train
    assert held_out
    assert not (train | worked) & held_out


def test_words_outside_the_alphabet_are_no_items(spelling: ReasoningGymEnv) -> None:
    assert all(spelling.draw(seed)["metadata"]["word"] != "ax1e" for seed in range(200))


def test_the_plain_format_is_the_question(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reasoning_gym, "load_dataset", lambda name, config: WordList())
    env = ReasoningGymEnv("chain_sum", worked_format=PlainFormat())
    assert now(env.reset(3)).text.startswith("Spell this word")
    answer = env.draw(3)["answer"]
    assert now(env.step(f" {answer}\n")).success
    with pytest.raises(ValueError, match="no worked steps"):
        env.worked_example(3)


def test_a_step_before_reset_is_our_own_bug() -> None:
    for env in (FrozenLakeText(), ReasoningGymEnv("chain_sum")):
        with pytest.raises(RuntimeError, match="before reset"):
            now(env.step("left"))


def test_a_format_path_must_name_a_class() -> None:
    with pytest.raises(ValueError, match=r"package\.module:Class"):
        ReasoningGymEnv("chain_sum", worked_format="rollart.quickstart.spelling")


@pytest.mark.slow
def test_reasoning_gym_itself_scores() -> None:
    """Slow: importing reasoning_gym takes two seconds."""
    env = ReasoningGymEnv("spell_backward", config={"min_word_len": 3, "max_word_len": 5}, worked_format=SpellSteps())
    prompts = set()
    for seed in range(100):
        prompt, answer = env.worked_example(seed)
        now(env.reset(seed))
        assert now(env.step(answer)).success
        half = now(env.step("= " + " ".join(env.draw(seed)["answer"][:2])))
        assert 0.0 < half.reward < 1.0
        prompts.add(prompt)
    assert len(prompts) > 95
    sums = ReasoningGymEnv("chain_sum")
    now(sums.reset(5))
    assert now(sums.step(str(sums.draw(5)["answer"]))).success


def _into_a_hole() -> tuple[int, list[str]]:
    for seed in range(1000):
        lake = draw_lake(seed)
        if lake.start % 4 < 3 and lake.start + 1 in lake.holes:
            return seed, ["right"] * 8
    raise AssertionError("no lake has a hole to the right of its start")


@pytest.mark.slow  # a process that imports reasoning_gym, 3 s
@pytest.mark.parametrize(
    ("environment", "arguments", "module"),
    [
        ("rollart.adapters.envs.reasoning_gym:ReasoningGymEnv", {"dataset": "chain_sum"}, "reasoning_gym"),
        ("rollart.adapters.envs.frozen_lake:FrozenLakeText", {}, "gymnasium"),
        ("rollart.adapters.envs.gymnasium:GymnasiumText", {"id": "FrozenLake-v1", "render": "ansi"}, "gymnasium"),
    ],
)
def test_nothing_is_imported_after_a_host_has_made_its_domains(
    environment: str, arguments: dict[str, object], module: str
) -> None:
    """On the lease of its start, and not inside a reset that others wait for."""
    script = (
        "import asyncio, sys\n"
        "from rollart.adapters.env_hosts.host import load_factories\n"
        f"made = load_factories({{'d': {{'environment': {environment!r}, 'arguments': {arguments!r}}}}})['d']\n"
        "assert made.make is not None, made.problem\n"
        f"assert {module!r} in sys.modules\n"
        "before = set(sys.modules)\n"
        "asyncio.run(made.make().reset(3))\n"
        "print(sorted(set(sys.modules) - before))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert not [name for name in ast.literal_eval(done.stdout) if name.partition(".")[0] == module]
