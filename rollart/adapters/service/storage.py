"""The values of a service's rows, and its persistence: SQLite, with large values in segment files beside it, as in a
run's ledger."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import sqlite3
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollart.adapters.service.packed import PackedColumn, pack
from rollart.errors import StorageFailed, UsageError
from rollart.ledger.payloads import INLINE_LIMIT, PayloadFiles
from rollart.policy.sample_table import SampleRow

MAX_REMEMBERED_KEYS = 100_000
"""Maximum remembered keys of finished leases and answered requests, so that a client whose answer was lost may repeat
its call."""

SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS rows (
    id TEXT PRIMARY KEY, seq INTEGER NOT NULL, grp TEXT NOT NULL, size INTEGER NOT NULL, tokens INTEGER NOT NULL,
    version INTEGER NOT NULL, sampled INTEGER, freed INTEGER NOT NULL DEFAULT 0);
CREATE INDEX IF NOT EXISTS rows_grp ON rows (grp);
CREATE TABLE IF NOT EXISTS cells (
    row TEXT NOT NULL, col TEXT NOT NULL, value TEXT, segment INTEGER, place INTEGER, PRIMARY KEY (row, col));
CREATE TABLE IF NOT EXISTS consumed (task TEXT NOT NULL, row TEXT NOT NULL, PRIMARY KEY (task, row));
CREATE TABLE IF NOT EXISTS loans (id TEXT PRIMARY KEY, body TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS keys (seq INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT UNIQUE, answer TEXT NOT NULL);
"""


@dataclass(frozen=True, slots=True)
class SegmentLocation:
    """Location of a large value in the segment files."""

    segment: int
    offset: int


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


@dataclass(slots=True)
class ServiceRow:
    """A row with its values by column: a large value is a `SegmentLocation` once it is on disk. `sampled`: the policy
    version that the row was sampled with. `freed`: no task needs it any more and its values are deleted, but other rows
    of its group are still needed."""

    row: SampleRow
    values: dict[str, Any]
    sampled: int | None = None
    freed: bool = False


@dataclass(frozen=True, slots=True)
class StoredState:
    """The persisted state. Rows are in insertion order; `consumed` by task."""

    meta: Mapping[str, Any]
    rows: Sequence[ServiceRow]
    consumed: Mapping[str, set[str]]
    leases: Sequence[RowLease]
    keys: Mapping[str, Any]


