"""Real awslambdaric processes as workers: deaths, limits, load failures, logs, and no leftovers."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from serverless.providers.base import Reply
from serverless.types import FaultKind, InfraFault
from serverless.wire import encode
from serverless.workers import logs
from serverless.workers.local import LocalBackend
from tests.serverless.support import descendants, item, package, until
from tests.serverless.workers.controller import kill_controller

pytestmark = pytest.mark.slow  # real processes

pytest.importorskip("awslambdaric")


def replies(*whats: str, source: str = "behave", memory_mb: int = 256, **settings: float) -> list[Reply]:
    async def main() -> list[Reply]:
        one = package(source, memory_mb=memory_mb, concurrency=1, **settings)
        async with LocalBackend(runtime="awslambdaric") as backend:
            await backend.deploy(one)
            events = [[encode(item(do=what, seconds=30.0))] for what in whats]
            return [await backend.invoke(one.spec.name, event, deadline_s=60.0) for event in events]

    before = set(descendants())
    found = asyncio.run(main())
    assert set(descendants()) <= before
    return found


@pytest.mark.parametrize(
    ("what", "kind", "detail"),
    [
        ("exit", FaultKind.CRASH, "the worker exited with code 3"),
        ("eat", FaultKind.OUT_OF_MEMORY, "MemoryError"),
        ("sleep", FaultKind.TIMEOUT, "no answer in 2 s (timeout_s)"),
        ("next", FaultKind.CRASH, "the worker was ended by signal 9"),  # an event before it has answered this one
    ],
)
def test_a_call_that_ends_its_worker_fails_alone(what: str, kind: FaultKind, detail: str) -> None:
    first, guilty, last = replies("score", what, "score", timeout_s=2.0 if what == "sleep" else 30.0)
    assert (first.fault, last.fault) == (None, None)
    assert guilty.fault is not None
    assert (guilty.fault.kind, guilty.fault.retryable) == (kind, True)
    assert detail in guilty.fault.detail
    assert first.invocation is not None
    assert last.invocation is not None
    assert first.invocation.cold_start_s > 0.0
    assert last.invocation.cold_start_s > 0.0


def test_an_error_of_the_handler_keeps_its_worker() -> None:
    async def main() -> list[Reply]:
        one = package("lambdas:raising", memory_mb=256, concurrency=1)
        async with LocalBackend(runtime="awslambdaric") as backend:
            await backend.deploy(one)
            events = [[encode(item(poison=poison))] for poison in (True, False)]
            return [await backend.invoke("raising", event, deadline_s=60.0) for event in events]

    raised, scored = asyncio.run(main())
    assert raised.fault == InfraFault(FaultKind.CRASH, retryable=False, detail="RuntimeError: poison")
    assert scored.fault is None
    assert scored.invocation is not None
    assert scored.invocation.cold_start_s == 0.0


def test_a_function_that_does_not_load_says_so() -> None:
    [reply] = replies("score", source="broken")
    assert reply.fault is not None
    assert (reply.fault.kind, reply.fault.retryable) == (FaultKind.CRASH, False)
    assert "No module named 'no_such_module'" in reply.fault.detail


def test_its_log_is_dated() -> None:
    async def main() -> None:
        one = package(memory_mb=256, concurrency=1)
        async with LocalBackend(runtime="awslambdaric") as backend:
            await backend.deploy(one)
            reply = await backend.invoke("behave", [encode(item(do="raise"))], deadline_s=60.0)
            assert reply.invocation is not None
            lines = logs.read(backend.root / "logs", "behave", since_s=3600.0, limit=1000)
            assert any(line.t and line.text == "ValueError: no such a" for line in lines)

    asyncio.run(main())


def test_a_killed_worker_is_replaced() -> None:
    async def main() -> None:
        one = package(memory_mb=256, concurrency=1)
        async with LocalBackend(runtime="awslambdaric") as backend:
            await backend.deploy(one)
            reply = await backend.invoke("behave", [encode(item(do="pid"))], deadline_s=60.0)
            assert isinstance(reply.body, list)
            os.kill(int(reply.body[0]["aggregate_reward_score"]), signal.SIGKILL)
            await until(lambda: backend.load("behave").workers == 0)
            assert (await backend.invoke("behave", [encode(item())], deadline_s=60.0)).fault is None

    asyncio.run(main())


def test_a_killed_controller_leaves_no_process() -> None:
    kill_controller(
        'await backend.invoke("behave", [encode(item())], deadline_s=60.0)',
        processes=2,
        settings="memory_mb=256, timeout_s=60.0",
        backend='runtime="awslambdaric"',
    )
