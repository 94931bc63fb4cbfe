"""Synchronous calls off the loop: one daemon thread per episode, so that one call that hangs holds up nobody else."""

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

    A caller waits for its own call; one that is cancelled leaves the call to end by itself, with nobody to hear of it.
    The thread is a daemon and nobody joins it: a call that never returns costs a thread, and neither the loop nor the
    end of the program waits for it.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._open = 0

    @property
    def busy(self) -> bool:
        """Whether a call was given up by its caller and has not returned."""
        return self._open > 0

    async def call(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """What the call returns or raises, made on the thread."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()
        self._open += 1
        self._calls.put((loop, answer, functools.partial(function, *args, **kwargs)))
        return await answer

    def end(self, last: Callable[[], object] | None = None) -> None:
        """No more calls: the thread ends after those it has, and after `last`, whatever that raises."""
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
            with contextlib.suppress(RuntimeError):  # the loop is over, and so is whoever waited
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
        answer.exception()  # where nobody waits any more, nobody is to hear of it
