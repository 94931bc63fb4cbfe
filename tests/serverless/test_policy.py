"""Batching and retrying as plain decisions."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from serverless.policy.batch import BatchPolicy, SendBatch, WaitForItems
from serverless.policy.retry import RetryBudget, retry_delay
from serverless.settings import RetrySpec
from serverless.types import FaultKind, InfraFault

FAULT = InfraFault(FaultKind.CRASH, retryable=True)


@given(
    sizes=st.lists(st.integers(0, 3000), min_size=1, max_size=20),
    waited=st.floats(0.0, 1.0),
    max_items=st.integers(1, 20),
    max_wait_s=st.floats(0.0, 0.5),
    max_bytes=st.integers(1, 5000),
)
def test_a_batch_keeps_its_bounds(
    sizes: list[int], waited: float, max_items: int, max_wait_s: float, max_bytes: int
) -> None:
    sizes = sizes[:max_items]
    decision = BatchPolicy(max_items, max_wait_s, max_bytes).decide(sizes, waited)
    if isinstance(decision, WaitForItems):
        assert 0.0 < decision.seconds <= max_wait_s
        assert len(sizes) < max_items
        assert sum(sizes) <= max_bytes or len(sizes) == 1
    else:
        assert isinstance(decision, SendBatch)
        assert 1 <= decision.count <= max_items
        assert sum(sizes[: decision.count]) <= max_bytes or decision.count == 1
        full = decision.count == max_items or decision.count < len(sizes)
        assert full or waited >= max_wait_s - 1e-9
        if decision.count < len(sizes):
            assert sum(sizes[: decision.count + 1]) > max_bytes


@given(attempt=st.integers(1, 10), remaining=st.floats(0.0, 10.0), seed=st.integers(0, 99))
def test_a_delay_is_jittered_bounded_and_before_the_deadline(attempt: int, remaining: float, seed: int) -> None:
    settings = RetrySpec(max_attempts=5)
    delay = retry_delay(settings, FAULT, attempt, remaining, random.Random(seed))
    if delay is None:
        assert attempt >= 5 or remaining <= min(settings.cap_s, settings.base_s * 2 ** (attempt - 1))
    else:
        assert 0.0 <= delay <= min(settings.cap_s, settings.base_s * 2 ** (attempt - 1))
        assert delay < remaining
        assert attempt < 5


def test_what_is_not_retryable_is_not_retried() -> None:
    fault = InfraFault(FaultKind.CRASH, retryable=False)
    assert retry_delay(RetrySpec(), fault, 1, 10.0, random.Random(0)) is None


@given(steps=st.lists(st.booleans(), max_size=300), budget=st.floats(0.0, 1.0), reserve=st.floats(0.0, 30.0))
def test_retries_stay_within_the_budget(steps: list[bool], budget: float, reserve: float) -> None:
    bucket = RetryBudget(RetrySpec(budget=budget, reserve=reserve))
    retries = items = 0
    for is_item in steps:
        if is_item:
            bucket.earn()
            items += 1
        else:
            retries += bucket.take()
        assert retries <= reserve + budget * items + 1e-6
