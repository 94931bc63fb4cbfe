"""Users' environments in the controller's process, wrapped so that none of their calls can block the run."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from rollart.model import Observation, Step
from rollart.ports import Environment, EnvironmentFactory
from rollart.user_code import UserCodeGuard, cancel_call, declares_quick, guard, require_awaitable

T = TypeVar("T")


def in_process(make: EnvironmentFactory) -> EnvironmentFactory:
    """Wrap the factory so that each environment is an `InProcessEnvironment`."""

    @guard
    def made() -> Environment:
        return InProcessEnvironment(make())

    return made


class InProcessEnvironment:
    """Implements `Environment` over a user's object. One call at a time.

    Each call runs in its own task, which waits only for the user's code. A cancelled caller returns at once; the task
    is cancelled, and abandoned if it does not end (`rollart.user_code.cancel_call`). `close` waits for such a task to
    end before it calls the user's `close`.

    An environment whose attribute `quick` is true promises to return without waiting and is called without a task; a
    call that waits nevertheless is a fault.
    """

    __slots__ = ("_call", "_environment", "_task")

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self._call = self._at_once if declares_quick(environment) else self._in_task
        self._task: asyncio.Task[object] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._environment, name)

    async def reset(self, seed: int) -> Observation:
        return await self._call("reset", lambda: self._environment.reset(seed))

    async def step(self, action: str) -> Step:
        return await self._call("step", lambda: self._environment.step(action))

    async def close(self) -> None:
        before = self._task
        if before is not None and not before.done():
            await asyncio.shield(asyncio.gather(before, return_exceptions=True))
        await self._call("close", self._environment.close)

    async def _at_once(self, what: str, call: Callable[[], Awaitable[T]]) -> T:
        task = asyncio.current_task()
        assert task is not None
        cancelling = task.cancelling()
        try:
            return _answer(what, call)
        finally:
            if task.cancelling() > cancelling:  # cancelled by the call itself: no other code ran meanwhile
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.sleep(0)
                while task.cancelling() > cancelling:
                    task.uncancel()
                raise RuntimeError("it cancelled its own task")

    async def _in_task(self, what: str, call: Callable[[], Awaitable[T]]) -> T:
        loop = asyncio.get_running_loop()
        # Not in a TaskGroup, which would wait for the task without bound.
        task = loop.create_task(_awaited(what, call), name=f"{what} of {type(self._environment).__name__}")
        self._task = task
        ended: asyncio.Future[None] = loop.create_future()
        task.add_done_callback(lambda _: None if ended.done() else ended.set_result(None))
        try:
            await ended
        except asyncio.CancelledError:
            cancel_call(task)
            raise
        if task.cancelled():
            raise RuntimeError("it cancelled its own task")
        return task.result()


@guard
async def _awaited(what: str, call: Callable[[], Awaitable[T]]) -> T:
    with UserCodeGuard():
        return await require_awaitable(call(), what)  # type: ignore[return-value]


@guard
def _answer(what: str, call: Callable[[], Awaitable[T]]) -> T:
    with UserCodeGuard():
        steps = require_awaitable(call(), what).__await__()
        try:
            next(steps)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        steps.close()
    raise RuntimeError(f"{what} waited, but its class says `quick = True` (rule: a quick environment answers at once)")
