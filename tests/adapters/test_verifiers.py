"""Environments of verifiers' v0 API, played by the real package: its rollouts, its rubrics, its rows."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rollart.adapters.envs.verifiers import VerifiersText
from rollart.errors import SpecError
from rollart.model import Completion, FinishReason, Observation, SegmentKind, Step, VersionSpan
from rollart.ports import EVAL_SEEDS_FROM
from rollart.settings.run import DomainSpec

pytest.importorskip("verifiers", reason="verifiers is installed by `make test-slow` only")
pytest.importorskip("datasets")

pytestmark = pytest.mark.slow  # seven seconds to import

WORLDS = "tests.adapters.vf_worlds"


def play(env: VerifiersText, seed: int, actions: Sequence[str]) -> tuple[list[str], Step]:
    async def played() -> tuple[list[str], Step]:
        shown: list[str] = [(await env.reset(seed)).text]
        try:
            for action in actions:
                step = await env.step(action)
                shown.append(step.observation.text)
        finally:
            await env.close()
        return shown, step

    return asyncio.run(played())


def first(env: VerifiersText, seed: int) -> str:
    async def shown() -> Observation:
        observation = await env.reset(seed)
        await env.close()
        return observation

    return asyncio.run(shown()).text


def test_one_question_pays_the_reward_of_its_rubric() -> None:
    env = VerifiersText(f"{WORLDS}:load_environment")
    text = first(env, 5)
    system, _, question = text.partition("\n")
    assert system == "Double it."
    number = int(question.removeprefix("double "))
    _, step = play(env, 5, [str(2 * number)])
    assert step.done
    assert (step.reward, step.success) == (1.5, True)
    assert step.metadata["reference_answer"] == str(2 * number)
    assert step.metadata["info"] == {"i": number}
    metrics: Any = step.metadata["metrics"]
    assert (metrics["right"], metrics["short"]) == (1.0, 1.0)
    _, step = play(env, 5, ["no idea"])
    assert (step.reward, step.success) == (0.0, False)


def test_it_is_found_by_its_id_and_takes_arguments() -> None:
    env = VerifiersText("tests.adapters.vf_worlds", env_args={"rows": 4, "evaluation": 8}, render="chatml")
    assert first(env, 1).endswith("<|im_end|>\n<|im_start|>assistant\n")
    assert first(env, 1).startswith("<|im_start|>system\nDouble it.<|im_end|>\n<|im_start|>user\ndouble ")
    trained = {first(env, seed) for seed in range(30)}
    held_out = {first(env, EVAL_SEEDS_FROM + seed) for seed in range(30)}
    assert len(trained) == 4
    assert len(held_out) > 4  # its own evaluation rows


def test_without_evaluation_rows_an_eighth_is_held_out() -> None:
    env = VerifiersText(f"{WORLDS}:load_environment")
    trained = {first(env, seed) for seed in range(60)}
    held_out = {first(env, EVAL_SEEDS_FROM + seed) for seed in range(60)}
    assert not trained & held_out
    assert held_out


def test_a_talk_goes_on_by_its_own_answers() -> None:
    shown, step = play(VerifiersText(f"{WORLDS}:talk"), 3, ["hello", "bye"])
    assert shown[1] == "you said hello"
    assert step.done
    assert step.reward == 1.0
    _, step = play(VerifiersText(f"{WORLDS}:talk"), 3, ["a", "b", "c"])
    assert step.done
    assert step.reward == 0.0


def test_tools_are_called_from_text() -> None:
    env = VerifiersText(f"{WORLDS}:tools", render="chatml")
    call = f"<tool_call>{json.dumps({'name': 'add', 'arguments': {'a': 4, 'b': 5}})}</tool_call>"
    shown, step = play(env, 3, [call, "<tool_call>{}</tool_call> 9"])
    assert '{"name": "add", "description": "Add two numbers."' in shown[0]
    assert shown[1] == ("\n<|im_start|>tool\n<tool_response>\n9\n</tool_response><|im_end|>\n<|im_start|>assistant\n")
    assert step.done  # an answer without a call is the last


def test_errors_are_raised_and_never_paid() -> None:
    with pytest.raises(RuntimeError, match=r"reward function fails raised KeyError: 'no judge'"):
        play(VerifiersText(f"{WORLDS}:broken"), 1, ["x"])
    with pytest.raises(RuntimeError, match="the talk broke"):
        play(VerifiersText(f"{WORLDS}:talk"), 1, ["break"])
    with pytest.raises(RuntimeError, match="rewrites its conversation"):
        play(VerifiersText(f"{WORLDS}:rewriting"), 1, ["x"])


def test_an_episode_that_is_given_up_leaves_nothing() -> None:
    async def given_up() -> set[str]:
        env = VerifiersText(f"{WORLDS}:talk")
        await env.reset(1)
        await env.close()
        return {task.get_name() for task in asyncio.all_tasks()}

    assert "verifiers rollout" not in asyncio.run(given_up())


def test_signals_stay_ours() -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    VerifiersText(f"{WORLDS}:load_environment", env_args={"rows": 9})
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"env": "no-such-environment"}, "Could not import 'no-such-environment'"),
        ({"env": f"{WORLDS}:nothing"}, "has no 'nothing'"),
        ({"env": f"{WORLDS}:grouped"}, "scores whole groups"),
        ({"env": f"{WORLDS}:add", "env_args": {"a": 1, "b": 1}}, "no verifiers environment"),
        ({"env": f"{WORLDS}:talk", "render": "markdown"}, "plain, chatml or package.module:function"),
        ({"env": f"{WORLDS}:talk", "tools": "xml"}, "one of hermes, json, none"),
    ],
)
def test_what_cannot_be_is_refused_before_the_run(arguments: dict[str, Any], message: str) -> None:
    from rollart.launch.prepare import environment_factory

    spec = DomainSpec(name="x", environment="rollart.adapters.envs.verifiers:VerifiersText", environment_args=arguments)
    with pytest.raises(SpecError, match=message):
        environment_factory(spec)


def test_as_a_harness_it_asks_the_capture_proxy(tmp_path: Path) -> None:
    """Through the real client of OpenAI that verifiers uses, with the model's own chat template."""
    from rollart.adapters.envs.verifiers import episode
    from rollart.adapters.proxy.chat import ChatFormat
    from rollart.adapters.proxy.harness import HarnessRunner
    from rollart.adapters.proxy.server import Proxy
    from rollart.launch.servers import serve_app
    from tests.proxy.scripted import spelling

    spelling(tmp_path)
    form = ChatFormat(tmp_path)
    answer = form.encode("world") + form.stop_ids

    async def play() -> tuple[str, Step]:
        proxy = Proxy(form)
        arguments = {"env": f"{WORLDS}:load_environment", "success_at": 0.0}
        async with (
            asyncio.timeout(120),
            serve_app(proxy.app(), host="127.0.0.1", port=0) as url,
            HarnessRunner(proxy, url, context=256) as harnesses,
        ):
            begun = harnesses.factory(episode, arguments)("one", 5)
            wanted = await begun.wanted()
            assert wanted is not None
            span = VersionSpan(3, 0, len(answer))
            begun.answer(Completion(answer, (-0.5,) * len(answer), (span,), FinishReason.STOP))
            assert await begun.wanted() is None
            assert [s.kind for s in begun.segments()] == [SegmentKind.PROMPT, SegmentKind.ACTION]
            ending = begun.ending()
            await begun.close()
        return form.text(wanted.token_ids), ending

    shown, step = asyncio.run(play())
    assert shown.startswith("<|system|>Double it.<|end|><|user|>double ")
    assert shown.endswith("<|end|><|answer|>")
    assert (step.reward, step.success) == (0.0, True)
    assert step.metadata["metrics"] == {"right": 0.0, "short": 0.0, "num_turns": 1.0}
