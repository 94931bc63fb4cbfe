"""The conformance suite of function backends on those that need no control plane of a provider."""

from __future__ import annotations

import pytest

from rollart.testing.backend_suite import *  # noqa: F403
from tests.serverless.support import PROVIDERS, Provider


@pytest.fixture(
    params=[pytest.param(name, marks=[pytest.mark.slow] if one.real else []) for name, one in PROVIDERS.items()]
)
def provider(request: pytest.FixtureRequest) -> Provider:
    one = PROVIDERS[request.param]()
    if one.missing:
        pytest.skip(one.missing)
    return one
