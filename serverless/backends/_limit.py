"""A time limit for consecutive calls, without a timer per call."""

from __future__ import annotations

import asyncio

__all__ = ["ReusableTimeout"]

_EARLY_S = 0.0005
"""Seconds that a loop with timers of 1 ms may fire early."""


class ReusableTimeout:
    """A reusable `asyncio.timeout`, entered repeatedly by one task at a time, in one loop.

        with limit.of(seconds):      # TimeoutError when they have passed
            await ...

    Its timer keeps running when a block ends, and checks on firing whether the current block is overdue. So calls that
    end in time, which are nearly all, neither make nor cancel a timer. `close` stops it.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[object] | None = None
        self._expires = 0.0
        self._expired = False
        self._cancelling = 0

    def of(self, seconds: float) -> ReusableTimeout:
        self._expires = self._loop.time() + seconds
        return self

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def __enter__(self) -> None:
        self._task = asyncio.current_task()
        assert self._task is not None
        self._expired = False
        self._cancelling = self._task.cancelling()
        if self._timer is None or self._timer.when() > self._expires:
            self.close()
            self._timer = self._loop.call_at(self._expires, self._fire)

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        task, self._task = self._task, None
        if not self._expired or task is None:
            return
        # This timeout was one of the task's cancellations; if it was the only one, it becomes a `TimeoutError` here.
        if task.uncancel() <= self._cancelling and kind is not None and issubclass(kind, asyncio.CancelledError):
            raise TimeoutError from None

    def _fire(self) -> None:
        self._timer = None
        if self._task is None:
            return
        if self._expires - self._loop.time() > _EARLY_S:
            self._timer = self._loop.call_at(self._expires, self._fire)
            return
        self._expired = True
        self._task.cancel()
