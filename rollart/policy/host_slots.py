"""Priorities for slots on environment hosts: which waiting episode gets the next slot."""

from __future__ import annotations

import enum
import heapq
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")


class PlacementPriority(enum.IntEnum):
    """The purpose of an episode, in order of priority."""

    TRAIN = 0
    """A trajectory that its group needs."""
    EVALUATE = 1
    SPARE = 2
    """A redundant member of its group."""
    AHEAD = 3
    """An environment that is reset before its trajectory is admitted: it yields its slot to any other purpose."""

    @property
    def gives_up(self) -> bool:
        return self is PlacementPriority.AHEAD


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """A priority, and the seniority of the group: at equal priority the older group (lower) goes first, so that started
    groups finish."""

    claim: PlacementPriority = PlacementPriority.TRAIN
    seniority: int = 0


@dataclass(slots=True)
class PlacementQueue(Generic[T]):
    """Waiting episodes in the order in which they get a slot: by priority, then seniority, then arrival.

    Bound: a request is overtaken only by requests that precede it in that order. Running trajectories are bounded (I4)
    and end by themselves once they have a slot, so each of them gets one, provided that slots become free at all.
    """

    heap: list[tuple[int, int, int, T]] = field(default_factory=list)
    gone: set[int] = field(default_factory=set)
    """Numbers of requests in the heap that were withdrawn."""
    waiting: dict[PlacementPriority, int] = field(default_factory=lambda: dict.fromkeys(PlacementPriority, 0))
    number: int = 0

    def add(self, request: PlacementRequest, item: T) -> int:
        """Add a request; returns its number, by which it may be withdrawn."""
        self.number += 1
        heapq.heappush(self.heap, (request.claim, request.seniority, self.number, item))
        self.waiting[request.claim] += 1
        return self.number

    def first(self) -> T | None:
        """The next item; None if the queue is empty."""
        while self.heap and self.heap[0][2] in self.gone:
            self.gone.discard(heapq.heappop(self.heap)[2])
        return self.heap[0][3] if self.heap else None

    def pop(self) -> None:
        """Remove the first item, which got its slot."""
        claim, *_ = heapq.heappop(self.heap)
        self.waiting[PlacementPriority(claim)] -= 1

    def leave(self, number: int, request: PlacementRequest) -> None:
        """Withdraw a request."""
        self.gone.add(number)
        self.waiting[request.claim] -= 1

    @property
    def pressing(self) -> int:
        """Waiting requests for which prefetched environments yield their slots."""
        return sum(count for claim, count in self.waiting.items() if not claim.gives_up)
