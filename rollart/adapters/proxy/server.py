"""The proxy's HTTP server: OpenAI's and Anthropic's APIs over captured sessions, and routes to read them back."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import hmac
import json
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from aiohttp import web

from rollart.adapters.proxy.api import (
    ApiResponse,
    ChatCompletions,
    Messages,
    PromptBody,
    Responses,
    TextCompletions,
)
from rollart.adapters.proxy.capture import CapturedTurn
from rollart.adapters.proxy.chat import ChatFormat
from rollart.adapters.proxy.messages import (
    BadRequest,
    CompletionRequest,
    OutputDelta,
    PolicyResponse,
    ResponseHeader,
)
from rollart.adapters.proxy.record import SessionRecorder, session_body
from rollart.adapters.proxy.sessions import (
    DeltaCallback,
    ProxySession,
    SessionCache,
    SessionLimits,
    SessionOutcome,
    SessionPolicy,
)
from rollart.errors import EngineError, RollartError

SESSION_HEADER = "X-Rollart-Session"
"""Names the session of a request whose path names none."""

ROUTER_SESSION_HEADER = "X-Session-ID"
"""The session header of routers that pin a rollout to an engine; verifiers sends it."""

DEFAULT_SESSION = "default"
"""The session of requests that name none."""

MAX_BODY = 64 * 2**20
"""Longest request body, bytes."""

RETRY_AFTER_S = 1
"""Value of `Retry-After` while the policy is paused. The clients of both APIs wait and retry by themselves."""

KEEPALIVE_INTERVAL_S = 10.0
"""Longest silence of a stream, seconds. A failure within the first such interval still gets its own HTTP status."""

KEEPALIVE_COMMENT = b": the policy is still generating\n\n"
"""An SSE comment: clients ignore it, and it keeps the connection open."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:@-]{0,127}")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass
class Proxy:
    """Owns the sessions. Requests of one session may overlap; each waits only for its policy.

    `policy` creates the policy of a session that was not `open`ed before; without it, only opened sessions are served.
    `paused` is checked before every request. `limits` bound the sessions that were not `open`ed (`SessionCache`);
    lines that `recording` wrote about evicted sessions remain.
    """

    form: ChatFormat
    policy: Callable[[str], SessionPolicy] | None = None
    paused: Callable[[], Awaitable[bool]] | None = None
    recording: SessionRecorder = field(default_factory=lambda: SessionRecorder(None))
    token: str = ""
    model: str = "policy"
    limits: SessionLimits | None = None

    def __post_init__(self) -> None:
        self._paused = False
        self._cache = SessionCache(self.limits or SessionLimits())
        self._sessions = self._cache.sessions

    def app(self) -> web.Application:
        app = web.Application(client_max_size=MAX_BODY, middlewares=[self._guard])
        for prefix in ("", "/s/{session}", "/v1", "/s/{session}/v1"):  # with /v1: for clients that append another
            for api in (ChatCompletions, TextCompletions, Responses, Messages):
                app.router.add_post(prefix + api.path, partial(self._serve, api))
            app.router.add_post(prefix + "/v1/messages/count_tokens", self._count)
            app.router.add_get(prefix + "/v1/models", self._models)
        app.add_routes(
            [
                web.get("/sessions", self._list),
                web.get("/sessions/{session}", self._show),
                web.post("/sessions/{session}/end", self._end),
                web.delete("/sessions/{session}", self._forget),
                web.post("/pause", partial(self._set_paused, True)),
                web.post("/resume", partial(self._set_paused, False)),
                web.get("/is_paused", self._is_paused),
                web.get("/metrics", self._metrics),
                web.get("/health", self._health),
            ]
        )
        return app

    def open(self, name: str, policy: SessionPolicy) -> ProxySession:
        """Open a session that `policy` generates for; ValueError if the name is taken."""
        if name in self._sessions:
            raise ValueError(f"session {name} is open already")
        session = self._sessions[name] = ProxySession(name, self.form, policy, on_turn=self._record_turn)
        return session

    def _record_turn(self, session: ProxySession, turn: CapturedTurn) -> None:
        self.recording.turn(session, turn)
        if self._sessions.get(session.name) is session:
            self._cache.count(turn)

    async def close(self, name: str) -> None:
        """Remove a session and release its policy."""
        session = self._cache.remove(name)
        if session is not None:
            await session.policy.release()

    async def _serve(self, api: type[ApiResponse], request: web.Request) -> web.StreamResponse:
        session = await self._session(request)
        ask = api.request.read(await _body(request), session.conversation).completion()
        if await self._policy_paused():
            raise EngineError("the policy is paused for new weights", retryable=True)
        session.ended = False
        created = int(dt.datetime.now(dt.UTC).timestamp())
        headers = {"X-Rollart-Unenforced": ", ".join(ask.unenforced)} if ask.unenforced else {}
        if not ask.stream:
            answer = await session.answer(ask, created=created)
            return _json(api(ask, answer.head).body(answer), headers={**headers, **_response_headers(answer)})
        headers[SESSION_HEADER] = session.name
        return await _stream(
            request, api, ask, headers, lambda sink: session.answer(ask, created=created, streamed=sink)
        )

    async def _count(self, request: web.Request) -> web.Response:
        session = await self._session(request)
        prompt = PromptBody.read(await _body(request)).prompt()
        return _json({"input_tokens": len(session.plan(prompt).token_ids)})

    async def _models(self, request: web.Request) -> web.Response:
        model = {
            "id": self.model,
            "object": "model",
            "type": "model",
            "display_name": self.model,
            "created": 0,
            "created_at": "1970-01-01T00:00:00Z",
            "owned_by": "rollart",
        }
        return _json(
            {"object": "list", "data": [model], "has_more": False, "first_id": self.model, "last_id": self.model}
        )

    async def _list(self, request: web.Request) -> web.Response:
        shown = [
            {
                "session": s.name,
                "turns": len(s.capture.turns),
                "branches": len(s.capture.branches()),
                "busy": s.busy,
                "abandoned": s.abandoned,
            }
            for s in self._sessions.values()
        ]
        return _json({"schema_version": 1, "sessions": shown})

    async def _show(self, request: web.Request) -> web.Response:
        return _json(session_body(self._existing_session(request)))

    async def _end(self, request: web.Request) -> web.Response:
        session = self._existing_session(request)
        session.ending, session.ended = SessionOutcome.read(await _body(request)), True
        self.recording.ended(session)
        return _json({"session": session.name})

    async def _forget(self, request: web.Request) -> web.Response:
        session = self._existing_session(request)
        if session.busy:
            raise BadRequest(f"session {session.name} has {session.busy} requests under way", status=409)
        await self.close(session.name)
        return _json({"session": session.name})

    async def _set_paused(self, paused: bool, request: web.Request) -> web.Response:
        self._paused = paused
        return _json({"status": "paused" if paused else "resumed"})

    async def _is_paused(self, request: web.Request) -> web.Response:
        return _json({"is_paused": await self._policy_paused()})

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(text=self._cache.metrics(), content_type="text/plain")

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _policy_paused(self) -> bool:
        return self._paused or (self.paused is not None and await self.paused())

    async def _session(self, request: web.Request) -> ProxySession:
        """The request's session; created if necessary."""
        named = request.headers.get(SESSION_HEADER) or request.headers.get(ROUTER_SESSION_HEADER)
        name = request.match_info.get("session") or named or DEFAULT_SESSION
        session = self._sessions.get(name)
        if session is None:
            if not _NAME.fullmatch(name):
                raise BadRequest(
                    f"session {name!r} (rule: letters, digits, '_.:@-', at most 128)", field=SESSION_HEADER
                )
            if self.policy is None:
                raise BadRequest(f"session {name} is not open at {request.url}: {_base_urls_text(request)}", status=404)
            await self._cache.make_room(begins=True)
            session = self._sessions.get(name) or self.open(name, self.policy(name))
        elif self.policy is not None:
            await self._cache.make_room(begins=False)
        session.used = asyncio.get_running_loop().time()
        self._sessions.move_to_end(name)
        return session

    def _existing_session(self, request: web.Request) -> ProxySession:
        name = request.match_info["session"]
        if name in self._sessions:
            return self._sessions[name]
        if (why := self._cache.evicted.get(name)) is not None:
            raise BadRequest(f"session {name} was given up for others ({why}); --record keeps it", status=410)
        raise BadRequest(f"no session {name}", status=404)

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Check the API key, and render errors in the format of the called API."""
        api: type[ApiResponse] = Messages if "/v1/messages" in request.path else ChatCompletions
        if self.token and request.path != "/health":
            given = request.headers.get("x-api-key") or request.headers.get("Authorization", "").removeprefix("Bearer ")
            if not hmac.compare_digest(given.encode(errors="replace"), self.token.encode()):
                return _json(api.error_body("the API key is not this proxy's", 401), status=401)
        try:
            return await handler(request)
        except BadRequest as error:
            shape = api.error_body(str(error), error.status, field=error.field, code=error.code)
            headers = {} if error.retry_after is None else {"Retry-After": str(error.retry_after)}
            return _json(shape, status=error.status, headers=headers)
        except RollartError as error:  # 503 if a retry may succeed, 400 if it never will; 500 if the proxy failed
            retryable = getattr(error, "retryable", None)
            status = 500 if retryable is None else 503 if retryable else 400
            headers = {"Retry-After": str(RETRY_AFTER_S)} if status == 503 else {}
            return _json(api.error_body(str(error), status), status=status, headers=headers)
        except web.HTTPNotFound:
            return _json(api.error_body(f"nothing is at {request.url}: {_base_urls_text(request)}", 404), status=404)
        except web.HTTPException as error:
            return _json(api.error_body(error.reason, error.status), status=error.status)


async def _stream(
    request: web.Request,
    api: type[ApiResponse],
    ask: CompletionRequest,
    headers: Mapping[str, str],
    generate: Callable[[DeltaCallback], Awaitable[PolicyResponse]],
) -> web.StreamResponse:
    """Stream a generation. The HTTP status is sent with the first byte: with the first text, at the end of the
    generation, or after `KEEPALIVE_INTERVAL_S`. BadRequest or RollartError for a failure before the first byte; a later
    failure is sent as an event. A disconnected client cancels the generation.

    Text queues here for a client that reads slower than the policy generates; the queue holds at most one response."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache", **headers})
    queue: asyncio.Queue[list[bytes] | None] = asyncio.Queue()
    writer: ApiResponse | None = None

    async def write(chunks: Iterable[bytes]) -> None:
        for chunk in chunks:
            if not response.prepared:
                await response.prepare(request)
            await response.write(chunk)

    def events(head: ResponseHeader, part: OutputDelta | PolicyResponse) -> Iterator[bytes]:
        nonlocal writer
        if writer is None:
            writer = api(ask, head)
            yield from writer.begin(part if isinstance(part, PolicyResponse) else None)
        yield from writer.add(part) if isinstance(part, OutputDelta) else writer.finish(part)

    failed: BadRequest | RollartError | None = None
    answer: PolicyResponse | None = None
    gone = False
    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(_forward(queue, write), name="stream")
            try:
                answer = await generate(lambda head, delta: queue.put_nowait(list(events(head, delta))))
            except (BadRequest, RollartError) as error:
                failed = error
            queue.put_nowait(None)
    except* ConnectionError:
        gone = True
    if failed is not None and not response.prepared:
        raise failed
    if answer is not None and not response.prepared:
        response.headers.update(_response_headers(answer))
    with contextlib.suppress(ConnectionError):
        if not gone:
            await write([api.error_event(str(failed))] if answer is None else events(answer.head, answer))
        await response.write_eof()
    return response


