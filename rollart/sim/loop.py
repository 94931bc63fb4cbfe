"""An asyncio event loop on virtual time: the same scheduler code, as fast as the CPU, deterministic.

`VirtualLoop` keeps asyncio's own Task and Future and jumps to the next timer when nothing is ready. With a
`seed` the order of everything that is ready at the same instant is shuffled, so that nobody relies on it; the
same seed gives the same order. When no callback is ready and no timer is set while the main task still waits,
that is a deadlock: `Deadlock` names every task and where it waits, at once.

It has no sockets and no threads: `run_in_executor` runs inline.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

__all__ = ["Deadlock", "VirtualLoop", "run"]

T = TypeVar("T")


class Deadlock(RuntimeError):
    """Nothing is ready and no timer is set: the tasks named here wait for each other, or for nothing."""


class _Handle:
    """What `call_soon` and `call_at` return: lighter than asyncio's own, with the same two methods."""

    __slots__ = ("_args", "_callback", "_cancelled", "_context", "_when")

    def __init__(
        self, when: float, callback: Callable[..., Any], args: tuple[Any, ...], context: contextvars.Context | None
    ) -> None:
        self._when = when
        self._callback = callback
        self._args = args
        self._context = context
        self._cancelled = False

    def cancel(self) -> None:
        """It stays in the heap until its time, so it lets go of what it would have called."""
        self._cancelled = True
        self._callback, self._args = _nothing, ()

    def cancelled(self) -> bool:
        return self._cancelled

    def when(self) -> float:
        return self._when


def _nothing() -> None:
    return None


class VirtualLoop(asyncio.AbstractEventLoop):
    """Owns virtual time, starting at 0.0 seconds. One thread, no I/O. `seed` None keeps first-in first-out order."""

    def __init__(self, seed: int | None = None) -> None:
        self._now = 0.0
        self._ready: deque[_Handle] = deque()
        self._timers: list[tuple[float, float, int, _Handle]] = []
        self._sequence = itertools.count()
        self._random = random.Random(seed) if seed is not None else None
        self._running = self._closed = self._stopping = False
        self._failure: BaseException | None = None
        self.callbacks = 0

    def time(self) -> float:
        return self._now

    def call_soon(self, callback: Any, *args: Any, context: contextvars.Context | None = None) -> Any:  # type: ignore[override]
        handle = _Handle(self._now, callback, args, context)
        self._ready.append(handle)
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def call_later(self, delay: float, callback: Any, *args: Any, context: contextvars.Context | None = None) -> Any:  # type: ignore[override]
        when = self._now + delay if delay > 0.0 else self._now
        handle = _Handle(when, callback, args, context)
        tie = self._random.random() if self._random is not None else 0.0
        heapq.heappush(self._timers, (when, tie, next(self._sequence), handle))
        return handle

    def call_at(self, when: float, callback: Any, *args: Any, context: contextvars.Context | None = None) -> Any:  # type: ignore[override]
        when = max(when, self._now)
        handle = _Handle(when, callback, args, context)
        tie = self._random.random() if self._random is not None else 0.0
        heapq.heappush(self._timers, (when, tie, next(self._sequence), handle))
        return handle

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(self, coro: Any, *, name: str | None = None, context: contextvars.Context | None = None) -> Any:
        return asyncio.Task(coro, loop=self, name=name, context=context)

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Any:  # type: ignore[override]
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    def run_forever(self) -> None:
        asyncio._set_running_loop(self)
        self._running = True
        try:
            while not self._stopping and self._failure is None:
                self._turn()
        finally:
            self._running = self._stopping = False
            asyncio._set_running_loop(None)
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def run_until_complete(self, future: Any) -> Any:
        task = asyncio.ensure_future(future, loop=self)  # noqa: TID251 - a loop is where the first task comes from
        task.add_done_callback(lambda _: self.stop())
        self.run_forever()
        return task.result()

    def stop(self) -> None:
        self._stopping = True

    def close(self) -> None:
        self._closed = True
        self._ready.clear()
        self._timers.clear()

    def is_running(self) -> bool:
        return self._running

    def is_closed(self) -> bool:
        return self._closed

    def get_debug(self) -> bool:
        return False

    async def shutdown_asyncgens(self) -> None:
        return None

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        return None

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Nothing is only logged here: an error nobody awaited ends the run."""
        error = context.get("exception")
        if isinstance(error, BaseException) and self._failure is None:
            self._failure = error

    default_exception_handler = call_exception_handler

    def _turn(self) -> None:
        ready = self._ready
        if not ready:
            self._advance()
        count = len(ready)
        if self._random is not None and count > 1:
            batch = [ready.popleft() for _ in range(count)]
            self._random.shuffle(batch)
            ready.extendleft(reversed(batch))
        self.callbacks += count
        for _ in range(count):
            handle = ready.popleft()
            context = handle._context
            if context is None:
                handle._callback(*handle._args)
            else:
                context.run(handle._callback, *handle._args)

    def _advance(self) -> None:
        timers = self._timers
        while timers and timers[0][3]._cancelled:
            heapq.heappop(timers)
        if not timers:
            raise Deadlock(_who_waits(self))
        self._now = timers[0][0]
        while timers and timers[0][0] <= self._now:
            self._ready.append(heapq.heappop(timers)[3])


def run(main: Coroutine[Any, Any, T], *, seed: int | None = None) -> T:
    """Run `main` on a fresh virtual loop, like `asyncio.run`: remaining tasks are cancelled at the end."""
    loop = VirtualLoop(seed)  # type: ignore[abstract]
    try:
        result: T = loop.run_until_complete(main)
        return result
    finally:
        leftover = [task for task in asyncio.all_tasks(loop) if not task.done()]
        for task in leftover:
            task.cancel()
        if leftover:
            loop.run_until_complete(asyncio.gather(*leftover, return_exceptions=True))
        loop.close()


def _who_waits(loop: asyncio.AbstractEventLoop) -> str:
    lines = []
    for task in sorted(asyncio.all_tasks(loop), key=lambda t: t.get_name()):
        stack = task.get_stack(limit=1)
        where = f"{stack[0].f_code.co_qualname}:{stack[0].f_lineno}" if stack else "not started"
        lines.append(f"{task.get_name()} waits in {where}")
    return f"deadlock at {loop.time():.3f} s: " + ("; ".join(lines) or "no task is left")
