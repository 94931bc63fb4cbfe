"""An HTTP server for any backend: AWS's clients and plain HTTP callers reach functions that run here.

    POST /functions/{name}                             the list form in and out (`providers.http`)
    POST /2015-03-31/functions/{name}/invocations      Lambda's Invoke: X-Amz-Invocation-Type, X-Amz-Log-Type,
                                                       ?Qualifier=, X-Amz-Function-Error, X-Amz-Log-Result,
                                                       429 with Reason
    GET  /jobs/{key}, DELETE /jobs/{key}               a call with `Prefer: respond-async` (RFC 7240)
    GET  /health                                       200

A call may have the secrets of the function in the header X-Rollart-Secrets (`serverless.secrets`): it runs in workers
that have these, and no other caller's calls do. They take precedence over those of this machine.

`name` may be an ARN, or include its qualifier (`name:live`). If a plain caller hangs up, the call ends. If a caller of
Lambda's API does, the call continues and is billed, as on Lambda. A plain caller may resend a call under an
Idempotency-Key: it gets the answer of the single execution (`IdempotencyStore`), and has a second to return before
hanging up ends the call. 422 for a key with another body, 409 for a key whose answer is no longer available.

A plain call with `Prefer: respond-async, wait=SECONDS` that takes longer than its wait is answered 202 with the
`Location` of its job. GET of it waits in the same way and returns the answer of the call, or 202 while it runs; DELETE
ends it. A job has a lease: without a request for it in X-Rollart-Lease-S seconds, it is ended, and so is its bill.

Source: the service model of Lambda's API 2015-03-31 (botocore); IETF draft-ietf-httpapi-idempotency-key-header; RFC
7240, section 4.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import hashlib
import hmac
import json
import math
import secrets
import urllib.parse
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from dataclasses import KW_ONLY, dataclass, field
from types import MappingProxyType
from typing import Any

from aiohttp import http_exceptions, web

from serverless import wire
from serverless.errors import ServerlessError, SpecInvalid, UnknownFunction
from serverless.providers import faults
from serverless.providers.base import Backend, Reply, SecretsBackend
from serverless.secrets import HEADER, HEADER_BYTES, given_secrets
from serverless.types import FaultKind, InfraFault, Invocation

HEALTH = "/health"
"""The health path answers GET and HEAD with 200, without a token, while the server is up."""

_PLAIN = "/functions/"

_LAMBDA = "/2015-03-31/functions/"

_ERROR_TYPE = "x-amzn-ErrorType"

_JOBS = "/jobs/"

_LONGEST_S = 900.0
"""Lambda's longest time limit, in seconds: the default for callers that set no deadline."""

_LONGEST_JOB_S = 86_400.0
"""Modal's longest time limit, in seconds."""

LEASE_S = 60.0
"""Seconds for which a job continues, and its answer is kept, without a request for it."""

_WAIT_S = 60.0
"""Longest wait of one request for a job, in seconds: gateways cut idle connections after about a minute."""

_STOP_S = 1.0
"""Seconds that calls in flight may take to end at closing."""


_LAMBDA_BYTES = 6 * 2**20
"""Lambda's limit of a synchronous request."""

_PLAIN_BYTES = 256 * 2**20
"""Limit of a plain request, which is read into memory."""


