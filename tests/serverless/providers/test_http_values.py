"""The pure parts of functions over HTTP: signatures and faults."""

from __future__ import annotations

import datetime
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serverless.providers import faults, signing
from serverless.providers.faults import function_fault
from serverless.types import FaultKind, InfraFault, Throttle

NOW = datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.UTC)


def check(header: str, **changes: object) -> str | None:
    given = {"method": "POST", "path": "/f?x=1", "body": b"[]", "now": 1000.0, **changes}
    return signing.verify(header, {"k": "secret"}, **given)  # type: ignore[arg-type]


def test_a_signature_covers_method_path_time_and_body_and_ages() -> None:
    header = signing.sign("k", "secret", method="POST", path="/f?x=1", body=b"[]", now=1000.9)
    assert check(header) is None
    assert check(header, now=1000.0 + signing.SKEW_S) is None
    assert check(header, method="PUT") == "the signature does not match"
    assert check(header, path="/f") == "the signature does not match"
    assert check(header, body=b"[1]") == "the signature does not match"
    assert check(header.replace("Timestamp=1000", "Timestamp=1001")) == "the signature does not match"
    assert check(header.replace("=k,", "=other,")) == "the signature does not match"
    assert check(header, now=1001.0 + signing.SKEW_S) == "the request is more than 300 s from now"
    assert check("Bearer x") == "no ROLLART-HMAC-SHA256 authorization"


def test_an_unknown_key_is_not_signed_with_an_empty_secret() -> None:
    header = signing.sign("who", "", method="POST", path="/f?x=1", body=b"[]", now=1000.0)
    assert check(header) == "the signature does not match"


FAULTS = st.builds(
    InfraFault,
    kind=st.sampled_from(FaultKind),
    retryable=st.booleans(),
    detail=st.text(max_size=80),
    throttle=st.none() | st.sampled_from(Throttle),
    retry_after_s=st.none() | st.floats(0.0, 1e6),
)


@given(fault=FAULTS)
def test_a_fault_survives_the_way_in_its_exact_form(fault: InfraFault) -> None:
    assert faults.decode(faults.encode(fault)) == fault


@pytest.mark.parametrize("body", [b"", b"oops", b"{}", b"[]", b'{"fault": 3}', b'{"fault": {"kind": "x"}}'])
def test_what_is_no_exact_form_is_not_read_as_one(body: bytes) -> None:
    assert faults.decode(body) is None


@pytest.mark.parametrize(
    ("status", "kind", "retryable"),
    [
        (500, FaultKind.UNAVAILABLE, True),
        (503, FaultKind.UNAVAILABLE, True),
        (502, FaultKind.UNAVAILABLE, False),
        (504, FaultKind.UNAVAILABLE, False),
        (408, FaultKind.UNAVAILABLE, True),
        (429, FaultKind.THROTTLED, True),
        (400, FaultKind.ENVIRONMENT, False),
        (413, FaultKind.ENVIRONMENT, False),
        (401, FaultKind.UNAVAILABLE, False),
        (404, FaultKind.UNAVAILABLE, False),
        (307, FaultKind.UNAVAILABLE, False),
    ],
)
def test_statuses(status: int, kind: FaultKind, retryable: bool) -> None:
    fault = faults.fault_of_status(status, b"why", {}, NOW)
    assert (fault.kind, fault.retryable, fault.detail) == (kind, retryable, f"HTTP {status}: why")


def test_a_throttle_has_its_reason_and_its_time() -> None:
    body = json.dumps({"Reason": "ReservedFunctionConcurrentInvocationLimitExceeded"}).encode()
    fault = faults.fault_of_status(429, body, {"Retry-After": "Fri, 02 Jan 2026 03:04:15 GMT"}, NOW)
    assert (fault.throttle, fault.retry_after_s) == (Throttle.RESERVED, 10.0)
    assert faults.fault_of_status(429, b"", {"Retry-After": "1.5"}, NOW).retry_after_s == 1.5
    assert faults.fault_of_status(429, b"", {"Retry-After": "soon"}, NOW).retry_after_s is None
    assert faults.fault_of_status(429, b"", {}, NOW).throttle is None, "a limit of calls at once, or of a rate"


@pytest.mark.parametrize(
    "fault",
    [
        InfraFault(FaultKind.CRASH, retryable=False, detail="ValueError: no such a"),
        InfraFault(FaultKind.CRASH, retryable=False, detail="the function did not load: ImportError: x"),
        InfraFault(FaultKind.CRASH, retryable=True, detail="the worker exited with code 3"),
        InfraFault(FaultKind.TIMEOUT, retryable=True),
        InfraFault(FaultKind.OUT_OF_MEMORY, retryable=True),
        InfraFault(FaultKind.BAD_ANSWER, retryable=False, detail="the answer has no wire form"),
    ],
)
def test_lambdas_payload_of_a_fault_reads_as_that_fault(fault: InfraFault) -> None:
    payload = faults.function_error(fault, "r-1", 3.0)
    read = function_fault(json.dumps(payload).encode(), None)
    assert (read.kind, read.retryable) == (fault.kind, fault.retryable)


def test_a_fault_of_the_platform_is_no_function_error() -> None:
    for kind in (FaultKind.THROTTLED, FaultKind.UNAVAILABLE, FaultKind.ENVIRONMENT):
        assert faults.function_error(InfraFault(kind, retryable=True), "r-1", 3.0) is None
