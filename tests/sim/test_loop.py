"""The virtual-time loop: time, order, cancellation, deadlock."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollart.sim.loop import Deadlock, VirtualLoop, run


def now() -> float:
    return asyncio.get_running_loop().time()


def test_time_jumps_to_the_next_timer() -> None:
    async def main() -> float:
        await asyncio.sleep(3600.0)
        return now()

    assert run(main()) == 3600.0


@given(st.lists(st.floats(0, 1000, allow_nan=False), min_size=1, max_size=20), st.integers(0, 2**32))
def test_sleepers_wake_in_order_of_time(delays: list[float], seed: int) -> None:
    woken: list[float] = []

    async def sleeper(delay: float) -> None:
        await asyncio.sleep(delay)
        assert now() == delay
        woken.append(delay)

    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            for delay in delays:
                tasks.create_task(sleeper(delay))

    run(main(), seed=seed)
    assert woken == sorted(delays)


def order(seed: int | None) -> list[int]:
    seen: list[int] = []

    async def task(i: int) -> None:
        await asyncio.sleep(1.0)
        seen.append(i)

    async def main() -> None:
        await asyncio.gather(*(task(i) for i in range(20)))

    run(main(), seed=seed)
    return seen


def test_ties_are_broken_by_the_seed_and_only_by_it() -> None:
    assert order(None) == list(range(20))
    assert order(1) == order(1)
    assert order(1) != order(2)
    assert sorted(order(1)) == list(range(20))


@pytest.mark.parametrize("seed", [None, 1, 2])
def test_a_group_that_aborts_ends_its_tasks_in_the_same_order_wherever_they_lie(seed: int | None) -> None:
    """Python keeps the tasks of a group in a set, whose order follows their hashes: by default, addresses."""

    def ended() -> list[int]:
        order: list[int] = []

        async def waits(n: int) -> None:
            try:
                await asyncio.Event().wait()
            finally:
                order.append(n)

        async def main() -> None:
            with contextlib.suppress(ExceptionGroup):
                async with asyncio.TaskGroup() as tasks:
                    for n in range(12):
                        tasks.create_task(waits(n))
                    await asyncio.sleep(1.0)
                    raise ValueError("over")

        run(main(), seed=seed)
        return order

    elsewhere = list[list[object]]()
    first = ended()
    for n in range(1, 6):
        elsewhere.append([object() for _ in range(977 * n)])
        assert ended() == first
    assert sorted(first) == list(range(12))


def test_timeouts_and_task_groups_and_queues() -> None:
    async def main() -> tuple[float, int]:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5.0):
                await asyncio.Event().wait()
        queue: asyncio.Queue[int] = asyncio.Queue(maxsize=1)

        async def producer() -> None:
            for i in range(5):
                await asyncio.sleep(1.0)
                await queue.put(i)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(producer())
            total = sum([await queue.get() for _ in range(5)])
        return now(), total

    assert run(main()) == (10.0, 10)


def test_a_deadlock_names_who_waits_where() -> None:
    async def stuck() -> None:
        await asyncio.Event().wait()

    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(stuck(), name="the stuck one")

    with pytest.raises(Deadlock, match=r"the stuck one waits in .*stuck"):
        run(main())


def test_an_error_nobody_awaits_ends_the_run() -> None:
    async def main() -> None:
        asyncio.get_running_loop().call_soon(lambda: 1 / 0)
        await asyncio.sleep(1.0)

    with pytest.raises(ZeroDivisionError):
        run(main())


def test_executors_run_inline() -> None:
    async def main() -> int:
        return await asyncio.to_thread(lambda: 7)

    assert run(main()) == 7


def test_leftover_tasks_are_cancelled() -> None:
    ended: list[bool] = []

    async def leftover() -> None:
        try:
            await asyncio.sleep(1e9)
        finally:
            ended.append(True)

    async def main() -> None:
        asyncio.get_running_loop().create_task(leftover())
        await asyncio.sleep(1.0)

    run(main())
    assert ended == [True]


def test_a_loop_is_one_thread_and_closes() -> None:
    loop = VirtualLoop()
    loop.close()
    assert loop.is_closed()
    assert not loop.is_running()