class FunctionHttpServer:
    """Owns the listening socket and the calls of Lambda's API in flight. Use `async with`, which sets `url`.

    With a `token` every call must bear it. The backend has one version of a function, which the qualifiers `$LATEST`
    and `live` name.
    """

    def __init__(self, backend: Backend, *, host: str = "127.0.0.1", port: int = 0, token: str = "") -> None:
        self._backend = backend
        self._address = host, port
        self._token = token
        self._stack = contextlib.AsyncExitStack()
        self._calls = 0

    async def __aenter__(self) -> FunctionHttpServer:
        longest = len(HEADER) + HEADER_BYTES
        handler = _Server(self._handle, access_log=None, handler_cancellation=True, max_field_size=longest)
        server = await asyncio.get_running_loop().create_server(handler, *self._address, backlog=1024)
        address, port = server.sockets[0].getsockname()[:2]
        self.url = f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"
        self._group = await self._stack.enter_async_context(_abandonable_tasks())
        self._once = IdempotencyStore(self._group.create_task)
        self._stack.callback(self._once.close)
        self._stack.push_async_callback(handler.shutdown, _STOP_S)
        self._stack.callback(server.close)
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._stack.aclose()

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        path = request.path
        if request.method in ("GET", "HEAD") and path == HEALTH:
            return web.Response(text="ok")
        given = request.headers.get("Authorization", "").encode()
        if self._token and not hmac.compare_digest(given, f"Bearer {self._token}".encode()):
            return _error(403, "AccessDeniedException", "no valid bearer token")
        most = _PLAIN_BYTES if path.startswith(_PLAIN) else _LAMBDA_BYTES
        body = await _read(request, most)
        if body is None:
            message = f"Request must be smaller than {most} bytes for the InvokeFunction operation"
            return _error(413, "RequestTooLargeException", message)
        if path.startswith(_JOBS) and request.method in ("GET", "DELETE"):
            return await self._job(request, path.removeprefix(_JOBS))
        if request.method != "POST":
            return _error(404, "ResourceNotFoundException", f"nothing at {request.method} {path}")
        try:
            if path.startswith(_PLAIN):
                return await self._plain(request, path.removeprefix(_PLAIN), body)
            if path.startswith(_LAMBDA) and path.endswith("/invocations"):
                return await self._lambda(request, path.removeprefix(_LAMBDA).removesuffix("/invocations"), body)
        except ServerlessError as error:
            return _refusal(error)
        return _error(404, "ResourceNotFoundException", f"nothing at POST {path}")

    def _function(self, name: str, request: web.BaseRequest) -> str:
        """The backend's name of a function; with secrets of the caller, that of its workers with these. Raises
        `SpecInvalid` for a header of another form, which is not repeated."""
        function = _parse_function_name(name, request)
        header = request.headers.get(HEADER, "")
        if not header or not isinstance(self._backend, SecretsBackend):
            return function
        try:
            return self._backend.given(function, given_secrets(header))
        except ValueError as error:
            raise SpecInvalid(str(error)) from None

    async def _plain(self, request: web.BaseRequest, name: str, body: bytes) -> web.Response:
        function = self._function(name, request)
        event = _parse_event(body)
        if isinstance(event, str):
            return _error(400, "InvalidRequestContentException", event)
        key, wait_s = request.headers.get("Idempotency-Key", ""), _wait_s(request)
        deadline_s = _deadline_s(request, _LONGEST_S if wait_s is None else _LONGEST_JOB_S)
        if not key and wait_s is None:
            return _web_response(_plain(await self._backend.invoke(function, event, deadline_s=deadline_s)))
        key = key or secrets.token_hex(16)

        async def run() -> IdempotentResponse:
            reply = await self._run(function, event, deadline_s)
            if not isinstance(reply, ServerlessError):
                return _plain(reply)
            response = _refusal(reply)
            assert isinstance(response.body, bytes)
            kind = {_ERROR_TYPE: response.headers[_ERROR_TYPE]}
            return IdempotentResponse(response.status, response.body, kind, executed=False)

        digest = hashlib.sha256(function.encode() + b"\0" + body).digest()
        linger_s = None if wait_s is None else LEASE_S
        return await self._answer(key, self._once.call(key, digest, run, linger_s=linger_s), wait_s)

    async def _job(self, request: web.BaseRequest, key: str) -> web.Response:
        if request.method == "DELETE":
            self._once.end(key)
            return web.Response(status=204)
        return await self._answer(key, self._once.join(key), _wait_s(request) or 0.0)

    async def _answer(self, key: str, answer: Awaitable[IdempotentResponse], wait_s: float | None) -> web.Response:
        """The answer of a keyed call: within `wait_s` seconds, or the job's location."""
        try:
            async with asyncio.timeout(wait_s):
                return _web_response(await answer)
        except TimeoutError:
            headers = {"Location": _JOBS + key, "X-Rollart-Lease-S": f"{LEASE_S:g}", "Retry-After": "0"}
            return web.Response(status=202, headers=headers)
        except KeyReused:
            return _error(422, "IdempotentParameterMismatchException", "the Idempotency-Key was another call's")
        except ResponseGone:
            detail = "the call of this Idempotency-Key was begun, and its answer is not to be had: it is not repeated"
            fault = InfraFault(FaultKind.UNAVAILABLE, retryable=False, detail=detail)
            return _web_response(IdempotentResponse(409, faults.encode(fault)))

    async def _lambda(self, request: web.BaseRequest, name: str, body: bytes) -> web.Response:
        function = self._function(urllib.parse.unquote(name), request)
        event = _parse_event(body)
        if isinstance(event, str):
            return _error(400, "InvalidRequestContentException", f"Could not parse request body into json: {event}")
        how = request.headers.get("X-Amz-Invocation-Type", "RequestResponse")
        if how == "DryRun":
            return web.Response(status=204)
        call = self._group.create_task(self._run(function, event, _deadline_s(request)))
        if how == "Event":
            self._calls += 1
            return web.Response(status=202, headers={"X-Amzn-RequestId": f"event-{self._calls:012d}"})
        reply = await asyncio.shield(call)
        if isinstance(reply, ServerlessError):
            raise reply
        bill, fault, payload = reply.invocation, reply.fault, reply.body
        headers = {"X-Amz-Executed-Version": "$LATEST", "X-Amzn-RequestId": bill.provider_id if bill else "-"}
        if bill is not None and request.headers.get("X-Amz-Log-Type") == "Tail":
            headers["X-Amz-Log-Result"] = base64.b64encode(_report(bill)[-4096:].encode()).decode()
        if fault is not None:
            payload = faults.function_error(fault, headers["X-Amzn-RequestId"], bill.t1 - bill.t0 if bill else 0.0)
            if payload is None:
                return _service_error(fault)
            headers["X-Amz-Function-Error"] = "Unhandled"
        return web.Response(body=_strict_json(payload), headers=headers, content_type="application/json")

    async def _run(self, function: str, event: list[dict[str, Any]], deadline_s: float) -> Reply | ServerlessError:
        """Run a call and return its errors, so that they do not end the task group."""
        try:
            return await self._backend.invoke(function, event, deadline_s=deadline_s)
        except ServerlessError as error:
            return error


