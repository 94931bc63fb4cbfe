"""The real clients assemble the same response from a stream as they receive unstreamed, for any text and any split.
They call a transport that answers with the APIs' own translation, without sockets, so that many answers are tried."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.adapters.proxy.api import ApiResponse, ChatCompletions, Messages, Responses
from rollart.adapters.proxy.chat import ChatFormat
from rollart.adapters.proxy.messages import OutputDelta, PolicyResponse, ResponseHeader
from rollart.adapters.proxy.sessions import ProxySession
from rollart.model import Completion, FinishReason, VersionSpan
from tests.proxy.scripted import spelling
from tests.proxy.test_decoding import Telling
from tests.proxy.test_tool_calls import answers

pytestmark = pytest.mark.slow  # imports both official clients

openai = pytest.importorskip("openai")
anthropic = pytest.importorskip("anthropic")
http = pytest.importorskip("httpx2")

SCHEMA = {"type": "object", "properties": {}}
FUNCTION = {"name": "f", "description": "", "parameters": SCHEMA}
HI: list[Any] = [{"role": "user", "content": "hi"}]

_FORMS: dict[str, ChatFormat] = {}


@pytest.fixture(scope="module", autouse=True)
def _forms(tmp_path_factory: pytest.TempPathFactory) -> None:
    path: Path = tmp_path_factory.mktemp("spelling")
    spelling(path)
    _FORMS.update({name: ChatFormat(path, tools=name) for name in ("hermes", "json")})


class Saying:
    """Answers any of the three APIs with this text, sampled in pieces of these sizes. Holds the shared session."""

    def __init__(self, form: ChatFormat, text: str, sizes: list[int], *, cut: bool) -> None:
        self.form = form
        ids = form.encode(text) + (() if cut else form.stop_ids)
        finish = FinishReason.LENGTH if cut else FinishReason.STOP
        spans = (VersionSpan(0, 0, len(ids)),) if ids else ()
        self.policy = Telling(Completion(ids, (-0.1,) * len(ids), spans, finish), sizes)
        self.session = ProxySession("s", form, self.policy, on_turn=lambda *_: None)

    def __call__(self, request: Any) -> Any:
        body, path = json.loads(request.content), request.url.path
        api: type[ApiResponse] = next(a for a in (ChatCompletions, Responses, Messages) if path.endswith(a.path[3:]))
        ask = api.request.read(body, lambda _: None).completion()
        drawn: list[tuple[ResponseHeader, OutputDelta]] = []
        tell = (lambda head, delta: drawn.append((head, delta))) if ask.stream else None
        answer = asyncio.run(self.session.answer(ask, created=0, streamed=tell))
        if not ask.stream:
            return http.Response(200, json=api(ask, answer.head).body(answer))
        sent = b"".join(_events(api(ask, answer.head), drawn, answer))
        return http.Response(200, content=sent, headers={"content-type": "text/event-stream"})


def _events(
    events: ApiResponse, drawn: list[tuple[ResponseHeader, OutputDelta]], answer: PolicyResponse
) -> Iterator[bytes]:
    yield from events.begin()
    for _, delta in drawn:
        yield from events.add(delta)
    yield from events.finish(answer)


drawn_answers = {
    "text": answers(),
    "sizes": st.lists(st.integers(1, 7), max_size=60),
    "cut": st.booleans(),
    "tools": st.sampled_from(["hermes", "json"]),
}


@settings(max_examples=60, deadline=None)
@given(**drawn_answers)
def test_openai_chat(text: str, sizes: list[int], cut: bool, tools: str) -> None:
    saying = Saying(_FORMS[tools], text, sizes, cut=cut)
    with openai.OpenAI(api_key="none", http_client=http.Client(transport=http.MockTransport(saying))) as client:
        options: dict[str, Any] = {"model": "m", "messages": HI, "tools": [{"type": "function", "function": FUNCTION}]}
        whole = client.chat.completions.create(**options).choices[0]
        message: dict[str, Any] = {"content": None}
        calls: dict[int, dict[str, Any]] = {}
        finish = None
        for chunk in client.chat.completions.create(**options, stream=True):
            (choice,) = chunk.choices
            finish = choice.finish_reason or finish
            if choice.delta.content is not None:
                message["content"] = (message["content"] or "") + choice.delta.content
            for part in choice.delta.tool_calls or ():
                call = calls.setdefault(part.index, {"id": part.id, "name": part.function.name, "arguments": ""})
                call["arguments"] += part.function.arguments or ""
        assert message["content"] == whole.message.content
        assert finish == whole.finish_reason
        assert [(c["name"], c["arguments"]) for c in calls.values()] == [
            (c.function.name, c.function.arguments) for c in whole.message.tool_calls or ()
        ]
        if whole.finish_reason != "length":  # an error in the client's own stream
            with client.chat.completions.stream(**options) as events:
                final = events.get_final_completion().choices[0]
            assert final.message.content == whole.message.content
            assert [(c.function.name, c.function.arguments) for c in final.message.tool_calls or ()] == [
                (c.function.name, c.function.arguments) for c in whole.message.tool_calls or ()
            ]
        _goes_on_chat(client, options, whole.message, saying)


def _goes_on_chat(client: Any, options: dict[str, Any], message: Any, saying: Saying) -> None:
    """The answer may be sent back, even with a truncated call: the session continues from it."""
    said = message.model_dump(exclude_none=True)
    results = [{"role": "tool", "tool_call_id": c.id, "content": "?"} for c in message.tool_calls or ()]
    client.chat.completions.create(**{**options, "messages": [*HI, said, *results, *HI]})
    broken = any(not c.whole for c in _last(saying).answer.calls)
    assert not broken, "captured are whole calls alone"


def _last(saying: Saying) -> Any:
    return saying.session.capture.turns[-1]


@settings(max_examples=60, deadline=None)
@given(**drawn_answers)
def test_openai_responses(text: str, sizes: list[int], cut: bool, tools: str) -> None:
    saying = Saying(_FORMS[tools], text, sizes, cut=cut)
    with openai.OpenAI(api_key="none", http_client=http.Client(transport=http.MockTransport(saying))) as client:
        options: dict[str, Any] = {"model": "m", "input": "hi", "tools": [{"type": "function", **FUNCTION}]}
        whole = client.responses.create(**options)
        texts: dict[int, str] = {}
        done: dict[int, Any] = {}
        for event in client.responses.create(**options, stream=True):
            if event.type in ("response.output_text.delta", "response.function_call_arguments.delta"):
                texts[event.output_index] = texts.get(event.output_index, "") + event.delta
            elif event.type == "response.output_item.done":
                done[event.output_index] = event.item
        assert [_item(item) for item in done.values()] == [_item(item) for item in whole.output]
        shown = [i.arguments if i.type == "function_call" else i.content[0].text for i in whole.output]
        assert [texts.get(i, "") for i in range(len(shown))] == shown
        echoed = [item.model_dump(exclude_none=True) for item in whole.output]
        results = [
            {"type": "function_call_output", "call_id": i.call_id, "output": "?"}
            for i in whole.output
            if i.type == "function_call"
        ]
        client.responses.create(**{**options, "input": [*HI, *echoed, *results, *HI]})


def _item(item: Any) -> Any:
    if item.type == "function_call":
        return item.name, item.arguments, item.status
    return item.content[0].text, item.status


@settings(max_examples=60, deadline=None)
@given(**drawn_answers)
def test_anthropic_messages(text: str, sizes: list[int], cut: bool, tools: str) -> None:
    saying = Saying(_FORMS[tools], text, sizes, cut=cut)
    with anthropic.Anthropic(api_key="none", http_client=http.Client(transport=http.MockTransport(saying))) as client:
        options: dict[str, Any] = {
            "model": "m",
            "messages": HI,
            "max_tokens": 999,
            "tools": [{"name": "f", "input_schema": SCHEMA}],
        }
        whole = client.messages.create(**options)
        with client.messages.stream(**options) as events:
            final = events.get_final_message()
        assert [_block(b) for b in final.content] == [_block(b) for b in whole.content]
        assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)
        said = {"role": "assistant", "content": [b.model_dump(exclude_none=True) for b in whole.content]}
        results = [
            {"type": "tool_result", "tool_use_id": b.id, "content": "?"} for b in whole.content if b.type == "tool_use"
        ]
        client.messages.create(**{**options, "messages": [*HI, said, {"role": "user", "content": results or "?"}]})


def _block(block: Any) -> Any:
    return (block.name, block.input) if block.type == "tool_use" else block.text
