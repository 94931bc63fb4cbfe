"""The HTTP server: the subset of vLLM's API that reinforcement learning needs, and a few routes under `/rollart`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web
from torch import Tensor

from rollart.engine.driver import Driver
from rollart.engine.events import stream_response
from rollart.engine.handoff import HandoffSettings, KvHandoffs
from rollart.engine.jobs import parse_job
from rollart.engine.metrics import render_metrics
from rollart.engine.staging import WeightStaging
from rollart.engine.stream import StreamConnection
from rollart.errors import EngineError, HandoffFailed
from rollart.generation import completion_body, error_body, strip_prefix
from rollart.model import PauseMode

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

MAX_BODY = 64 * 2**20
"""Longest request body, bytes: a million token ids fit."""


class EngineServer:
    """The routes of one engine. Owns the staged weights. `handoffs` owns the exported KV and the driver all other
    state; the caller must run both."""

    def __init__(
        self, driver: Driver, *, model: str, advertise: tuple[str, int], handoff: HandoffSettings | None = None
    ) -> None:
        self._driver, self._runner = driver, driver.runner
        self.model = model
        self.handoffs = KvHandoffs(driver, handoff or HandoffSettings(), advertise=advertise)
        self._staging = WeightStaging(self._runner.network)
        self._staged: tuple[str, dict[str, Tensor], str] | None = None
        self._updating = False
        self._count = 0
        self._stream_port = 0

    def app(self) -> web.Application:
        app = web.Application(client_max_size=MAX_BODY, middlewares=[_errors])
        app.add_routes(
            [
                web.post("/inference/v1/generate", self._generate),
                web.post("/abort_requests", self._abort),
                web.post("/inference/v1/abort_requests", self._abort),
                web.post("/pause", self._pause),
                web.post("/resume", self._resume),
                web.get("/is_paused", self._is_paused),
                web.post("/init_weight_transfer_engine", self._init_transfer),
                web.post("/start_weight_update", self._start_update),
                web.post("/update_weights", self._update),
                web.post("/finish_weight_update", self._finish_update),
                web.get("/weight_info", self._weight_info),
                web.post("/reset_prefix_cache", self._reset_prefix_cache),
                web.get("/health", self._health),
                web.get("/metrics", self._metrics),
                web.get("/v1/models", self._models),
                web.post("/rollart/release_session", self._release),
                web.get("/rollart/kv", self._kv),
                web.get("/rollart/stream", self._stream),
            ]
        )
        app.on_cleanup.append(self._close)
        return app

    async def listen(self, host: str) -> asyncio.Server:
        """Listen for stream connections (see `stream`) on a free port of `host`."""
        loop = asyncio.get_running_loop()
        listener = await loop.create_server(
            lambda: StreamConnection(self._driver, self.handoffs, self._next_id), host, 0, backlog=1024
        )
        self._stream_port = listener.sockets[0].getsockname()[1]
        return listener

    async def generate(self, body: object, session: str) -> dict[str, Any]:
        """Serve one request, from request body to response body. Cancelling the call aborts the request."""
        job = parse_job(body, session=session, fallback_id=self._next_id())
        finished = await self.handoffs.serve(job)
        return completion_body(job.request.request_id, finished.completion)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body, session = await _body(request), request.headers.get("X-Session-ID", "")
        if body.get("stream"):
            job = parse_job(body, session=session, fallback_id=self._next_id())
            return await stream_response(request, job, self.handoffs.serve)
        return _json(await self.generate(body, session))

    async def _abort(self, request: web.Request) -> web.Response:
        ids = (await _body(request)).get("request_ids")
        if ids is not None and not isinstance(ids, list):
            raise EngineError("request_ids must be a list", retryable=False)
        names = [strip_prefix(str(i)) for i in ids] if ids else None
        self.handoffs.abort(names)
        await self._driver.abort(names)
        return _json({"status": "ok"})

    async def _pause(self, request: web.Request) -> web.Response:
        mode = request.query.get("mode", "abort")
        if mode not in set(PauseMode):
            raise EngineError(f"pause mode {mode!r} is unknown", retryable=False, remedy="use keep, wait or abort")
        await self._driver.pause(PauseMode(mode))
        return _json({"status": "paused"})

    async def _resume(self, request: web.Request) -> web.Response:
        await self._driver.resume()
        return _json({"status": "resumed"})

    async def _is_paused(self, request: web.Request) -> web.Response:
        return _json({"is_paused": self._driver.paused})

    async def _init_transfer(self, request: web.Request) -> web.Response:
        """With an order in `init_info`, take part in one broadcast of the trainer, concurrently with all requests."""
        if self._staging.take_part((await _body(request)).get("init_info")):
            return _json({"message": "takes part in the broadcast"})
        return _json({"message": "weights are read from published directories: nothing to set up"})

    async def _start_update(self, request: web.Request) -> web.Response:
        self._updating, self._staged = True, None
        return _json({"message": "weight update started"})

    async def _update(self, request: web.Request) -> web.Response:
        """Stage a version in memory, from a published directory or a broadcast. Requests are unaffected until
        `/finish_weight_update`."""
        if not self._updating:
            raise EngineError("no weight update was started", retryable=False, remedy="POST /start_weight_update first")
        self._staged = await self._staging.stage((await _body(request)).get("update_info"))
        return _json({"message": f"staged {self._staged[0]}"})

    async def _finish_update(self, request: web.Request) -> web.Response:
        """Swap the staged weights in between two steps, as one version."""
        if not self._updating or self._staged is None:
            raise EngineError("no weights are staged", retryable=False, remedy="POST /update_weights first")
        version = (await _body(request)).get("weight_version")
        if not str(version).isdigit():
            raise EngineError(f"weight_version is {version!r}, it must be an integer", retryable=False)
        path, tensors, stamp = self._staged

        def replace() -> None:
            self._runner.load(tensors, int(str(version)), stamp)
            self.handoffs.exports.clear(f"the weights are version {version} now")

        await self._driver.apply(replace)
        self._staged, self._updating, self.model = None, False, path
        return _json({"message": f"weights are version {version}", "weight_version": int(str(version)), "stamp": stamp})

    async def _weight_info(self, request: web.Request) -> web.Response:
        return _json({"weight_version": self._runner.version, "stamp": self._runner.stamp, "path": self.model})

    async def _reset_prefix_cache(self, request: web.Request) -> web.Response:
        running = request.query.get("reset_running_requests", "false").lower() == "true"

        def reset() -> bool:
            self.handoffs.exports.clear("the prefix cache was reset")
            return self._runner.reset_prefix_cache(running=running)

        done = await self._driver.apply(reset)
        return _json({"success": done})

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _metrics(self, request: web.Request) -> web.Response:
        self.handoffs.exports.sweep()
        text = render_metrics(self._runner, self.handoffs, held=self._driver.held, paused=self._driver.paused)
        return web.Response(text=text, content_type="text/plain")

    async def _models(self, request: web.Request) -> web.Response:
        return _json(
            {"object": "list", "data": [{"id": self.model, "object": "model", "max_model_len": self._runner.context}]}
        )

    async def _release(self, request: web.Request) -> web.Response:
        session = str((await _body(request)).get("session", ""))
        self.handoffs.exports.drop_session(session)
        return _json({"released": await self._driver.apply(lambda: self._runner.release(session))})

    async def _kv(self, request: web.Request) -> web.StreamResponse:
        query = request.query
        try:
            start = int(query.get("from", "0"))
        except ValueError:
            raise EngineError(f"from is {query['from']!r}, it must be a number of tokens", retryable=False) from None
        try:
            parts = await self.handoffs.hand_out(query.get("request_id", ""), query.get("token", ""), max(start, 0))
        except HandoffFailed as error:
            return _json(error_body(error, 404), status=404)
        answer = web.StreamResponse(headers={"Content-Type": "application/octet-stream"})
        answer.content_length = sum(map(len, parts))
        await answer.prepare(request)
        for part in parts:
            await answer.write(part)
        await answer.write_eof()
        return answer

    async def _stream(self, request: web.Request) -> web.Response:
        return _json({"port": self._stream_port}, status=200 if self._stream_port else 404)

    def _next_id(self) -> str:
        """An id for a request without one."""
        self._count += 1
        return f"request-{self._count}"

    async def _close(self, app: web.Application) -> None:
        self._staging.close()
        await self.handoffs.close()


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Render EngineErrors as JSON: 400 if the request can never run here, 503 if it may run elsewhere or later."""
    try:
        return await handler(request)
    except EngineError as error:
        status = 503 if error.retryable else 400
        return _json(error_body(error, status), status=status)


async def _body(request: web.Request) -> dict[str, Any]:
    raw = await request.read()
    if not raw:
        return {}
    try:
        value = json.loads(raw)
    except ValueError as error:
        raise EngineError(f"the body is not JSON: {error}", retryable=False) from None
    if not isinstance(value, dict):
        raise EngineError("the body must be a JSON object", retryable=False)
    return value


def _json(value: object, *, status: int = 200) -> web.Response:
    return web.Response(body=json.dumps(value).encode(), status=status, content_type="application/json")
