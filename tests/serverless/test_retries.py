"""Retry policies: bounds of attempts and pauses on virtual time and in threads, and the table of the docs."""

from __future__ import annotations

import asyncio
import pathlib
import random
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollart.sim import loop as virtual
from serverless.retries import POLICIES, RetryPolicy, table


class Failing:
    """An operation that fails `failures` times; it keeps the times of its attempts."""

    def __init__(self, failures: int) -> None:
        self.failures = failures
        self.times: list[float] = []

    async def attempt(self) -> str:
        self.times.append(asyncio.get_running_loop().time())
        if len(self.times) <= self.failures:
            raise ConnectionError(f"failure {len(self.times)}")
        return "done"


@given(
    attempts=st.integers(1, 8),
    first_s=st.floats(0.01, 10.0),
    ratio=st.floats(1.0, 50.0),
    jitter=st.sampled_from(["none", "half", "full"]),
    failures=st.integers(0, 10),
    seed=st.integers(0, 9),
)
def test_attempts_and_pauses_stay_in_their_bounds(
    attempts: int, first_s: float, ratio: float, jitter: str, failures: int, seed: int
) -> None:
    policy = RetryPolicy("", "", attempts, first_s, first_s * ratio, jitter=jitter)  # type: ignore[arg-type]
    failing = Failing(failures)

    async def main() -> str:
        return await policy.run(failing.attempt, ConnectionError, rng=random.Random(seed))

    if failures < attempts:
        assert virtual.run(main()) == "done"
    else:
        with pytest.raises(ConnectionError, match=f"failure {attempts}$"):
            virtual.run(main())
    assert len(failing.times) == min(attempts, failures + 1)
    assert failing.times[-1] - failing.times[0] <= policy.total_s + 1e-6
    for n, (before, after) in enumerate(zip(failing.times, failing.times[1:], strict=False)):
        longest = min(first_s * ratio, first_s * 2.0**n)
        least = {"none": longest, "half": longest / 2.0, "full": 0.0}[jitter]
        assert least - 1e-6 <= after - before <= longest + 1e-6


def test_the_last_attempt_is_at_the_time_limit() -> None:
    failing, policy = Failing(1000), RetryPolicy("", "", 0, 1.0, 4.0)
    with pytest.raises(ConnectionError):
        virtual.run(policy.run(failing.attempt, ConnectionError, within_s=10.0))
    assert failing.times == [0.0, 1.0, 3.0, 7.0, 10.0]


def test_other_errors_and_cancellation_end_the_attempts() -> None:
    policy, seen = RetryPolicy("", "", 5, 1.0, 1.0), list[int]()

    async def wrong() -> None:
        seen.append(1)
        raise ValueError("never retried")

    async def cancelled() -> None:
        task = asyncio.get_running_loop().create_task(policy.run(Failing(9).attempt, ConnectionError))
        await asyncio.sleep(1.5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert asyncio.get_running_loop().time() == 1.5

    with pytest.raises(ValueError, match="never retried"):
        virtual.run(policy.run(wrong, ConnectionError))
    assert len(seen) == 1
    virtual.run(cancelled())


def test_every_failure_but_the_last_is_reported_before_its_pause() -> None:
    reported: list[tuple[str, int, float]] = []

    async def failed(error: BaseException, attempt: int) -> None:
        reported.append((str(error), attempt, asyncio.get_running_loop().time()))

    with pytest.raises(ConnectionError):
        virtual.run(RetryPolicy("", "", 3, 1.0, 9.0).run(Failing(9).attempt, ConnectionError, failed=failed))
    assert reported == [("failure 1", 1, 0.0), ("failure 2", 2, 1.0)]


def test_a_thread_that_is_stopped_ends_in_its_pause() -> None:
    pauses: list[float] = []

    def attempt() -> None:
        raise ConnectionError

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 2:
            raise InterruptedError("stopped")

    with pytest.raises(InterruptedError, match="stopped"):
        RetryPolicy("", "", 9, 0.5, 9.0).run_blocking(attempt, lambda error: True, pause=pause)
    assert pauses == [0.5, 1.0]


def test_the_table_of_the_docs_is_that_of_the_policies() -> None:
    assert table() in pathlib.Path("docs/functions.md").read_text()
    assert len({policy.operation for policy in POLICIES}) == len(POLICIES)


def test_the_policies_import_no_library() -> None:
    code = "import sys, serverless.retries; sys.exit('tenacity' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
