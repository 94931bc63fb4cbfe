"""The server of one engine: the subset of vLLM's HTTP API that reinforcement learning needs, a few routes under
`/rollart`, and the stream.

`rollart.generation` translates generations. A generation may be answered whole, as server-sent events while its tokens
are sampled (vLLM's `stream: true`), or over the stream, on which many requests share one connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import json
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

from aiohttp import web

from rollart.engine.driver import Driver
from rollart.engine.handoff import HandoffSettings, KvHandoffs
from rollart.engine.jobs import EngineJob, FinishedJob, parse_job
from rollart.engine.runner import Runner
from rollart.engine.weights import StagedWeights, WeightStaging
from rollart.errors import EngineError, HandoffFailed
from rollart.framing import MessageConnection
from rollart.generation import (
    VLLM_PREFIX,
    body_of_message,
    chunk_body,
    chunk_message,
    completion_body,
    completion_message,
    error_body,
    error_message,
    usage,
)
from rollart.model import CompletionChunk, PauseMode

MAX_FRAME = 64 * 2**20
"""Longest frame of requests, bytes."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

MAX_BODY = 64 * 2**20
"""Longest request body, bytes: a million token ids fit."""


class EngineServer:
    """The routes of one engine. Owns the staged weights. `handoffs` owns the exported KV and the driver all other
    state; the caller must run both."""

    def __init__(self, driver: Driver, *, model: str, handoff: HandoffSettings | None = None) -> None:
        self._driver, self._runner = driver, driver.runner
        self.model = model
        self.handoffs = KvHandoffs(driver, handoff or HandoffSettings())
        self._staging = WeightStaging(self._runner.network, model)
        self._staged: StagedWeights | None = None
        self._updating = False
        self._ids = (f"request-{number}" for number in itertools.count(1))
        """Ids for requests without one."""
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
        """Listen for stream connections on a free port of `host`."""
        loop = asyncio.get_running_loop()
        listener = await loop.create_server(
            lambda: StreamConnection(self._driver, self.handoffs, self._ids), host, 0, backlog=1024
        )
        self._stream_port = listener.sockets[0].getsockname()[1]
        return listener

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await _body(request)
        if body.get("model") == self.model:  # the name of the weights themselves, as `/v1/models` lists it
            del body["model"]
        job = parse_job(body, session=request.headers.get("X-Session-ID", ""), fallback_id=next(self._ids))
        if body.get("stream"):
            return await stream_response(request, job, self.handoffs.serve)
        finished = await self.handoffs.serve(job)
        return _json(completion_body(job.request.request_id, finished.completion))

    async def _abort(self, request: web.Request) -> web.Response:
        ids = (await _body(request)).get("request_ids")
        if ids is not None and not isinstance(ids, list):
            raise EngineError("request_ids must be a list", retryable=False)
        names = [str(i).removeprefix(VLLM_PREFIX) for i in ids] if ids else None
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
        return _json({"message": f"staged {self._staged.path}"})

    async def _finish_update(self, request: web.Request) -> web.Response:
        """Swap the staged weights in between two steps, as one version."""
        if not self._updating or self._staged is None:
            raise EngineError("no weights are staged", retryable=False, remedy="POST /update_weights first")
        version = (await _body(request)).get("weight_version")
        if not str(version).isdigit():
            raise EngineError(f"weight_version is {version!r}, it must be an integer", retryable=False)
        path, tensors, stamp, adapters = self._staged

        def replace() -> None:
            self._runner.load(tensors, int(str(version)), stamp, adapters)
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
        stack = self._runner.network.adapters
        names = (self.model,) if stack is None else stack.names
        listed = [{"id": name, "object": "model", "max_model_len": self._runner.context} for name in names]
        return _json({"object": "list", "data": listed})

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

    async def _close(self, app: web.Application) -> None:
        self._staging.receiver.close()
        await self.handoffs.close()


