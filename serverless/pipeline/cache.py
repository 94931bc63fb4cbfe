"""Results of deterministic functions by key, in one SQLite file that outlives the run.

A key is equal for equal items of one version of a function. A cache may only save calls: any problem with its file
(corrupt, locked, full disk, another format) disables it with one warning, and the calls are made.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import pathlib
import sqlite3
from collections.abc import Callable
from dataclasses import asdict, replace

from serverless.keys import canonical
from serverless.types import ModelFault, Outcome, Scored
from serverless.wire import WireItem


def item_key(version: str, item: WireItem) -> bytes | None:
    """SHA-256 over the function's version and the canonical JSON of the item without its id; 32 bytes.

    None if it has no canonical form (NaN, bytes): such an item never equals another.
    """
    try:
        text = canonical([version, item["messages"], item["reference_answer"], item["metadata"]])
    except (TypeError, ValueError):
        return None
    return hashlib.sha256(text).digest()


def copy_outcome(outcome: Outcome) -> Outcome:
    """A copy of the outcome that shares no mutable state with it."""
    return replace(outcome, metrics=dict(outcome.metrics)) if isinstance(outcome, Scored) else outcome


_FORMAT = 1
"""PRAGMA user_version of the file."""

_GATHER = 256
"""Results per transaction, which takes about 1 ms on the loop. The rest is written at `close`."""

_LOCKED_S = 0.05
"""Seconds that another process may hold the file before it counts as locked; the event loop is blocked meanwhile."""


class Cache:
    """Owns the file. Synchronous; for one thread.

    Bound: at most `max_entries` results; the oldest are removed first. Exact: a result is read back equal to the one
    stored.
    """

    def __init__(self, path: pathlib.Path, *, max_entries: int, warn: Callable[[str], None]) -> None:
        self._path = path
        self._max = max_entries
        self._warn = warn
        self._file: sqlite3.Connection | None = None
        self._fresh: dict[bytes, str] = {}

    @property
    def on(self) -> bool:
        return self._file is not None

    def open(self) -> None:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = sqlite3.connect(self._path, timeout=_LOCKED_S, isolation_level=None, cached_statements=16)
            (found,) = self._file.execute("PRAGMA user_version").fetchone()
            if found not in (0, _FORMAT):
                raise sqlite3.DatabaseError(f"format {found}, not {_FORMAT}")
            self._file.execute("PRAGMA journal_mode = WAL")
            self._file.execute("PRAGMA synchronous = OFF")  # a lost result only costs a repeated call
            self._file.execute(
                "CREATE TABLE IF NOT EXISTS results (n INTEGER PRIMARY KEY, key BLOB UNIQUE, value TEXT)"
            )
            self._file.execute(f"PRAGMA user_version = {_FORMAT}")
        except (sqlite3.Error, OSError) as error:
            self._off(error)

    def get(self, key: bytes) -> Outcome | None:
        if self._file is None:
            return None
        try:
            text = self._fresh.get(key)
            if text is None:
                row = self._file.execute("SELECT value FROM results WHERE key = ?", (key,)).fetchone()
                if row is None:
                    return None
                text = row[0]
            return _decode(text)
        except (sqlite3.Error, TypeError, ValueError, KeyError, AttributeError) as error:
            self._off(error)
            return None

    def put(self, key: bytes, outcome: Scored | ModelFault) -> None:
        if self._file is None:
            return
        self._fresh[key] = json.dumps(asdict(outcome))  # a float's shortest form reads back as the same float
        if len(self._fresh) >= _GATHER:
            self._write()

    def close(self) -> None:
        self._write()
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            except sqlite3.Error as error:
                self._warn(f"the result cache {self._path} did not close: {error}")

    def _write(self) -> None:
        file, fresh = self._file, self._fresh
        if file is None or not fresh:
            return
        self._fresh = {}
        try:
            file.execute("BEGIN IMMEDIATE")
            file.executemany("INSERT OR IGNORE INTO results (key, value) VALUES (?, ?)", fresh.items())
            # A new row's number is the maximum plus one, and the oldest rows are deleted first: the span of numbers is
            # the count.
            (low, high) = file.execute("SELECT min(n), max(n) FROM results").fetchone()
            if high is not None and high - low + 1 > self._max:
                file.execute("DELETE FROM results WHERE n <= ?", (high - self._max,))
            file.execute("COMMIT")
        except sqlite3.Error as error:
            self._off(error)

    def _off(self, error: Exception) -> None:
        file, self._file = self._file, None
        self._fresh = {}
        if file is not None:
            with contextlib.suppress(sqlite3.Error):  # the file is abandoned anyway
                file.close()
        self._warn(
            f"the result cache {self._path} is off: {type(error).__name__}: {error} (delete the file to renew it)"
        )


def _decode(text: str) -> Outcome:
    fields = json.loads(text)
    if "floor" in fields:
        return ModelFault(float(fields["floor"]), str(fields["reason"]))
    steps = fields["steps"]
    metrics = {str(k): float(v) for k, v in fields["metrics"].items()}
    return Scored(float(fields["value"]), metrics, None if steps is None else tuple(map(float, steps)))
