"""The conformance suite of function backends on AWS Lambda: real clients, moto's control plane, the real runtime."""

from __future__ import annotations

import pytest

from rollart.testing import backend_suite
from tests.serverless.aws.provider import AwsLambda

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(AwsLambda.missing), reason=AwsLambda.missing or "-")]

ELSEWHERE = {
    "test_concurrency_is_a_bound_and_workers_are_reused",
    "test_a_cancelled_call_is_billed_and_leaves_a_working_function",
}
"""They count workers by their names and end one by cancelling, which Lambda lacks: `test_aws_invoke` has the equivalent
tests."""

globals().update({k: v for k, v in vars(backend_suite).items() if k.startswith("test_") and k not in ELSEWHERE})


@pytest.fixture
def provider() -> AwsLambda:
    return AwsLambda()
