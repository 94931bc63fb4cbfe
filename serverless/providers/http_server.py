"""An HTTP server for any backend: AWS's clients and plain HTTP callers reach functions that run here.

    POST /functions/{name}                             the list form in and out (`providers.http`)
    POST /2015-03-31/functions/{name}/invocations      Lambda's Invoke: X-Amz-Invocation-Type, X-Amz-Log-Type,
                                                       ?Qualifier=, X-Amz-Function-Error, X-Amz-Log-Result,
                                                       429 with Reason
    GET  /health                                       200

`name` may be an ARN, or include its qualifier (`name:live`). If a plain caller hangs up, the call ends. If a caller of
Lambda's API does, the call continues and is billed, as on Lambda. A plain caller may resend a call under an
Idempotency-Key: it gets the answer of the single execution (`IdempotencyStore`), and has a second to return before
hanging up ends the call. 422 for a key with another body, 409 for a key whose answer is no longer available. Source:
the service model of Lambda's API 2015-03-31 (botocore); IETF draft-ietf-httpapi-idempotency-key-header.
"""

from __future__ import annotations

import asyncio
import base64
import datetime
import functools
import hashlib
import hmac
import json
import urllib.parse
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from serverless.errors import ServerlessError, UnknownFunction
from serverless.providers import faults, signing
from serverless.providers.base import Backend, Reply
from serverless.types import FaultKind, InfraFault, Invocation

HEALTH = "/health"
"""The health path answers GET and HEAD with 200, without a token, while the server is up."""

_PLAIN = "/functions/"

_LAMBDA = "/2015-03-31/functions/"

_LONGEST_S = 900.0
"""Lambda's longest time limit, in seconds: the default for callers that set no deadline."""

_STOP_S = 1.0
"""Seconds that calls in flight may take to end at closing."""


def current_version_only(function: str, qualifier: str) -> str:
    """The default `resolve`: a backend has one version of a function, which any of these qualifiers names."""
    if qualifier not in ("", "$LATEST", "live"):
        raise UnknownFunction(f"Function not found: {function}:{qualifier}")
    return function