class ServiceStore:
    """One service's directory, used by one process (enforced by a file lock) and one loop.

    Changes are queued in order and are on disk when `flush` returns. A caller that answers only after `flush` reports
    nothing that a kill -9 or a power failure could undo. `StorageFailed`: a write failed, now or earlier. Memory is
    then ahead of the disk, and no further call may be answered.
    """

    def __init__(self, directory: Path) -> None:
        """UsageError if another process uses the directory, or it cannot be written."""
        try:
            (directory / "segments").mkdir(parents=True, exist_ok=True)
            self._lock = os.open(directory / "service.lock", os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise UsageError(f"cannot write {directory}: {error.strerror}", remedy="choose another --data") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise UsageError(f"another service uses {directory}", remedy="stop it, or choose another --data") from None
        try:
            self._base = sqlite3.connect(directory / "service.sqlite", isolation_level=None, check_same_thread=False)
            self._base.executescript(f"PRAGMA journal_mode=WAL; PRAGMA synchronous=FULL; {SCHEMA}")
        except sqlite3.Error as error:
            os.close(self._lock)
            raise StorageFailed(f"{directory}: {error}") from None
        self._segments = PayloadFiles(directory / "segments")
        self._reset_queue(last_row=int(self._base.execute("SELECT COALESCE(MAX(seq), 0) FROM rows").fetchone()[0]))

    def _reset_queue(self, last_row: int) -> None:
        self._last = last_row
        self.pending: list[tuple[str, tuple[Any, ...]]] = []
        """Changes that no flush has begun to write."""
        self.written: deque[tuple[str, str, SegmentLocation]] = deque()
        """Large values that were written: row, column and location."""
        self._changes = self._flushed = 0
        """Number of changes made, and number of changes on disk."""
        self._writing: asyncio.Future[None] | None = None
        self._broken: StorageFailed | None = None

    def load(self) -> StoredState:
        query = self._base.execute
        cells: dict[str, dict[str, Any]] = {}
        for row, column, value, segment, location in query("SELECT row, col, value, segment, place FROM cells"):
            cells.setdefault(row, {})[column] = (
                _decode_value(value) if segment is None else SegmentLocation(segment, location)
            )
        consumed: dict[str, set[str]] = {}
        for task, row in query("SELECT task, row FROM consumed"):
            consumed.setdefault(task, set()).add(row)
        rows = query("SELECT id, grp, size, tokens, version, sampled, freed FROM rows ORDER BY seq").fetchall()
        leases = (json.loads(body) for (body,) in query("SELECT body FROM loans ORDER BY id"))
        return StoredState(
            {name: json.loads(value) for name, value in query("SELECT name, value FROM meta")},
            [ServiceRow(SampleRow(*row), cells.get(row[0], {}), sampled, bool(freed)) for *row, sampled, freed in rows],
            consumed,
            [
                RowLease(id, task, tuple(map(tuple, batches)), tuple(consumed), seconds, 0.0, key)
                for id, task, batches, consumed, seconds, key in leases
            ],
            {name: json.loads(answer) for name, answer in query("SELECT name, answer FROM keys ORDER BY seq")},
        )

    def meta(self, **values: Any) -> None:
        for name, value in values.items():
            self._queue("INSERT OR REPLACE INTO meta VALUES (?, ?)", name, json.dumps(value))

    def row(self, row: SampleRow, values: Mapping[str, Any]) -> None:
        self._last += 1
        held = row.id, self._last, row.group, row.group_size, row.tokens, row.version
        self._queue("INSERT INTO rows VALUES (?, ?, ?, ?, ?, ?, NULL, 0)", *held)
        self.cells(row.id, values)

    def cells(self, row: str, values: Mapping[str, Any], sampled: int | None = None) -> None:
        for column, value in values.items():
            # Packed numbers: a zero byte (which starts no JSON), the type code, and the data.
            packed = isinstance(value, PackedColumn)
            written = b"\0" + value.code.encode() + value.data if packed else json.dumps(value)
            self._queue("INSERT INTO cells VALUES (?, ?, ?, NULL, NULL)", row, column, written)
        if sampled is not None:
            self._queue("UPDATE rows SET sampled = ? WHERE id = ?", sampled, row)

    def consumed(self, task: str, rows: Iterable[str]) -> None:
        for row in rows:
            self._queue("INSERT INTO consumed VALUES (?, ?)", task, row)

    def freed(self, rows: Iterable[str]) -> None:
        """Delete the values of rows that no task needs any more. The rows themselves stay until their whole group is
        gone."""
        for row in rows:
            self._queue("UPDATE rows SET freed = 1 WHERE id = ?", row)
            self._queue("DELETE FROM cells WHERE row = ?", row)

    def group_gone(self, group: str) -> None:
        for table in ("cells", "consumed"):
            self._queue(f"DELETE FROM {table} WHERE row IN (SELECT id FROM rows WHERE grp = ?)", group)
        self._queue("DELETE FROM rows WHERE grp = ?", group)

    def lease(self, lease: RowLease) -> None:
        body = [lease.id, lease.task, lease.batches, lease.consumed, lease.seconds, lease.key]
        self._queue("INSERT OR REPLACE INTO loans VALUES (?, ?)", lease.id, json.dumps(body))

    def end_lease(self, id: str) -> None:
        self._queue("DELETE FROM loans WHERE id = ?", id)

    def key(self, name: str, answer: Any) -> None:
        """Remember the answer to the request with this key; the oldest answers are forgotten."""
        self._queue("INSERT OR REPLACE INTO keys (name, answer) VALUES (?, ?)", name, json.dumps(answer))
        self._queue("DELETE FROM keys WHERE seq <= (SELECT MAX(seq) FROM keys) - ?", MAX_REMEMBERED_KEYS)

    def read(self, value: Any) -> Any:
        """The value itself; a `SegmentLocation` is read, usually from the page cache, while its row exists."""
        if isinstance(value, SegmentLocation):
            return _decode_value(self._segments.read(value.segment, value.offset))
        return value

    async def flush(self) -> None:
        """Wait until every change so far is on disk; the changes of several callers share a transaction. If a caller is
        cancelled, e.g. because its client disconnected, the write continues and the next caller waits for it."""
        target = self._changes
        while self._flushed < target and self._broken is None:
            if self._writing is None or self._writing.done():
                batch, self.pending = self.pending, []
                loop = asyncio.get_running_loop()
                self._writing = loop.run_in_executor(None, self._write_or_break, batch, self._changes)
            await asyncio.shield(self._writing)
        if self._broken is not None:
            raise self._broken

    def close(self) -> None:
        self._base.close()
        os.close(self._lock)

    def _queue(self, statement: str, *values: Any) -> None:
        self._changes += 1
        self.pending.append((statement, values))

    def _write_or_break(self, batch: Sequence[tuple[str, tuple[Any, ...]]], flushed: int) -> None:
        """Runs in a thread, one call at a time."""
        try:
            self.write(batch)
            self._flushed = flushed
        except Exception as error:  # after any failure, memory is ahead of the disk
            self._broken = StorageFailed(f"the service's directory: {error}", remedy="look at its disk")

    def write(self, batch: Sequence[tuple[str, tuple[Any, ...]]]) -> None:
        """Write statements with their values in one transaction, large values to the segments first."""
        statements, locations = [], []
        for statement, values in batch:
            if statement.startswith("INSERT INTO cells") and len(values[2]) > INLINE_LIMIT:
                row, column, value = values
                location = self._segments.append(value.encode() if isinstance(value, str) else value)
                locations.append((row, column, SegmentLocation(*location)))
                statement, values = "INSERT INTO cells VALUES (?, ?, NULL, ?, ?)", (row, column, *location)
            statements.append((statement, values))
        self._segments.sync()
        with self._base:  # commits, or rolls back
            self._base.execute("BEGIN IMMEDIATE")
            for statement, values in statements:
                self._base.execute(statement, values)
        self.written.extend(locations)
        if self._segments.rolled:
            used = self._base.execute("SELECT DISTINCT segment FROM cells WHERE segment IS NOT NULL")
            self._segments.keep({segment for (segment,) in used})


class VolatileStore(ServiceStore):
    """Keeps nothing: the state is in memory alone."""

    def __init__(self) -> None:
        self._reset_queue(last_row=0)

    def load(self) -> StoredState:
        return StoredState({}, (), {}, (), {})

    def cells(self, row: str, values: Mapping[str, Any], sampled: int | None = None) -> None:
        pass

    def close(self) -> None:
        pass

    def _queue(self, statement: str, *values: Any) -> None:
        pass


def _decode_value(written: str | bytes) -> Any:
    if isinstance(written, bytes) and written[:1] == b"\0":
        return PackedColumn(chr(written[1]), written[2:])
    return pack(json.loads(written))
