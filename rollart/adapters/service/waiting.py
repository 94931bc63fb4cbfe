"""Waiting for a change of shared state."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import TypeVar

__all__ = ["ChangeNotifier"]

Polled = TypeVar("Polled")


class ChangeNotifier:
    """Serves any number of callers on one loop; each polls again after every `wake`, which never waits."""

    def __init__(self) -> None:
        self._changed = asyncio.Event()
        """Set at the next change, and then replaced."""

    def wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def until(
        self, poll: Callable[[], Polled | None], seconds: float, due: Callable[[], float | None]
    ) -> Polled | None:
        """The first result of `poll` that is not None; None after `seconds`. `poll` is called at once, at every change
        and at the loop time that `due` returns."""
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        while True:
            found = poll()
            if found is not None or loop.time() >= end:
                return found
            next_due, changed = due(), self._changed
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(end if next_due is None else min(end, next_due)):
                    await changed.wait()
