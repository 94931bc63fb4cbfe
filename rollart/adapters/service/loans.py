"""Leases on rows that consumers took and have not finished: the rows return to their task at the deadline."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace

from rollart.adapters.service.store import MAX_REMEMBERED_KEYS, RowLease

__all__ = ["RowLeases"]


class RowLeases:
    """Invariant: a row is in at most one open lease of a task; a lease ends once, done or returned."""

    def __init__(self) -> None:
        self.open: dict[str, RowLease] = {}
        self._by_key: dict[str, str] = {}
        self._done: OrderedDict[str, None] = OrderedDict()
        self._granted = 0

    def grant(
        self, task: str, batches: Sequence[Sequence[str]], consumed: Sequence[str], seconds: float, now: float, key: str
    ) -> RowLease:
        self._granted += 1
        id = f"l{self._granted}"
        lease = RowLease(id, task, tuple(map(tuple, batches)), tuple(consumed), seconds, now + seconds, key)
        self.put(lease)
        return lease

    def put(self, lease: RowLease) -> None:
        """Add an existing lease; later ids continue after its id."""
        self.open[lease.id] = lease
        self._granted = max(self._granted, int(lease.id[1:]))
        if lease.key:
            self._by_key[lease.key] = lease.id

    def by_key(self, key: str) -> RowLease | None:
        """The open lease granted to the request with this key."""
        return self.open.get(self._by_key.get(key, ""))

    def renew(self, id: str, seconds: float, now: float) -> RowLease | None:
        lease = self.open.get(id)
        if lease is not None:
            lease = self.open[id] = replace(lease, seconds=seconds, until=now + seconds)
        return lease

    def end(self, id: str, *, done: bool) -> RowLease | None:
        """End a lease; None if it is over already."""
        lease = self.open.pop(id, None)
        if lease is not None:
            if self._by_key.get(lease.key) == id:
                del self._by_key[lease.key]
            if done:
                self.mark_done(id)
        return lease

    def mark_done(self, id: str) -> None:
        self._granted = max(self._granted, int(id[1:]))
        self._done[id] = None
        if len(self._done) > MAX_REMEMBERED_KEYS:
            self._done.popitem(last=False)

    def done(self, id: str) -> bool:
        return id in self._done

    def due(self, now: float) -> list[RowLease]:
        return [lease for lease in self.open.values() if lease.until <= now]

    def next_due(self) -> float | None:
        return min((lease.until for lease in self.open.values()), default=None)
