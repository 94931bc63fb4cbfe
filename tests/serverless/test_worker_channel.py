"""The channel of a worker process: what is left when it closes and nobody waits."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

from serverless.backends.processes import ProcessWorker


def test_a_start_that_is_given_up_before_it_waits_leaves_no_error_behind() -> None:
    """Python would report an exception that nobody retrieved, in the middle of the user's terminal."""
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