async def stream_response(
    request: web.Request, job: EngineJob, serve: Callable[[EngineJob], Awaitable[FinishedJob]]
) -> web.StreamResponse:
    """Stream the answer to `request`. EngineError if nothing was sent yet; later errors are sent as events."""
    name, answer = job.request.request_id, web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    pieces: asyncio.Queue[CompletionChunk | None] = asyncio.Queue()
    job.on_chunk = pieces.put_nowait

    async def send(event: dict[str, Any] | str) -> None:
        if not answer.prepared:
            await answer.prepare(request)
        await answer.write(f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n".encode())

    async def forward() -> None:
        with contextlib.suppress(ConnectionError):  # a disconnect also cancels this handler
            while (piece := await pieces.get()) is not None:
                await send(chunk_body(name, piece))

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(forward(), name=f"pieces of {name}")
        result: FinishedJob | EngineError
        try:
            result = await serve(job)
        except EngineError as error:
            result = error
        pieces.put_nowait(None)
    if isinstance(result, EngineError):
        if not answer.prepared:
            raise result
        await send(error_body(result, 503 if result.retryable else 400))
    else:
        c = result.completion
        version, stamp = (c.spans[-1].version, c.spans[-1].stamp) if c.spans else (0, None)
        await send(
            chunk_body(name, CompletionChunk(c.token_ids[job.shown :], c.logprobs[job.shown :], version, stamp), c)
        )
        await send({"request_id": name, "choices": [], "usage": usage(c)})
    await send("[DONE]")
    await answer.write_eof()
    return answer


class StreamConnection(MessageConnection):
    """One connection, on the driver's loop."""

    def __init__(self, driver: Driver, handoffs: KvHandoffs, ids: Iterator[str]) -> None:
        super().__init__(max_frame=MAX_FRAME)
        self._driver, self._handoffs, self._ids = driver, handoffs, ids
        self._requests: dict[int, Callable[[], object]] = {}
        """By its number, the function that aborts a request whose client is gone."""

    def on_lost(self, error: Exception | None) -> None:
        requests, self._requests = self._requests, {}
        for abort in requests.values():
            abort()

    def on_invalid(self, problem: str) -> None:
        self.close()

    def on_message(self, message: Sequence[Any]) -> None:
        kind = message[0]
        if kind in ("g", "G"):
            self._generate(message)
        elif kind == "a":
            names = [str(name).removeprefix(VLLM_PREFIX) for name in message[1]]
            self._handoffs.abort(names)
            self._driver.abort_soon(names)
        elif kind == "x":
            if (abort := self._requests.pop(message[1], None)) is not None:
                abort()
        elif kind == "r":
            self._handoffs.exports.drop_session(str(message[1]))
            self._driver.apply_soon(lambda: self._driver.runner.release(str(message[1])))
        else:
            raise ValueError(f"unknown message kind {kind!r}")

    def _generate(self, message: Sequence[Any]) -> None:
        number, session, body = body_of_message(message)
        try:
            job = parse_job(body, session=session, fallback_id=next(self._ids))
            if message[0] == "G":
                job.on_chunk = lambda piece: self._send_piece(number, piece)
            if job.request.kv_transfer:  # the request waits for other engines, before or after its steps
                self._requests[number] = self._handoffs.start(self._serve(number, job)).cancel
                return
            self._requests[number] = functools.partial(self._driver.discard, job.request.request_id)
            job.deliver = lambda result: self._deliver(number, result)
            self._driver.submit(job)
        except EngineError as error:
            self._deliver(number, error)

    async def _serve(self, number: int, job: EngineJob) -> None:
        """Run a request with a hand-off."""
        try:
            result: FinishedJob | EngineError = await self._handoffs.serve(job)
        except EngineError as error:
            result = error
        if number in self._requests:
            self._deliver(number, result)

    def _send_piece(self, number: int, piece: CompletionChunk) -> None:
        if number in self._requests:
            self.send(chunk_message(number, piece))

    def _deliver(self, number: int, result: FinishedJob | EngineError) -> None:
        self._requests.pop(number, None)
        if isinstance(result, EngineError):
            self.send(error_message(number, result))
        else:
            self.send(completion_message(number, result.completion))


def render_metrics(runner: Runner, handoffs: KvHandoffs, *, held: int, paused: bool) -> str:
    """One line per metric. `held`: number of requests that wait for `resume`."""
    s, exports = runner.stats(), handoffs.exports
    computed = s.prompt_tokens - s.cached_tokens
    gauges = {
        "vllm:num_requests_running": s.running,
        "vllm:num_requests_waiting": s.waiting + held + len(handoffs.pull_timeouts),
        "vllm:kv_cache_usage_perc": s.kv_used,
        "vllm:engine_sleep_state": 0,
        f'vllm:cache_config_info{{block_size="{runner.context}",num_gpu_blocks="{runner.table.slots}"}}': 1,
        "rollart:paused": int(paused),
        "rollart:weight_version": runner.version,
        "rollart:idle_sessions": runner.table.idle_sessions(),
        "rollart:kept_tokens": runner.table.used_tokens(),
        "rollart:slots": runner.table.slots,
        "rollart:pending_kv_exports": len(exports),
        "rollart:pending_kv_export_bytes": exports.bytes,
    }
    counters = {
        "vllm:prompt_tokens_total": s.prompt_tokens,
        "vllm:generation_tokens_total": s.generated_tokens,
        "vllm:prefix_cache_queries_total": s.prompt_tokens,
        "vllm:prefix_cache_hits_total": s.cached_tokens - runner.imported_tokens,
        "vllm:external_prefix_cache_hits_total": runner.imported_tokens,
        'vllm:prompt_tokens_by_source_total{source="local_compute"}': computed,
        'vllm:prompt_tokens_by_source_total{source="local_cache_hit"}': s.cached_tokens - runner.imported_tokens,
        'vllm:prompt_tokens_by_source_total{source="external_kv_transfer"}': runner.imported_tokens,
        "vllm:num_preemptions_total": s.preemptions,
        "vllm:iteration_tokens_total_count": s.steps,
        "vllm:request_prefill_time_seconds_sum": s.prefill_seconds,
        "vllm:request_decode_time_seconds_sum": s.decode_seconds,
        "rollart:kv_exported_bytes_total": exports.exported_bytes,
        "rollart:kv_exports_taken_total": exports.taken,
        "rollart:kv_exports_expired_total": exports.expired,
        "rollart:kv_exports_dropped_total": exports.dropped,
        "rollart:kv_pull_failures_total": handoffs.failed,
        "rollart:kv_imports_dropped_total": runner.dropped_imports,
        **{f'rollart:kv_pulls_total{{transport="{t}"}}': p.pulls for t, p in handoffs.pulled.items()},
        **{f'rollart:kv_pulled_bytes_total{{transport="{t}"}}': p.bytes for t, p in handoffs.pulled.items()},
        **{f'rollart:kv_pull_seconds_sum{{transport="{t}"}}': p.seconds for t, p in handoffs.pulled.items()},
        **{f'vllm:request_success_total{{finished_reason="{r.value}"}}': n for r, n in runner.ended.items()},
    }
    lines = []
    for kind, values in (("gauge", gauges), ("counter", counters)):
        seen = set()
        for name, value in values.items():
            family = name.partition("{")[0]
            if family not in seen:
                lines.append(f"# TYPE {family} {kind}")
                seen.add(family)
            lines.append(f"{name} {value}")
    return "\n".join(lines) + "\n"


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
