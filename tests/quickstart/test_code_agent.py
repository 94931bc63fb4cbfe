"""The small agent's tasks, its tokenizer with its template, and what its worked examples know."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.adapters.chat import EpisodeChat
from rollart.adapters.envs.code_tools import TOOLS, CodeTools, written_call
from rollart.adapters.proxy.chat import ChatFormat
from rollart.adapters.proxy.messages import Message, ToolCall
from rollart.ports import EVAL_SEEDS_FROM
from rollart.quickstart.code_agent import CARELESS, policy_config, task, vocabulary, write_tokenizer
from rollart.settings.load import builtin, load_run
from rollart.settings.run import RunSpec

TASKS = "rollart.quickstart.code_agent:task"


@pytest.fixture(scope="module")
def form(tmp_path_factory: pytest.TempPathFactory) -> ChatFormat:
    directory: Path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(directory)
    return ChatFormat(directory)


@functools.cache
def shipped() -> RunSpec:
    return load_run(builtin("runs/code-agent.yaml"))


def solved(seed: int) -> bool:
    """True if the worked example's program passes its tests."""
    one, names = task(seed), dict[str, object]()
    exec(one.solution[-1][1], names)
    return all(eval(test["call"], names) == test["returns"] for test in one.tests)


def test_worked_examples_forget_parentheses_and_err_in_nothing_else() -> None:
    with_them = without = 0
    for seed in range(400):
        _, first, second = "".join(task(seed).files.values()).split(", ")
        sum_first = second.startswith("times") and not first.startswith("times")
        program = task(seed).solution[-1][1]
        if not sum_first:
            assert solved(seed), program
        elif "return (" in program:
            with_them += 1
            assert solved(seed), program
        else:
            without += 1
            assert not solved(seed), program
    assert without / (with_them + without) == pytest.approx(CARELESS, abs=0.07)
    assert 0.4 < (with_them + without) / 400 < 0.65


@settings(max_examples=30)
@given(seed=st.integers(0, EVAL_SEEDS_FROM - 1), held_out=st.integers(0, 10_000))
def test_held_out_instructions_are_never_trained_on(seed: int, held_out: int) -> None:
    assert task(seed) == task(seed)
    assert set(task(seed).files.values()).isdisjoint(task(EVAL_SEEDS_FROM + held_out).files.values())


@settings(max_examples=20)
@given(seed=st.integers(0, EVAL_SEEDS_FROM - 1))
def test_an_example_is_the_conversation_that_the_template_renders(form: ChatFormat, seed: int) -> None:
    """With calls as calls or as text, and within the run's limits."""
    run = shipped()
    chat = EpisodeChat(form, role="tool", tools=TOOLS)
    texts = CodeTools(TASKS).worked_example(seed)
    tokens = list(chat.opening(texts[0]))
    for answer, text in zip(texts[1::2], [*texts[2::2], None], strict=True):
        sampled = chat.answer(answer)
        assert len(sampled) <= run.domains[0].max_tokens
        tokens += sampled if text is None else (*sampled, *chat.following(text, sampled))
    messages = [Message("user", texts[0])]
    for position, text in enumerate(texts[1:]):
        call = None if position % 2 else json.loads(text.split("\n")[1])
        calls = () if call is None else (ToolCall(call["name"], call["arguments"]),)
        messages.append(Message("tool", text) if call is None else Message("assistant", "", calls))
    assert form.text(tokens) + "\n" == form.render(messages, TOOLS, prompt=False)
    assert len(tokens) < run.model.context / 2
    assert form.stop_ids == (tokens[-1],)


@settings(max_examples=20)
@given(text=st.text(st.characters(max_codepoint=126, exclude_categories=["Cc"], include_characters="\n")))
def test_any_ascii_text_can_be_spelled(form: ChatFormat, text: str) -> None:
    for whole in (text, written_call("submit", text)):
        assert form.text(form.encode(whole)) == whole
    assert policy_config()["vocab_size"] == len(vocabulary())
