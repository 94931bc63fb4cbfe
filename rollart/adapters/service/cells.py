"""The values of a table's rows: numbers are packed, and large values are kept on disk only, if there is a store."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rollart.adapters.service.store import SegmentLocation, ServiceStore
from rollart.packed import pack

__all__ = ["RowValues"]


class RowValues:
    """Values by row and column. A value above `INLINE_LIMIT` is held in memory only until the store has written it to
    a segment; afterwards it is read from there (usually from the page cache) when it is handed out."""

    def __init__(self, store: ServiceStore | None) -> None:
        self._store = store
        self._rows: dict[str, dict[str, Any]] = {}

    def __contains__(self, row: object) -> bool:
        return row in self._rows

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def forget(self, row: str) -> None:
        del self._rows[row]

    def put(self, row: str, values: Mapping[str, Any]) -> None:
        self._rows.setdefault(row, {}).update(values)

    def holds(self, row: str, values: Mapping[str, Any]) -> bool:
        """True if the row already has all of these values."""
        held = self._rows.get(row)
        return (
            bool(values)
            and held is not None
            and all(c in held and self._read(held[c]) == pack(v) for c, v in values.items())
        )

    def select(self, row: str, columns: Sequence[str]) -> dict[str, Any]:
        held = self._rows[row]
        return {c: self._read(held[c]) for c in columns if c in held}

    def drop_written(self) -> None:
        """Drop values from memory that are on disk by now."""
        if self._store is not None:
            for row, column, location in self._store.written_locations():
                if row in self._rows and column in self._rows[row]:
                    self._rows[row][column] = location

    def _read(self, value: Any) -> Any:
        if isinstance(value, SegmentLocation):
            assert self._store is not None
            return self._store.read(value)
        return value
