"""An asyncio event loop on virtual time: the same scheduler code, as fast as the CPU, deterministic.

`VirtualLoop` keeps asyncio's own Task and Future and jumps to the next timer when nothing is ready. With a `seed` the
order of everything that is ready at the same instant is shuffled, so that no code can rely on it; the same seed gives
the same order. When no callback is ready and no timer is set while the main task still waits, that is a deadlock:
`Deadlock` names every task and where it waits, at once.

It has no sockets and no threads: `run_in_executor` runs inline.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import random
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from heapq import heappop, heappush
from typing import Any, TypeAlias, TypeVar

T = TypeVar("T")


class Deadlock(RuntimeError):
    """Nothing is ready and no timer is set: the named tasks wait for each other or for events that never occur."""


_Call: TypeAlias = "Sequence[Any]"
"""A call: (callback, arguments, context). A tuple, or a list if it can be cancelled."""


class _Handle:
    """The handle that `call_soon` and `call_at` return: lighter than asyncio's own, with the same methods."""

    __slots__ = ("_call", "_when")

    def __init__(self, call: list[Any], when: float) -> None:
        self._call = call
        self._when = when

    def cancel(self) -> None:
        """Release the callback: the call itself stays queued until its time."""
        self._call[:2] = _nothing, ()

    def cancelled(self) -> bool:
        return self._call[0] is _nothing

    def when(self) -> float:
        return self._when


def _nothing() -> None:
    return None


class _Task(asyncio.Task[Any]):
    """Hashed by its number within its loop: a TaskGroup that aborts cancels its tasks in the order of a set, which by
    address would differ from one process to the next."""

    __slots__ = ("number",)
    number: int

    def __hash__(self) -> int:
        return self.number


class VirtualLoop(asyncio.AbstractEventLoop):
    """Owns virtual time, starting at 0.0 seconds. One thread, no I/O. `seed` None keeps first-in first-out order.

    Timers are a heap of instants (plain numbers) and a mapping from instant to the calls due then, nearly always one:
    comparing numbers costs a third of comparing entries, and simultaneous calls keep their order, or are shuffled.
    """

    def __init__(self, seed: int | None = None) -> None:
        self._now = 0.0
        self._ready: deque[_Call] = deque()
        self._instants: list[float] = []
        self._due: dict[float, _Call | list[_Call]] = {}
        """At each instant in the heap: a tuple is one call, a list several."""
        self._random = random.Random(seed) if seed is not None else None
        self._tasks = itertools.count()
        self._running = self._closed = self._stopping = False
        self._failure: BaseException | None = None

    def time(self) -> float:
        return self._now

    def call_soon(self, callback: Any, *args: Any, context: contextvars.Context | None = None) -> Any:  # type: ignore[override]
        """Callers that give a context get no handle: these are futures and tasks, which never use it."""
        if context is not None:
            self._ready.append((callback, args, context))
            return None
        call = [callback, args, None]
        self._ready.append(call)
        return _Handle(call, self._now)

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def call_later(self, delay: float, callback: Any, *args: Any, context: contextvars.Context | None = None) -> Any:  # type: ignore[override]
        return self.call_at(self._now + delay, callback, *args, context=context)

    def call_at(self, when: float, callback: Any, *args: Any, context: contextvars.Context | None = None) -> Any:  # type: ignore[override]
        when = max(when, self._now)
        call = [callback, args, context]
        self._set(when, [call])
        return _Handle(call, when)

    def post(self, when: float, callback: Callable[..., object], *args: Any) -> None:
        """`call_at` without a handle, for timers that are never cancelled: an outdated timer is ignored when it
        fires."""
        if when not in self._due and when > self._now:
            self._due[when] = callback, args, None
            heappush(self._instants, when)
        else:
            self._set(max(when, self._now), [(callback, args, None)])

    def _set(self, when: float, calls: list[_Call]) -> None:
        there = self._due.get(when)
        if there is None:
            self._due[when] = calls
            heappush(self._instants, when)
        elif type(there) is tuple:
            self._due[when] = [there, *calls]
        else:
            there += calls  # type: ignore[operator]

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(self, coro: Any, *, name: str | None = None, context: contextvars.Context | None = None) -> Any:
        task = _Task.__new__(_Task)
        task.number = next(self._tasks)  # before asyncio puts it into sets of its own
        task.__init__(coro, loop=self, name=name, context=context)  # type: ignore[misc]
        return task

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
                if self._ready:
                    self._turn()
                else:
                    self._advance()
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
        self._instants.clear()
        self._due.clear()

    def is_running(self) -> bool:
        return self._running

    def is_closed(self) -> bool:
        return self._closed

    def get_debug(self) -> bool:
        return False

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Errors are never only logged: an error that is not awaited ends the run."""
        error = context.get("exception")
        if isinstance(error, BaseException) and self._failure is None:
            self._failure = error

    def _turn(self) -> None:
        """Run the ready calls; calls that become ready meanwhile run in the next turn."""
        ready = self._ready
        count = len(ready)
        if self._random is not None and count > 1:
            batch = [ready.popleft() for _ in range(count)]
            self._random.shuffle(batch)
            ready.extendleft(reversed(batch))
        pop = ready.popleft
        while count:
            count -= 1
            callback, args, context = pop()
            if context is None:
                callback(*args)
            else:
                context.run(callback, *args)

    def _advance(self) -> None:
        """With nothing ready, advance to the next instant with due calls. Instants with a single call are run at once,
        until a call makes another one ready or stops the loop."""
        instants, due, ready = self._instants, self._due, self._ready
        while not ready:
            if not instants:
                raise Deadlock(_describe_waiting_tasks(self))
            when = heappop(instants)
            calls = due.pop(when)
            if type(calls) is tuple:
                self._now = when
                calls[0](*calls[1])
                if self._stopping or self._failure is not None:
                    return
            else:
                calls = [call for call in calls if call[0] is not _nothing]
                if calls:
                    self._now = when
                    ready.extend(calls)


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def posting(loop: asyncio.AbstractEventLoop) -> Callable[..., object]:
    """`post` of a virtual loop, `call_at` of any other."""
    return loop.post if isinstance(loop, VirtualLoop) else loop.call_at


def sleeping(seconds: float) -> asyncio.Future[None]:
    """An awaitable in place of `asyncio.sleep` on hot paths, at a third of the cost. If it is abandoned, its timer
    still fires, without effect."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[None] = asyncio.Future(loop=loop)
    if isinstance(loop, VirtualLoop):
        loop.post(loop._now + seconds, _wake, future)
    else:
        loop.call_at(loop.time() + seconds, _wake, future)
    return future


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


def _describe_waiting_tasks(loop: asyncio.AbstractEventLoop) -> str:
    lines = []
    for task in sorted(asyncio.all_tasks(loop), key=lambda t: t.get_name()):
        stack = task.get_stack(limit=1)
        where = f"{stack[0].f_code.co_qualname}:{stack[0].f_lineno}" if stack else "not started"
        lines.append(f"{task.get_name()} waits in {where}")
    return f"deadlock at {loop.time():.3f} s: " + ("; ".join(lines) or "no task is left")
