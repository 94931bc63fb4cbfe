"""Code that is not ours ends its own call, and nothing else."""

from __future__ import annotations

import asyncio
import inspect
import sys

import pytest

from rollart.user_code import UserCodeGuard, isolate_user_code


def test_an_exit_is_the_callers_failure() -> None:
    with pytest.raises(RuntimeError, match="it exited with 3"), UserCodeGuard():
        sys.exit(3)
    with pytest.raises(ValueError, match="its own"), UserCodeGuard():
        raise ValueError("its own")
    with pytest.raises(SystemExit):
        sys.exit(3)


def test_an_exit_in_a_task_of_theirs_does_not_end_the_loop() -> None:
    async def leaving() -> None:
        await asyncio.sleep(0)
        sys.exit(4)

    async def step() -> str:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(leaving())
        return "never"

    async def main() -> None:
        isolate_user_code(asyncio.get_running_loop())
        for start in (step, lambda: asyncio.gather(leaving()), lambda: asyncio.create_task(leaving(), name="theirs")):
            with pytest.raises((RuntimeError, ExceptionGroup)) as found, UserCodeGuard():
                await start()
            error = found.value.exceptions[0] if isinstance(found.value, ExceptionGroup) else found.value
            assert str(error) == "it exited with 4"
        ours = asyncio.create_task(asyncio.sleep(0, "done"), name="ours")
        assert (ours.get_name(), await ours) == ("ours", "done")

    asyncio.run(main())


def test_our_own_exits_still_end_it() -> None:
    async def leaving() -> None:
        sys.exit(5)

    async def main() -> None:
        isolate_user_code(asyncio.get_running_loop())
        await asyncio.create_task(leaving())

    with pytest.raises(SystemExit, match="5"):
        asyncio.run(main())


def test_a_task_of_theirs_that_is_cancelled_before_it_began_is_no_warning() -> None:
    async def main() -> None:
        isolate_user_code(asyncio.get_running_loop())
        theirs = asyncio.sleep(1)
        with UserCodeGuard():
            task = asyncio.get_running_loop().create_task(theirs)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()
        assert inspect.getcoroutinestate(theirs) == inspect.CORO_CLOSED  # else Python says that nobody awaited it

    asyncio.run(main())