class FunctionHttpServer:
    """Owns the listening socket and the calls of Lambda's API in flight. Use `async with`, which sets `url`.

    With a `token` or `secrets` (by key id: `providers.signing`) every call must be authenticated by one of them.
    `resolve` maps a function and a qualifier to the backend's name. `tail` returns the output of a call, for
    `X-Amz-Log-Type: Tail`.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        token: str = "",
        secrets: Mapping[str, str] | None = None,
        resolve: Callable[[str, str], str] = current_version_only,
        tail: Callable[[Invocation], str] = lambda call: "",
        max_bytes: int = 6 * 2**20,
        clock: Callable[[], datetime.datetime] = lambda: datetime.datetime.now(datetime.UTC),
    ) -> None:
        self._backend = backend
        self._address = host, port
        self._token = token
        self._secrets = secrets or {}
        self._resolve = resolve
        self._tail = tail
        self._max_bytes = max_bytes
        self._clock = clock
        self._group: asyncio.TaskGroup | None = None
        self._handler: web.Server | None = None
        self._server: asyncio.Server | None = None
        self._calls = 0
        self._once: IdempotencyStore | None = None

    @property
    def url(self) -> str:
        assert self._server is not None
        host, port = self._server.sockets[0].getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def __aenter__(self) -> FunctionHttpServer:
        self._group = asyncio.TaskGroup()
        await self._group.__aenter__()
        self._once = IdempotencyStore(self._group.create_task)
        self._handler = web.Server(self._handle, access_log=None, handler_cancellation=True)
        self._server = await asyncio.get_running_loop().create_server(self._handler, *self._address, backlog=1024)
        return self

    async def __aexit__(self, *exc: object) -> None:
        group, self._group = self._group, None
        if self._server is not None:
            self._server.close()
        if self._handler is not None:
            await self._handler.shutdown(_STOP_S)
        if self._once is not None:
            self._once.close()
        if group is not None:
            # Abandoned calls end with the server.
            group.create_task(_end(group))
            try:
                await group.__aexit__(None, None, None)
            except* _Ended:
                pass

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        path = request.path
        if request.method in ("GET", "HEAD") and path == HEALTH:
            return web.Response(text="ok")
        if request.method != "POST":
            return _error(404, "ResourceNotFoundException", f"nothing at {request.method} {path}")
        body = await self._body(request)
        if body is None:
            message = f"Request must be smaller than {self._max_bytes} bytes for the InvokeFunction operation"
            return _error(413, "RequestTooLargeException", message)
        refused = self._refuse(request, body)
        if refused is not None:
            return _error(403, "AccessDeniedException", refused)
        try:
            if path.startswith(_PLAIN):
                return await self._plain(request, path.removeprefix(_PLAIN), body)
            if path.startswith(_LAMBDA) and path.endswith("/invocations"):
                return await self._lambda(request, path.removeprefix(_LAMBDA).removesuffix("/invocations"), body)
        except UnknownFunction as error:
            return _error(404, "ResourceNotFoundException", str(error))
        except ServerlessError as error:
            return _error(500, "ServiceException", str(error))
        return _error(404, "ResourceNotFoundException", f"nothing at POST {path}")

    async def _body(self, request: web.BaseRequest) -> bytes | None:
        """The whole body, or None if it is too large."""
        if (request.content_length or 0) > self._max_bytes:
            return None
        body = bytearray()
        async for chunk in request.content.iter_any():
            body += chunk
            if len(body) > self._max_bytes:
                return None
        return bytes(body)

    def _refuse(self, request: web.BaseRequest, body: bytes) -> str | None:
        """The reason to refuse the caller, or None."""
        if not self._token and not self._secrets:
            return None
        header = request.headers.get("Authorization", "")
        if self._token and hmac.compare_digest(header.encode(), f"Bearer {self._token}".encode()):
            return None
        if not self._secrets:
            return "no valid bearer token"
        now = self._clock().timestamp()
        return signing.verify(header, self._secrets, method=request.method, path=request.raw_path, body=body, now=now)

    async def _plain(self, request: web.BaseRequest, name: str, body: bytes) -> web.Response:
        function = self._resolve(*_parse_function_name(name, request.query.get("Qualifier", "")))
        event = _parse_event(body)
        if isinstance(event, str):
            return _error(400, "InvalidRequestContentException", event)
        key = request.headers.get("Idempotency-Key", "")
        if not key:
            return _web_response(_plain(await self._backend.invoke(function, event, deadline_s=_deadline_s(request))))
        return await self._keyed(request, key, function, event, body)

    async def _keyed(
        self, request: web.BaseRequest, key: str, function: str, event: list[dict[str, Any]], body: bytes
    ) -> web.Response:
        """Execute a call once per key. Keys are scoped by caller, so that a guessed key does not reveal another
        caller's answer."""

        async def run() -> IdempotentResponse:
            reply = await self._run(function, event, _deadline_s(request))
            return _refusal(reply) if isinstance(reply, ServerlessError) else _plain(reply)

        assert self._once is not None
        caller = signing.key_of(request.headers.get("Authorization", ""))
        digest = hashlib.sha256(function.encode() + b"\0" + body).digest()
        try:
            answer = await self._once.call((caller, key), digest, run)
        except KeyReused:
            return _error(422, "IdempotentParameterMismatchException", "the Idempotency-Key was another call's")
        except ResponseGone:
            detail = "the call of this Idempotency-Key was begun, and its answer is not to be had: it is not repeated"
            fault = InfraFault(FaultKind.UNAVAILABLE, retryable=False, detail=detail)
            answer = IdempotentResponse(409, faults.encode(fault))
        return _web_response(answer)

    async def _lambda(self, request: web.BaseRequest, name: str, body: bytes) -> web.Response:
        function = self._resolve(*_parse_function_name(urllib.parse.unquote(name), request.query.get("Qualifier", "")))
        event = _parse_event(body)
        if isinstance(event, str):
            return _error(400, "InvalidRequestContentException", f"Could not parse request body into json: {event}")
        how = request.headers.get("X-Amz-Invocation-Type", "RequestResponse")
        if how == "DryRun":
            return web.Response(status=204)
        assert self._group is not None
        call = self._group.create_task(self._run(function, event, _deadline_s(request)))
        if how == "Event":
            self._calls += 1
            return web.Response(status=202, headers={"X-Amzn-RequestId": f"event-{self._calls:012d}"})
        reply = await asyncio.shield(call)
        if isinstance(reply, ServerlessError):
            raise reply
        return self._lambda_answer(reply, tail=request.headers.get("X-Amz-Log-Type") == "Tail")

    async def _run(self, function: str, event: list[dict[str, Any]], deadline_s: float) -> Reply | ServerlessError:
        """Run a call and return its errors, so that they do not end the task group."""
        try:
            return await self._backend.invoke(function, event, deadline_s=deadline_s)
        except ServerlessError as error:
            return error

    def _lambda_answer(self, reply: Reply, *, tail: bool) -> web.Response:
        call, fault = reply.invocation, reply.fault
        headers = {"X-Amz-Executed-Version": "$LATEST", "X-Amzn-RequestId": call.provider_id if call else "-"}
        if call is not None and tail:
            log = (self._tail(call) + _report(call))[-4096:]
            headers["X-Amz-Log-Result"] = base64.b64encode(log.encode()).decode()
        if fault is None:
            return _answer(reply, headers)
        run_s = call.t1 - call.t0 if call else 0.0
        payload = faults.function_error(fault, headers["X-Amzn-RequestId"], run_s)
        if payload is None:
            return _service_error(fault)
        headers["X-Amz-Function-Error"] = "Unhandled"
        return web.Response(body=json.dumps(payload).encode(), headers=headers, content_type="application/json")


