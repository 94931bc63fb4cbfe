"""The event log of a runtime."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator

from rollart.ports import RuntimeEvent

MAX_EVENTS = 10_000
"""Events that are kept: a reader that is further behind misses the oldest."""


class EventLog:
    """Any number of readers, each from the oldest event that is kept."""

    def __init__(self, max_events: int = MAX_EVENTS) -> None:
        self._events: deque[RuntimeEvent] = deque(maxlen=max_events)
        self._count = 0
        self._closed = False
        self._changed = asyncio.Event()

    def emit(self, event: RuntimeEvent) -> None:
        self._events.append(event)
        self._count += 1
        self._notify()

    async def read(self) -> AsyncIterator[RuntimeEvent]:
        """Events until `close`. Waits for `emit`."""
        next_event = 0
        while not self._closed:
            while next_event < self._count:
                next_event = max(next_event, self._count - len(self._events))
                yield self._events[next_event - self._count]
                next_event += 1
            changed = self._changed
            await changed.wait()

    def close(self) -> None:
        self._closed = True
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
