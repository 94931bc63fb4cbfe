"""Functions behind any URL: one endpoint each, called with the list form as JSON.

    POST <url>          [{id, messages, reference_answer, metadata}]
    200                 [{id, aggregate_reward_score, metrics_list}]

Request headers  Authorization (bearer, or signed: `providers.signing`), X-Rollart-Deadline-Ms: the time left for the
                 call, Idempotency-Key: equal for a resent call, X-Rollart-Secrets (`serverless.secrets`): the
                 function's secrets, for an endpoint that is to have them
Answer headers   X-Rollart-Billed-Ms, X-Rollart-Cold-Ms, X-Rollart-Memory-Mb, X-Rollart-Worker, X-Rollart-Request-Id, or
                 Lambda's X-Amz-Log-Result with a REPORT line; without either the bill is the wall time.
                 X-Rollart-Idempotent: 1: this host executes calls of one Idempotency-Key once
Jobs             a function with a time limit above 60 s is called with `Prefer: respond-async, wait=30` (RFC
                 7240). A host may answer 202 with the `Location` of the job on the same host, which is then asked
                 for the answer, and ended (DELETE) at the deadline. `providers.http_server` makes such jobs
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
import urllib.parse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from secrets import token_hex
from typing import Any

import aiohttp

from serverless.deploy.package import Package
from serverless.errors import BackendFailed, UnknownFunction
from serverless.meter import MeterSink, NullMeter, billed_seconds
from serverless.providers import faults, signing
from serverless.providers.base import Reply
from serverless.providers.faults import LambdaReport, function_fault, parse_report
from serverless.providers.jobs import HELD_S, poll_job
from serverless.retries import HTTP_LOST
from serverless.secrets import HEADER, EchoMask, Secrets, private_url, secrets_header
from serverless.spec import FunctionSpec
from serverless.types import Cause, FaultKind, InfraFault, Invocation

_NOT_SENT_ERRORS = (aiohttp.ClientConnectorError, aiohttp.ServerTimeoutError)
"""Errors before a connection was made: nothing has been executed."""

_CONNECTIONS = 256

_PREFER = "respond-async, wait=30"

_ASK_AGAIN_S = 0.5
"""Least seconds between two requests for a job."""


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
    answers declare. `send_secrets`: the function's secrets go along with each call, over https or on this machine."""

    url: str
    auth: Bearer | Signed | None = None
    idempotent: bool | None = None
    send_secrets: bool = False

    def __post_init__(self) -> None:
        parts = urllib.parse.urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"endpoint {self.url!r} is not an http or https URL")
        if self.send_secrets and not private_url(self.url):
            raise ValueError(f"endpoint {self.url!r} gets secrets, and is neither https nor of this machine")


class _ConnectionLost(Exception):
    """A call that the host recognises was lost, or not accepted after it had been lost."""