class _Ended(Exception):
    pass


async def _end(group: asyncio.TaskGroup) -> None:
    """In a task group: end its other tasks."""
    raise _Ended


def _parse_function_name(name: str, qualifier: str) -> tuple[str, str]:
    """A function and its qualifier, from any of Lambda's forms: name, name:qualifier, account:function:name, ARN."""
    parts = name.split(":")
    if "function" in parts[:-1]:
        parts = parts[parts.index("function") + 1 :]
    return parts[0], qualifier or (parts[1] if len(parts) > 1 else "")


def _parse_event(body: bytes) -> list[dict[str, Any]] | str:
    """The items of a call, or an error text: answers are matched to items by `id`, so each item must have one."""
    try:
        event = json.loads(body)
    except ValueError:
        event = None
    if not isinstance(event, list) or not all(isinstance(one, dict) for one in event):
        return "the body is not a JSON list of objects"
    bad = next((n for n, one in enumerate(event, 1) if not isinstance(one.get("id"), str)), None)
    return event if bad is None else f"item {bad} has no `id` that is a string"


def _deadline_s(request: web.BaseRequest) -> float:
    try:
        return min(_LONGEST_S, max(0.0, float(request.headers["X-Rollart-Deadline-Ms"]) / 1000.0))
    except (KeyError, ValueError):
        return _LONGEST_S


def _bill_headers(call: Invocation | None) -> dict[str, str]:
    if call is None:
        return {}
    return {
        "X-Rollart-Billed-Ms": f"{call.billed_s * 1000.0:.0f}",
        "X-Rollart-Cold-Ms": f"{call.cold_start_s * 1000.0:.3f}",
        "X-Rollart-Memory-Mb": str(call.memory_mb),
        "X-Rollart-Worker": call.worker,
        "X-Rollart-Request-Id": call.provider_id,
    }


