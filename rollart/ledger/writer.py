"""Group commit: one thread writes, many callers wait, one transaction serves them all."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any, TypeAlias

from rollart.errors import RollartError, StorageFailed
from rollart.ledger.database import Database, Operation

__all__ = ["FLUSH_SECONDS", "MAX_PENDING", "InlineWriter", "ThreadWriter"]

FLUSH_SECONDS = 0.03
"""How long recorded rows wait for others when no caller waits for them: one fsync then carries hundreds."""

MAX_PENDING = 1_000_000
"""Rows that may wait for a slow disk; beyond it the ledger has failed (about 200 MB, a minute at full rate)."""

JOIN_SECONDS = 30.0
"""Bound on closing: one last transaction on a loaded disk takes far less."""

_Waiting: TypeAlias = tuple[Operation, "asyncio.Future[Any]"]


class ThreadWriter:
    """Owns the database in a thread of its own.

    The loop's thread calls `record` (never waits) and `run` (waits until its transaction is durable; unblocked by the
    thread through the loop). Invariant: rows recorded before a `run` are durable when it returns. The first
    StorageFailed is final: every later call raises it, and `failure` resolves.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._rows: deque[Any] = deque()
        self._waiting: list[_Waiting] = []
        self._changed = threading.Condition()
        self._signalled = False
        self._stopping = False
        self._error: StorageFailed | None = None
        self._watchers: list[asyncio.Future[None]] = []
        self._thread = threading.Thread(target=self._work, name="rollart-ledger", daemon=True)
        self._thread.start()

    def record(self, row: Any) -> None:
        if self._error is not None:
            raise self._error
        self._rows.append(row)
        if not self._signalled:
            if self._stopping:
                raise StorageFailed("the ledger is closed")
            with self._changed:
                self._signalled = True
                self._changed.notify()
        elif len(self._rows) > MAX_PENDING:
            raise StorageFailed(
                f"the ledger is {len(self._rows)} rows behind (rule: {MAX_PENDING})", remedy="use a faster disk"
            )

    async def run(self, operation: Operation) -> Any:
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        with self._changed:
            if self._error is not None:
                raise self._error
            if self._stopping:
                raise StorageFailed("the ledger is closed")
            self._waiting.append((operation, future))
            self._changed.notify()
        return await future

    async def failure(self) -> None:
        """Never returns; raises StorageFailed once writing has failed."""
        with self._changed:
            if self._error is not None:
                raise self._error
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._watchers.append(future)
        await future

    def close(self) -> None:
        """Write the remaining rows and stop; bounded. Raises StorageFailed if that last write fails."""
        with self._changed:
            if self._stopping:
                return
            self._stopping = True
            self._changed.notify()
        self._thread.join(JOIN_SECONDS)
        if self._thread.is_alive():
            raise StorageFailed(f"the ledger could not be closed within {JOIN_SECONDS:g} s", remedy="check the disk")
        self._database.close()
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        while True:
            with self._changed:
                while not (self._signalled or self._waiting or self._stopping):
                    self._changed.wait()
                if not (self._waiting or self._stopping):
                    self._changed.wait(FLUSH_SECONDS)
                waiting, self._waiting = self._waiting, []
                self._signalled = False
                stopping = self._stopping
            rows = [self._rows.popleft() for _ in range(len(self._rows))]
            try:
                if rows or waiting:
                    results = self._database.write(rows, [operation for operation, _ in waiting])
                    _deliver([(future, result) for (_, future), result in zip(waiting, results, strict=True)])
            except BaseException as error:
                self._fail(error, waiting)
                return
            if stopping:
                return

    def _fail(self, error: BaseException, waiting: Sequence[_Waiting]) -> None:
        failed = error if isinstance(error, StorageFailed) else StorageFailed(f"the ledger's writer broke: {error!r}")
        with self._changed:
            self._error = failed
            waiting, self._waiting = [*waiting, *self._waiting], []
            watchers, self._watchers = self._watchers, []
        _deliver([(future, failed) for future in (*(f for _, f in waiting), *watchers)])


class InlineWriter:
    """The same without a thread, for a loop on virtual time: operations within `FLUSH_SECONDS` of the loop share one
    transaction, written on the loop."""

    BATCH = 4096

    def __init__(self, database: Database) -> None:
        self._database = database
        self._rows: list[Any] = []
        self._waiting: list[_Waiting] = []
        self._error: StorageFailed | None = None
        self._closed = False

    def record(self, row: Any) -> None:
        self._check()
        self._rows.append(row)
        if len(self._rows) >= self.BATCH:
            self._write([])

    async def run(self, operation: Operation) -> Any:
        self._check()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        if not self._waiting:
            loop.call_later(FLUSH_SECONDS, self._flush)
        self._waiting.append((operation, future))
        return await future

    async def failure(self) -> None:
        self._check()
        await asyncio.get_running_loop().create_future()

    def close(self) -> None:
        if self._closed:
            return
        try:
            if self._error is None:
                self._flush()
        finally:
            self._closed = True
            self._database.close()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error
        if self._closed:
            raise StorageFailed("the ledger is closed")

    def _flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        try:
            results = self._write([operation for operation, _ in waiting])
        except StorageFailed as error:
            results = [error] * len(waiting)
        _settle([(future, result) for (_, future), result in zip(waiting, results, strict=True)])

    def _write(self, operations: Sequence[Operation]) -> list[Any]:
        rows, self._rows = self._rows, []
        try:
            return self._database.write(rows, operations)
        except StorageFailed as error:
            self._error = error
            raise


def _deliver(outcomes: Sequence[tuple[asyncio.Future[Any], Any]]) -> None:
    """Hand results to their futures, in one call per loop. Futures of a loop that is gone are left alone."""
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Future[Any], Any]]] = {}
    for future, result in outcomes:
        by_loop.setdefault(future.get_loop(), []).append((future, result))
    for loop, own in by_loop.items():
        try:
            loop.call_soon_threadsafe(_settle, own)
        except RuntimeError:
            continue


def _settle(outcomes: Sequence[tuple[asyncio.Future[Any], Any]]) -> None:
    for future, result in outcomes:
        if future.done():
            continue
        if isinstance(result, RollartError):
            future.set_exception(result)
        else:
            future.set_result(result)
