"""Faults on the wire, in both directions: status codes of HTTP, Lambda's error payloads, throttles and REPORT line, and
this package's exact form. Pure.

The exact form is a body `{"fault": {kind, retryable, detail, throttle, retry_after_s}}` under the status of its kind,
so that clients unaware of it still react properly.
"""

from __future__ import annotations

import base64
import binascii
import datetime
import email.utils
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from serverless.types import FaultKind, InfraFault, Throttle

STATUS = {
    FaultKind.THROTTLED: 429,
    FaultKind.UNAVAILABLE: 503,
    FaultKind.TIMEOUT: 504,
    FaultKind.DEADLINE: 504,
    FaultKind.ENVIRONMENT: 400,
}
"""The status of the other kinds is 500."""

REASONS = {
    Throttle.CONCURRENCY: "ConcurrentInvocationLimitExceeded",
    Throttle.QUEUE: "ConcurrentInvocationLimitExceeded",
    Throttle.RESERVED: "ReservedFunctionConcurrentInvocationLimitExceeded",
    Throttle.RATE: "FunctionInvocationRateLimitExceeded",
    Throttle.SCALING: "ConcurrentSnapshotCreateLimitExceeded",
}
"""ThrottleReason of the Lambda API."""

AMBIGUOUS = frozenset({502, 504})
"""Statuses of a gateway after it forwarded the call: the call may have been executed or still be running."""

_NAMED = re.compile(r"([A-Za-z_][\w.]*): (.*)", re.DOTALL)


def encode(fault: InfraFault) -> bytes:
    return json.dumps({"fault": asdict(fault)}).encode()


def decode(body: bytes) -> InfraFault | None:
    """A fault in the exact form, or None."""
    try:
        form = json.loads(body)["fault"]
        return InfraFault(
            FaultKind(form["kind"]),
            retryable=form["retryable"] is True,
            detail=str(form["detail"]),
            throttle=Throttle(form["throttle"]) if form["throttle"] else None,
            retry_after_s=form["retry_after_s"],
        )
    except (ValueError, KeyError, TypeError):
        return None


def function_error(fault: InfraFault, request: str, timeout_s: float) -> dict[str, object] | None:
    """The payload that Lambda returns with `X-Amz-Function-Error`, or None for a fault that is not the function's."""
    if fault.kind in (FaultKind.TIMEOUT, FaultKind.DEADLINE):
        message = f"RequestId: {request} Error: Task timed out after {timeout_s:.2f} seconds"
        return {"errorType": "Sandbox.Timedout", "errorMessage": message}
    if fault.kind is FaultKind.OUT_OF_MEMORY:
        message = f"RequestId: {request} Error: Runtime exited with error: signal: killed: {fault.detail}"
        return {"errorType": "Runtime.OutOfMemory", "errorMessage": message}
    if fault.kind is FaultKind.BAD_ANSWER:
        return {"errorType": "Runtime.MarshalError", "errorMessage": fault.detail, "requestId": request}
    if fault.kind is not FaultKind.CRASH:
        return None
    if fault.retryable:
        message = f"RequestId: {request} Error: {fault.detail}"
        return {"errorType": "Runtime.ExitError", "errorMessage": message}
    named = _NAMED.fullmatch(fault.detail)
    if named is None:
        return {"errorType": "Runtime.ImportModuleError", "errorMessage": fault.detail, "requestId": request}
    return {"errorType": named[1], "errorMessage": named[2], "requestId": request, "stackTrace": []}


def fault_of_status(status: int, body: bytes, headers: Mapping[str, str], now: datetime.datetime) -> InfraFault:
    """The fault of a status other than 200 of an unknown host. Only declared faults are retryable."""
    detail = f"HTTP {status}: {body[:300].decode(errors='replace').strip()}"
    wait = retry_after_s(headers.get("Retry-After", ""), now)
    if status == 429:
        throttle = next((t for reason, t in _BY_REASON.items() if f'"{reason}"'.encode() in body), None)
        return InfraFault(FaultKind.THROTTLED, retryable=True, detail=detail, throttle=throttle, retry_after_s=wait)
    if status >= 500 or status == 408:
        return InfraFault(FaultKind.UNAVAILABLE, retryable=status not in AMBIGUOUS, detail=detail, retry_after_s=wait)
    kind = FaultKind.ENVIRONMENT if status in (400, 413, 415, 422) else FaultKind.UNAVAILABLE
    return InfraFault(kind, retryable=False, detail=detail)


def retry_after_s(value: str, now: datetime.datetime) -> float | None:
    """Seconds of a Retry-After header, which is a number or a date; None if neither."""
    if (seconds := _seconds(value)) is not None:
        return seconds
    try:
        at = email.utils.parsedate_to_datetime(value)
    except ValueError:
        return None
    aware = at if at.tzinfo is not None else at.replace(tzinfo=datetime.UTC)
    return max(0.0, (aware - now).total_seconds())


NOT_ALLOWED = frozenset(
    {
        "AccessDenied",
        "AccessDeniedException",
        "AuthFailure",
        "ExpiredToken",
        "ExpiredTokenException",
        "IncompleteSignature",
        "InvalidClientTokenId",
        "InvalidSignatureException",
        "MissingAuthenticationToken",
        "MissingAuthenticationTokenException",
        "OptInRequired",
        "SignatureDoesNotMatch",
        "UnrecognizedClientException",
    }
)
"""Error codes for which retries do not help: the user is unknown or lacks the permission."""

_BY_REASON = {reason: throttle for throttle, reason in REASONS.items() if throttle is not Throttle.QUEUE}

_THROTTLES = _BY_REASON | {
    "ReservedFunctionInvocationRateLimitExceeded": Throttle.RATE,
    "CallerRateLimitExceeded": Throttle.RATE,
}
"""Limits by ThrottleReason of the Lambda API; a reserved function's rate limit passes with time like any other rate."""