async def _forward(queue: asyncio.Queue[list[bytes] | None], write: Callable[[list[bytes]], Awaitable[None]]) -> None:
    """Write the queue's chunks up to the first None, and a comment after each `KEEPALIVE_INTERVAL_S` of silence."""
    while True:
        try:
            async with asyncio.timeout(KEEPALIVE_INTERVAL_S):
                chunks = await queue.get()
        except TimeoutError:
            chunks = [KEEPALIVE_COMMENT]
        if chunks is None:
            return
        await write(chunks)


def _response_headers(answer: PolicyResponse) -> dict[str, str]:
    return {SESSION_HEADER: answer.head.session, "X-Rollart-Turn": str(answer.turn)}


def _base_urls_text(request: web.Request) -> str:
    """The base URLs for clients, as a text for error messages."""
    at, name = request.url.origin(), "SESSION"
    parts = request.path.split("/")
    if parts[1] == "s" and len(parts) > 2:
        name = parts[2]
    return f"the base URL is {at}/s/{name}/v1 for clients of OpenAI's API, {at}/s/{name} for those of Anthropic's"


async def _body(request: web.Request) -> Mapping[str, Any]:
    raw = await request.read()
    try:
        value = json.loads(raw.decode() or "{}")
        if b"\\ud" in raw.lower():  # refuse escaped lone surrogates, which are no text and have no tokens
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise BadRequest("the body must be a JSON object")
    return value


def _json(value: object, *, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    return web.Response(
        body=json.dumps(value).encode(), status=status, headers=headers or {}, content_type="application/json"
    )
