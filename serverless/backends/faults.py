"""Faults over HTTP: status codes, Lambda's error payloads, and this package's exact form. Pure.

The exact form is a body `{"fault": {kind, retryable, detail, throttle, retry_after_s}}` under the status of its kind,
so that clients unaware of it still react properly.
"""

from __future__ import annotations

import datetime
import email.utils
import json
import re
from collections.abc import Mapping

from serverless.types import FaultKind, InfraFault, Throttle

__all__ = ["AMBIGUOUS", "REASONS", "STATUS", "decode", "encode", "function_error", "fault_of_status", "retry_after_s"]

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
    form = {
        "kind": fault.kind,
        "retryable": fault.retryable,
        "detail": fault.detail,
        "throttle": fault.throttle,
        "retry_after_s": fault.retry_after_s,
    }
    return json.dumps({"fault": form}).encode()


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
        known = {reason: throttle for throttle, reason in REASONS.items() if throttle is not Throttle.QUEUE}
        throttle = next((t for reason, t in known.items() if f'"{reason}"'.encode() in body), None)
        return InfraFault(FaultKind.THROTTLED, retryable=True, detail=detail, throttle=throttle, retry_after_s=wait)
    if status in AMBIGUOUS:
        return InfraFault(FaultKind.UNAVAILABLE, retryable=False, detail=detail, retry_after_s=wait)
    if status >= 500 or status == 408:
        return InfraFault(FaultKind.UNAVAILABLE, retryable=True, detail=detail, retry_after_s=wait)
    kind = FaultKind.ENVIRONMENT if status in (400, 413, 415, 422) else FaultKind.UNAVAILABLE
    return InfraFault(kind, retryable=False, detail=detail)


def retry_after_s(value: str, now: datetime.datetime) -> float | None:
    """Seconds of a Retry-After header, which is a number or a date; None if neither."""
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        at = email.utils.parsedate_to_datetime(value)
    except ValueError:
        return None
    aware = at if at.tzinfo is not None else at.replace(tzinfo=datetime.UTC)
    return max(0.0, (aware - now).total_seconds())
