"""The real clients of both APIs and a third-party agent loop, against `rollart proxy` and the engine as processes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollart.adapters.proxy.record import read_sessions
from rollart.model import Segment, SegmentKind
from tests.engine.hosting import process
from tests.proxy.scripted import CALL, END, scripted

pytestmark = pytest.mark.slow  # an engine and a proxy as processes

openai = pytest.importorskip("openai")
anthropic = pytest.importorskip("anthropic")

KEY = "sk-none"
WEATHER = {
    "name": "weather",
    "description": "The weather in a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return scripted(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def engine(directory: Path) -> Iterator[str]:
    with process(directory, "--max-context", "1024", "--weight-version", "7") as (url, _):
        yield url


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("record") / "turns.jsonl"


@pytest.fixture(scope="module")
def url(engine: str, directory: Path, record: Path) -> Iterator[str]:
    with proxy("--engine", engine, "--tokenizer", str(directory), "--record", str(record)) as at:
        yield at


@contextlib.contextmanager
def proxy(*arguments: str) -> Iterator[str]:
    command = [sys.executable, "-m", "rollart.cli.main", "proxy", *arguments, "--json"]
    started = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert started.stdout is not None
        line = started.stdout.readline()
        if not line:
            raise AssertionError(started.communicate(timeout=60))
        yield json.loads(line)["url"]
    finally:
        started.terminate()
        _, said = started.communicate(timeout=60)
    assert started.returncode == 130, said


def call(url: str, body: dict[str, Any] | None = None, *, method: str = "GET") -> Any:
    request = urllib.request.Request(url, None if body is None else json.dumps(body).encode(), method=method)
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.loads(answer.read())


def spoken(url: str, session: str) -> list[list[str]]:
    """Texts of the actions of every branch; also checks log-probabilities and versions."""
    form = _form(url)
    found = []
    for branch in call(f"{url}/sessions/{session}")["branches"]:
        actions = [s for s in branch["segments"] if s["kind"] == "action"]
        for segment in actions:
            assert segment["policy_version"] == 7
            assert len(segment["logprobs"]) == len(segment["token_ids"])
            assert all(-0.1 < p <= 0 for p in segment["logprobs"])
        found.append([form(s["token_ids"]) for s in actions])
    return found


_FORMS: dict[str, Any] = {}


def _form(url: str) -> Any:
    return _FORMS[url]


@pytest.fixture(autouse=True)
def _decoding(url: str, directory: Path) -> None:
    from rollart.adapters.proxy.chat import ChatFormat

    _FORMS[url] = ChatFormat(directory).text


@pytest.mark.parametrize("stream", [False, True])
def test_openai_chat_with_tools_over_two_turns(url: str, stream: bool) -> None:
    session = f"chat-{stream}"
    client = openai.OpenAI(base_url=f"{url}/s/{session}/v1", api_key=KEY)
    tools = [{"type": "function", "function": WEATHER}]
    messages: list[Any] = [{"role": "user", "content": "What is the weather?"}]

    def ask() -> tuple[Any, Any, str]:
        options = {"model": "any", "messages": messages, "tools": tools, "temperature": 0, "max_tokens": 64}
        if not stream:
            answer = client.chat.completions.create(**options)
            return answer.choices[0].message, answer.usage, answer.choices[0].finish_reason
        with client.chat.completions.stream(**options, stream_options={"include_usage": True}) as events:
            final = events.get_final_completion()
        return final.choices[0].message, final.usage, final.choices[0].finish_reason

    said, usage, finish = ask()
    assert finish == "tool_calls"
    assert (said.tool_calls[0].function.name, json.loads(said.tool_calls[0].function.arguments)) == (
        "weather",
        {"city": "Oslo"},
    )
    messages += [
        said.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": said.tool_calls[0].id, "content": "sunny"},
    ]
    before = usage.prompt_tokens + usage.completion_tokens
    said, usage, finish = ask()
    assert (said.content, finish) == ("world", "stop")
    assert usage.completion_tokens == len("world") + 1
    assert spoken(url, session) == [[CALL + END, "world" + END]]
    assert usage.prompt_tokens > before
    assert usage.prompt_tokens_details.cached_tokens >= before - 1, "the engine holds the session's prefix"


def test_openai_completions_and_logprobs(url: str) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, default_headers={"X-Rollart-Session": "bare"})
    prompt = "<|user|>hi<|end|><|answer|>"
    answer = client.completions.create(model="any", prompt=prompt, temperature=0, logprobs=1)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("world", "stop")
    assert len(answer.choices[0].logprobs.token_logprobs) == 6
    onwards = prompt + "world<|user|>more<|end|><|answer|>"
    streamed = client.completions.create(model="any", prompt=onwards, temperature=0, stream=True, max_tokens=3)
    assert "".join(c.choices[0].text for c in streamed) == "wor"
    assert spoken(url, "bare") == [["world" + END, "wor"]], "the second prompt goes on from the first"


@pytest.mark.parametrize("stream", [False, True])
def test_openai_responses_remember(url: str, stream: bool) -> None:
    session = f"responses-{stream}"
    client = openai.OpenAI(base_url=f"{url}/s/{session}/v1", api_key=KEY)
    tools = [{"type": "function", "strict": False, **WEATHER}]

    def ask(given: Any, previous: str | None) -> Any:
        options = {
            "model": "any",
            "input": given,
            "tools": tools,
            "temperature": 0,
            "instructions": "Be brief.",
            "previous_response_id": previous,
        }
        options = {name: value for name, value in options.items() if value is not None}
        if not stream:
            return client.responses.create(**options)
        with client.responses.stream(**options) as events:
            return events.get_final_response()

    first = ask("What is the weather?", None)
    (wanted,) = first.output
    assert (wanted.type, wanted.name, json.loads(wanted.arguments)) == ("function_call", "weather", {"city": "Oslo"})
    result = {"type": "function_call_output", "call_id": wanted.call_id, "output": "sunny"}
    second = ask([result], first.id)
    assert (second.output_text, second.status) == ("world", "completed")
    assert second.usage.output_tokens == 6
    assert spoken(url, session) == [[CALL + END, "world" + END]]


@pytest.mark.parametrize("stream", [False, True])
def test_anthropic_messages_with_tools(url: str, stream: bool) -> None:
    session = f"messages-{stream}"
    client = anthropic.Anthropic(base_url=f"{url}/s/{session}", api_key=KEY)
    tools = [{"name": "weather", "description": "", "input_schema": WEATHER["parameters"]}]
    messages: list[Any] = [{"role": "user", "content": "What is the weather?"}]

    def ask() -> Any:
        options = {
            "model": "any",
            "messages": messages,
            "tools": tools,
            "max_tokens": 64,
            "system": "Be brief.",
            "extra_body": {"temperature": 0},
        }
        if not stream:
            return client.messages.create(**options)
        with client.messages.stream(**options) as events:
            return events.get_final_message()

    counted = client.messages.count_tokens(model="any", messages=messages, tools=tools, system="Be brief.")
    first = ask()
    assert first.usage.input_tokens + first.usage.cache_read_input_tokens == counted.input_tokens
    assert (first.stop_reason, first.content[0].name, first.content[0].input) == (
        "tool_use",
        "weather",
        {"city": "Oslo"},
    )
    messages += [
        {"role": "assistant", "content": [b.model_dump(exclude_none=True) for b in first.content]},
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": first.content[0].id,
                    "content": [{"type": "text", "text": "sunny"}],
                },
            ],
        },
    ]
    second = ask()
    assert (second.stop_reason, second.content[0].text) == ("end_turn", "world")
    assert second.usage.output_tokens == 6
    assert spoken(url, session) == [[CALL + END, "world" + END]]


def test_a_third_party_agent_loop_is_a_rollout(url: str) -> None:
    agents = pytest.importorskip("agents")
    agents.set_tracing_disabled(True)
    asked = []

    @agents.function_tool
    def weather(city: str) -> str:
        """The weather in a city."""
        asked.append(city)
        return "sunny"

    async def episode(session: str, model: Any, *, stream: bool) -> Any:
        client = openai.AsyncOpenAI(base_url=f"{url}/s/{session}/v1", api_key=KEY)
        agent = agents.Agent(
            name="agent",
            instructions="Be brief.",
            tools=[weather],
            model=model("any", openai_client=client),
            model_settings=agents.ModelSettings(temperature=0.0),
        )
        async with client:
            if not stream:
                return (await agents.Runner.run(agent, "What is the weather?")).final_output
            result = agents.Runner.run_streamed(agent, "What is the weather?")
            async for _ in result.stream_events():
                pass
            return result.final_output

    for name, model in (("c", agents.OpenAIChatCompletionsModel), ("r", agents.OpenAIResponsesModel)):
        for stream in (False, True):
            session = f"agents-{name}-{stream}"
            assert asyncio.run(episode(session, model, stream=stream)) == "world"
            assert spoken(url, session) == [[CALL + END, "world" + END]], session
    assert asked == ["Oslo"] * 4


def test_errors_have_the_shape_of_the_api_that_was_called(url: str) -> None:
    plain = {"model": "any", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}
    one = openai.OpenAI(base_url=f"{url}/s/errors/v1", api_key=KEY, max_retries=0)
    other = anthropic.Anthropic(base_url=f"{url}/s/errors", api_key=KEY, max_retries=0)
    with pytest.raises(openai.BadRequestError, match="only 1 is served") as refused:
        one.chat.completions.create(**plain, n=2)
    assert refused.value.param == "n"
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}
    with pytest.raises(openai.BadRequestError, match="the policy reads nothing else"):
        one.chat.completions.create(**{**plain, "messages": [image]})
    long = {**plain, "messages": [{"role": "user", "content": "a b " * 1000}]}
    with pytest.raises(openai.BadRequestError, match="room for an answer within 1024") as refused:
        one.chat.completions.create(**long)
    assert refused.value.code == "context_length_exceeded"
    with pytest.raises(anthropic.BadRequestError, match="room for an answer within 1024"):
        other.messages.create(**long)
    with pytest.raises(anthropic.BadRequestError, match="names no function"):
        other.messages.create(**{**plain, "messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}]})
    assert call(f"{url}/sessions/errors")["branches"] == [], "nothing was captured"


def test_a_paused_engine_is_waited_for_and_says_when(url: str, engine: str) -> None:
    plain = {
        "model": "any",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 8,
        "extra_body": {"temperature": 0},
    }
    call(f"{engine}/pause?mode=keep", {}, method="POST")
    try:
        with pytest.raises(openai.InternalServerError, match="paused for new weights") as refused:
            openai.OpenAI(base_url=f"{url}/s/paused/v1", api_key=KEY, max_retries=0).chat.completions.create(**plain)
        assert (refused.value.status_code, refused.value.response.headers["Retry-After"]) == (503, "1")
        with pytest.raises(anthropic.APIStatusError, match="paused for new weights") as overloaded:
            anthropic.Anthropic(base_url=f"{url}/s/paused", api_key=KEY, max_retries=0).messages.create(**plain)
        assert (overloaded.value.status_code, overloaded.value.type) == (503, "overloaded_error")
    finally:
        call(f"{engine}/resume", {}, method="POST")
    client = openai.OpenAI(base_url=f"{url}/s/paused/v1", api_key=KEY)
    assert client.chat.completions.create(**plain).choices[0].message.content == "world"


def test_the_file_holds_what_the_sessions_say(url: str, record: Path) -> None:
    client = openai.OpenAI(base_url=f"{url}/s/kept/v1", api_key=KEY)
    for words in ("one", "two"):
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": words}], temperature=0)
    call(f"{url}/sessions/kept/end", {"reward": 0.5, "success": True}, method="POST")
    shown = call(f"{url}/sessions/kept")
    assert (shown["reward"], shown["success"]) == (0.5, True)
    assert [t["begun"] for t in shown["turns"]] == ["start", "diverged"]
    kept = read_sessions(record)["kept"]
    assert [[_shown(s) for s in path] for path in kept] == [b["segments"] for b in shown["branches"]]
    assert call(f"{url}/sessions/kept", method="DELETE") == {"session": "kept"}
    assert "kept" not in {s["session"] for s in call(f"{url}/sessions")["sessions"]}


def _shown(s: Segment) -> dict[str, Any]:
    shown: dict[str, Any] = {"kind": s.kind.value, "turn": s.turn, "token_ids": list(s.token_ids)}
    if s.kind is SegmentKind.ACTION:
        shown |= {"policy_version": s.policy_version, "logprobs": list(s.logprobs)}
    return shown
