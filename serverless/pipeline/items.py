"""Pending items: the state that a function queue and its provider queues share.

An item has waiters with deadlines (`Timers`), waits for a call in a queue that gathers batches (`WaitingItems`), and
is carried by calls, each of one attempt or two.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from typing import Generic, TypeVar

from serverless.spec import FunctionBatchSpec
from serverless.types import Cause, Outcome
from serverless.wire import WireItem


@dataclass(slots=True, eq=False)
class PendingItem:
    """An item that one or more submits wait for, until `expires`, the latest of their deadlines.

    `provider_index` is the index of the first provider that has not failed the item, `sent_to` that of the provider
    that it was last sent to. `done` is set when no submit waits for it any more. `alone` is set after a call of several
    items that failed as a whole: the item then shares no further call.
    """

    wire: WireItem
    size: int
    key: bytes | None
    prompt: str
    expires: float
    since: float
    waiters: list[Waiter] = field(default_factory=list)
    cause: Cause = Cause.CALL
    provider_index: int = 0
    sent_to: int = 0
    attempts: int = 0
    throttles: int = 0
    scored_before: int = 0
    """Items that the function had scored when the item was last refused by an API behind it."""
    retried: bool = False
    alone: bool = False
    done: bool = False
    call: PipelineCall | None = None
    retry: asyncio.TimerHandle | None = None


@dataclass(slots=True, eq=False)
class Waiter:
    """One `submit`, with its own outcome and deadline."""

    entry: PendingItem
    outcome: asyncio.Future[Outcome]
    expires: float
    deadline_s: float


@dataclass(slots=True, eq=False)
class PipelineCall:
    """A logical call of several items, carried by one attempt, or by two if it is hedged. `alive` counts the items that
    are still waited for. `limit` is the time limit of its only item, if there is one."""

    entries: list[PendingItem]
    event: list[WireItem]
    cause: Cause
    expires: float
    limit: float | None
    alive: int
    provider_index: int
    counted: bool
    """True if the call counts as an attempt of its items. A call that isolates the failing item of a batch does not."""
    done: bool = False
    tries: list[CallAttempt] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class CallAttempt:
    """One invocation."""

    call: PipelineCall
    cause: Cause
    began: float
    trial: bool
    number: int = 0
    reported: bool = False
    task: asyncio.Task[None] | None = None


class WaitingItems:
    """First come, first served within a bucket. Buckets are served in the order of their heads' waiting times, longest
    first, so that no length starves. Without `by_length` there is one bucket. Finished items are dropped when they
    reach the head.

    A batch is full at `max_items` or when one more item would exceed `max_bytes`; an item above `max_bytes` is sent
    alone. It is due when full or when its oldest item has waited `max_wait_ms`. `take` is called only while a call may
    start: then no item waits longer. Otherwise items accumulate, so that load makes batches larger before it makes
    queues longer.
    """

    def __init__(self, batch: FunctionBatchSpec, *, by_length: bool) -> None:
        self._max_items, self._max_bytes = batch.max_items, batch.max_bytes
        self.max_wait_s = batch.max_wait_ms / 1000.0
        self._by_length = by_length
        self._buckets: defaultdict[int, _Bucket] = defaultdict(_Bucket)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, entry: PendingItem, *, front: bool = False) -> bool:
        """Append an item, or return it to the front of its bucket. Returns True if its bucket is now full."""
        bucket = self._buckets[entry.size.bit_length() // 2 if self._by_length else 0]
        (bucket.entries.appendleft if front else bucket.entries.append)(entry)
        bucket.size += entry.size
        self._count += 1
        return entry.alone or len(bucket.entries) >= self._max_items or bucket.size >= self._max_bytes

    def take(self, now: float) -> tuple[list[PendingItem], float | None]:
        """The items of a call that is due; or no items and the seconds until a call may be due (None: nothing
        waits)."""
        soonest: float | None = None
        for bucket in self._in_order():
            while bucket.entries:
                head = bucket.entries[0]
                if head.done:
                    self._pop(bucket)
                    continue
                if head.alone:
                    return [self._pop(bucket)], None
                count, full = self._fit(bucket)
                left = self.max_wait_s - (now - head.since)
                if not full and left > 1e-9:
                    soonest = left if soonest is None else min(soonest, left)
                    break
                batch = self._gather(bucket, count)
                if batch:
                    return batch, None
        return [], soonest

    def purge(self) -> None:
        for bucket in self._buckets.values():
            bucket.entries = deque(e for e in bucket.entries if not e.done)
            bucket.size = sum(e.size for e in bucket.entries)
        self._count = sum(len(b.entries) for b in self._buckets.values())

    def drain(self) -> list[PendingItem]:
        entries = [e for bucket in self._in_order() for e in bucket.entries if not e.done]
        self._buckets.clear()
        self._count = 0
        return entries

    def _in_order(self) -> list[_Bucket]:
        waiting = [bucket for bucket in self._buckets.values() if bucket.entries]
        return waiting if len(waiting) < 2 else sorted(waiting, key=lambda b: b.entries[0].since)

    def _fit(self, bucket: _Bucket) -> tuple[int, bool]:
        """The number of items of the next batch, and True if it is full."""
        total = 0
        for count, entry in enumerate(islice(bucket.entries, self._max_items)):
            total += entry.size
            if total > self._max_bytes and count > 0:
                return count, True
        count = min(len(bucket.entries), self._max_items)
        return count, count == self._max_items

    def _gather(self, bucket: _Bucket, count: int) -> list[PendingItem]:
        """The next items of a shared call: the unfinished ones, up to the first that must be called alone."""
        batch: list[PendingItem] = []
        while bucket.entries and len(batch) < count and not bucket.entries[0].alone:
            entry = self._pop(bucket)
            if not entry.done:
                batch.append(entry)
        return batch

    def _pop(self, bucket: _Bucket) -> PendingItem:
        entry = bucket.entries.popleft()
        bucket.size -= entry.size
        self._count -= 1
        return entry


@dataclass(slots=True)
class _Bucket:
    entries: deque[PendingItem] = field(default_factory=deque)
    size: int = 0


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

    def __len__(self) -> int:
        return len(self._heap)

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
