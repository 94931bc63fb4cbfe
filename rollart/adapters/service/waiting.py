"""Waiting for whatever changes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import TypeVar

__all__ = ["ChangeNotifier"]

T = TypeVar("T")


class ChangeNotifier:
    """Any number of callers on one loop; each looks again at every `wake`, which waits for nobody."""

    def __init__(self) -> None:
        self._changed = asyncio.Event()
        """Of everything from now on; another one once it is set."""

    def wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def until(self, look: Callable[[], T | None], seconds: float, due: Callable[[], float | None]) -> T | None:
        """What `look` finds, looked for at once, at every change and when something is `due` (a second of the loop);
        None after `seconds`."""
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        while True:
            found = look()
            if found is not None or loop.time() >= end:
                return found
            next_due, changed = due(), self._changed
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(end if next_due is None else min(end, next_due)):
                    await changed.wait()
