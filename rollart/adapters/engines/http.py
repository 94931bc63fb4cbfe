"""Client of an engine with vLLM's HTTP protocol: the embedded engine, and vLLM itself with the additions in `vllm`.

The embedded engine also offers a stream, on which many requests share one connection without HTTP; `rollart.generation`
has the formats of both. Third-party errors become `EngineError` here and nowhere else. The contract suite runs over
this client.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, cast
from urllib.parse import urlsplit

import aiohttp

from rollart.errors import EngineError, ForeignWeights, WrongAnswer
from rollart.framing import MessageConnection
from rollart.generation import (
    VLLM_PREFIX,
    CompletionAssembler,
    parse_chunk_message,
    parse_completion,
    parse_completion_message,
    parse_error,
    parse_error_message,
    request_body,
    request_message,
)
from rollart.model import (
    Completion,
    CompletionChunk,
    EngineId,
    EngineStats,
    GenerateRequest,
    PauseMode,
    WeightsRef,
)

MAX_FRAME = 2**28
"""Longest frame of answers, bytes, far above real frames: the client would wait for that many bytes of garbage."""

CONNECT_S = 10.0
"""Connection timeout, seconds. Calls have no other timeout here: their leases bound them."""

_LABEL = re.compile(r'(\w+)="([^"]*)"')


class HttpEngine:
    """Implements the `Engine` port over one keep-alive connection pool, and the embedded engine's stream if it has one.

    Any number of calls may run at once, on one loop. `close` ends the connections; later calls fail. `version` is the
    version of the weights that the server started with; it labels tokens of a server that reports no versions. Without
    `streaming`, or with a server that offers no stream, generations use HTTP like all other calls. An idle connection
    is reused for `keepalive_s` seconds, which must be less than the server keeps it. `local` waits until a version is
    on the server's host and returns its path there; without it, the published path is used.
    """

    _once = False
    """True if each control call needs its own connection, for servers that close it after an error."""

    def __init__(
        self,
        id: EngineId,
        url: str,
        *,
        version: int = 0,
        streaming: bool = True,
        keepalive_s: float = 600.0,
        local: Callable[[WeightsRef], Awaitable[str]] | None = None,
    ) -> None:
        self.id = id
        self.url = url.rstrip("/")
        self._first = version
        self._http: aiohttp.ClientSession | None = None
        self._closed = False
        self._streaming = streaming
        self._keepalive_s = keepalive_s
        self._local = local
        self._broadcast: tuple[int, str] = (-1, "")
        """The version in the server's memory after a broadcast, and the broadcast's stamp."""
        self._stamps: dict[int, tuple[str, ...]] = {}
        """Accepted stamps, by version, of the weights that this client had the server load: the stamp of the published
        files, then that of the broadcast. If the former is empty, stamps are not compared."""
        self.stream: EngineStream | None = None
        """The connection that carries the requests, if the engine offers one."""
        self._opening = asyncio.Lock()

    async def generate(self, request: GenerateRequest) -> Completion:
        """Generate the tokens of one turn. Cancelling aborts the request on the server. HandoffFailed if the KV named
        in `kv_transfer` is unavailable; ForeignWeights if tokens were drawn by weights that this client did not have
        the server load."""
        if (on_chunk := request.on_chunk) is not None:

            def check_and_forward(piece: CompletionChunk) -> None:
                self._check_stamp(piece.version, piece.stamp)
                on_chunk(piece)

            request = dataclasses.replace(request, on_chunk=check_and_forward)
        answer = await self._generate_any(request)
        for span in answer.spans:
            self._check_stamp(span.version, span.stamp)
        return answer

    async def _generate_any(self, request: GenerateRequest) -> Completion:
        if (stream := await self._open_stream()) is not None:
            return await stream.generate(request)
        body = request_body(request)
        if request.on_chunk is not None and request.kv_transfer is None:  # events cannot carry `kv_transfer_params`
            return await self._generate_streamed(request, body)
        raw = await self.request("POST", "/inference/v1/generate", body, session=request.session)
        try:
            return parse_completion(json.loads(raw), self._first)
        except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
            raise WrongAnswer(f"{self.url}: answer not understood: {error!r}") from error

    async def started_with(self, weights: WeightsRef) -> None:
        """Call before the first request. `EngineError` if the server does not compute with these weights."""
        self._stamps = {weights.version: (weights.stamp,)}
        if weights.stamp:
            info = as_object(await self.request("GET", "/weight_info", limit_s=CONNECT_S, optional=True))
            self._check_stamp(weights.version, info.get("stamp"))

    def _check_stamp(self, version: object, stamp: object) -> None:
        """ForeignWeights if a version's stamp differs from the stamps that this client had the server load. Versions
        loaded otherwise, and servers that report no stamps, are not compared."""
        expected = self._stamps.get(version) if isinstance(version, int) else None
        if expected and expected[0] and stamp is not None and stamp not in expected:
            raise ForeignWeights(
                f"{self.url}: its weights are not those that were published as v{version} (stamp {str(stamp)[:12]!r}, "
                f"published {expected[0][:12]!r})",
                remedy="something else loads weights into this engine: keep it from the engine's port",
            )

    def _version_source(self) -> Callable[[], int | None]:
        """A function that returns the version currently drawing tokens for a request sent now, for servers that report
        versions only at the end. None (always, here): unknown, because other clients may load weights meanwhile."""
        return lambda: None

    async def _generate_streamed(self, request: GenerateRequest, body: Mapping[str, object]) -> Completion:
        events = CompletionAssembler(self.url, self._first, request.on_chunk, self._version_source())
        headers = {"X-Session-ID": request.session} if request.session else {}
        data = {**body, "stream": True, "stream_options": {"include_usage": True}}
        path = "/inference/v1/generate"
        try:
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
            async with self._client().post(self.url + path, json=data, headers=headers, timeout=timeout) as answer:
                if answer.status >= 400:
                    raise parse_error(self.url, path, answer.status, await answer.read())
                rest = b""
                async for chunk in answer.content.iter_any():  # a line may exceed aiohttp's read limit
                    *lines, rest = (rest + chunk).split(b"\n")
                    for line in lines:
                        if line.startswith(b"data: "):
                            events.add(line[6:].strip())
        except (aiohttp.ClientError, TimeoutError) as error:
            cause = str(error) or type(error).__name__
            raise EngineError(f"{self.url}{path} broke off: {cause}", retryable=True) from error
        return events.completion()

    async def abort(self, request_ids: Sequence[str]) -> None:
        if not request_ids:  # an empty list would abort everything
            return
        if self.stream is not None and self.stream.open:  # keeps the order with earlier requests
            self.stream.send(("a", tuple(request_ids)))
        else:
            ids = [form for i in request_ids for form in (i, VLLM_PREFIX + i)]
            await self.control("/abort_requests", {"request_ids": ids})

    async def release(self, session: str) -> None:
        """Free the trajectory's prefix KV. A server without this route (vLLM) evicts by itself."""
        if self.stream is not None and self.stream.open:
            self.stream.send(("r", session))
        else:
            await self.control("/rollart/release_session", {"session": session}, optional=True)

    async def pause(self, mode: PauseMode) -> None:
        await self.control(f"/pause?mode={mode.value}", {})

    async def resume(self) -> None:
        await self.control("/resume", {})

    async def update_weights(self, weights: WeightsRef) -> None:
        version, stamp = self._broadcast
        info = {"path": weights.path}
        stamps: tuple[str, ...] = (weights.stamp,)
        if version == weights.version:
            info["stamp"] = stamp
            stamps += (stamp,)  # a server that no longer has the broadcast reads the files instead
        elif self._local is not None:
            info["path"] = await self._local(weights)
        await self._begin_update()
        await self.control("/update_weights", {"update_info": info})
        self._stamps[weights.version] = stamps
        loaded = await self.control("/finish_weight_update", {"weight_version": str(weights.version)})
        self._check_stamp(weights.version, loaded.get("stamp"))
        await self._drop_kv()

    async def members(self) -> int:
        """Number of processes that hold a part of the model; each takes part in a broadcast."""
        return 1

    async def take_part(self, order: Mapping[str, object]) -> None:
        """Receive one broadcast (`rollart.collective.BroadcastOrder`) of the trainer, concurrently with other calls."""
        await self.control("/init_weight_transfer_engine", {"init_info": dict(order)})

    def received(self, version: int, stamp: str) -> None:
        """Note that the server has a version in memory: `update_weights` loads it from there, not from files."""
        self._broadcast = version, stamp

    def sent_anew(self, version: int) -> None:
        """Note that a broadcast of this version begins. An earlier broadcast with this number or a later one was never
        committed (its publish failed), so it must not be loaded."""
        if self._broadcast[0] >= version:
            self._broadcast = -1, ""

    async def _begin_update(self) -> None:
        await self.control("/start_weight_update", {})

    async def _drop_kv(self) -> None:
        """Drop all KV: by default, vLLM keeps its prefix cache and the KV of running requests across an update."""
        answer = await self.control("/reset_prefix_cache?reset_running_requests=true", {})
        if answer.get("success") is False:
            raise EngineError(f"{self.url} kept stale KV: reset_prefix_cache failed", retryable=True)

    async def stats(self) -> EngineStats:
        text = (await self.request("GET", "/metrics", limit_s=CONNECT_S)).decode()
        values = parse_metrics(text)

        def of(name: str) -> float:
            return values.get("vllm:" + name, 0.0)

        return EngineStats(
            running=int(of("num_requests_running")),
            waiting=int(of("num_requests_waiting")),
            prompt_tokens=int(of("prompt_tokens_total")),
            generated_tokens=int(of("generation_tokens_total")),
            cached_tokens=int(of("prefix_cache_hits_total") + of("external_prefix_cache_hits_total")),
            prefill_seconds=of("request_prefill_time_seconds_sum"),
            decode_seconds=of("request_decode_time_seconds_sum"),
            kv_used=of("kv_cache_usage_perc"),
            preemptions=int(of("num_preemptions_total")),
            kv_tokens=kv_capacity_tokens(text),
            kv_sessions=int(values["rollart:slots"]) if "rollart:slots" in values else None,
            external_tokens=int(of("external_prefix_cache_hits_total")),
            ended=int(of("request_success_total")),
            steps=int(of("iteration_tokens_total_count")),
            latencies=int(of("inter_token_latency_seconds_count")),
            latency_seconds=of("inter_token_latency_seconds_sum"),
        )

    async def healthy(self) -> bool:
        try:
            await self.request("GET", "/health", limit_s=CONNECT_S)
        except EngineError:
            return False
        return True

    async def paused(self) -> bool:
        """True if the server is paused; a server without this route counts as running."""
        answer = await self.request("GET", "/is_paused", limit_s=CONNECT_S, optional=True)
        return bool(as_object(answer).get("is_paused"))

    async def context(self) -> int:
        """Maximum tokens of prompt and answer together."""
        models = as_object(await self.request("GET", "/v1/models", limit_s=CONNECT_S)).get("data")
        try:
            return int(models[0]["max_model_len"])  # type: ignore[index]
        except (KeyError, IndexError, TypeError, ValueError):
            raise EngineError(f"{self.url}/v1/models names no max_model_len", retryable=False) from None

    async def close(self) -> None:
        """Close the connections; requests in flight are aborted."""
        self._closed = True
        if self.stream is not None:
            self.stream.close()
        if self._http is not None:
            await self._http.close()

    async def _open_stream(self) -> EngineStream | None:
        """The server's stream, connected. None, now and in future, if it has none or its port is unreachable."""
        async with self._opening:
            if not self._streaming or (self.stream is not None and self.stream.open):
                return self.stream
            offered = as_object(await self.request("GET", "/rollart/stream", limit_s=CONNECT_S, optional=True))
            host, port = urlsplit(self.url).hostname or "", offered.get("port")
            if not port:
                self._streaming, self.stream = False, None
                return None
            try:
                async with asyncio.timeout(CONNECT_S):
                    loop = asyncio.get_running_loop()
                    _, self.stream = await loop.create_connection(lambda: EngineStream(self.url), host, port)
            except OSError:  # TimeoutError included
                self._streaming, self.stream = False, None
            return self.stream

    async def control(self, path: str, body: Mapping[str, object], *, optional: bool = False) -> dict[str, Any]:
        return as_object(await self.request("POST", path, body, once=self._once, optional=optional))

    async def request(
        self,
        method: str,
        path: str,
        body: Mapping[str, object] | None = None,
        *,
        session: str = "",
        limit_s: float | None = None,
        optional: bool = False,
        once: bool = False,
    ) -> bytes:
        """The body of the answer; empty if the route is missing and `optional` is set. EngineError otherwise."""
        headers = {"Content-Type": "application/json"}
        if session:
            headers["X-Session-ID"] = session
        if once:
            headers["Connection"] = "close"
        timeout = aiohttp.ClientTimeout(total=limit_s, sock_connect=CONNECT_S)
        data = None if body is None else json.dumps(body).encode()
        try:
            async with self._client().request(
                method, self.url + path, data=data, headers=headers, timeout=timeout
            ) as answer:
                raw = await answer.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            cause = str(error) or type(error).__name__
            raise EngineError(
                f"{self.url}{path} failed: {cause}", retryable=True, remedy="is the engine alive?"
            ) from error
        if optional and answer.status == 404:
            return b""
        if answer.status >= 400:
            raise parse_error(self.url, path, answer.status, raw)
        return raw

    def _client(self) -> aiohttp.ClientSession:
        if self._closed:
            raise EngineError(f"{self.url}: this engine's client was closed", retryable=True)
        if self._http is None:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=self._keepalive_s)
            self._http = aiohttp.ClientSession(connector=connector)
        return self._http


