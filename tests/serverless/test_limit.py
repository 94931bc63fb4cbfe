"""The time limit of a pool's calls, against asyncio.timeout, on virtual time."""

from __future__ import annotations

import asyncio

import pytest

from rollart.sim import loop as virtual
from serverless.backends._limit import ReusableTimeout


def test_it_ends_what_takes_longer_again_and_again_and_nothing_else() -> None:
    async def main() -> list[float]:
        loop, limit, ended = asyncio.get_running_loop(), ReusableTimeout(), []
        for limit_s, work_s in ((1.0, 0.5), (1.0, 2.0), (0.1, 3.0), (5.0, 4.0), (0.25, 9.0)):
            began = loop.time()
            try:
                with limit.of(limit_s):
                    await asyncio.sleep(work_s)
            except TimeoutError:
                ended.append(-(loop.time() - began))
            else:
                ended.append(loop.time() - began)
        limit.close()
        return ended

    assert virtual.run(main()) == pytest.approx([0.5, -1.0, -0.1, 4.0, -0.25])


def test_a_timer_of_an_ended_block_disturbs_nobody() -> None:
    async def main() -> float:
        limit = ReusableTimeout()
        with limit.of(1.0):
            pass
        await asyncio.sleep(2.0)
        limit.close()
        return asyncio.get_running_loop().time()

    assert virtual.run(main()) == pytest.approx(2.0)


def test_a_cancellation_from_outside_stays_one_even_at_the_same_instant() -> None:
    async def work(limit: ReusableTimeout) -> None:
        with limit.of(1.0):
            await asyncio.sleep(9.0)

    async def main(cancel_at: float) -> str:
        limit = ReusableTimeout()
        async with asyncio.TaskGroup() as group:
            task = group.create_task(work(limit))
            asyncio.get_running_loop().call_at(cancel_at, task.cancel)
        return "cancelled" if task.cancelled() else "other"

    for cancel_at in (0.5, 1.0):
        assert virtual.run(main(cancel_at)) == "cancelled"


def test_an_error_in_the_block_is_that_error() -> None:
    async def main() -> None:
        with ReusableTimeout().of(1.0):
            raise KeyError("x")

    with pytest.raises(KeyError):
        virtual.run(main())
