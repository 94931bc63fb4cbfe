"""The streamed response equals the complete one: for any tokens, in any pieces, with any stop texts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.adapters.proxy.chat import ChatFormat, IncrementalDecoder
from rollart.adapters.proxy.messages import (
    CompletionRequest,
    Message,
    OutputDelta,
    OutputPart,
    PolicyResponse,
    PromptInput,
    TextDelta,
    ToolCall,
)
from rollart.adapters.proxy.sessions import ProxySession
from rollart.adapters.proxy.tool_calls import merge_events
from rollart.model import Completion, CompletionChunk, FinishReason, Sampling, VersionSpan
from tests.proxy.scripted import CALL, spelling

_FORMS: dict[str, ChatFormat] = {}

CALLED = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
BARE = '{"name": "f", "parameters": {}}'
WORDS = [
    "a",
    " ",
    "\n",
    "é",
    "日本",
    "🙂",
    "world",
    "wor",
    "<tool",
    "<tool_call>",
    "</tool_call>",
    CALLED,
    CALL,
    BARE,
    "{",
    "}",
    "stop",
    "st",
    "op",
    "\ufffd",
]
said = st.lists(st.sampled_from(WORDS), max_size=12).map("".join)
stopping = st.lists(st.sampled_from(["stop", "o", "日本a", "a\n", "<tool_call>x", "<|e"]), max_size=2, unique=True)


@pytest.fixture(scope="module", autouse=True)
def _forms(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("spelling")
    spelling(path)
    _FORMS.update({name: ChatFormat(path, tools=name) for name in ("hermes", "json", "none")})


class Telling:
    """Implements `Policy`: emits its tokens in pieces of these sizes, except the last ones."""

    context = 4096

    def __init__(self, completion: Completion, sizes: Sequence[int]) -> None:
        self.completion, self.sizes = completion, sizes

    async def generate(
        self, token_ids: tuple[int, ...], sampling: Sampling, on_chunk: Callable[[CompletionChunk], None] | None = None
    ) -> Completion:
        at = 0
        for size in self.sizes if on_chunk is not None else ():
            piece = slice(at, min(at + size, len(self.completion.token_ids) - 1))
            if on_chunk is not None and piece.start < piece.stop:
                on_chunk(CompletionChunk(self.completion.token_ids[piece], self.completion.logprobs[piece], 0))
            at += size
        return self.completion

    async def release(self) -> None: ...


def answered(
    form: ChatFormat, ask: CompletionRequest, policy: Telling, *, streamed: bool
) -> tuple[PolicyResponse, list[OutputDelta]]:
    session = ProxySession("s", form, policy, on_turn=lambda *_: None)
    deltas: list[OutputDelta] = []
    tell = (lambda _, delta: deltas.append(delta)) if streamed else None
    return asyncio.run(session.answer(ask, created=0, streamed=tell)), deltas


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(
    text=said,
    raw=st.lists(st.integers(0, 255), max_size=6),
    stops=stopping,
    ended=st.booleans(),
    tools=st.booleans(),
    parser=st.sampled_from(["hermes", "json", "none"]),
    sizes=st.lists(st.integers(1, 5), max_size=80),
)
def test_what_was_streamed_is_how_the_answer_begins(
    text: str, raw: list[int], stops: list[str], ended: bool, tools: bool, parser: str, sizes: list[int]
) -> None:
    form = _FORMS[parser]
    ids = (*form.encode(text), *raw, *(form.stop_ids if ended else ()))
    logprobs = tuple(-0.01 * i for i in range(len(ids)))
    finish = FinishReason.STOP if ended else FinishReason.LENGTH
    completion = Completion(ids, logprobs, (VersionSpan(0, 0, len(ids)),) if ids else (), finish)
    given_tools = ({"type": "function", "function": {"name": "f"}},) if tools else ()
    ask = CompletionRequest(PromptInput((Message("user", "hi"),), given_tools), stop=tuple(stops))
    plain, _ = answered(form, ask, Telling(completion, sizes), streamed=False)
    answer, deltas = answered(form, ask, Telling(completion, sizes), streamed=True)
    assert answer.completion == plain.completion, "captured is the same"
    assert (answer.message, answer.finish) == (plain.message, plain.finish)
    said = [one for d in deltas for one in d.events] + list(answer.rest.events)
    assert _unnamed(merge_events(said)) == _unnamed(plain.parts) == _unnamed(answer.parts)
    deltas.append(answer.rest)
    shown = sum((d.token_ids for d in deltas), ()), sum((d.logprobs for d in deltas), ())
    assert shown == (plain.completion.token_ids, plain.completion.logprobs)


def _unnamed(parts: Sequence[OutputPart]) -> list[OutputPart]:
    return [replace(p, id="") if isinstance(p, ToolCall) else p for p in parts]


def test_text_leaves_as_soon_as_it_is_certain() -> None:
    def seen(form: ChatFormat, text: str, *, stops: Sequence[str] = (), tools: bool = False) -> list[str]:
        unfolding = IncrementalDecoder(form, stops=stops, tools=tools)
        deltas = [unfolding.push(CompletionChunk((i,), (0.0,), 0)) for letter in text for i in form.encode(letter)]
        return ["" if d is None else "".join(e.text for e in d.events if isinstance(e, TextDelta)) for d in deltas]

    hermes = _FORMS["hermes"]
    assert seen(hermes, "aé b") == ["a", "", "é", " ", "b"]
    assert seen(hermes, "a b", tools=True) == ["a", "", " b"], "white space may stand before a call"
    assert seen(hermes, "as tostop", stops=["stop"]) == ["a", "", "s ", "t", "o", "", "", "", ""]
    assert seen(hermes, "a<to", tools=True) == ["a", "", "", ""]
    assert seen(_FORMS["json"], "{a", tools=True) == ["", ""]
    assert seen(_FORMS["json"], "a{", tools=True) == ["a", "{"]