class _Connection(web.RequestHandler):
    """A connection that answers an unreadable request without its text, which may hold a secret. aiohttp's own handler
    repeats a part of it in the answer and in the server's log."""

    __slots__ = ()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        if isinstance(exc, http_exceptions.LineTooLong):
            longest = f"a header is longer than {self.max_field_size} bytes, or the URL than {self.max_line_size}"
            response = _error(431, "RequestHeaderFieldsTooLargeException", longest)
        elif isinstance(exc, http_exceptions.HttpProcessingError):
            response = _error(400, "InvalidRequestException", "the request is not valid HTTP")
        else:
            return super().handle_error(request, status, exc, message)
        response.force_close()
        return response


class _Server(web.Server):
    def __call__(self) -> _Connection:
        return _Connection(self, loop=self._loop, **self._kwargs)


class _Ended(Exception):
    pass


@contextlib.asynccontextmanager
async def _abandonable_tasks() -> AsyncIterator[asyncio.TaskGroup]:
    """A task group whose tasks end with the block."""

    async def end() -> None:
        raise _Ended

    try:
        async with asyncio.TaskGroup() as group:
            yield group
            group.create_task(end())
    except* _Ended:
        pass


async def _read(request: web.BaseRequest, most: int) -> bytes | None:
    """The whole body, or None if it is larger than `most` bytes."""
    if (request.content_length or 0) > most:
        return None
    body = bytearray()
    async for chunk in request.content.iter_any():
        body += chunk
        if len(body) > most:
            return None
    return bytes(body)


def _parse_function_name(name: str, request: web.BaseRequest) -> str:
    """The function, from any of Lambda's forms: name, name:qualifier, account:function:name, ARN. Raises
    `UnknownFunction` for a version that the backend does not have."""
    parts = name.split(":")
    if "function" in parts[:-1]:
        parts = parts[parts.index("function") + 1 :]
    qualifier = request.query.get("Qualifier", "") or (parts[1] if len(parts) > 1 else "")
    if qualifier not in ("", "$LATEST", "live"):
        raise UnknownFunction(f"Function not found: {parts[0]}:{qualifier}")
    return parts[0]


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


def _deadline_s(request: web.BaseRequest, longest_s: float = _LONGEST_S) -> float:
    try:
        return min(longest_s, max(0.0, float(request.headers["X-Rollart-Deadline-Ms"]) / 1000.0))
    except (KeyError, ValueError):
        return longest_s


