"""Rows that consumers took and have not said to be done with: each returns to its task at its deadline."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace

__all__ = ["RowLease", "RowLeases"]

MAX_REMEMBERED_KEYS = 100_000
"""Loans that are over, so that a consumer whose answer was lost may say again that it is done."""


@dataclass(frozen=True, slots=True)
class RowLease:
    """`batches` of row ids for a task, until second `until` of the loop, `seconds` after it was given or renewed.
    `key` is the consumer's own name for its request."""

    id: str
    task: str
    batches: tuple[tuple[str, ...], ...]
    consumed: tuple[str, ...]
    seconds: float
    until: float
    key: str = ""


class RowLeases:
    """Invariant: a row is in one open loan of a task at most; a loan ends once, done or returned."""

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
        """One that was given before; ids go on after it."""
        self.open[loan.id] = loan
        self._given = max(self._given, int(loan.id[1:]))
        if loan.key:
            self._by_key[loan.key] = loan.id

    def of(self, key: str) -> RowLease | None:
        """The open loan that a request of this name was given."""
        return self.open.get(self._by_key.get(key, ""))

    def renew(self, id: str, seconds: float, now: float) -> RowLease | None:
        loan = self.open.get(id)
        if loan is not None:
            loan = self.open[id] = replace(loan, seconds=seconds, until=now + seconds)
        return loan

    def end(self, id: str, *, done: bool) -> RowLease | None:
        """None: it is over already."""
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
