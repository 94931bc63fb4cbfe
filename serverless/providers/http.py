"""Functions behind any URL: one endpoint each, called with the list form as JSON.

    POST <url>          [{id, messages, reference_answer, metadata}]
    200                 [{id, aggregate_reward_score, metrics_list}]

Request headers  Authorization (bearer, or signed: `providers.signing`), X-Rollart-Deadline-Ms: the time left for the
                 call, Idempotency-Key: equal for a resent call
Answer headers   X-Rollart-Billed-Ms, X-Rollart-Cold-Ms, X-Rollart-Memory-Mb, X-Rollart-Worker, X-Rollart-Request-Id, or
                 Lambda's X-Amz-Log-Result with a REPORT line; without either the bill is the wall time.
                 X-Rollart-Idempotent: 1: this host executes calls of one Idempotency-Key once
Errors           `providers.faults`; 429 with Retry-After throttles, 408 and 5xx are retryable, 4xx are not

If the connection is lost after a call was sent, the call may have been executed. A host that honours the key gets the
call again under the same key, and returns the first execution's answer. No other host gets it again, and the fault has
a bill without a call id, which marks it for callers (`pipeline.retrying.is_outcome_unknown`). A 502 or 504 without a
declared fault is treated the same: a gateway reports so a call that it lost, or that exceeded its time limit and may
still run.

Source of the key: IETF draft-ietf-httpapi-idempotency-key-header.
"""

from __future__ import annotations

import asyncio
import base64
import datetime
import json
import secrets
import urllib.parse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from serverless.deploy.package import Package
from serverless.errors import BackendFailed, UnknownFunction
from serverless.meter import MeterSink, NullMeter, billed_seconds
from serverless.providers import faults, signing
from serverless.providers.base import Reply
from serverless.providers.faults import LambdaReport, function_fault, parse_report
from serverless.spec import FunctionSpec
from serverless.types import Cause, FaultKind, InfraFault, Invocation

_NOT_SENT_ERRORS = (aiohttp.ClientConnectorError, aiohttp.ServerTimeoutError)
"""Errors before a connection was made: nothing has been executed."""

_CONNECTIONS = 256

_RESEND_S = (0.0, 0.1, 0.4)
"""Pauses in seconds before a lost call is resent. A connection that the host closed for its age needs none, a network
failure a moment. The host keeps a call for its returning caller about as long (`providers.http_server`)."""