class HttpBackend:
    """Implements `Backend` over endpoints by function name.

    Any number of tasks may call `invoke`. Each waits for a connection (at most `_CONNECTIONS`) and its answer, and is
    unblocked by these or by its deadline. A call is executed once: no redirect is followed, and a lost connection is
    retried only if the host recognises the call by its key. Cancelling a call closes its connection, which ends the
    call on hosts that notice. `deploy` installs nothing at the host; it only sets the limits on this side.
    """

    provider = "http"

    def __init__(
        self, endpoints: Mapping[str, Endpoint], *, meter: MeterSink | None = None, secrets: Secrets | None = None
    ) -> None:
        self._endpoints = endpoints
        self._secrets = secrets or Secrets()
        self._meter = meter or NullMeter()
        self._packages: dict[str, Package] = {}
        self._session: aiohttp.ClientSession | None = None
        self._honour = {name for name, one in endpoints.items() if one.idempotent}
        self._run = token_hex(12)
        self._calls = 0

    async def deploy(self, package: Package) -> None:
        """See `Backend`. Raises `SecretMissing` for a secret to send that has no value, and `BackendFailed` if they are
        too long for a header."""
        name = package.spec.name
        if name not in self._endpoints:
            known = ", ".join(self._endpoints) or "none"
            raise UnknownFunction(f"function {name} has no URL", remedy=f"give it one; with a URL: {known}")
        if self._endpoints[name].send_secrets:
            self._secrets.require(package.spec)
            secrets_header(name, self._secrets.values(package.spec))
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
        try:
            values, header = self._values(package.spec)
        except BackendFailed as error:  # values may have changed since the deployment
            return Reply(fault=InfraFault(FaultKind.ENVIRONMENT, retryable=False, detail=str(error)))
        now = asyncio.get_running_loop().time
        t0 = now()
        answer: _HttpReply | None = None
        bill: Invocation | None = None
        self._calls += 1
        try:
            headers = {"Idempotency-Key": f"{self._run}-{self._calls}", **header}
            answer = await self._call(self._session, package.spec, body, headers, t0 + deadline_s)
        finally:
            if answer is None or answer.reached:
                bill = _bill(package.spec, answer, t0, now(), len(event), cause)
                self._meter.invocation(bill)
        fault = answer.fault
        if fault is not None and values:
            fault = replace(fault, detail=EchoMask(values).text(fault.detail))
        return Reply(answer.body, fault, bill)

    def _values(self, spec: FunctionSpec) -> tuple[dict[str, str], dict[str, str]]:
        """The values of a function's secrets here, and the header with those that its endpoint gets. Raises
        `BackendFailed` if they cannot be read or are too long."""
        send = self._endpoints[spec.name].send_secrets
        try:
            values = self._secrets.values(spec)
        except BackendFailed:
            if send:
                raise
            return {}, {}
        return values, {HEADER: secrets_header(spec.name, values)} if send and spec.secrets else {}

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
        self,
        session: aiohttp.ClientSession,
        spec: FunctionSpec,
        body: bytes,
        headers: Mapping[str, str],
        expires: float,
    ) -> _HttpReply:
        """Send a call, and again if its connection is lost and the host recognises the key; all within its time
        limit."""
        now = asyncio.get_running_loop().time
        began, deadline_s = now(), expires - now()
        limit = min(deadline_s, spec.init_timeout_s + spec.timeout_s)
        lost: _HttpReply | None = None

        async def send() -> _HttpReply:
            nonlocal lost
            answer = await self._send(session, spec, body, headers, expires - now())
            if answer.job:
                return await self._job_answer(session, spec, answer.job)
            if not answer.lost and (answer.reached or lost is None):
                return answer
            # Lost, or (after that) not even accepted: the result of the first attempt is as unknown as before.
            lost = lost or answer
            if spec.name not in self._honour:
                return lost
            raise _ConnectionLost

        try:
            async with asyncio.timeout(limit):
                return await HTTP_LOST.run(send, _ConnectionLost)
        except TimeoutError:
            if lost is None:
                # It may still run at the host: a second call would be a second execution.
                kind = FaultKind.DEADLINE if limit == deadline_s else FaultKind.TIMEOUT
                detail = f"no answer in {now() - began:.3f} s"
                return _HttpReply(fault=InfraFault(kind, retryable=False, detail=detail))
        except _ConnectionLost:
            pass
        assert lost is not None
        return lost

    async def _send(
        self,
        session: aiohttp.ClientSession,
        spec: FunctionSpec,
        body: bytes,
        headers: Mapping[str, str],
        left_s: float,
    ) -> _HttpReply:
        endpoint = self._endpoints[spec.name]
        headers = {
            **headers,
            "Content-Type": "application/json",
            "X-Rollart-Deadline-Ms": str(int(left_s * 1000.0)),
            **_authorization(endpoint, "POST", endpoint.url, body),
        }
        if spec.timeout_s > HELD_S:
            headers["Prefer"] = _PREFER
        try:
            async with session.post(endpoint.url, data=body, headers=headers, allow_redirects=False) as response:
                if endpoint.idempotent is None and response.headers.get("X-Rollart-Idempotent") == "1":
                    self._honour.add(spec.name)
                if response.status == 202 and (job := _job_url(endpoint.url, response.headers.get("Location", ""))):
                    return _HttpReply(job=job)
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

    async def _job_answer(self, session: aiohttp.ClientSession, spec: FunctionSpec, url: str) -> _HttpReply:
        """The answer of a job, which is ended at the deadline and at a cancellation."""
        lost = (aiohttp.ClientError, OSError, _HostBusy)

        async def end() -> None:
            headers = _authorization(self._endpoints[spec.name], "DELETE", url, b"")
            await session.delete(url, headers=headers)

        try:
            return await poll_job(lambda: self._ask(session, spec, url), end, lost=lost, pause_s=_ASK_AGAIN_S)
        except lost as error:
            problem = f"{type(error).__name__}: {error}"
            detail = f"the host of the job does not answer, and it may have been executed: {problem}"[:500]
            return _HttpReply(fault=InfraFault(FaultKind.UNAVAILABLE, retryable=False, detail=detail), lost=True)

    async def _ask(self, session: aiohttp.ClientSession, spec: FunctionSpec, url: str) -> _HttpReply | None:
        """The answer of a job, None while it runs. Raises `_HostBusy` if a gateway answers in place of its host."""
        headers = {"Prefer": _PREFER, **_authorization(self._endpoints[spec.name], "GET", url, b"")}
        began = asyncio.get_running_loop().time()
        async with session.get(url, headers=headers, allow_redirects=False) as response:
            body = await response.read()
            if response.status == 202:
                asked_s = asyncio.get_running_loop().time() - began
                wait_s = faults.retry_after_s(
                    response.headers.get("Retry-After", ""), datetime.datetime.now(datetime.UTC)
                )
                await asyncio.sleep(max(wait_s or 0.0, _ASK_AGAIN_S - asked_s))
                return None
            if response.status in (429, 502, 503, 504) and faults.decode(body) is None:
                raise _HostBusy(f"HTTP {response.status}")
            return _read(spec, response.status, response.headers, body)


class _HostBusy(Exception):
    """A request for a job was not answered by the host of the job."""


def _authorization(endpoint: Endpoint, method: str, url: str, body: bytes) -> dict[str, str]:
    if isinstance(endpoint.auth, Bearer):
        return {"Authorization": f"Bearer {endpoint.auth.token}"}
    if isinstance(endpoint.auth, Signed):
        auth, parts = endpoint.auth, urllib.parse.urlsplit(url)
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        now = datetime.datetime.now(datetime.UTC).timestamp()
        return {"Authorization": signing.sign(auth.key, auth.secret, method=method, path=path, body=body, now=now)}
    return {}


def _job_url(endpoint: str, location: str) -> str:
    """The URL of a job. '' if there is none, or if it is on another host: that would receive the token."""
    url = urllib.parse.urljoin(endpoint, location) if location else ""
    ours, theirs = urllib.parse.urlsplit(endpoint), urllib.parse.urlsplit(url)
    return url if (theirs.scheme, theirs.netloc) == (ours.scheme, ours.netloc) else ""


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
    job: str = ""
    """The URL of the job that the host made of the call."""


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
