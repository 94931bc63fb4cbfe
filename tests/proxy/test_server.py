"""The proxy over sockets with a scripted policy: errors, authentication, disconnects."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from rollart.adapters.proxy import server as module
from rollart.adapters.proxy.api import ChatCompletions, Messages
from rollart.adapters.proxy.chat import ChatFormat
from rollart.adapters.proxy.messages import CompletionRequest as Ask_
from rollart.adapters.proxy.messages import Message, PolicyResponse, PromptInput, ResponseHeader
from rollart.adapters.proxy.record import SessionRecorder, read_sessions
from rollart.adapters.proxy.server import Proxy
from rollart.adapters.proxy.sessions import SessionLimits
from rollart.errors import EngineError, StorageFailed, UsageError
from rollart.launch.servers import serve_app
from rollart.model import Completion, CompletionChunk, FinishReason, Sampling, VersionSpan
from tests.proxy.scripted import spelling

CHAT = "/v1/chat/completions"
HI: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture(scope="module")
def form(tmp_path_factory: pytest.TempPathFactory) -> ChatFormat:
    path = tmp_path_factory.mktemp("spelling")
    spelling(path)
    return ChatFormat(path)


class Speaker:
    """Implements `Policy`: generates the scripted text, once it is released."""

    context = 256

    def __init__(self, form: ChatFormat) -> None:
        self.form = form
        self.says: str | Exception = "world"
        self.tells = ""
        """Emitted before the policy is released."""
        self.finish = FinishReason.STOP
        self.go, self.asked, self.cancelled = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.go.set()
        self.sampling: list[Sampling] = []
        self.released = 0

    async def generate(
        self, token_ids: tuple[int, ...], sampling: Sampling, on_chunk: Callable[[CompletionChunk], None] | None = None
    ) -> Completion:
        self.sampling.append(sampling)
        if self.tells and on_chunk is not None:
            ids = self.form.encode(self.tells)
            on_chunk(CompletionChunk(ids, (-0.1,) * len(ids), 0))
        self.asked.set()
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        if isinstance(self.says, Exception):
            raise self.says
        said = tuple(i for letter in self.says for i in self.form.encode(letter)) if self.tells else ()
        ids = (said or self.form.encode(self.says)) + (self.form.stop_ids if self.finish is FinishReason.STOP else ())
        return Completion(ids, (-0.1,) * len(ids), (VersionSpan(0, 0, len(ids)),), self.finish)

    async def release(self) -> None:
        self.released += 1


Ask = Callable[..., Awaitable[tuple[int, Any, Any]]]
"""Path, body, headers; method: status, body and headers of the answer."""


def with_proxy(form: ChatFormat, scenario: Callable[[Ask, Speaker, str], Awaitable[None]], **options: Any) -> None:
    async def body() -> None:
        speaker = Speaker(form)
        proxy = Proxy(form, policy=lambda _: speaker, **options)
        async with (
            serve_app(proxy.app(), host="127.0.0.1", port=0) as url,
            aiohttp.ClientSession() as http,
            asyncio.timeout(120),
        ):

            async def ask(path: str, body: Any = None, method: str = "POST", **headers: str) -> tuple[int, Any, Any]:
                async with http.request(method, url + path, json=body, headers=headers) as answer:
                    plain = answer.content_type != "application/json"
                    return answer.status, await (answer.text() if plain else answer.json()), answer.headers

            await scenario(ask, speaker, url)

    asyncio.run(body())


def test_a_session_is_named_by_path_or_header_or_not_at_all(form: ChatFormat) -> None:
    async def scenario(ask: Ask, speaker: Speaker, url: str) -> None:
        for path, headers, name in (
            ("/s/a-1" + CHAT, {}, "a-1"),
            (CHAT, {"X-Rollart-Session": "b:2"}, "b:2"),
            (CHAT, {}, "default"),
            (CHAT, {"X-Session-ID": "t"}, "t"),
            (CHAT, {"X-Session-ID": "t", "X-Rollart-Session": "c"}, "c"),
        ):
            _, _, said = await ask(path, HI, **headers)
            assert (said["X-Rollart-Session"], said["X-Rollart-Turn"]) == (name, "0")
        status, body, _ = await ask("/s/%20" + CHAT, HI)
        assert (status, body["error"]["type"]) == (400, "invalid_request_error")
        assert (await ask("/sessions/none", method="GET"))[0] == 404
        assert (await ask("/nowhere", HI))[0] == 404

    with_proxy(form, scenario)


def test_what_failed_is_said_in_the_apis_words_and_not_captured(form: ChatFormat) -> None:
    async def scenario(ask: Ask, speaker: Speaker, url: str) -> None:
        for error, status, kind, theirs in (
            (EngineError("it is gone", retryable=True), 503, "server_error", "overloaded_error"),
            (EngineError("too odd", retryable=False), 400, "invalid_request_error", "invalid_request_error"),
            (UsageError("a bug"), 500, "server_error", "api_error"),
        ):
            speaker.says = error
            for stream in (False, True):
                given, body, headers = await ask(CHAT, {**HI, "stream": stream})
                assert (given, body["error"]["type"], body["error"]["message"]) == (status, kind, str(error))
                assert ("Retry-After" in headers) == (status == 503)
                given, body, _ = await ask("/v1/messages", {**HI, "max_tokens": 9, "stream": stream})
                assert (given, body["error"]["type"]) == (status, theirs)
        speaker.says, speaker.finish = "wor", FinishReason.ABORT
        assert (await ask(CHAT, HI))[0] == 503, "half an answer is none"
        assert (await ask("/sessions/default", method="GET"))[1]["turns"] == []

    with_proxy(form, scenario)


@pytest.mark.parametrize(
    ("path", "body", "wrong"),
    [
        (CHAT, {"messages": []}, "messages is empty"),
        (CHAT, {"messages": "hi"}, "messages must be a list"),
        (CHAT, {"messages": [{"role": "robot", "content": "x"}]}, "role 'robot'"),
        (CHAT, {**HI, "temperature": "hot"}, "temperature is 'hot'"),
        (CHAT, {**HI, "temperature": 10**400}, "temperature is 1000"),
        (CHAT, {**HI, "top_p": 0}, "top_p is 0"),
        (CHAT, {**HI, "max_tokens": 0}, "max_tokens is 0"),
        (CHAT, {**HI, "max_completion_tokens": 0, "max_tokens": 9}, "max_completion_tokens is 0"),
        (CHAT, {**HI, "stop": [1]}, "stop must be"),
        (CHAT, {"messages": [{"content": "x"}]}, "messages has the role None"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "a part of type 'image_url'"),
        (CHAT, {"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]}, "tool_calls names no function"),
        (
            CHAT,
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
            "must be a JSON object",
        ),
        *(
            (
                CHAT,
                {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": odd}}]}]},
                "must be a JSON object",
            )
            for odd in ('{"a": "\\ud800"}', '{"a": NaN}', '{"a": ' + "[" * 3000)
        ),
        (CHAT, {"messages": [{"role": "user", "content": "half a pair: \ud800"}]}, "the body is not JSON"),
        ("/v1/completions", {}, "prompt must be"),
        ("/v1/completions", {"prompt": [2**64]}, "prompt must be"),
        (CHAT, {**HI, "seed": 2**64}, "seed is 18446744073709551616"),
        ("/v1/completions", {"prompt": "x", "echo": True}, "only False is served"),
        ("/v1/responses", {"input": "x", "previous_response_id": "resp-other-1"}, "not of this session"),
        ("/v1/responses", {"input": "x", "tools": [{"type": "web_search"}]}, "web_search"),
        ("/v1/messages", HI, "max_tokens: field required"),
        ("/v1/messages", {**HI, "max_tokens": None}, "max_tokens: field required"),
        ("/v1/messages", {**HI, "max_tokens": 1, "stop_sequences": [1]}, "stop_sequences must be"),
        (
            "/v1/messages",
            {**HI, "max_tokens": 1, "tools": [{"type": "bash_20250124", "name": "bash"}]},
            "run by a server",
        ),
    ],
)
def test_a_request_that_cannot_be_served_is_told_why(
    form: ChatFormat, path: str, body: dict[str, Any], wrong: str
) -> None:
    async def scenario(ask: Ask, speaker: Speaker, url: str) -> None:
        status, answer, _ = await ask(path, body)
        assert status == 400
        assert wrong in answer["error"]["message"]
        assert speaker.sampling == []

    with_proxy(form, scenario)


@pytest.mark.parametrize(
    ("path", "body", "wrong"),
    [
        (CHAT, b'{"prompt": "\xed\xa0\x80"}', "the body is not JSON"),
        (CHAT, b"[" * 100_000, "the body is not JSON"),
        ("/sessions/a/end", b'{"reward": NaN}', "reward is nan"),
        ("/sessions/a/end", b'{"reward": 1e999}', "reward is inf"),
        ("/sessions/a/end", b'{"reward": 1' + b"0" * 400 + b"}", "reward is 1000"),
        ("/sessions/a/end", b'{"reward": true}', "reward is True"),
    ],
)
def test_a_body_that_no_client_writes_is_told_why(form: ChatFormat, path: str, body: bytes, wrong: str) -> None:
    async def scenario(ask: Ask, speaker: Speaker, url: str) -> None:
        await ask("/s/a" + CHAT, HI)
        async with aiohttp.ClientSession() as http, http.post(url + path, data=body) as answer:
            assert answer.status == 400
            assert wrong in (await answer.json())["error"]["message"]
        assert (await ask("/sessions/a/end", {"reward": 1}))[0] == 200

    with_proxy(form, scenario)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_aborts_its_generation(form: ChatFormat, stream: bool) -> None:
    async def scenario(ask: Ask, speaker: Speaker, url: str) -> None:
        speaker.go.clear()
        asking = asyncio.create_task(ask(CHAT, {**HI, "stream": stream}))
        await speaker.asked.wait()
        asking.cancel()
        await speaker.cancelled.wait()
        assert (await ask("/sessions/default", method="GET"))[1]["turns"] == []

    with_proxy(form, scenario)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, HI),
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/responses", {"input": "hi"}),
        ("/v1/messages", {**HI, "max_tokens": 99}),
    ],
)
def test_a_stream_that_waits_long_says_so_and_tells_a_late_failure(
    form: ChatFormat, path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "KEEPALIVE_INTERVAL_S", 0.001)

    async def scenario(ask: Ask, speaker: Speaker, url: str) -> None:
        speaker.go.clear()
        speaker.says = EngineError("it is gone", retryable=True)
        async with aiohttp.ClientSession() as http, http.post(url + path, json={**body, "stream": True}) as answer:
            assert (await answer.content.readline()).startswith(b": the policy is still generating")
            speaker.go.set()
            rest = await answer.read()
        assert b"it is gone" in rest
        assert b"error" in rest

    with_proxy(form, scenario)


STREAMS = [
    (CHAT, HI),
    ("/v1/completions", {"prompt": "hi"}),
    ("/v1/responses", {"input": "hi"}),
    ("/v1/messages", {**HI, "max_tokens": 99}),
]


async def _until(answer: aiohttp.ClientResponse, text: bytes) -> bytes:
    seen = b""
    while text not in seen:
        seen += await answer.content.readline()
    return seen


@pytest.mark.parametrize(("path", "body"), STREAMS)
def test_text_reaches_the_client_before_the_answer_is_whole(form: ChatFormat, path: str, body: dict[str, Any]) -> None:
    async def scenario(ask: Ask, speaker: Speaker, url: str) -> None:
        speaker.go.clear()
        speaker.tells, speaker.says = "w", "wor"
        async with aiohttp.ClientSession() as http, http.post(url + path, json={**body, "stream": True}) as answer:
            await _until(answer, b'"w"')
            assert not speaker.go.is_set()
            speaker.go.set()
            rest = await answer.read()
        assert b'"or"' in rest, "and none of it twice"
        shown = (await ask("/sessions/default", method="GET"))[1]
        assert [t["answer"]["content"] for t in shown["turns"]] == ["wor"]

    with_proxy(form, scenario)


@pytest.mark.parametrize(("path", "body"), STREAMS)
def test_a_failure_in_mid_stream_is_an_event_and_nothing_is_captured(
    form: ChatFormat, path: str, body: dict[str, Any]
) -> None:
    async def scenario(ask: Ask, speaker: Speaker, url: str) -> None:
        speaker.go.clear()
        speaker.tells, speaker.says = "w", EngineError("it is gone", retryable=True)
        async with aiohttp.ClientSession() as http, http.post(url + path, json={**body, "stream": True}) as answer:
            assert answer.status == 200
            await _until(answer, b'"w"')
            speaker.go.set()
            rest = await answer.read()
        assert b"it is gone" in rest
        assert b"[DONE]" not in rest
        assert (await ask("/sessions/default", method="GET"))[1]["turns"] == []

    with_proxy(form, scenario)


def test_a_client_that_goes_away_in_mid_stream_is_noted(form: ChatFormat) -> None:
    async def scenario(ask: Ask, speaker: Speaker, url: str) -> None:
        speaker.go.clear()
        speaker.tells = "w"
        async with aiohttp.ClientSession() as http:
            async with http.post(url + CHAT, json={**HI, "stream": True}) as answer:
                await _until(answer, b'"w"')
                answer.close()
            await speaker.cancelled.wait()
        shown = (await ask("/sessions/default", method="GET"))[1]
        assert (shown["turns"], shown["abandoned"]) == ([], 1)
        assert (await ask("/sessions", method="GET"))[1]["sessions"][0]["busy"] == 0

    with_proxy(form, scenario)


def test_log_probabilities_and_ids_go_with_their_text(form: ChatFormat) -> None:
    async def scenario(ask: Ask, speaker: Speaker, url: str) -> None:
        speaker.tells, speaker.says = "w", "wor"
        wish = {**HI, "stream": True, "logprobs": True, "return_token_ids": True}
        _, text, _ = await ask(CHAT, wish)
        events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
        choices = [e["choices"][0] for e in events]
        ids = [i for c in choices for i in c.get("token_ids", ())]
        assert ids == [*(i for letter in "wor" for i in form.encode(letter)), *form.stop_ids]
        assert [len((c.get("logprobs") or {"content": []})["content"]) for c in choices] == [0, 1, 3, 0]
        assert [c["delta"].get("content") for c in choices] == [None, "w", "or", None]

    with_proxy(form, scenario)


def test_a_pause_of_the_proxy_refuses_before_anything_is_sent(form: ChatFormat) -> None:
    async def scenario(ask: Ask, speaker: Speaker, url: str) -> None:
        await ask("/pause")
        status, body, headers = await ask(CHAT, HI)
        assert (status, headers["Retry-After"], speaker.sampling) == (503, "1", [])
        assert "paused" in body["error"]["message"]
        assert (await ask("/is_paused", method="GET"))[1] == {"is_paused": True}
        await ask("/resume")
        assert (await ask(CHAT, HI))[0] == 200

    with_proxy(form, scenario)


def test_a_key_is_asked_for_in_the_words_of_either_api(form: ChatFormat) -> None:
    async def scenario(ask: Ask, speaker: Speaker, url: str) -> None:
        assert (await ask(CHAT, HI))[0] == 401
        status, body, _ = await ask("/v1/messages", {**HI, "max_tokens": 1}, **{"x-api-key": "wrong"})
        assert (status, body["error"]["type"]) == (401, "authentication_error")
        assert (await ask("/sessions", method="GET"))[0] == 401
        assert (await ask(CHAT, HI, Authorization="Bearer secret"))[0] == 200
        assert (await ask("/v1/messages", {**HI, "max_tokens": 1}, **{"x-api-key": "secret"}))[0] == 200
        assert (await ask("/health", method="GET"))[0] == 200

    with_proxy(form, scenario, token="secret")


def test_sessions_that_are_idle_make_room(form: ChatFormat, tmp_path: Path) -> None:
    recording = SessionRecorder(tmp_path / "turns.jsonl")

    async def scenario(ask: Ask, speaker: Speaker, url: str) -> None:
        for name in ("a", "b", "a", "c"):
            assert (await ask(f"/s/{name}{CHAT}", HI))[0] == 200
        shown = (await ask("/sessions", method="GET"))[1]["sessions"]
        assert [s["session"] for s in shown] == ["a", "c"], "b was idle longest"
        assert speaker.released == 1
        speaker.go.clear()
        speaker.asked.clear()
        async with asyncio.TaskGroup() as tasks:
            for name in ("a", "c"):
                speaker.asked.clear()
                tasks.create_task(ask(f"/s/{name}{CHAT}", HI))
                await speaker.asked.wait()
            assert (await ask(f"/s/d{CHAT}", HI))[0] == 503, "nobody is idle"
            assert (await ask("/sessions/a", method="DELETE"))[0] == 409
            speaker.go.set()

    with_proxy(form, scenario, limits=SessionLimits(sessions=2, idle_s=0), recording=recording)
    recording.close()
    kept = read_sessions(tmp_path / "turns.jsonl")
    assert {name: len(paths) for name, paths in kept.items()} == {"a": 3, "b": 1, "c": 2}
    with (tmp_path / "turns.jsonl").open("a") as file:
        file.write(json.dumps({"session": "torn"})[:-3])
    assert read_sessions(tmp_path / "turns.jsonl") == kept
    again = SessionRecorder(tmp_path / "turns.jsonl")

    async def afterwards(ask: Ask, speaker: Speaker, url: str) -> None:
        assert (await ask(f"/s/e{CHAT}", HI))[0] == 200

    with_proxy(form, afterwards, recording=again)
    again.close()
    more = read_sessions(tmp_path / "turns.jsonl")
    assert {**kept, "e": more["e"]} == more, "the next life begins a line of its own"


@pytest.mark.parametrize("torn", [b"", b"{", b"x" * 200_000])
@pytest.mark.parametrize("whole", [b"", b"{}\n", b"{}\n{}\n"])
def test_a_line_that_was_torn_goes_before_the_next_is_written(tmp_path: Path, whole: bytes, torn: bytes) -> None:
    path = tmp_path / "turns.jsonl"
    path.write_bytes(whole + torn)
    SessionRecorder(path).close()
    assert path.read_bytes() == whole


def test_an_answer_that_was_cached_twice_was_not_cached_more_than_it_is(form: ChatFormat) -> None:
    ids = form.encode("hi")
    twice = Completion(ids, (-0.1,) * len(ids), (VersionSpan(0, 0, len(ids)),), FinishReason.STOP, 200, 150)
    head, ask = ResponseHeader((1,) * 100, "s", 0, "m", 0), Ask_(PromptInput())
    answer = PolicyResponse(head, Message("assistant", "hi"), twice, ("hi",), 0, ("hi",))
    assert Messages(ask, head).body(answer)["usage"]["input_tokens"] == 0
    assert ChatCompletions(ask, head).body(answer)["usage"]["prompt_tokens_details"]["cached_tokens"] == 100


def test_wishes_that_are_not_enforced_are_named(form: ChatFormat) -> None:
    async def scenario(ask: Ask, speaker: Speaker, url: str) -> None:
        wish = {"tool_choice": "required", "response_format": {"type": "json_object"}}
        _, _, headers = await ask(CHAT, {**HI, **wish})
        assert headers["X-Rollart-Unenforced"] == "tool_choice, response_format"

    with_proxy(form, scenario)


def test_sampling_is_the_requests_and_ends_where_the_model_does(form: ChatFormat) -> None:
    async def scenario(ask: Ask, speaker: Speaker, url: str) -> None:
        body = {**HI, "temperature": 0.5, "top_p": 0.9, "seed": 3, "max_tokens": 7, "stop": ["world", "two words"]}
        _, answer, _ = await ask(CHAT, body)
        (sampling,) = speaker.sampling
        assert (sampling.temperature, sampling.top_p, sampling.seed, sampling.max_tokens) == (0.5, 0.9, 3, 7)
        assert sampling.stop_token_ids == (*form.stop_ids, *form.encode("world")), "a stop of one token ends it there"
        assert answer["choices"][0]["message"]["content"] == "", "what ends an answer is no part of it"

    with_proxy(form, scenario)


def test_a_turn_that_could_not_be_recorded_was_never_there(form: ChatFormat, tmp_path: Path) -> None:
    recording, fails = SessionRecorder(tmp_path / "turns.jsonl"), [True]

    class Failing(SessionRecorder):
        def turn(self, session: Any, turn: Any) -> None:
            if fails:
                raise StorageFailed("no room on the disk")
            recording.turn(session, turn)

    async def scenario(ask: Ask, speaker: Speaker, url: str) -> None:
        for said in ({}, {"stream": True}):
            status, body, _ = await ask("/s/a" + CHAT, {**HI, **said})
            assert (status, "no room" in body["error"]["message"]) == (500, True)
        fails.clear()
        assert (await ask("/s/a" + CHAT, HI))[0] == 200
        _, shown, _ = await ask("/sessions/a", method="GET")
        assert [t["begun"] for t in shown["turns"]] == ["start"], "no fork of what nobody saw"

    with_proxy(form, scenario, recording=Failing(None))
    recording.close()


def test_a_call_that_broke_off_is_given_out_and_gone_on_from(form: ChatFormat) -> None:
    """As in the API: the arguments up to the truncation. The captured message is the text, which the template renders
    unchanged."""
    wish = {**HI, "tools": [{"type": "function", "function": {"name": "f"}}]}

    async def scenario(ask: Ask, speaker: Speaker, url: str) -> None:
        speaker.says, speaker.finish = 'Well. <tool_call>{"name": "f", "arguments": {"city": "Os', FinishReason.LENGTH
        _, body, _ = await ask("/s/a" + CHAT, wish)
        (choice,) = body["choices"]
        (made,) = choice["message"]["tool_calls"]
        assert (choice["finish_reason"], choice["message"]["content"]) == ("length", "Well.")
        assert made["function"] == {"name": "f", "arguments": '{"city": "Os'}
        result = {"role": "tool", "tool_call_id": made["id"], "content": "no JSON"}
        speaker.says, speaker.finish = "world", FinishReason.STOP
        onwards = {**wish, "messages": [*HI["messages"], choice["message"], result]}
        assert (await ask("/s/a" + CHAT, onwards))[0] == 200
        _, shown, _ = await ask("/sessions/a", method="GET")
        assert [t["begun"] for t in shown["turns"]] == ["start", "extends"]
        other = json.loads(json.dumps(onwards).replace(made["id"], "mine"))
        status, body, _ = await ask("/s/a" + CHAT, other)
        assert (status, body["error"]["message"]) == (400, "the arguments of f must be a JSON object")

    with_proxy(form, scenario)
