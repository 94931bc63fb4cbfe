"""Synchronous calls off the loop: one daemon thread per episode, so that a call that hangs blocks no other episode."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["CallThread"]

T = TypeVar("T")
_Call = tuple[asyncio.AbstractEventLoop, "asyncio.Future[Any]", Callable[[], Any]]


class CallThread:
    """Owns one thread, started by the first call, which makes its calls in order. Used by one episode's task.

    A caller waits for its own call; a cancelled caller abandons the call, whose result is then dropped. The thread is a
    daemon and is never joined: a call that never returns costs a thread, and delays neither the loop nor the end of the
    program.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._open = 0

    @property
    def busy(self) -> bool:
        """True if an abandoned call has not returned."""
        return self._open > 0

    async def call(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """The return value or exception of the function, called on the thread."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()
        self._open += 1
        self._calls.put((loop, answer, functools.partial(function, *args, **kwargs)))
        return await answer

    def end(self, last: Callable[[], object] | None = None) -> None:
        """Accept no more calls: the thread ends after its pending calls and after `last`, whose exceptions are
        ignored."""
        if self._thread is None:
            if last is not None:
                with contextlib.suppress(Exception):
                    last()
            return
        if last is not None:
            loop = asyncio.get_running_loop()
            self._calls.put((loop, loop.create_future(), last))
        self._calls.put(None)
        self._thread = None

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            loop, answer, function = call
            value: Any = None
            error: BaseException | None = None
            try:
                value = function()
            except BaseException as raised:
                error = raised
            with contextlib.suppress(RuntimeError):  # the loop is closed, and the caller with it
                loop.call_soon_threadsafe(self._settle, answer, value, error)

    def _settle(self, answer: asyncio.Future[Any], value: Any, error: BaseException | None) -> None:
        self._open -= 1
        if answer.done():
            return
        if error is None:
            answer.set_result(value)
            return
        if not isinstance(error, Exception) or isinstance(error, StopIteration):  # a future carries neither
            error = RuntimeError(f"it raised {type(error).__name__}: {error}")
        answer.set_exception(error)
        answer.exception()  # marked as retrieved: an abandoned call logs nothing