def _wait_s(request: web.BaseRequest) -> float | None:
    """The `wait` of a caller that prefers an asynchronous answer; None for any other."""
    preferred = [one.strip() for one in request.headers.get("Prefer", "").split(",")]
    if "respond-async" not in preferred:
        return None
    wait = next((one.removeprefix("wait=") for one in preferred if one.startswith("wait=")), "0")
    return min(_WAIT_S, float(wait)) if wait.isdigit() else 0.0


def _plain(reply: Reply) -> IdempotentResponse:
    call, fault = reply.invocation, reply.fault
    headers: dict[str, str] = {}
    if call is not None:
        headers = {
            "X-Rollart-Billed-Ms": f"{call.billed_s * 1000.0:.0f}",
            "X-Rollart-Cold-Ms": f"{call.cold_start_s * 1000.0:.3f}",
            "X-Rollart-Memory-Mb": str(call.memory_mb),
            "X-Rollart-Worker": call.worker,
            "X-Rollart-Request-Id": call.provider_id,
        }
    if fault is None:
        return IdempotentResponse(200, _strict_json(reply.body), headers)
    if fault.retry_after_s is not None:
        headers["Retry-After"] = f"{fault.retry_after_s:g}"
    return IdempotentResponse(faults.STATUS.get(fault.kind, 500), faults.encode(fault), headers, call is not None)


def _strict_json(body: object) -> bytes:
    """The answer of a call as JSON, which has no NaN and no infinities. A score or metric that is one makes its item's
    answer an error, as it is for our own clients (`wire.outcomes`); any other becomes null."""
    try:
        return json.dumps(body, allow_nan=False).encode()
    except ValueError:
        answers = [_finite_answer(one) for one in body] if isinstance(body, list) else body
        return json.dumps(_without_nan(answers), allow_nan=False).encode()


def _finite_answer(answer: Any) -> Any:
    if not isinstance(answer, dict) or not isinstance(answer.get("id"), str):
        return answer
    [outcome] = wire.outcomes([answer], [{"id": answer["id"]}], deterministic=True)
    if not isinstance(outcome, InfraFault) or "error" in answer:
        return answer
    error = {"type": "ValueError", "message": outcome.detail, "kind": str(outcome.kind)}
    return {"id": answer["id"], "error": error, **{k: v for k, v in answer.items() if k == "usage"}}


