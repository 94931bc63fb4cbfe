"""The ledger of a run: records of adapters, and the durable state that a resume starts from.

Group commit: one thread writes, many callers wait, one transaction serves them all.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TypeAlias

from rollart.errors import RollartError, StorageFailed
from rollart.ledger.database import Database, Measure, Operation
from rollart.ledger.events import WORKER_LEFT_PROCESSES
from rollart.ledger.intervals import RESOURCE_CLOSED, RESOURCE_OPENED, ResourceState
from rollart.ledger.kept import KeptScore, KeptTrajectory, PendingTrajectories
from rollart.model import Group, TrainSample, TrajectoryId
from rollart.ports import Charge, Clock, Interval, Recovered, RunEvent
from rollart.settings.prices import PriceList
from serverless.meter import LeftProcesses, Saving, TokenBill, WorkerSpan
from serverless.types import Invocation

FLUSH_SECONDS = 0.03
"""How long recorded rows wait for others when no caller waits for them: one fsync then carries hundreds."""

MAX_PENDING = 1_000_000
"""Rows that may wait for a slow disk; beyond it the ledger has failed (about 200 MB, a minute at full rate)."""

JOIN_SECONDS = 30.0
"""Bound on closing: one last transaction on a loaded disk takes far less."""

STOPPING = "stopping"
"""Cause of a resource's time between its own end and the end of the run's life."""

_Waiting: TypeAlias = tuple[Operation, "asyncio.Future[Any]"]


class Ledger:
    """`Recorder` and `Journal` over one SQLite file (WAL, synchronous FULL) in the run's directory.

    Recording is synchronous and buffered: it costs the caller about a microsecond and is durable within a few tens of
    milliseconds. Journal calls return when their transaction is durable; concurrent ones share it (group commit). All
    calls come from one event loop's thread. `inline=True` writes in the caller instead of in a thread and does not
    protect against power cuts, for virtual time. `measure` maps token ids to a number of tokens: simulated ids
    represent many tokens each.

    `clock` is the loop's: times are recorded as seconds of it and stored as seconds of the run, which continue where a
    resumed run stopped. A life of the run begins at `began`, by default now. The resources in `held` are paid from then
    on, and resources that close after `stopping` are paid until the ledger closes. `on_event` receives every event: a
    terminal selects its output from them. `kept_mb` bounds the trajectories that `keep` stores, of
    which it stores those that failed alone with `only_failed`.

    Errors: StorageFailed (final: every later call raises it, and `watch` too), RunFailed for a change that would break
    a rule (a sample trained twice), UsageError when another process holds the run.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        clock: Clock,
        config: Mapping[str, Any] | None = None,
        prices: PriceList | None = None,
        inline: bool = False,
        measure: Measure = len,
        began: float | None = None,
        held: Collection[str] = (),
        on_event: Callable[[RunEvent], None] | None = None,
        kept_mb: float = 0.0,
        only_failed: bool = False,
    ) -> None:
        self._on_event = on_event
        self._clock = clock
        self._began = clock() if began is None else began
        self._held = set(held)
        self._stopping = False
        self._closed: list[RunEvent] = []
        database = self._database = Database(
            Path(directory),
            now=self._began,
            config=config,
            prices=prices,
            sync=not inline,
            measure=measure,
            kept_mb=kept_mb,
        )
        self._pending = None if database.kept is None else PendingTrajectories(only_failed=only_failed)
        self._writer: InlineWriter | ThreadWriter = InlineWriter(database) if inline else ThreadWriter(database)
        self._record: Callable[[Any], None] = self._writer.record

    @property
    def spent_usd(self) -> float:
        """Dollars billed that have reached the file, over all of the run's lives: intervals, and calls where `prices`
        are known. Excludes the spending of open resources since their last change (`ResourceClock.flush`)."""
        return self._database.spent_usd

    @property
    def seconds(self) -> float:
        """Seconds of the run until now, over all of its lives."""
        return self._database.clock + self._clock() - self._began

    @property
    def functions_usd(self) -> float:
        """The part of `spent_usd` that providers of functions bill."""
        return self._database.functions_usd

    def event(self, event: RunEvent) -> None:
        self._record(event)
        if self._on_event is not None:
            self._on_event(event)
        if event.kind == RESOURCE_OPENED and event.subject in self._held:
            self._held.discard(event.subject)
            self._idle(event, self._began, event.t, ResourceState.STARTUP)
        elif event.kind == RESOURCE_CLOSED and self._stopping:
            self._closed.append(event)

    def stopping(self) -> None:
        """The run is over: the resources that close from now on are held until the ledger closes."""
        self._stopping = True

    def record(self, row: Interval | Charge | Invocation | Saving | TokenBill | WorkerSpan) -> None:
        """Record one row. The times of an `Invocation` (the bill of one function call) are the run's; a `Saving` is of
        items that needed no call; of `WorkerSpan`s, stretches of a function worker's life, only sums by the minute are
        kept."""
        self._record(row)

    interval = invocation = saving = tokens = worker = record

    def charge(self, charge: Charge) -> None:
        self._record(self._row(charge))

    def keep(self, kept: KeptTrajectory) -> None:
        """Store a trajectory together with its row, which follows: a crash leaves both or neither. Nothing is stored of
        a trajectory above an eighth of the bound."""
        if self._pending is not None:
            self._pending.add(kept)

    def scored(self, trajectory: str, value: float | None, scores: tuple[KeptScore, ...]) -> None:
        """Store the scores of a trajectory with it, if it is kept."""
        if self._pending is not None:
            self._pending.score(trajectory, value, scores)

    def _row(self, charge: Charge) -> Any:
        return charge if self._pending is None else self._pending.row(charge)

    def left(self, left: LeftProcesses) -> None:
        """Record an event: processes of a function outlived their call."""
        fields = {"worker": left.worker, "processes": left.processes}
        self.event(RunEvent(left.t, WORKER_LEFT_PROCESSES, left.function, fields))

    async def admit(self, group: str, domain: str, seed: int) -> None:
        await self._writer.run(lambda db: db.admit(group, domain, seed))

    async def finish(self, sample: TrainSample, charge: Charge) -> None:
        row = self._row(charge)

        def finished(db: Database) -> None:
            db.finish(sample)
            db.insert([row])

        await self._writer.run(finished)

    async def outdate(self, trajectory: TrajectoryId) -> None:
        await self._writer.run(lambda db: db.outdate(trajectory))

    async def drop(self, group: str, reason: str) -> None:
        await self._writer.run(lambda db: db.drop(group, reason))

    async def commit(
        self, *, version: int, step: int, consumed: Sequence[Group], metrics: Mapping[str, float], stamp: str = ""
    ) -> None:
        await self._writer.run(lambda db: db.commit(version, step, consumed, metrics, stamp))

    async def recover(self) -> Recovered | None:
        recovered: Recovered | None = await self._writer.run(Database.recover)
        return recovered

    async def roll_back(self, version: int) -> int:
        """Make `version` the newest one. Groups that were trained into later versions, and groups with tokens of later
        versions, are dropped: payloads of trained samples are deleted, and a later version's number will be used again.
        Returns how many samples are lost. RunFailed if the version was never committed."""
        lost: int = await self._writer.run(lambda db: db.roll_back(version))
        return lost

    async def flush(self) -> None:
        """Returns when everything recorded so far is durable."""
        await self._writer.run(lambda db: None)

    async def watch(self) -> None:
        """Waits for ever; raises StorageFailed once writing has failed. A run keeps it in its TaskGroup."""
        await self._writer.failure()

    def close(self) -> None:
        """Write the remaining rows and release the run; bounded, may be called again."""
        closed, self._closed = self._closed, []
        with contextlib.suppress(StorageFailed):  # the writer raises it again
            for event in closed:
                self._idle(event, event.t, self._clock(), ResourceState.IDLE, STOPPING)
        self._writer.close()

    def _idle(self, resource: RunEvent, t0: float, t1: float, state: ResourceState, cause: str = "") -> None:
        """Record an interval of the resource that the event opened or closed."""
        role, units, price = (resource.fields[name] for name in ("role", "units", "usd_per_unit_hour"))
        if t1 > t0:
            units, price = float(units or 0.0), float(price or 0.0)
            self._record(Interval(str(role), resource.subject, t0, t1, str(state), cause, units, price))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


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
    for loop, own in itertools.groupby(outcomes, key=lambda outcome: outcome[0].get_loop()):
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(_settle, list(own))


def _settle(outcomes: Sequence[tuple[asyncio.Future[Any], Any]]) -> None:
    for future, result in outcomes:
        if future.done():
            continue
        if isinstance(result, RollartError):
            future.set_exception(result)
        else:
            future.set_result(result)
