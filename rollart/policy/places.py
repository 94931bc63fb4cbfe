"""Who gets the next place on an environment host, and what gives one up: those that run before those that might."""

from __future__ import annotations

import enum
import heapq
from dataclasses import dataclass, field
from typing import Generic, TypeVar

__all__ = ["PlacementPriority", "PlacementQueue", "PlacementRequest", "slots_to_reclaim"]

T = TypeVar("T")


class PlacementPriority(enum.IntEnum):
    """What an episode is for, in the order that places are given out in."""

    TRAIN = 0
    """A trajectory that its group needs."""
    EVALUATE = 1
    SPARE = 2
    """A member beyond those that its group needs."""
    AHEAD = 3
    """An environment that is reset before its trajectory is admitted: it gives its place up to any of the others."""

    @property
    def gives_up(self) -> bool:
        return self is PlacementPriority.AHEAD


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """A claim, and how old its group is: of two alike the older (lower) goes first, so that what was begun ends."""

    claim: PlacementPriority = PlacementPriority.TRAIN
    seniority: int = 0


@dataclass(slots=True)
class PlacementQueue(Generic[T]):
    """Those that wait, in the order in which they get a place: by claim, then seniority, then as they came.

    Bound: nobody who waits is passed by more than those before it in that order. Trajectories under way are bounded
    (I4) and end by themselves once they have a place, so each of them gets one, as long as any place ever gets free.
    """

    heap: list[tuple[int, int, int, T]] = field(default_factory=list)
    gone: set[int] = field(default_factory=set)
    """Numbers of those in the heap that wait no more."""
    waiting: dict[PlacementPriority, int] = field(default_factory=lambda: dict.fromkeys(PlacementPriority, 0))
    number: int = 0

    def add(self, wish: PlacementRequest, who: T) -> int:
        """Its number, by which it may leave."""
        self.number += 1
        heapq.heappush(self.heap, (wish.claim, wish.seniority, self.number, who))
        self.waiting[wish.claim] += 1
        return self.number

    def first(self) -> T | None:
        """Who is next; None if nobody waits."""
        while self.heap and self.heap[0][2] in self.gone:
            self.gone.discard(heapq.heappop(self.heap)[2])
        return self.heap[0][3] if self.heap else None

    def pop(self) -> None:
        """The first has its place."""
        claim, *_ = heapq.heappop(self.heap)
        self.waiting[PlacementPriority(claim)] -= 1

    def leave(self, number: int, wish: PlacementRequest) -> None:
        """It gave up waiting."""
        self.gone.add(number)
        self.waiting[wish.claim] -= 1

    @property
    def pressing(self) -> int:
        """Those that wait and for whom others give up."""
        return sum(count for claim, count in self.waiting.items() if not claim.gives_up)


def slots_to_reclaim(*, pressing: int, going: int, held: int) -> int:
    """How many more of the places that are `held` ahead of need are given up, the newest first: one for each that
    presses, less those whose place is `going` to be free already."""
    return max(0, min(pressing - going, held))