def _without_nan(value: Any) -> Any:
    """A JSON-able value with null in place of NaN and infinities."""
    if isinstance(value, dict):
        return {key: _without_nan(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _refusal(error: ServerlessError) -> web.Response:
    if isinstance(error, UnknownFunction):
        return _error(404, "ResourceNotFoundException", str(error))
    if isinstance(error, SpecInvalid):
        return _error(400, "InvalidParameterValueException", str(error))
    return _error(500, "ServiceException", str(error))


def _web_response(answer: IdempotentResponse) -> web.Response:
    headers = {**answer.headers, "X-Rollart-Idempotent": "1"}
    return web.Response(status=answer.status, body=answer.body, headers=headers, content_type="application/json")


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
    if fault.kind is FaultKind.THROTTLED:
        reason = {} if fault.throttle is None else {"Reason": faults.REASONS[fault.throttle]}
        wait = {} if fault.retry_after_s is None else {"Retry-After": f"{fault.retry_after_s:g}"}
        return _error(
            429, "TooManyRequestsException", f"Rate Exceeded. {fault.detail}", {**reason, "Type": "User"}, wait
        )
    if fault.kind is FaultKind.ENVIRONMENT:
        return _error(400, "InvalidRequestContentException", fault.detail)
    return _error(500, "ServiceException", fault.detail, {"Type": "Service"})


def _error(
    status: int,
    kind: str,
    message: str,
    extra: Mapping[str, str] = MappingProxyType({}),
    headers: Mapping[str, str] = MappingProxyType({}),
) -> web.Response:
    """An error in the form of AWS's REST services."""
    body = json.dumps({**extra, "message": message, "Message": message}).encode()
    return web.Response(
        status=status, body=body, headers={_ERROR_TYPE: kind, **headers}, content_type="application/json"
    )


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
    linger_s: float
    recorded: bool = False
    """The task has ended, and its answer was stored if there is one."""
    waiting: int = 0
    unattended: asyncio.TimerHandle | None = None
    """Cancels the task, which has no waiter."""

    def attend(self) -> None:
        if self.unattended is not None:
            self.unattended.cancel()


@dataclass(slots=True, eq=False)
class IdempotencyStore:
    """Owns the keyed calls in flight and the answers of the calls that ended less than `keep_s` ago.

    `call` waits for the single execution of its key, which it starts or joins. A call whose last waiter has left
    continues for `linger_s`, during which a caller may return, and is then cancelled: hanging up still ends a call.
    Bounds: a key is remembered for `keep_s` after its end. Answers take at most `most_bytes`; the oldest are dropped
    first (their keys then raise `ResponseGone`). So no key is executed twice within `keep_s`. A call with a `linger_s`
    of its own (a job) lingers so long in place of the store's, and its answer is kept at least as long.
    """

    spawn: Callable[[Coroutine[Any, Any, IdempotentResponse]], asyncio.Task[IdempotentResponse]]
    _: KW_ONLY
    keep_s: float = 30.0
    linger_s: float = 1.0
    most_bytes: int = 32 * 2**20
    _kept: dict[str, _StoredResponse] = field(default_factory=dict, init=False)
    _answered: dict[str, IdempotentResponse] = field(default_factory=dict, init=False)
    """Answers, the oldest first."""
    _bytes: int = field(default=0, init=False)

    def __len__(self) -> int:
        return len(self._kept)

    async def call(
        self,
        key: str,
        digest: bytes,
        run: Callable[[], Coroutine[Any, Any, IdempotentResponse]],
        *,
        linger_s: float | None = None,
    ) -> IdempotentResponse:
        """Execute or join the call of a key. `digest` is that of the whole call. Raises `KeyReused` if the key came
        with another digest before, `ResponseGone` if its answer is no longer available."""
        kept = self._kept.get(key)
        if kept is None:
            linger_s = self.linger_s if linger_s is None else linger_s
            kept = self._kept[key] = _StoredResponse(digest, self.spawn(run()), linger_s)
            kept.task.add_done_callback(functools.partial(self._done, key, kept))
        if kept.digest != digest:
            raise KeyReused
        return await self.join(key)

    async def join(self, key: str) -> IdempotentResponse:
        """The answer of a call that was begun. Raises `ResponseGone` if it is not available."""
        kept = self._kept.get(key)
        if kept is None:
            raise ResponseGone
        if key in self._answered:
            return self._answered[key]
        if kept.recorded:
            raise ResponseGone
        kept.waiting += 1
        kept.attend()
        try:
            return await asyncio.shield(kept.task)
        except asyncio.CancelledError:
            waiter = asyncio.current_task()
            if kept.task.cancelled() and waiter is not None and not waiter.cancelling():
                raise ResponseGone from None
            raise
        finally:
            kept.waiting -= 1
            if not kept.waiting and not kept.task.done():
                kept.unattended = asyncio.get_running_loop().call_later(kept.linger_s, kept.task.cancel)

    def end(self, key: str) -> None:
        """End the call of a key, if it runs."""
        if (kept := self._kept.get(key)) is not None:
            kept.task.cancel()

    def close(self) -> None:
        """Forget all keys. The owner of the tasks ends them."""
        for kept in self._kept.values():
            kept.attend()
        self._kept.clear()

    def _done(self, key: str, kept: _StoredResponse, task: asyncio.Task[IdempotentResponse]) -> None:
        if self._kept.get(key) is not kept:
            return
        kept.attend()
        kept.recorded = True
        if not task.cancelled() and task.exception() is None:
            answer = task.result()
            if not answer.executed:
                del self._kept[key]
                return
            self._bytes += len(answer.body)
            self._answered[key] = answer
        asyncio.get_running_loop().call_later(max(self.keep_s, kept.linger_s), self._forget, key)
        while self._bytes > self.most_bytes:
            self._drop(next(iter(self._answered)))

    def _forget(self, key: str) -> None:
        self._kept.pop(key, None)
        if key in self._answered:
            self._drop(key)

    def _drop(self, key: str) -> None:
        self._bytes -= len(self._answered.pop(key).body)
