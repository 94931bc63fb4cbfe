"""Leases on rows that consumers took and have not finished: the rows return to their task at the deadline."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace

__all__ = ["RowLease", "RowLeases"]

MAX_REMEMBERED_KEYS = 100_000
"""Maximum remembered keys of finished leases and answered requests, so that a client whose answer was lost may repeat
its call."""


@dataclass(frozen=True, slots=True)
class RowLease:
    """`batches` of row ids for a task, leased until the loop time `until`: `seconds` after the lease was granted or
    renewed. `key` is the consumer's name for its request."""

    id: str
    task: str
    batches: tuple[tuple[str, ...], ...]
    consumed: tuple[str, ...]
    seconds: float
    until: float
    key: str = ""


class RowLeases:
    """Invariant: a row is in at most one open lease of a task; a lease ends once, done or returned."""

    def __init__(self) -> None:
        self.open: dict[str, RowLease] = {}
        self._by_key: dict[str, str] = {}
        self._done: OrderedDict[str, None] = OrderedDict()
        self._given = 0

    def give(
        self, task: str, batches: Sequence[Sequence[str]], consumed: Sequence[str], seconds: float, now: float, key: str
    ) -> RowLease:
        self._given += 1
        id = f"l{self._given}"
        loan = RowLease(id, task, tuple(map(tuple, batches)), tuple(consumed), seconds, now + seconds, key)
        self.put(loan)
        return loan

    def put(self, loan: RowLease) -> None:
        """Add an existing lease; later ids continue after its id."""
        self.open[loan.id] = loan
        self._given = max(self._given, int(loan.id[1:]))
        if loan.key:
            self._by_key[loan.key] = loan.id

    def of(self, key: str) -> RowLease | None:
        """The open lease granted to the request with this key."""
        return self.open.get(self._by_key.get(key, ""))

    def renew(self, id: str, seconds: float, now: float) -> RowLease | None:
        loan = self.open.get(id)
        if loan is not None:
            loan = self.open[id] = replace(loan, seconds=seconds, until=now + seconds)
        return loan

    def end(self, id: str, *, done: bool) -> RowLease | None:
        """End a lease; None if it is over already."""
        loan = self.open.pop(id, None)
        if loan is not None:
            if self._by_key.get(loan.key) == id:
                del self._by_key[loan.key]
            if done:
                self.was_done(id)
        return loan

    def was_done(self, id: str) -> None:
        self._given = max(self._given, int(id[1:]))
        self._done[id] = None
        if len(self._done) > MAX_REMEMBERED_KEYS:
            self._done.popitem(last=False)

    def done(self, id: str) -> bool:
        return id in self._done

    def due(self, now: float) -> list[RowLease]:
        return [loan for loan in self.open.values() if loan.until <= now]

    def next_due(self) -> float | None:
        return min((loan.until for loan in self.open.values()), default=None)
