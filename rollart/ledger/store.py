"""The ledger of a run: records of adapters, and the durable state that a resume starts from."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from rollart.errors import StorageFailed
from rollart.ledger import tables
from rollart.ledger.clock import RESOURCE_CLOSED, RESOURCE_OPENED
from rollart.ledger.database import Database
from rollart.ledger.intervals import ResourceState
from rollart.ledger.prices import PriceBook
from rollart.ledger.writer import InlineWriter, ThreadWriter
from rollart.model import Group, TrainSample, TrajectoryId
from rollart.ports import Charge, Clock, Interval, Recovered, RunEvent
from serverless.meter import Saving, WorkerSpan
from serverless.types import Invocation

__all__ = ["STOPPING", "Ledger"]

STOPPING = "stopping"
"""Cause of a resource's time between its own end and the end of the run's life."""


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
    terminal selects its output from them.

    Errors: StorageFailed (final: every later call raises it, and `watch` too), RunFailed for a change that would break
    a rule (a sample trained twice), UsageError when another process holds the run.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        clock: Clock,
        config: Mapping[str, Any] | None = None,
        prices: PriceBook | None = None,
        inline: bool = False,
        measure: tables.Measure = len,
        began: float | None = None,
        held: Collection[str] = (),
        on_event: Callable[[RunEvent], None] | None = None,
    ) -> None:
        self._on_event = on_event
        self._clock = clock
        self._began = clock() if began is None else began
        self._held = set(held)
        self._stopping = False
        self._closed: list[RunEvent] = []
        database = Database(Path(directory), now=self._began, config=config, prices=prices, sync=not inline)
        self._database = database
        self._measure = measure
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

    def interval(self, interval: Interval) -> None:
        self._record(interval)

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

    def invocation(self, invocation: Invocation) -> None:
        """The bill of one function call; its times are the run's."""
        self._record(invocation)

    def saving(self, saving: Saving) -> None:
        """Items that needed no function call."""
        self._record(saving)

    def worker(self, span: WorkerSpan) -> None:
        """A stretch of a function worker's life; only sums by the minute are kept."""
        self._record(span)

    def charge(self, charge: Charge) -> None:
        self._record(charge)

    async def admit(self, group: str, domain: str, seed: int) -> None:
        await self._writer.run(lambda db: tables.admit(db.connection, group, domain, seed))

    async def finish(self, sample: TrainSample, charge: Charge) -> None:
        def finished(db: Database) -> None:
            tables.finish(db.connection, db.segments, sample, self._measure)
            db.insert([charge])

        await self._writer.run(finished)

    async def outdate(self, trajectory: TrajectoryId) -> None:
        await self._writer.run(lambda db: tables.outdate(db.connection, trajectory))

    async def drop(self, group: str, reason: str) -> None:
        await self._writer.run(lambda db: tables.drop(db.connection, group, reason))

    async def commit(
        self, *, version: int, step: int, consumed: Sequence[Group], metrics: Mapping[str, float], stamp: str = ""
    ) -> None:
        def committed(db: Database) -> None:
            tables.commit(db.connection, version, step, consumed, metrics, self._measure, stamp=stamp)
            db.published = True

        await self._writer.run(committed)

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

    def __enter__(self) -> Ledger:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
