"""Queue of the items that wait for a call, in order of arrival, optionally bucketed by length."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import islice

from serverless.pipeline_entry import PendingItem
from serverless.policy.batch import BatchPolicy, WaitForItems

__all__ = ["WaitingItems"]


@dataclass(slots=True)
class _Bucket:
    entries: deque[PendingItem] = field(default_factory=deque)
    size: int = 0


class WaitingItems:
    """First come, first served within a bucket. Buckets are served in the order of their heads' waiting times, longest
    first, so that no length starves. Without `by_length` there is one bucket. Finished items are dropped when they
    reach the head."""

    def __init__(self, policy: BatchPolicy, *, by_length: bool) -> None:
        self.policy = policy
        self._by_length = by_length
        self._buckets: dict[int, _Bucket] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, entry: PendingItem) -> bool:
        """Append an item. Returns True if its bucket is now full."""
        bucket = self._bucket(entry)
        bucket.entries.append(entry)
        bucket.size += entry.size
        self._count += 1
        return entry.alone or len(bucket.entries) >= self.policy.max_items or bucket.size >= self.policy.max_bytes

    def put_back(self, entry: PendingItem) -> None:
        """Return an item to the front of its bucket."""
        bucket = self._bucket(entry)
        bucket.entries.appendleft(entry)
        bucket.size += entry.size
        self._count += 1

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
                sizes = [e.size for e in islice(bucket.entries, self.policy.max_items)]
                decision = self.policy.decide(sizes, now - head.since)
                if isinstance(decision, WaitForItems):
                    soonest = decision.seconds if soonest is None else min(soonest, decision.seconds)
                    break
                batch = self._gather(bucket, decision.count)
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

    def _bucket(self, entry: PendingItem) -> _Bucket:
        kind = entry.size.bit_length() // 2 if self._by_length else 0
        bucket = self._buckets.get(kind)
        if bucket is None:
            bucket = self._buckets[kind] = _Bucket()
        return bucket

    def _in_order(self) -> list[_Bucket]:
        waiting = [bucket for bucket in self._buckets.values() if bucket.entries]
        return waiting if len(waiting) < 2 else sorted(waiting, key=lambda b: b.entries[0].since)

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
