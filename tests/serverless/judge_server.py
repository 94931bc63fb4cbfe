"""An endpoint that speaks OpenAI's chat completions and Anthropic's messages, with answers that a test gives.

Every answer must be asked for: a server that closes with answers left fails its test. Tokens of each answered request
are in `log`, as the endpoint's own bill would have them.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from serverless.types import TokenUsage


@dataclass(frozen=True)
class Answer:
    """An answer of the judge: `verdict` as JSON, or `text` as it is. A status other than 200 sends `error`."""

    verdict: Any = None
    text: str | None = None
    finish: str = ""
    refusal: str = ""
    status: int = 200
    error: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    after_s: float = 0.0
    raw: str | None = None
    cached: int = 0

    @property
    def content(self) -> str:
        return self.text if self.text is not None else json.dumps(self.verdict)


Judging = Callable[[str, str], Answer]
"""From the system prompt and the user's prompt."""


class JudgeServer:
    """Owns a listening socket on a private port. `answers`: given in order, or a function of the prompts."""

    def __init__(self, answers: Iterable[Answer] | Judging, key: str = "") -> None:
        self._answers = answers if callable(answers) else list(answers)
        self._key = key
        self.requests: list[dict[str, Any]] = []
        self.log: list[TokenUsage] = []
        self.url = ""
        self.running = self.peak = 0

    @property
    def endpoint(self) -> str:
        return self.url.removeprefix("http://").removesuffix("/v1")

    @property
    def total(self) -> TokenUsage:
        used = self.log[0]
        for one in self.log[1:]:
            used = used + one
        return used

    async def __aenter__(self) -> JudgeServer:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/messages", self._messages)
        self._runner = web.AppRunner(app, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        port = self._runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{port}/v1"
        return self

    async def __aexit__(self, kind: object, *rest: object) -> None:
        await self._runner.cleanup()
        if kind is None and isinstance(self._answers, list):
            assert not self._answers, f"{len(self._answers)} answers were never asked for"

    async def _chat(self, request: web.Request) -> web.Response:
        if request.headers.get("Authorization", "") != f"Bearer {self._key or 'none'}":
            return _error(401, {"message": f"Incorrect API key provided: {self._key[:4]}"}, {})
        body = await request.json()
        system, user = (message["content"] for message in body["messages"])
        answer = await self._next(body, system, user)
        if answer.status != 200 or answer.raw is not None:
            return _sent(answer)
        message = {"role": "assistant", "content": None if answer.refusal else answer.content}
        message |= {"refusal": answer.refusal or None}
        used = self._used(body["model"], system + user, answer)
        usage = {
            "prompt_tokens": used.input_tokens + used.cached_tokens,
            "completion_tokens": used.output_tokens,
            "total_tokens": used.input_tokens + used.cached_tokens + used.output_tokens,
            "prompt_tokens_details": {"cached_tokens": used.cached_tokens},
        }
        choice = {"index": 0, "message": message, "finish_reason": answer.finish or "stop"}
        whole = {"id": "c", "object": "chat.completion", "created": 1, "model": body["model"], "choices": [choice]}
        return web.json_response(whole | {"usage": usage}, headers=answer.headers)

    async def _messages(self, request: web.Request) -> web.Response:
        given = request.headers.get("x-api-key") or request.headers.get("Authorization", "").removeprefix("Bearer ")
        if given != (self._key or "none"):
            return _error(401, {"type": "authentication_error", "message": "invalid x-api-key"}, {})
        body = await request.json()
        system, user = body["system"], body["messages"][0]["content"]
        answer = await self._next(body, system, user)
        if answer.status != 200 or answer.raw is not None:
            return _sent(answer)
        name = body["tool_choice"]["name"]
        content: list[dict[str, Any]] = [{"type": "tool_use", "id": "t", "name": name, "input": answer.verdict}]
        if answer.refusal or answer.text is not None:
            content = [{"type": "text", "text": answer.refusal or answer.text}]
        used = self._used(body["model"], system + user, answer)
        usage = {
            "input_tokens": used.input_tokens,
            "cache_read_input_tokens": used.cached_tokens,
            "cache_creation_input_tokens": 0,
            "output_tokens": used.output_tokens,
        }
        stop = answer.finish or ("refusal" if answer.refusal else "tool_use")
        whole = {"id": "m", "type": "message", "role": "assistant", "model": body["model"], "stop_sequence": None}
        return web.json_response(
            whole | {"content": content, "stop_reason": stop, "usage": usage}, headers=answer.headers
        )

    async def _next(self, body: dict[str, Any], system: str, user: str) -> Answer:
        self.requests.append(body)
        if callable(self._answers):
            answer = self._answers(system, user)
        else:
            assert self._answers, "a request for which no answer was given"
            answer = self._answers.pop(0)
        self.running += 1
        self.peak = max(self.peak, self.running)
        try:
            await asyncio.sleep(answer.after_s)
        finally:
            self.running -= 1
        return answer

    def _used(self, model: str, prompt: str, answer: Answer) -> TokenUsage:
        counted = len(prompt.split())
        used = TokenUsage(
            self.endpoint, model, 1, counted - answer.cached, answer.cached, 0, len(answer.content.split()) + 1
        )
        self.log.append(used)
        return used


@contextmanager
def served(server: JudgeServer) -> Iterator[None]:
    """The server on a thread of its own: its callers are other processes."""
    up, done = threading.Event(), threading.Event()

    async def main() -> None:
        async with server:
            up.set()
            await asyncio.to_thread(done.wait)

    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    try:
        assert up.wait(30.0)
        yield
    finally:
        done.set()
        thread.join(30.0)


def _sent(answer: Answer) -> web.Response:
    if answer.raw is not None:
        return web.Response(text=answer.raw, status=answer.status, headers=answer.headers)
    return _error(answer.status, answer.error, answer.headers)


def _error(status: int, error: Mapping[str, Any], headers: Mapping[str, str]) -> web.Response:
    return web.json_response({"error": dict(error)}, status=status, headers=headers)