def _plain(reply: Reply) -> IdempotentResponse:
    headers, fault = _bill_headers(reply.invocation), reply.fault
    if fault is None:
        return IdempotentResponse(200, json.dumps(reply.body).encode(), headers)
    if fault.retry_after_s is not None:
        headers["Retry-After"] = f"{fault.retry_after_s:g}"
    executed = reply.invocation is not None
    return IdempotentResponse(faults.STATUS.get(fault.kind, 500), faults.encode(fault), headers, executed)


def _refusal(error: ServerlessError) -> IdempotentResponse:
    response = _error(404, "ResourceNotFoundException", str(error))
    if not isinstance(error, UnknownFunction):
        response = _error(500, "ServiceException", str(error))
    assert isinstance(response.body, bytes)
    kind = response.headers["x-amzn-ErrorType"]
    return IdempotentResponse(response.status, response.body, {"x-amzn-ErrorType": kind}, executed=False)


def _web_response(answer: IdempotentResponse) -> web.Response:
    headers = {**answer.headers, "X-Rollart-Idempotent": "1"}
    return web.Response(status=answer.status, body=answer.body, headers=headers, content_type="application/json")


def _answer(reply: Reply, headers: dict[str, str]) -> web.Response:
    return web.Response(body=json.dumps(reply.body).encode(), headers=headers, content_type="application/json")


def _report(call: Invocation) -> str:
    """Lambda's REPORT line. The memory used is not measured here: it is the limit after an out-of-memory fault,
    else 0."""
    used = call.memory_mb if call.status == FaultKind.OUT_OF_MEMORY else 0
    init = f"\tInit Duration: {call.cold_start_s * 1000.0:.2f} ms" if call.cold_start_s else ""
    return (
        f"REPORT RequestId: {call.provider_id}\tDuration: {(call.t1 - call.t0) * 1000.0:.2f} ms\t"
        f"Billed Duration: {call.billed_s * 1000.0:.0f} ms\tMemory Size: {call.memory_mb} MB\t"
        f"Max Memory Used: {used} MB{init}\n"
    )


def _service_error(fault: InfraFault) -> web.Response:
    if fault.kind is FaultKind.THROTTLED and fault.throttle is not None:
        headers = {} if fault.retry_after_s is None else {"Retry-After": f"{fault.retry_after_s:g}"}
        reason = {"Reason": faults.REASONS[fault.throttle], "Type": "User"}
        return _error(429, "TooManyRequestsException", f"Rate Exceeded. {fault.detail}", extra=reason, headers=headers)
    if fault.kind is FaultKind.THROTTLED:
        return _error(429, "TooManyRequestsException", f"Rate Exceeded. {fault.detail}", extra={"Type": "User"})
    if fault.kind is FaultKind.ENVIRONMENT:
        return _error(400, "InvalidRequestContentException", fault.detail)
    return _error(500, "ServiceException", fault.detail, extra={"Type": "Service"})


def _error(
    status: int,
    kind: str,
    message: str,
    *,
    extra: Mapping[str, str] | None = None,
    headers: Mapping[str, str] | None = None,
) -> web.Response:
    """An error in the form of AWS's REST services."""
    body = {**(extra or {}), "message": message, "Message": message}
    given = {"x-amzn-ErrorType": kind, **(headers or {})}
    return web.Response(status=status, body=json.dumps(body).encode(), headers=given, content_type="application/json")


@dataclass(frozen=True, slots=True)
class IdempotentResponse:
    """A complete HTTP answer. `executed` False: the call was refused and not executed, so its key stays free."""

    status: int
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)
    executed: bool = True


class KeyReused(Exception):
    """The key was used for another call."""


class ResponseGone(Exception):
    """The call of this key was abandoned and ended, or its answer is no longer kept. It is not repeated."""


@dataclass(slots=True, eq=False)
class _StoredResponse:
    digest: bytes
    task: asyncio.Task[IdempotentResponse]
    waiting: int = 0
    answer: IdempotentResponse | None = None
    ended_at: float = 0.0
    unattended: asyncio.TimerHandle | None = None


