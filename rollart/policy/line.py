"""Admission order: resumed work first, then arrival order or longest first.

Longest processing time first (LPT) minimises the completion time of a set of trajectories (StreamRL, arXiv 2504.15930,
§4.3; Graham 1969), but under a steady stream of arrivals a short item might wait for ever. Items that arrive before the
next admission form a wave and are admitted in exact LPT order. An item of a wave that left S items in the queue has
priority once S + `GRACE` items were admitted since the wave began, so at most 2 S + `GRACE` items precede it.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import Generic, TypeVar

__all__ = ["GRACE", "AdmissionQueue"]

T = TypeVar("T")

GRACE = 8
"""Later arrivals that may precede an item that found the queue empty: a group."""


@dataclass(slots=True)
class _Wave:
    """`admitted_before`: admissions before the wave; `size`: length of the queue at the end of the wave, None while it
    lasts."""

    admitted_before: int
    size: int | None = None


@dataclass(slots=True)
class _QueuedItem(Generic[T]):
    item: T
    begun: bool
    wave: _Wave
    left: bool = False


@dataclass(slots=True)
class AdmissionQueue(Generic[T]):
    """`longest`: order by length, then by age. Ties: the earlier arrival. Synchronous; O(log n) per call."""

    longest: bool = False
    _by_rank: list[tuple[tuple[float, ...], _QueuedItem[T]]] = field(default_factory=list)
    _by_age: list[tuple[int, int, _QueuedItem[T]]] = field(default_factory=list)
    _seq: int = 0
    _waiting: int = 0
    _gone: int = 0
    _wave: _Wave = field(default_factory=lambda: _Wave(0))

    def __len__(self) -> int:
        return self._waiting

    def add(self, item: T, *, age: int, length: float = 0.0, begun: bool = False) -> None:
        """`age` counts up from the first arrival ever; an item that returns keeps its age."""
        if self._wave.size is not None:
            self._wave = _Wave(self._gone)
        queued = _QueuedItem(item, begun, self._wave)
        rank = (0.0, age) if begun else (1.0, -length if self.longest else 0.0, age)
        self._seq += 1
        self._waiting += 1
        heapq.heappush(self._by_rank, ((*rank, self._seq), queued))
        if self.longest and not begun:
            heapq.heappush(self._by_age, (age, self._seq, queued))

    def head(self) -> T | None:
        """The next item to admit; None if the queue is empty."""
        queued = self._next()
        return None if queued is None else queued.item

    def leave(self) -> T:
        """Remove the head, which was admitted or gave up."""
        queued = self._next()
        if queued is None:
            raise ValueError("the queue is empty (rule: call head first)")
        if self._wave.size is None:
            self._wave.size = self._waiting
        queued.left = True
        self._waiting -= 1
        self._gone += 1
        return queued.item

    def _next(self) -> _QueuedItem[T] | None:
        while self._by_rank and self._by_rank[0][1].left:
            heapq.heappop(self._by_rank)
        if not self._by_rank:
            return None
        first = self._by_rank[0][1]
        if not self.longest or first.begun:
            return first
        while self._by_age[0][2].left:
            heapq.heappop(self._by_age)
        wave = self._by_age[0][2].wave
        overdue = wave.size is not None and self._gone - wave.admitted_before >= wave.size + GRACE
        return self._by_age[0][2] if overdue else first