class EngineStream(MessageConnection):
    """One connection to an engine. Owns the requests that wait for an answer on it.

    Any task of the loop may call `generate`; it waits until the engine answers, and is unblocked by an EngineError
    (retryable) when the connection is lost.
    """

    def __init__(self, peer: str) -> None:
        super().__init__(max_frame=MAX_FRAME)
        self._peer = peer
        self._pending: dict[int, asyncio.Future[Completion]] = {}
        self._on_chunk: dict[int, Callable[[CompletionChunk], None]] = {}
        self._sent = 0

    async def generate(self, request: GenerateRequest) -> Completion:
        """Send a request and wait for its end. Cancelling it aborts it on the engine."""
        self._sent = number = self._sent + 1
        self.send(request_message(number, request))
        answer: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._pending[number] = answer
        if request.on_chunk is not None:
            self._on_chunk[number] = request.on_chunk
        try:
            return await answer
        except (asyncio.CancelledError, WrongAnswer):
            if self.open:
                self.send(("x", number))
            raise
        finally:
            del self._pending[number]
            self._on_chunk.pop(number, None)

    def send(self, message: Sequence[object]) -> None:
        """Queue a message: ("a", request_ids) to abort, ("r", session) to release, or one of `generate`'s."""
        if not self.open:
            raise self._lost(None)
        super().send(message)

    def on_lost(self, error: Exception | None) -> None:
        self._fail_all(lambda: self._lost(error))

    def on_invalid(self, problem: str) -> None:
        self._fail_all(lambda: WrongAnswer(f"{self._peer}: answer not understood: {problem}"))
        self.abort()

    def on_unsendable(self, message: Sequence[object], error: Exception) -> None:
        answer = self._pending.get(cast(int, message[1])) if message[0] in ("g", "G") else None
        if answer is not None and not answer.done():
            answer.set_exception(EngineError(f"{self._peer} cannot be sent this: {error}", retryable=False))

    def on_message(self, message: Sequence[Any]) -> None:
        answer = self._pending.get(message[1])
        if answer is None or answer.done():  # the request was cancelled
            return
        if message[0] == "p":
            try:
                self._on_chunk[message[1]](parse_chunk_message(message))
            except WrongAnswer as error:
                answer.set_exception(error)
        elif message[0] == "e":
            answer.set_exception(parse_error_message(self._peer, message))
        else:
            answer.set_result(parse_completion_message(message))

    def _fail_all(self, error: Callable[[], Exception]) -> None:
        for answer in self._pending.values():
            if not answer.done():
                answer.set_exception(error())

    def _lost(self, exc: Exception | None) -> EngineError:
        why = f": {exc}" if exc else ""
        return EngineError(f"{self._peer}: connection lost{why}", retryable=True, remedy="is the engine alive?")


def as_object(raw: bytes) -> dict[str, Any]:
    try:
        value = json.loads(raw) if raw else {}
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def parse_metrics(text: str) -> dict[str, float]:
    """Prometheus samples summed over their labels."""
    values: dict[str, float] = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            name, _, number = line.rpartition(" ")
            family = name.partition("{")[0]
            values[family] = values.get(family, 0.0) + float(number)
    return values


def kv_capacity_tokens(text: str) -> int | None:
    """KV capacity in tokens, from the labels of a vLLM gauge: blocks times tokens per block, summed over the
    data-parallel ranks. None if the labels are missing, or still "None"."""
    tokens = 0
    for line in text.splitlines():
        if line.startswith("vllm:cache_config_info{"):
            labels = dict(_LABEL.findall(line))
            blocks, size = labels.get("num_gpu_blocks", ""), labels.get("block_size", "")
            tokens += int(blocks) * int(size) if blocks.isdigit() and size.isdigit() else 0
    return tokens or None
