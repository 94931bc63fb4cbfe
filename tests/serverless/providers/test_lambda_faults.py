"""Parsing of Lambda's responses. The texts are Lambda's own."""

from __future__ import annotations

import base64
import json

import pytest

from serverless.deploy.aws_function import AwsSettings, function_configuration
from serverless.errors import SpecInvalid
from serverless.providers.faults import LambdaReport, function_fault, function_log_tail, parse_report, service_fault
from serverless.spec import FunctionSpec
from serverless.types import FaultKind, Throttle

COLD = (
    "START RequestId: 8f5 Version: 3\nhello\nEND RequestId: 8f5\n"
    "REPORT RequestId: 8f5\tDuration: 2.44 ms\tBilled Duration: 112 ms\tMemory Size: 128 MB\t"
    "Max Memory Used: 33 MB\tInit Duration: 108.55 ms\t\n"
)
WARM = "REPORT RequestId: 9a\tDuration: 1.00 ms\tBilled Duration: 1 ms\tMemory Size: 512 MB\tMax Memory Used: 40 MB\t\n"
RESTORED = WARM.replace("\t\n", "\tRestore Duration: 350.50 ms\tBilled Restore Duration: 6 ms\t\n")


def log(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def error(kind: str, message: str = "m") -> bytes:
    return json.dumps({"errorType": kind, "errorMessage": message}).encode()


def test_a_report_line_is_the_bill() -> None:
    assert parse_report(log(COLD)) == LambdaReport("8f5", 0.112, 128, 33, 0.10855)
    assert parse_report(log(WARM)) == LambdaReport("9a", 0.001, 512, 40, 0.0)
    assert parse_report(log(RESTORED)) == LambdaReport("9a", 0.007, 512, 40, 0.3505)


def test_the_last_report_counts_and_none_is_none() -> None:
    """A function may print anything, a line that looks like a report too."""
    forged = WARM.replace("9a", "forged") + COLD
    assert (found := parse_report(log(forged))) is not None
    assert found.request_id == "8f5"
    assert parse_report(log("no such line")) is None
    assert parse_report("not base64!") is None
    assert parse_report("") is None


def test_last_words_are_the_functions_own() -> None:
    assert function_log_tail(log(COLD)) == "hello"
    assert function_log_tail(log("a\nb\nc\nd\n" + WARM)) == "b | c | d"


@pytest.mark.parametrize(
    ("payload", "kind", "retryable"),
    [
        (error("Sandbox.Timedout", "RequestId: 1 Error: Task timed out after 3.00 seconds"), FaultKind.TIMEOUT, True),
        (b'{"errorMessage":"2025-01-01T00:00:00Z 1 Task timed out after 3.00 seconds"}', FaultKind.TIMEOUT, True),
        (error("Runtime.OutOfMemory"), FaultKind.OUT_OF_MEMORY, True),
        (error("MemoryError"), FaultKind.OUT_OF_MEMORY, True),
        (error("Runtime.ExitError", "Runtime exited with error: exit status 1"), FaultKind.CRASH, True),
        (error("Runtime.ImportModuleError"), FaultKind.CRASH, False),
        (error("ValueError"), FaultKind.CRASH, False),
        (error("Runtime.MarshalError"), FaultKind.BAD_ANSWER, False),
        (error("Function.ResponseSizeTooLarge"), FaultKind.BAD_ANSWER, False),
        (error("Sandbox.Failure"), FaultKind.UNAVAILABLE, True),
        (b"<html>", FaultKind.CRASH, False),
        (b"[1]", FaultKind.CRASH, False),
    ],
)
def test_errors_of_functions_by_their_type(payload: bytes, kind: FaultKind, retryable: bool) -> None:
    fault = function_fault(payload, None)
    assert (fault.kind, fault.retryable) == (kind, retryable)


def test_an_exit_with_all_memory_used_is_out_of_memory() -> None:
    killed = error("Runtime.ExitError", "Runtime exited with error: signal: killed")
    assert function_fault(killed, LambdaReport("1", 1, 128, 128, 0)).kind is FaultKind.OUT_OF_MEMORY
    assert function_fault(killed, LambdaReport("1", 1, 128, 60, 0)).kind is FaultKind.CRASH


@pytest.mark.parametrize(
    ("reason", "throttle"),
    [
        ("ConcurrentInvocationLimitExceeded", Throttle.CONCURRENCY),
        ("ReservedFunctionConcurrentInvocationLimitExceeded", Throttle.RESERVED),
        ("FunctionInvocationRateLimitExceeded", Throttle.RATE),
        ("ReservedFunctionInvocationRateLimitExceeded", Throttle.RATE),
        ("CallerRateLimitExceeded", Throttle.RATE),
        ("ConcurrentSnapshotCreateLimitExceeded", Throttle.SCALING),
        ("SomethingNew", Throttle.RATE),
    ],
)
def test_a_throttle_has_its_reason(reason: str, throttle: Throttle) -> None:
    response = {
        "Error": {"Code": "TooManyRequestsException", "Message": "Rate Exceeded."},
        "Reason": reason,
        "retryAfterSeconds": "2",
        "ResponseMetadata": {"HTTPStatusCode": 429},
    }
    fault = service_fault(response)
    assert fault is not None
    assert (fault.kind, fault.throttle, fault.retry_after_s) == (FaultKind.THROTTLED, throttle, 2.0)


@pytest.mark.parametrize(
    ("code", "status", "kind"),
    [
        ("ServiceException", 500, FaultKind.UNAVAILABLE),
        ("503", 503, FaultKind.UNAVAILABLE),
        ("ResourceConflictException", 409, FaultKind.UNAVAILABLE),
        ("EC2ThrottledException", 502, FaultKind.THROTTLED),
        ("RequestTooLargeException", 413, FaultKind.ENVIRONMENT),
        ("InvalidParameterValueException", 400, None),
        ("ResourceNotFoundException", 404, None),
    ],
)
def test_errors_of_the_service(code: str, status: int, kind: FaultKind | None) -> None:
    fault = service_fault({"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}})
    assert (fault.kind if fault else None) is kind


def spec(**settings: object) -> FunctionSpec:
    return FunctionSpec.model_validate({"name": "f", "source": "f.py", **settings})


def test_lambda_is_told_whole_seconds_and_the_memory_that_brings_the_cores() -> None:
    configured = function_configuration(spec(timeout_s=0.3, cpu=2.0), AwsSettings())
    assert (configured["Timeout"], configured["MemorySize"]) == (1, 3538)
    assert function_configuration(spec(timeout_s=10.2, memory_mb=256), AwsSettings())["Timeout"] == 11


@pytest.mark.parametrize("asked", [{"gpu": "L4"}, {"timeout_s": 901}, {"memory_mb": 20_000}, {"cpu": 8.0}])
def test_what_lambda_does_not_have_is_refused_with_a_remedy(asked: dict[str, object]) -> None:
    with pytest.raises(SpecInvalid, match="Modal"):
        function_configuration(spec(**asked), AwsSettings())


def test_names_have_the_prefix_and_a_limit() -> None:
    assert AwsSettings(prefix="SageMaker-").function_name("f") == "SageMaker-f"
    with pytest.raises(SpecInvalid, match="64"):
        AwsSettings().function_name("f" * 60)


@pytest.mark.parametrize("wrong", [{"log_retention_days": 8}, {"role_arn": "admin"}, {"runtime": "node"}, {"x": 1}])
def test_settings_are_checked_as_they_are_read(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        AwsSettings.model_validate(wrong)
