"""Functions on AWS Lambda: deployed by `AwsDeployer`, called through the run's own alias over aiobotocore.

Retries are the caller's: with boto's defaults, one call of a function slower than the read timeout is executed and
billed five times. Lambda cannot cancel a call: an abandoned call runs to its end, and its bill is awaited.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from secrets import token_hex
from typing import Any

from serverless.deploy.aws import LEASE_S, PROVIDER, AwsDeployer, PinnedVersion, lambda_bill
from serverless.deploy.aws_function import ALIAS, PAYLOAD_BYTES, AwsSettings
from serverless.deploy.aws_session import error_code, library, translate_error, translate_errors
from serverless.deploy.package import Package
from serverless.errors import BackendFailed, CredentialsMissing, ServerlessError, UnknownFunction
from serverless.meter import MeterSink, NullMeter
from serverless.providers.base import Reply, WorkerLoad
from serverless.providers.faults import LambdaReport, decode_answer, function_fault, parse_report, service_fault
from serverless.providers.payloads import MAX_BYTES, PayloadFailed, PayloadStore
from serverless.secrets import Secrets
from serverless.types import Cause, FaultKind, InfraFault, Throttle

_GRACE_S = 10.0
"""Allowance beyond the function's own time limit: the start of an environment, and the network."""

_LONGEST_S = 900.0 + _GRACE_S


@dataclass(slots=True, eq=False)
class _ConcurrencyGate:
    """A function and its pinned version. At most `slots` calls run at Lambda, in order of arrival; `waiting` counts the
    calls before them. `package` is None for a function that was not deployed from here."""

    package: Package | None
    pin: PinnedVersion
    slots: asyncio.Semaphore
    queue: int
    timeout_s: float
    memory_mb: int
    repair: asyncio.Lock = field(default_factory=asyncio.Lock)
    waiting: int = 0
    running: int = 0


@dataclass(slots=True, eq=False)
class _InFlightCall:
    """A call in flight. `left` is the reason why its caller left, '' while the caller waits."""

    gate: _ConcurrencyGate
    payload: bytes
    items: int
    cause: Cause
    sent: bool = False
    left: str = ""