_BUSY = {"ResourceConflictException", "SnapStartNotReadyException", "ResourceNotReadyException", "SnapStartException"}
"""The function is being changed or prepared: the error is transient."""

_REPORT = re.compile(
    r"REPORT RequestId: (?P<id>\S+)\s+Duration: [\d.]+ ms\s+Billed Duration: (?P<billed>\d+) ms\s+"
    r"Memory Size: (?P<memory>\d+) MB\s+Max Memory Used: (?P<used>\d+) MB"
    r"(?:\s+Init Duration: (?P<init>[\d.]+) ms)?"
    r"(?:\s+Restore Duration: (?P<restore>[\d.]+) ms)?(?:\s+Billed Restore Duration: (?P<rebilled>\d+) ms)?"
)

_PLATFORM_LINES = ("START RequestId", "END RequestId", "REPORT RequestId", "INIT_START", "INIT_REPORT")


@dataclass(frozen=True, slots=True)
class LambdaReport:
    """Lambda's report of one call. Seconds and MB; `init_s` is 0 for a warm call."""

    request_id: str
    billed_s: float
    memory_mb: int
    used_mb: int
    init_s: float


def parse_report(log_result: str) -> LambdaReport | None:
    """The last REPORT line of an invoke's `LogResult` (base64, the log's last 4 KB), or None."""
    found = next(reversed(list(_REPORT.finditer(_text(log_result)))), None)
    if found is None:
        return None
    return LambdaReport(
        request_id=found["id"],
        billed_s=(int(found["billed"]) + int(found["rebilled"] or 0)) / 1000.0,
        memory_mb=int(found["memory"]),
        used_mb=int(found["used"]),
        init_s=float(found["init"] or found["restore"] or 0.0) / 1000.0,
    )


def function_log_tail(log_result: str) -> str:
    """The last three lines of the function's own output, joined to one line."""
    lines = _text(log_result).splitlines()
    own = [line.strip() for line in lines if line.strip() and not line.startswith(_PLATFORM_LINES)]
    return " | ".join(own[-3:])[-600:]


def function_fault(payload: bytes, used: LambdaReport | None) -> InfraFault:
    """The fault of a call with `FunctionError`. The end of the environment is retryable; an exception in the code is
    not."""
    try:
        error = json.loads(payload)
    except ValueError:
        error = payload[:400].decode(errors="replace")
    if not isinstance(error, dict):
        error = {"errorMessage": str(error)[:400]}
    kind, message = str(error.get("errorType", "Error")), str(error.get("errorMessage", ""))
    detail = f"{kind}: {message}"[:500]
    full = used is not None and used.used_mb >= used.memory_mb
    ended = kind == "Runtime.ExitError"
    if kind == "Sandbox.Timedout" or "Task timed out after" in message:
        return InfraFault(FaultKind.TIMEOUT, retryable=True, detail=detail)
    if kind in ("Runtime.OutOfMemory", "MemoryError") or (ended and full):
        return InfraFault(FaultKind.OUT_OF_MEMORY, retryable=True, detail=detail)
    if kind in ("Runtime.MarshalError", "Function.ResponseSizeTooLarge"):
        return InfraFault(FaultKind.BAD_ANSWER, retryable=False, detail=detail)
    if kind.startswith(("Sandbox.", "Extension.", "Runtime.Unknown")) or kind == "PayloadUnavailable":
        return InfraFault(FaultKind.UNAVAILABLE, retryable=True, detail=detail)
    return InfraFault(FaultKind.CRASH, retryable=ended, detail=detail)


def decode_answer(body: bytes, *, retryable: bool = False) -> tuple[object, InfraFault | None]:
    """The answer of a call that succeeded, or the fault of an answer that is not JSON."""
    try:
        return json.loads(body), None
    except ValueError as error:
        return None, InfraFault(FaultKind.BAD_ANSWER, retryable=retryable, detail=f"the answer is not JSON: {error}")


def service_fault(response: Mapping[str, Any]) -> InfraFault | None:
    """The fault of an error response of the Lambda service (botocore's `ClientError.response`), or None for a mistake
    of the caller that no retry cures. Nothing has been executed."""
    error = response.get("Error", {})
    meta = response.get("ResponseMetadata", {})
    code, status = str(error.get("Code", "")), int(meta.get("HTTPStatusCode", 0))
    detail = f"{code}: {error.get('Message', '')}"[:500]
    if code == "EC2ThrottledException":
        return InfraFault(FaultKind.THROTTLED, retryable=True, detail=detail, throttle=Throttle.SCALING)
    if status == 429 or code in ("TooManyRequestsException", "ThrottlingException", "Throttling"):
        reason = str(response.get("Reason") or error.get("Reason") or "")
        return InfraFault(
            FaultKind.THROTTLED,
            retryable=True,
            detail=f"{detail} {reason}".strip(),
            throttle=_THROTTLES.get(reason, Throttle.RATE),
            retry_after_s=_seconds(response.get("retryAfterSeconds") or meta.get("HTTPHeaders", {}).get("retry-after")),
        )
    if status in (408, 413):
        return InfraFault(FaultKind.ENVIRONMENT, retryable=False, detail=detail)
    if status >= 500 or code in _BUSY:
        return InfraFault(FaultKind.UNAVAILABLE, retryable=True, detail=detail)
    return None


def _text(log_result: str) -> str:
    try:
        return base64.b64decode(log_result).decode(errors="replace")
    except (binascii.Error, ValueError):
        return ""


def _seconds(value: object) -> float | None:
    try:
        return max(0.0, float(str(value)))
    except ValueError:
        return None
