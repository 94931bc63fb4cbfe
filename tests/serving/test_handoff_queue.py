"""Places before a decode engine, when who waits for one is cancelled. On the virtual loop."""

from __future__ import annotations

import asyncio
from typing import Any
from unittest.mock import Mock

import pytest

from rollart.serving.handoff import HandoffQueue
from rollart.sim import loop


def decode_engine() -> Any:
    return Mock(engine=Mock(id="decode-0"), running=1)


@pytest.mark.parametrize("freed_first", [False, True])
def test_who_is_cancelled_as_a_place_comes_free_takes_none_and_harms_nobody(freed_first: bool) -> None:
    async def main() -> None:
        queue, engine = HandoffQueue(1, 1), decode_engine()
        await queue.enter(engine)
        waits, next_one = (asyncio.create_task(queue.enter(engine)) for _ in range(2))
        await asyncio.sleep(0)
        # Both in one turn of the loop, as when a publish ends several trajectories at once.
        if freed_first:
            queue.leave(engine)
        waits.cancel()
        if not freed_first:
            queue.leave(engine)
        with pytest.raises(asyncio.CancelledError):
            await waits
        await next_one
        queue.leave(engine)
        assert not queue.full(engine)

    loop.run(main())