class AwsLambdaBackend:
    """Implements `Backend` and `ProvisionedBackend`. Owns `deployer`, a client with connections, and a task per call in
    flight.

    `invoke` may be called by any number of tasks. Each is unblocked by Lambda's answer, its deadline, the function's
    time limit plus an allowance, or its cancellation. Invariants: one request per `invoke`, sent once; at most
    `concurrency` calls of a function at Lambda, abandoned ones included, and `queue` waiting; only the version that
    `deploy` named answers (an answer of another version is a fault, and the alias is reset); one meter record per
    request that Lambda accepted, with the values of its REPORT line, also for an abandoned call (with status
    `cancelled` or `deadline`). Without a REPORT line (a broken connection, a backend closed before the answer) the
    record holds the seconds until then, as an estimate, and no `provider_id`.
    """

    provider = PROVIDER
    calls_included = False
    """Provisioned concurrency has its own price, in addition to that of the calls."""

    def __init__(
        self,
        settings: AwsSettings | None = None,
        *,
        meter: MeterSink | None = None,
        run: str = "",
        secrets: Secrets | None = None,
    ) -> None:
        """`run` is the caller's id, unique in the account; '' generates one. See `AwsDeployer.pin`."""
        self.settings = settings or AwsSettings()
        self._meter = meter or NullMeter()
        self.deployer = AwsDeployer(self.settings, meter=self._meter, secrets=secrets)
        self._gates: dict[str, _ConcurrencyGate] = {}
        self._group: asyncio.TaskGroup | None = None
        self._client: Any = None
        self._payloads: PayloadStore | None = None
        self._stack = contextlib.AsyncExitStack()
        self._left: set[asyncio.Task[Reply | ServerlessError]] = set()
        self._run = run or token_hex(8)
        context = json.dumps({"custom": {"run": run}}).encode()
        self._context = {"ClientContext": base64.b64encode(context).decode()} if run else {}

    async def deploy(self, package: Package) -> None:
        """Direct calls to this version. It becomes current (`live`) only if the function has no current version."""
        spec, known = package.spec, self._gates.get(package.spec.name)
        pin = await self.deployer.pin(package, self._run)
        if known is not None and known.package is not None and known.package.spec == spec:
            known.package, known.pin = package, pin
            return
        self._gates[spec.name] = _ConcurrencyGate(
            package, pin, asyncio.Semaphore(spec.concurrency), spec.queue, spec.timeout_s, spec.memory_mb
        )

    async def attach(self, function: str, version: str = "") -> None:
        """See `AttachableBackend`. Lambda itself follows the weights of the alias `live`."""
        pin = await self.deployer.current(function, version)
        count = self.settings.connections
        slots = asyncio.Semaphore(count)
        self._gates[function] = _ConcurrencyGate(None, pin, slots, count, pin.timeout_s, pin.memory_mb)

    async def invoke(
        self, function: str, event: Sequence[dict[str, Any]], *, deadline_s: float, cause: Cause = Cause.CALL
    ) -> Reply:
        gate = self._gate(function)
        if self._group is None:
            raise BackendFailed("the AWS Lambda backend is not open", remedy="use `async with`")
        try:
            payload = json.dumps(list(event), ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
        except (TypeError, ValueError) as error:
            detail = f"the event has no JSON form: {error}"
            return Reply(fault=InfraFault(FaultKind.ENVIRONMENT, retryable=False, detail=detail))
        most = PAYLOAD_BYTES if self._payloads is None else MAX_BYTES
        if len(payload) > most:
            remedy = "lower batch.max_bytes" + ("" if self._payloads else ", or name a bucket (functions.aws_lambda)")
            detail = f"{len(event)} items are {len(payload)} bytes, Lambda takes {most}: {remedy}"
            return Reply(fault=InfraFault(FaultKind.ENVIRONMENT, retryable=False, detail=detail))
        if gate.waiting >= gate.queue:
            detail = f"{gate.queue} calls wait for {function}"
            return Reply(fault=InfraFault(FaultKind.THROTTLED, retryable=True, detail=detail, throttle=Throttle.QUEUE))
        call = _InFlightCall(gate, payload, len(event), cause)
        gate.waiting += 1
        task = self._group.create_task(self._call(call))

        def on_end(_: asyncio.Task[Reply | ServerlessError]) -> None:
            gate.waiting -= not call.sent

        # Not a `finally` of the task: a task that is cancelled before its first step runs no code.
        task.add_done_callback(on_end)
        try:
            async with asyncio.timeout(deadline_s):
                reply = await asyncio.shield(task)
        except TimeoutError:
            self._leave(call, task, "deadline")
            detail = f"no answer of {function} in the {deadline_s:.3f} s that were left"
            return Reply(fault=InfraFault(FaultKind.DEADLINE, retryable=False, detail=detail))
        except asyncio.CancelledError:
            self._leave(call, task, "cancelled")
            raise
        if isinstance(reply, ServerlessError):
            raise reply
        return reply

    def load(self, function: str) -> WorkerLoad:
        gate = self._gates.get(function)
        return WorkerLoad(busy=gate.running, waiting=gate.waiting) if gate is not None else WorkerLoad()

    async def provisioned(self, function: str) -> int:
        """The provisioned concurrency of the alias that calls go to."""
        return await self.deployer.warm(self._gate(function).pin)

    async def provision(self, function: str, workers: int) -> None:
        """Set the provisioned concurrency and wait until it is in force (minutes on AWS, at most three). Calls do not
        wait for it."""
        await self.deployer.set_warm(self._gate(function).pin, workers)

    async def __aenter__(self) -> AwsLambdaBackend:
        settings = self.settings
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(self.deployer)
            with translate_errors("opening the AWS Lambda client"):
                session = await asyncio.to_thread(library, "aiobotocore.session")
                config = library("aiobotocore.config").AioConfig(
                    max_pool_connections=settings.connections,
                    connect_timeout=3,
                    read_timeout=settings.read_timeout_s or _LONGEST_S,
                    tcp_keepalive=True,
                    retries={"mode": "standard", "total_max_attempts": 1},
                )
                clients = session.AioSession(profile=settings.profile or None)
                where = {"region_name": settings.region or None, "endpoint_url": settings.endpoint_url}
                self._client = await stack.enter_async_context(clients.create_client("lambda", config=config, **where))
                if settings.bucket:
                    retried = config.merge(library("aiobotocore.config").AioConfig(signature_version="s3v4"))
                    s3 = await stack.enter_async_context(clients.create_client("s3", config=retried, **where))
                    self._payloads = PayloadStore(s3, settings.bucket)
            stack.push_async_callback(self._unpin)
            self._group = await stack.enter_async_context(asyncio.TaskGroup())
            stack.push_async_callback(self._drain)
            stack.callback(self._group.create_task(self._renew(), name="leases of aliases").cancel)
            if self._payloads is not None:
                self._group.create_task(self._payloads.sweep(), name="payloads of killed callers")
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *exc: object) -> None:
        """Wait at most `drain_s` for the bills of abandoned calls, and remove the run's aliases."""
        self._group = None
        await self._stack.aclose()

    async def _drain(self) -> None:
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.settings.drain_s):
                    await asyncio.gather(*self._left, return_exceptions=True)
        finally:
            for task in self._left:
                task.cancel()

    async def _unpin(self) -> None:
        for gate in self._gates.values():
            if gate.package is not None:
                with contextlib.suppress(ServerlessError):  # its lease will expire
                    await self.deployer.unpin(gate.pin)

    def _gate(self, function: str) -> _ConcurrencyGate:
        gate = self._gates.get(function)
        if gate is None:
            known = ", ".join(self._gates) or "none"
            raise UnknownFunction(f"no function {function!r} is deployed", remedy=f"deployed: {known}")
        return gate

    async def _renew(self) -> None:
        """Renew the leases until cancelled. Failures are retried: a lease outlasts three attempts."""
        while True:
            await asyncio.sleep(LEASE_S / 4.0)
            for gate in list(self._gates.values()):
                with contextlib.suppress(ServerlessError):
                    await self._pin_again(gate, gate.pin)

    async def _pin_again(self, gate: _ConcurrencyGate, seen: PinnedVersion) -> None:
        """Reset the alias to the package's version, unless that was done since `seen`."""
        async with gate.repair:
            if gate.pin is not seen:
                return
            if gate.package is None:
                version = "" if gate.pin.alias == ALIAS else gate.pin.number
                gate.pin = await self.deployer.current(gate.pin.function, version)
            else:
                gate.pin = await self.deployer.pin(gate.package, self._run, existing=True)

    def _leave(self, call: _InFlightCall, task: asyncio.Task[Reply | ServerlessError], why: str) -> None:
        """Handle a caller that leaves. A sent call runs to its end at Lambda; a waiting one is dropped."""
        call.left = why
        if not call.sent:
            task.cancel()
        elif not task.done():
            self._left.add(task)
            task.add_done_callback(self._left.discard)

    async def _call(self, call: _InFlightCall) -> Reply | ServerlessError:
        """A caller's mistake is returned, not raised, so that the task group stays intact."""
        gate = call.gate
        async with gate.slots:
            call.sent = True
            gate.waiting -= 1
            gate.running += 1
            try:
                return await self._send(call)
            except ServerlessError as error:
                return error
            finally:
                gate.running -= 1

    async def _send(self, call: _InFlightCall) -> Reply:
        """One request and its answer. Raises `ServerlessError` for a caller's mistake."""
        now = asyncio.get_running_loop().time
        t0 = now()
        gate, pin = call.gate, call.gate.pin
        lambda_report: LambdaReport | None = None
        fault: InfraFault | None = None
        body: object = None
        taken, moved = True, False
        version = ""
        try:
            answer, data, fault = await self._request(call, pin)
            lambda_report = parse_report(answer.get("LogResult", ""))
            version = str(answer.get("ExecutedVersion", ""))
            if "FunctionError" in answer:
                fault = function_fault(data, lambda_report)
            elif fault is None:
                body, fault = decode_answer(data)
            moved = version not in (pin.number, pin.canary or pin.number)
            if moved:
                fault = _version_changed_fault(pin, version)
        except asyncio.CancelledError:
            call.left = call.left or "cancelled"
            raise
        except PayloadFailed as error:
            taken, fault = False, error.fault
        except Exception as error:
            taken, moved = False, error_code(error) == "ResourceNotFoundException"
            if moved:
                fault = _version_changed_fault(pin, "")
            else:
                fault, taken = _transport_fault(error, pin.function)
        finally:
            bill = None
            if taken:
                bill = lambda_bill(
                    gate.pin.function,
                    lambda_report,
                    t0,
                    now(),
                    memory_mb=gate.memory_mb,
                    items=call.items,
                    status=call.left or (str(fault.kind) if fault else "ok"),
                    cause=call.cause,
                    version=version,
                )
                self._meter.invocation(bill)
        if moved:
            try:
                await self._pin_again(gate, pin)
            except (CredentialsMissing, UnknownFunction):
                raise
            except ServerlessError as error:  # the next call retries
                assert fault is not None
                fault = replace(fault, detail=f"{fault.detail}, which failed: {error.message}"[:500])
        return Reply(body if fault is None else None, fault, bill)

    async def _request(
        self, call: _InFlightCall, pin: PinnedVersion
    ) -> tuple[dict[str, Any], bytes, InfraFault | None]:
        """Lambda's response, its body, and the fault of an answer that could not be read. A large event goes through
        S3. Raises `PayloadFailed` if nothing was sent."""
        limit_s = call.gate.timeout_s + _GRACE_S
        if self._payloads is None or len(call.payload) <= PAYLOAD_BYTES:
            return *await self._invoke(pin, call.payload, limit_s), None
        async with self._payloads.stored(call.payload, seconds=limit_s) as stored:
            answer, data = await self._invoke(pin, stored.payload, limit_s)
            try:
                return answer, await stored.answer(data), None
            except PayloadFailed as error:
                return answer, data, error.fault

    async def _invoke(self, pin: PinnedVersion, payload: bytes, limit_s: float) -> tuple[dict[str, Any], bytes]:
        async with asyncio.timeout(limit_s):
            answer = await self._client.invoke(
                FunctionName=self.settings.function_name(pin.function),
                Qualifier=pin.qualifier,
                LogType="Tail",
                Payload=payload,
                **self._context,
            )
            async with answer["Payload"] as stream:
                return answer, await stream.read()