class IdempotencyStore:
    """Owns the keyed calls in flight and the answers of the calls that ended less than `keep_s` ago.

    `call` waits for the single execution of its key, which it starts or joins. A call whose last waiter has left
    continues for `linger_s`, during which a caller may return, and is then cancelled: hanging up still ends a call.
    Bounds: a key is remembered for `keep_s` after its end. Answers take at most `most_bytes`; the oldest are dropped
    first (their keys then raise `ResponseGone`). So no key is executed twice within `keep_s`.
    """

    def __init__(
        self,
        spawn: Callable[[Coroutine[Any, Any, IdempotentResponse]], asyncio.Task[IdempotentResponse]],
        *,
        keep_s: float = 30.0,
        linger_s: float = 1.0,
        most_bytes: int = 32 * 2**20,
    ) -> None:
        self._spawn = spawn
        self._keep_s = keep_s
        self._linger_s = linger_s
        self._most_bytes = most_bytes
        self._kept: dict[Hashable, _StoredResponse] = {}
        self._ended: OrderedDict[Hashable, _StoredResponse] = OrderedDict()
        self._answered: OrderedDict[Hashable, _StoredResponse] = OrderedDict()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    async def call(
        self, key: Hashable, digest: bytes, run: Callable[[], Coroutine[Any, Any, IdempotentResponse]]
    ) -> IdempotentResponse:
        """Execute or join the call of a key. `digest` is that of the whole call. Raises `KeyReused` if the key came
        with another digest before, `ResponseGone` if its answer is no longer available."""
        self._forget()
        kept = self._kept.get(key)
        if kept is None:
            kept = self._kept[key] = _StoredResponse(digest, self._spawn(run()))
            kept.task.add_done_callback(functools.partial(self._done, key, kept))
        if kept.digest != digest:
            raise KeyReused
        if kept.answer is not None:
            return kept.answer
        if kept.task.done():
            raise ResponseGone
        return await self._wait(kept)

    def close(self) -> None:
        """Forget all keys. The owner of the tasks ends them."""
        for kept in self._kept.values():
            if kept.unattended is not None:
                kept.unattended.cancel()
        self._kept.clear()
        self._ended.clear()
        self._answered.clear()

    async def _wait(self, kept: _StoredResponse) -> IdempotentResponse:
        kept.waiting += 1
        if kept.unattended is not None:
            kept.unattended.cancel()
            kept.unattended = None
        try:
            return await asyncio.shield(kept.task)
        except asyncio.CancelledError:
            if kept.task.cancelled() and not _is_cancelling():
                raise ResponseGone from None
            raise
        finally:
            kept.waiting -= 1
            if not kept.waiting and not kept.task.done():
                kept.unattended = asyncio.get_running_loop().call_later(self._linger_s, kept.task.cancel)

    def _done(self, key: Hashable, kept: _StoredResponse, task: asyncio.Task[IdempotentResponse]) -> None:
        if self._kept.get(key) is not kept:
            return
        if kept.unattended is not None:
            kept.unattended.cancel()
        if not task.cancelled() and task.exception() is None:
            answer = task.result()
            if not answer.executed:
                del self._kept[key]
                return
            kept.answer = answer
            self._bytes += len(answer.body)
            self._answered[key] = kept
        kept.ended_at = asyncio.get_running_loop().time()
        self._ended[key] = kept
        while self._bytes > self._most_bytes:
            _, oldest = self._answered.popitem(last=False)
            assert oldest.answer is not None
            self._bytes -= len(oldest.answer.body)
            oldest.answer = None

    def _forget(self) -> None:
        """Drop calls that ended more than `keep_s` ago."""
        before = asyncio.get_running_loop().time() - self._keep_s
        while self._ended:
            key, kept = next(iter(self._ended.items()))
            if kept.ended_at > before:
                return
            del self._ended[key]
            del self._kept[key]
            if self._answered.pop(key, None) is not None and kept.answer is not None:
                self._bytes -= len(kept.answer.body)


def _is_cancelling() -> bool:
    """True if this task itself is being cancelled, rather than its awaited task."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