@dataclass(frozen=True, slots=True)
class Bearer:
    token: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class Signed:
    """An HMAC under a shared secret (`providers.signing`)."""

    key: str
    secret: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The endpoint of a function. `idempotent`: the host executes calls of one Idempotency-Key once; None: as its
    answers declare."""

    url: str
    auth: Bearer | Signed | None = None
    idempotent: bool | None = None

    def __post_init__(self) -> None:
        parts = urllib.parse.urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"endpoint {self.url!r} is not an http or https URL")


class HttpBackend:
    """Implements `Backend` over endpoints by function name.

    Any number of tasks may call `invoke`. Each waits for a connection (at most `_CONNECTIONS`) and its answer, and is
    unblocked by these or by its deadline. A call is executed once: no redirect is followed, and a lost connection is
    retried only if the host recognises the call by its key. Cancelling a call closes its connection, which ends the
    call on hosts that notice. `deploy` installs nothing at the host; it only sets the limits on this side.
    """

    provider = "http"

    def __init__(self, endpoints: Mapping[str, Endpoint], *, meter: MeterSink | None = None) -> None:
        self._endpoints = endpoints
        self._meter = meter or NullMeter()
        self._packages: dict[str, Package] = {}
        self._session: aiohttp.ClientSession | None = None
        self._honour = {name for name, one in endpoints.items() if one.idempotent}
        self._run = secrets.token_hex(12)
        self._calls = 0

    async def deploy(self, package: Package) -> None:
        name = package.spec.name
        if name not in self._endpoints:
            known = ", ".join(self._endpoints) or "none"
            raise UnknownFunction(f"function {name} has no URL", remedy=f"give it one; with a URL: {known}")
        self._packages[name] = package

    async def invoke(
        self, function: str, event: Sequence[dict[str, Any]], *, deadline_s: float, cause: Cause = Cause.CALL
    ) -> Reply:
        package = self._packages.get(function)
        if package is None:
            known = ", ".join(self._packages) or "none"
            raise UnknownFunction(f"no function {function!r} is deployed", remedy=f"deployed: {known}")
        if self._session is None:
            raise BackendFailed("the http backend is not open", remedy="use `async with`")
        try:
            body = json.dumps(event).encode()
        except (TypeError, ValueError) as error:
            detail = f"the event has no wire form: {error}"
            return Reply(fault=InfraFault(FaultKind.ENVIRONMENT, retryable=False, detail=detail))
        now = asyncio.get_running_loop().time
        t0 = now()
        answer: _HttpReply | None = None
        bill: Invocation | None = None
        self._calls += 1
        try:
            key = f"{self._run}-{self._calls}"
            answer = await self._call(self._session, package.spec, body, key, t0 + deadline_s)
        finally:
            if answer is None or answer.reached:
                bill = _bill(package.spec, answer, t0, now(), len(event), cause)
                self._meter.invocation(bill)
        return Reply(answer.body, answer.fault, bill)

    async def __aenter__(self) -> HttpBackend:
        connector = aiohttp.TCPConnector(limit=_CONNECTIONS)
        timeout = aiohttp.ClientTimeout(total=None)
        self._session = aiohttp.ClientSession(connector=connector, timeout=timeout, cookie_jar=aiohttp.DummyCookieJar())
        return self

    async def __aexit__(self, *exc: object) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _call(
        self, session: aiohttp.ClientSession, spec: FunctionSpec, body: bytes, key: str, expires: float
    ) -> _HttpReply:
        """Send a call, and again if its connection is lost and the host recognises the key; all within its time
        limit."""
        now = asyncio.get_running_loop().time
        began, deadline_s = now(), expires - now()
        limit = min(deadline_s, spec.init_timeout_s + spec.timeout_s)
        lost: _HttpReply | None = None
        try:
            async with asyncio.timeout(limit):
                for pause in (None, *_RESEND_S):
                    if pause is not None:
                        await asyncio.sleep(pause)
                    answer = await self._send(session, spec, body, key, expires - now())
                    if not answer.lost and (answer.reached or lost is None):
                        return answer
                    # Lost, or (after that) not even accepted: the result of the first attempt is as unknown as before.
                    lost = lost or answer
                    if spec.name not in self._honour:
                        break
        except TimeoutError:
            if lost is None:
                # It may still run at the host: a second call would be a second execution.
                kind = FaultKind.DEADLINE if limit == deadline_s else FaultKind.TIMEOUT
                detail = f"no answer in {now() - began:.3f} s"
                return _HttpReply(fault=InfraFault(kind, retryable=False, detail=detail))
        assert lost is not None
        return lost

    async def _send(
        self, session: aiohttp.ClientSession, spec: FunctionSpec, body: bytes, key: str, left_s: float
    ) -> _HttpReply:
        endpoint = self._endpoints[spec.name]
        headers = {
            "Content-Type": "application/json",
            "X-Rollart-Deadline-Ms": str(int(left_s * 1000.0)),
            "Idempotency-Key": key,
        }
        if isinstance(endpoint.auth, Bearer):
            headers["Authorization"] = f"Bearer {endpoint.auth.token}"
        elif isinstance(endpoint.auth, Signed):
            auth, parts = endpoint.auth, urllib.parse.urlsplit(endpoint.url)
            path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
            now = datetime.datetime.now(datetime.UTC).timestamp()
            headers["Authorization"] = signing.sign(auth.key, auth.secret, method="POST", path=path, body=body, now=now)
        try:
            async with session.post(endpoint.url, data=body, headers=headers, allow_redirects=False) as response:
                if endpoint.idempotent is None and response.headers.get("X-Rollart-Idempotent") == "1":
                    self._honour.add(spec.name)
                return _read(spec, response.status, response.headers, await response.read())
        except _NOT_SENT_ERRORS as error:
            fault = InfraFault(FaultKind.UNAVAILABLE, retryable=True, detail=f"no connection: {error}")
            return _HttpReply(fault=fault, reached=False)
        except TimeoutError:
            raise  # ours
        except (aiohttp.ClientError, OSError) as error:
            detail = f"the connection was lost, and it may have been executed: {type(error).__name__}: {error}"
            fault = InfraFault(FaultKind.UNAVAILABLE, retryable=False, detail=detail)
            return _HttpReply(fault=fault, lost=True)


@dataclass(frozen=True, slots=True)
class _HttpReply:
    """An answer. `reached` False: no worker received the call, so there is no bill. `lost`: a worker may have received
    it."""

    body: object = None
    fault: InfraFault | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    used: LambdaReport | None = None
    reached: bool = True
    lost: bool = False


def _read(spec: FunctionSpec, status: int, headers: Mapping[str, str], body: bytes) -> _HttpReply:
    used = parse_report(headers["X-Amz-Log-Result"]) if "X-Amz-Log-Result" in headers else None
    status, body = _unwrapped(status, body)
    if status != 200:
        declared = faults.decode(body)
        billed = used is not None or "X-Rollart-Billed-Ms" in headers
        lost = declared is None and not billed and status in faults.AMBIGUOUS
        fault = declared or faults.fault_of_status(status, body, headers, datetime.datetime.now(datetime.UTC))
        return _HttpReply(None, fault, headers, used, reached=billed or lost, lost=lost)
    if "X-Amz-Function-Error" in headers:
        return _HttpReply(None, function_fault(body, used), headers, used)
    answer, invalid = faults.decode_answer(body, retryable=not spec.deterministic)
    return _HttpReply(answer, invalid, headers, used)


def _unwrapped(status: int, body: bytes) -> tuple[int, bytes]:
    """Unwrap the `{"statusCode", "body"}` answer of an API Gateway handler, if no gateway did so."""
    try:
        wrapped = json.loads(body) if status == 200 and body.lstrip().startswith(b"{") else None
        match wrapped:
            case {"statusCode": int() | str() as inner, "body": value, **rest}:
                text = value if isinstance(value, str) else json.dumps(value)
                encoded = text is value and rest.get("isBase64Encoded") is True
                return int(inner), base64.b64decode(text) if encoded else text.encode()
    except ValueError:
        pass
    return status, body


def _bill(spec: FunctionSpec, answer: _HttpReply | None, t0: float, t1: float, items: int, cause: Cause) -> Invocation:
    """The bill of a call; without an answer, of a cancelled one."""
    status = "cancelled" if answer is None else str(answer.fault.kind) if answer.fault else "ok"
    answer = answer or _HttpReply()
    headers, used = answer.headers, answer.used
    billed_ms = _number(headers, "X-Rollart-Billed-Ms", 1000.0 * (used.billed_s if used else billed_seconds(t1 - t0)))
    cold_ms = _number(headers, "X-Rollart-Cold-Ms", 1000.0 * used.init_s if used else 0.0)
    memory_mb = _number(headers, "X-Rollart-Memory-Mb", used.memory_mb if used else spec.memory_mb)
    # A gateway's own id of a call that it lost does not show that a worker answered.
    named = {} if answer.lost else headers
    request = used.request_id if used else named.get("X-Amzn-RequestId", "")
    return Invocation(
        function=spec.name,
        provider=HttpBackend.provider,
        worker=headers.get("X-Rollart-Worker", f"{HttpBackend.provider}/{spec.name}"),
        t0=t0,
        t1=t1,
        cold_start_s=cold_ms / 1000.0,
        billed_s=billed_ms / 1000.0,
        memory_mb=int(memory_mb),
        items=items,
        status=status,
        cause=cause,
        provider_id=named.get("X-Rollart-Request-Id", request),
    )


def _number(headers: Mapping[str, str], name: str, otherwise: float) -> float:
    """A numeric header, or the default."""
    try:
        return max(0.0, float(headers[name]))
    except (KeyError, ValueError):
        return otherwise