def _version_changed_fault(pin: PinnedVersion, version: str) -> InfraFault:
    """The fault of an alias that names another version than it was set to, or that is gone: the answer is not this
    run's."""
    now = f"version {version} answered" if version else "it is gone"
    detail = f"{pin.function}: {pin.qualifier} was set to version {pin.number}, but {now}: it is set anew"
    return InfraFault(FaultKind.UNAVAILABLE, retryable=True, detail=detail)


def _transport_fault(error: Exception, function: str) -> tuple[InfraFault, bool]:
    """Classify a transport error: its fault and whether Lambda may have accepted the call. Raises `ServerlessError` for
    a caller's mistake.

    A timeout is not retryable: the call may still run, and the next one would be as slow.
    """
    response = getattr(error, "response", None)
    if isinstance(response, dict) and (fault := service_fault(response)) is not None:
        return fault, False
    names = {one.__name__ for one in type(error).__mro__}
    if names.intersection(("ConnectTimeoutError", "EndpointConnectionError", "SSLError", "ProxyConnectionError")):
        return InfraFault(FaultKind.UNAVAILABLE, retryable=True, detail=f"no way to Lambda: {error}"[:500]), False
    if isinstance(error, TimeoutError) or "ReadTimeoutError" in names:
        detail = f"no answer of {function}: it may still run ({type(error).__name__})"
        return InfraFault(FaultKind.TIMEOUT, retryable=False, detail=detail), True
    if names.intersection(("HTTPClientError", "ClientError", "OSError")) and not isinstance(response, dict):
        detail = f"the connection to Lambda broke: {type(error).__name__}: {error}"[:500]
        return InfraFault(FaultKind.UNAVAILABLE, retryable=True, detail=detail), True
    ours = translate_error(error, f"calling {function}")
    raise ours or BackendFailed(f"calling {function}: {type(error).__name__}: {error}") from error
