"""Decides when waiting items are sent as one call, and how many. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["BatchPolicy", "SendBatch", "WaitForItems"]


@dataclass(frozen=True, slots=True)
class SendBatch:
    """Send the first `count` waiting items now."""

    count: int


@dataclass(frozen=True, slots=True)
class WaitForItems:
    """Send nothing now; decide again after `seconds`, or when an item arrives."""

    seconds: float


@dataclass(frozen=True, slots=True)
class BatchPolicy:
    """First come, first served. A batch is full at `max_items` or when one more item would exceed `max_bytes`. It is
    due when full or when its oldest item has waited `max_wait_s`.

    It is consulted only while a call may start: then no item waits longer than `max_wait_s`. Otherwise items
    accumulate, so that load makes batches larger before it makes queues longer. An item above `max_bytes` is sent
    alone.
    """

    max_items: int
    max_wait_s: float
    max_bytes: int

    def decide(self, sizes: Sequence[int], oldest_wait_s: float) -> SendBatch | WaitForItems:
        """`sizes` are the bytes of the first waiting items, at least one and at most `max_items`."""
        count = self._fit(sizes)
        full = count >= self.max_items or count < len(sizes)
        left = self.max_wait_s - oldest_wait_s
        if full or left <= 1e-9:
            return SendBatch(count)
        return WaitForItems(left)

    def _fit(self, sizes: Sequence[int]) -> int:
        total = 0
        for count, size in enumerate(sizes):
            total += size
            if total > self.max_bytes and count > 0:
                return count
        return len(sizes)
