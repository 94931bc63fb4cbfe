"""The channel of a worker process: frames that are not the awaited answer, and its end."""

from __future__ import annotations

import asyncio
import gc
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from serverless.types import FaultKind
from serverless.workers.channel import encode_message
from serverless.workers.pool import WorkerFault, WorkerRequest
from serverless.workers.processes import ProcessWorker


@pytest.mark.slow
def test_a_start_that_is_given_up_before_it_waits_leaves_no_error_behind() -> None:
    """Otherwise Python reports an unretrieved exception, in the middle of the user's terminal."""
    reported: list[dict[str, Any]] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: reported.append(context))
        gone: list[bool] = []
        worker = ProcessWorker(0, -1, loop.create_future(), lambda: gone.append(True))
        worker.connection_lost(None)
        assert gone == [True]
        del worker
        gc.collect()

    asyncio.run(main())
    assert reported == []


def channel(scenario: Callable[[ProcessWorker, socket.socket, asyncio.Event], Awaitable[None]]) -> None:
    """A worker's client, ready, and the other end of its channel. The event is set once the worker is retired."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        gone = asyncio.Event()
        worker = ProcessWorker(0, -1, loop.create_future(), gone.set)
        await loop.create_unix_connection(lambda: worker, sock=ours)
        with theirs:
            theirs.sendall(encode_message(["", "ready", 0.25, None]))
            await worker.ready()
            async with asyncio.timeout(60):
                await scenario(worker, theirs, gone)

    asyncio.run(main())


def test_a_worker_that_sends_a_second_frame_is_retired() -> None:
    async def scenario(worker: ProcessWorker, theirs: socket.socket, gone: asyncio.Event) -> None:
        call = asyncio.create_task(worker.call(WorkerRequest("a", [], 1.0)))
        await asyncio.sleep(0)
        theirs.sendall(encode_message(["a", "ok", 0.0, [1]]))
        assert (await call).body == [1]
        theirs.sendall(encode_message(["a", "ok", 0.0, [2]]))
        await gone.wait()
        assert not worker.alive

    channel(scenario)


@pytest.mark.parametrize(
    "frame",
    [
        encode_message(["another", "ok", 0.0, [1]]),
        encode_message(["a", "fine", 0.0, [1]]),
        encode_message(["a", "ok"]),
        encode_message(["a", "fault", 0.0, "no such kind", "", True, True]),
        encode_message([]),
        encode_message("text"),
        b"\xff\xff\xff\xff",
        b"\x00\x00\x00\x02\xc1\xc1",
    ],
)
def test_a_frame_that_is_not_the_answer_fails_the_call_and_retires_the_worker(frame: bytes) -> None:
    async def scenario(worker: ProcessWorker, theirs: socket.socket, gone: asyncio.Event) -> None:
        call = asyncio.create_task(worker.call(WorkerRequest("a", [], 1.0)))
        await asyncio.sleep(0)
        theirs.sendall(frame)
        with pytest.raises(WorkerFault) as caught:
            await call
        assert (caught.value.fault.kind, caught.value.fault.retryable) == (FaultKind.BAD_ANSWER, True)
        await gone.wait()
        assert not worker.alive

    channel(scenario)
