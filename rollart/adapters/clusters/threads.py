"""Blocking calls that may never return and cannot be interrupted."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def run_in_daemon_thread(function: Callable[..., T], *args: object) -> T:
    """As `asyncio.to_thread`, but cancellation abandons the call: neither the end of the loop nor that of the process
    waits for it."""
    return await daemon_thread_future(function, *args)


def daemon_thread_future(function: Callable[..., T], *args: object) -> asyncio.Future[T]:
    """The result of such a call, as a future."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if done.done():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)  # type: ignore[arg-type]

    def work() -> None:
        result, error = None, None
        try:
            result = function(*args)
        except BaseException as problem:
            error = problem
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=work, name=f"{function.__name__}, left behind if it hangs", daemon=True).start()
    return done


def run_detached(function: Callable[..., object], *args: object) -> None:
    """Call a function without waiting for it. Its exceptions are ignored."""

    def work() -> None:
        with contextlib.suppress(Exception):
            function(*args)

    threading.Thread(target=work, name=f"{function.__name__}, of no matter", daemon=True).start()
