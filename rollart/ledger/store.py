"""The ledger of a run: what adapters record, and the durable state that a resume starts from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from rollart.ledger import tables
from rollart.ledger.database import Database
from rollart.ledger.prices import PriceBook
from rollart.ledger.writer import InlineWriter, ThreadWriter
from rollart.model import Group, TrainSample, TrajectoryId
from rollart.ports import Charge, Clock, Interval, Recovered, RunEvent
from serverless.meter import Saving, WorkerSpan
from serverless.types import Invocation

__all__ = ["Ledger"]


class Ledger:
    """`Recorder` and `Journal` over one SQLite file (WAL, synchronous FULL) in the run's directory.

    Recording is synchronous and buffered: it costs the caller about a microsecond and is durable within a few tens of
    milliseconds. Journal calls return when their transaction is durable; concurrent ones share it (group commit).
    Called from one event loop's thread. `inline=True` writes in the caller instead of in a thread
    and leaves power cuts out, for virtual time. `measure`: how many tokens ids stand for; simulated ones are many each.

    `clock` is the loop's: times are recorded as seconds of it and stored as seconds of the run, which go on where a
    resumed run stopped.

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
    ) -> None:
        database = Database(Path(directory), now=clock(), config=config, prices=prices, sync=not inline)
        self._database = database
        self._measure = measure
        self._writer: InlineWriter | ThreadWriter = InlineWriter(database) if inline else ThreadWriter(database)
        self.record = self._writer.record

    @property
    def spent_usd(self) -> float:
        """Dollars billed that have reached the file, over all of the run's lives: intervals, and calls where `prices`
        are known. What open resources have spent since their last change is not in it (`ResourceClock.flush`)."""
        return self._database.spent_usd

    @property
    def functions_usd(self) -> float:
        """The part of `spent_usd` that providers of functions bill."""
        return self._database.functions_usd

    def interval(self, interval: Interval) -> None:
        self.record(interval)

    def event(self, event: RunEvent) -> None:
        self.record(event)

    def invocation(self, invocation: Invocation) -> None:
        """The bill of one function call; its times are the run's."""
        self.record(invocation)

    def saving(self, saving: Saving) -> None:
        """Items that needed no function call."""
        self.record(saving)

    def worker(self, span: WorkerSpan) -> None:
        """A stretch of a function worker's life; only sums by the minute are kept."""
        self.record(span)

    def charge(self, charge: Charge) -> None:
        self.record(charge)

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

    async def commit(self, *, version: int, step: int, consumed: Sequence[Group], metrics: Mapping[str, float]) -> None:
        def committed(db: Database) -> None:
            tables.commit(db.connection, version, step, consumed, metrics, self._measure)
            db.published = True

        await self._writer.run(committed)

    async def recover(self) -> Recovered | None:
        recovered: Recovered | None = await self._writer.run(Database.recover)
        return recovered

    async def roll_back(self, version: int) -> int:
        """Make `version` the newest one. Groups that were trained into later ones, and groups with tokens of later
        ones, are dropped: payloads of trained samples are gone, and a later version's number will be used again.
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
        """Write what is left and let go of the run; bounded, may be called again."""
        self._writer.close()

    def __enter__(self) -> Ledger:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
