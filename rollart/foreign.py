"""Code that is not ours, on our loop: environments and agent programs. What it raises is its own, `SystemExit` too."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextvars import ContextVar, Token
from types import TracebackType
from typing import Any, TypeVar

__all__ = ["contain", "foreign"]

T = TypeVar("T")

_INSIDE: ContextVar[bool] = ContextVar("foreign", default=False)
"""Tasks inherit it from whoever starts them."""


class foreign:
    """`with foreign():` around a call, in one task. A `SystemExit` becomes a RuntimeError; so it does in tasks that are
    started inside, where the loop was told to (`contain`): there it would end the loop, whoever awaits the task."""

    __slots__ = ("_token",)

    def __enter__(self) -> None:
        self._token: Token[bool] = _INSIDE.set(True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _INSIDE.reset(self._token)
        if isinstance(error, SystemExit):
            raise _exited(error) from None


def contain(loop: asyncio.AbstractEventLoop) -> None:
    """From now on, tasks of code that is not ours end alone."""
    loop.set_task_factory(_task)


def _task(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
    if not _INSIDE.get():
        return asyncio.Task(coroutine, loop=loop, **options)
    task = asyncio.Task(_contained(coroutine), loop=loop, **options)
    task.add_done_callback(lambda _: coroutine.close())  # it may have been cancelled before it began
    return task


async def _contained(coroutine: Coroutine[Any, Any, T]) -> T:
    try:
        return await coroutine
    except SystemExit as exit:
        raise _exited(exit) from None


def _exited(exit: SystemExit) -> RuntimeError:
    return RuntimeError(f"it exited with {exit.code!r}")
