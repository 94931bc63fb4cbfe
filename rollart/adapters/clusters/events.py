"""The event log of a runtime."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator

from rollart.ports import RuntimeEvent

__all__ = ["EventLog"]

MAX_EVENTS = 10_000
"""Events that are kept: a reader that is further behind misses the oldest."""


class EventLog:
    """Any number of readers, each from the oldest event that is kept."""

    def __init__(self, kept: int = MAX_EVENTS) -> None:
        self._events: deque[RuntimeEvent] = deque(maxlen=kept)
        self._said = 0
        self._closed = False
        self._changed = asyncio.Event()

    def say(self, event: RuntimeEvent) -> None:
        self._events.append(event)
        self._said += 1
        self._notify()

    async def read(self) -> AsyncIterator[RuntimeEvent]:
        """Events until `close`. Waits for `emit`."""
        seen = 0
        while not self._closed:
            while seen < self._said:
                seen = max(seen, self._said - len(self._events))
                yield self._events[seen - self._said]
                seen += 1
            changed = self._changed
            await changed.wait()

    def close(self) -> None:
        self._closed = True
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
