"""The training loop: take a batch, train it, publish it. One step at a time, concurrently with the rollouts.

If the trainer streams, the batch is taken group by group and its gradient accumulated while the other groups are still
rolled out. After the last group only its own gradient and the update remain.

If publishes overlap, a version is staged and then written, committed and moved to the engines during the next step.
A trainer that dies meanwhile may lose two batches: the unpublished one is trained again first.

Columns of samples, reference log-probabilities and advantages, may be filled while a batch is rolled out (AsyncFlow
§6.1). Each has a separate task over the sample table, which takes every row once, as soon as the row's inputs are
written; training takes the rows whose columns are all written. The training step would compute bitwise equal values, so
only the timing of a run depends on these tasks; a resume fills the columns again.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import KW_ONLY, dataclass, field

from rollart.control.buffer import SampleBuffer, SampleColumn
from rollart.control.publish import Publisher
from rollart.errors import LeaseExpired, PartDied, RunFailed, TrainerError, TrainerRefused
from rollart.leases import Expiry, Leases
from rollart.ledger.intervals import ResourceClock, ResourceState
from rollart.model import Group, TrainReport, TrainSample
from rollart.ports import Trainer

ATTEMPTS = 3
"""Attempts at the same step, restart or rows, each after a restart of the trainer; then the run ends with the last
error."""

MAX_REFUSED_BATCHES = 3
"""Consecutive batches that a trainer may refuse whole: one may be accidental, three indicate a wrong setting."""


@dataclass(frozen=True, slots=True)
class StepDone:
    """One training step, for progress lines and reports. Times are loop seconds. `t0`: its batch was whole, after
    `waited_s`, which includes earlier accumulation. `trained`: the trainer was done. `t1`: its version became current,
    possibly during the next step."""

    step: int
    version: int
    groups: tuple[Group, ...]
    report: TrainReport
    t0: float
    trained: float
    t1: float
    waited_s: float


@dataclass(slots=True)
class _StreamedBatch:
    """A growing batch: its groups so far, and the number of groups that the trainer has (None: the trainer has no open
    step). `since`: the arrival time of the last group."""

    groups: list[Group] = field(default_factory=list)
    given: int | None = None
    whole: bool = False
    finishing: bool = False
    since: float = 0.0
    refusals: int = 0
    empty: int = 0

    def refused(self, error: TrainerRefused) -> list[Group]:
        """The groups that leave the batch: the groups of the samples that the trainer names. If it names none, all
        groups at the end of the step, and before that the groups that it was given last."""
        ending, self.finishing = self.finishing, False
        if ending:
            self.given = None
        kept, fresh = self.groups[: self.given or 0], self.groups[self.given or 0 :]
        gone = _refused_groups(fresh, error)
        self.empty += ending and len(gone) == len(fresh)
        self.refusals += not ending and len(gone) == len(fresh)
        self.groups = kept + [g for g in fresh if g not in gone]
        self.whole = False
        return gone


@dataclass(slots=True)
class _PendingPublish:
    """A trained step whose version is being published during the next step."""

    done: StepDone
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    error: TrainerError | None = None


def all_samples(groups: Sequence[Group], step: int) -> list[TrainSample]:
    """All samples, by id: groups are in the order in which they ended."""
    return sorted((s for g in groups for s in g.samples), key=lambda s: s.id)


@dataclass(eq=False)
class Training:
    """Consumes batches from the buffer and produces versions. Waits for a batch (unblocked by rollouts), for the
    trainer and for the publish; with `overlap` for the previous publish, so that at most one runs. `recover` restarts
    a trainer that dies. The same batch, or its groups so far, is then trained again from the same version: none of it
    was committed, so nothing is trained twice. `samples` selects the samples of a batch to train in a step.
    """

    trainer: Trainer
    buffer: SampleBuffer
    publisher: Publisher
    leases: Leases
    _: KW_ONLY
    clock: ResourceClock
    train_s: float
    recover: Callable[[], Awaitable[None]]
    on_step: Callable[[StepDone], None]
    on_refused: Callable[[Sequence[Group], str], None]
    on_taken: Callable[[Sequence[Group]], None] = lambda _: None
    on_failed: Callable[[int, int, Sequence[Group], str], None] = lambda *_: None
    """Given the step, the version it starts from, its batch and the error that ends the run."""
    overlap: bool = False
    samples: Callable[[Sequence[Group], int], Sequence[TrainSample]] = all_samples
    between: Callable[[int, bool], Awaitable[None]] | None = None
    """Awaited after each step, given the number of steps and true if it was the last, once its version is current: no
    version becomes current meanwhile."""

    def __post_init__(self) -> None:
        self._tasks: asyncio.TaskGroup | None = None
        self._behind: _PendingPublish | None = None
        self.lives = 1
        """Starts of the trainer known to training."""
        self._failed: TrainerError | None = None
        """The error of another component's call, if the trainer must be restarted for it."""
        self._wait: asyncio.Timeout | None = None
        """The scope of the wait for samples: a failure ends it."""
        self._mended = asyncio.Event()
        self._later: Sequence[Group] = ()
        """Groups taken during a publish: reported once its version is current."""
        self._steps = 0
        self._waiting = 0.0
        self._stopping = False

    async def run(self, *, first_step: int, version: int, steps: int) -> None:
        """Steps `first_step` .. `steps` - 1, from `version`."""
        self._steps = steps
        if not self.overlap:
            return await self._run(first_step, version)
        async with asyncio.TaskGroup() as self._tasks:
            await self._run(first_step, version)

    def stop(self) -> None:
        """End after the current step, or before the next one, with its version current."""
        self._stopping = True

    async def mend(self, error: TrainerError, life: int) -> None:
        """Restart the trainer after a failed call of another component; `life`: the value of `lives` at that call.
        Training restarts the trainer between two steps, or in a step that fails too; returns after that."""
        if life == self.lives:
            self._failed = error
            self._wake()
            await self._mended.wait()

    def _wake(self) -> None:
        if self._wait is not None:
            self._wait.reschedule(asyncio.get_running_loop().time())

    async def _run(self, first_step: int, version: int) -> None:
        loop = asyncio.get_running_loop()
        for step in range(first_step, self._steps):
            self._waiting = loop.time()
            self.clock.enter(ResourceState.IDLE, "waits_for_samples")
            train = self._stream_some if self.trainer.streams else self._train_some
            await train(version, step)
            version += 1
            if self.between is not None:
                await self._published_all()
                self.clock.enter(ResourceState.IDLE, "evaluation")
                await self.between(step + 1, self._stopping or step + 1 == self._steps)
            if self._stopping:
                await self._published_all()
                break
        self.clock.enter(ResourceState.IDLE, "run_over")

    async def _train_some(self, version: int, step: int) -> None:
        """Train the first batch that the trainer accepts. Groups with a refused sample are dropped with the reason, so
        that neither this run nor its resume trains them, and other groups replace them in the batch.
        `MAX_REFUSED_BATCHES` consecutive batches that are refused whole end the run."""
        loop = asyncio.get_running_loop()
        groups: tuple[Group, ...] = ()
        refusals = 0
        while True:
            groups = await self._batch(version, step, groups)
            self._taken(groups)
            began = loop.time()
            try:
                return await self._step(groups, version, step, began)
            except TrainerRefused as error:
                gone = _refused_groups(groups, error)
                groups = tuple(g for g in groups if g not in gone)
                self._refused(gone, str(error))
                refusals = 0 if groups else refusals + 1
                if refusals == MAX_REFUSED_BATCHES:
                    raise
                self.clock.enter(ResourceState.IDLE, "waits_for_samples")

    async def _batch(self, version: int, step: int, begun: tuple[Group, ...]) -> tuple[Group, ...]:
        """The next batch, or a batch that lost groups, completed from its remaining ones (`begun`)."""
        while True:
            try:
                with self.leases.note("training", f"a batch for step {step}"):
                    async with self._unless_broken():
                        if not begun:
                            return await self.buffer.take(version)
                        while more := await self.buffer.grow(version, begun):
                            begun += more
                        return begun
            except TrainerError:
                await self._restart()
                self.clock.enter(ResourceState.IDLE, "waits_for_samples")

    async def _stream_some(self, version: int, step: int) -> None:
        """Train a batch group by group. Refused groups are dropped and replaced by others; a refusal at the end
        concerns the whole batch."""
        state, failures = _StreamedBatch(), 0
        while True:
            try:
                if not state.whole and (state.given or 0) == len(state.groups):
                    await self._grow(state, version, step)
                await self._feed(state, version, step)
                if not state.whole:
                    continue
                async with self._lease(step):
                    state.finishing = True
                    report = await self.trainer.finish()
                state.finishing, state.given = False, None
                return await self._hand_over(version, step, state.groups, report, state.since)
            except TrainerRefused as error:
                self._refused(state.refused(error), str(error))
                if MAX_REFUSED_BATCHES in (state.refusals, state.empty):
                    raise
            except (TrainerError, LeaseExpired) as error:
                failures += 1
                if failures == ATTEMPTS:
                    self.on_failed(step, version, state.groups, str(error))
                    raise
                state.given = None
                await self._restart()

    async def _grow(self, state: _StreamedBatch, version: int, step: int) -> None:
        """Wait for more groups; note when the batch is whole."""
        self.clock.enter(ResourceState.IDLE, "waits_for_samples")
        with self.leases.note("training", f"groups for step {step}"):
            async with self._unless_broken():
                more = await self.buffer.grow(version, state.groups)
        state.whole = not more or self.buffer.in_one_piece
        if more:
            state.groups += more
            state.since = asyncio.get_running_loop().time()
        if state.whole:
            self._taken(state.groups)

    async def _feed(self, state: _StreamedBatch, version: int, step: int) -> None:
        """Give the trainer the groups that it lacks, or all of them if it has no open step."""
        if state.given is None:
            async with self._lease(step):
                await self.trainer.begin(version)
            state.given = 0
        if fresh := state.groups[state.given :]:
            async with self._lease(step):
                await self.trainer.accumulate([s for g in fresh for s in g.samples])
            state.given, state.refusals = len(state.groups), 0

    def _lease(self, step: int) -> AbstractAsyncContextManager[object]:
        self.clock.enter(ResourceState.BUSY)
        return self.leases.hold("training", f"step {step} of the trainer", self.train_s, Expiry.RESTART_PART)

    async def _step(self, groups: Sequence[Group], version: int, step: int, began: float) -> None:
        samples = self.samples(groups, step)
        for attempt in range(1, ATTEMPTS + 1):
            try:
                async with self._lease(step):
                    report = await self.trainer.train(samples, version)
                return await self._hand_over(version, step, groups, report, began)
            except TrainerRefused:
                raise
            except (TrainerError, LeaseExpired) as error:
                if attempt == ATTEMPTS:
                    self.on_failed(step, version, groups, str(error))
                    raise
                await self._restart()

    async def _hand_over(
        self, version: int, step: int, groups: Sequence[Group], report: TrainReport, began: float
    ) -> None:
        """Publish the version of a trained step, or stage it and publish it in the background. The last publish is
        awaited."""
        waited_s = began - self._waiting
        now = asyncio.get_running_loop().time
        trained = now()
        self.clock.enter(ResourceState.SYNC)
        await self._settled()
        await self.publisher.probe(version + 1, lambda: self.samples(groups, step))
        if self._tasks is None or step + 1 == self._steps:
            await self.publisher.publish(version + 1, step + 1, groups, report.metrics)
            self.on_step(StepDone(step, version + 1, tuple(groups), report, began, trained, now(), waited_s))
            return
        await self.publisher.stage(version + 1)
        done = StepDone(step, version + 1, tuple(groups), report, began, trained, now(), waited_s)
        self._behind = _PendingPublish(done)
        self._tasks.create_task(self._publish_behind(self._behind), name=f"publish v{version + 1}")

    async def _publish_behind(self, behind: _PendingPublish) -> None:
        done = behind.done
        try:
            await self.publisher.publish(done.version, done.step + 1, done.groups, done.report.metrics)
        except (TrainerError, LeaseExpired) as error:
            behind.error = TrainerError(f"v{done.version} could not be published: {error}")
            self._wake()
        else:
            self._published(done)
        finally:
            behind.ended.set()

    def _published(self, done: StepDone) -> None:
        """The version of the background publish is current."""
        self._behind = None
        self.on_step(dataclasses.replace(done, t1=asyncio.get_running_loop().time()))
        later, self._later = self._later, ()
        if later:
            self.on_taken(later)

    async def _settled(self) -> None:
        """Returns when no publish is running; raises its error if it failed."""
        behind = self._behind
        if behind is not None:
            await behind.ended.wait()
            if behind.error is not None:
                raise behind.error

    async def _published_all(self) -> None:
        """Returns when no publish is running. A publish that failed is repeated with a restarted trainer."""
        if self._behind is not None:
            await self._behind.ended.wait()
        if self._behind is not None:
            await self._restart()

    @contextlib.asynccontextmanager
    async def _unless_broken(self) -> AsyncIterator[None]:
        """The body waits for samples. They may never come if the running publish fails, or if the trainer fails to fill
        their columns: such a failure ends the wait."""
        if (error := self._broken()) is not None:
            raise error
        self._wait = asyncio.timeout(None)
        try:
            async with self._wait as scope:
                yield
        except TimeoutError:
            if not scope.expired() or (error := self._broken()) is None:
                raise
            raise error from None
        finally:
            self._wait = None

    def _broken(self) -> TrainerError | None:
        return self._failed or (None if self._behind is None else self._behind.error)

    def _taken(self, groups: Sequence[Group]) -> None:
        """The next batch may start once its initial weights are current."""
        if self._behind is None:
            self.on_taken(groups)
        else:
            self._later = tuple(groups)

    def _refused(self, groups: Sequence[Group], why: str) -> None:
        self._later = ()
        self.on_refused(groups, why)

    async def _restart(self) -> None:
        """Restart the trainer; a failed restart is tried again. `recover` bounds the total. A running publish ends
        first: the trainer resumes from its version, or the version is trained again."""
        if self._behind is not None:
            await self._behind.ended.wait()
        for attempt in range(1, ATTEMPTS + 1):
            self.clock.enter(ResourceState.DOWN, "trainer_restart")
            try:
                await self.recover()
                if self._behind is not None:
                    await self._again(self._behind.done)
                self._failed = None
                self.lives += 1
                self._mended.set()
                self._mended = asyncio.Event()
                return
            except (PartDied, TrainerError, LeaseExpired):
                if attempt == ATTEMPTS:
                    raise

    async def _again(self, done: StepDone) -> None:
        """Repeat the step that was lost with the trainer, and publish it before the next step."""
        try:
            async with self._lease(done.step):
                report = await self.trainer.train(self.samples(done.groups, done.step), done.version - 1)
        except TrainerRefused as error:
            raise RunFailed(f"the trainer refuses step {done.step}, which it had trained: {error}") from None
        self.clock.enter(ResourceState.SYNC)
        await self.publisher.publish(done.version, done.step + 1, done.groups, report.metrics)
        self._published(dataclasses.replace(done, report=report))


def _refused_groups(groups: Sequence[Group], error: TrainerRefused) -> list[Group]:
    """Groups with a sample that the refusal names; all groups if it names none of their samples."""
    samples = frozenset(error.samples)
    return [g for g in groups if any(s.id in samples for s in g.samples)] or list(groups)


@dataclass(eq=False)
class ColumnFiller:
    """One loop per column. Each loop waits for rows (unblocked by new samples) and for the trainer; if the trainer
    fails, it waits until training has restarted it. Invariant: a row is taken once per column, and written once unless
    it has left the table by then. `column_s`: longest call of the trainer, seconds. `training` restarts the trainer.
    """

    columns: Sequence[SampleColumn]
    trainer: Trainer
    buffer: SampleBuffer
    leases: Leases
    _: KW_ONLY
    column_s: float
    training: Training

    async def run(self) -> None:
        """Fill the columns until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for column in self.columns:
                tasks.create_task(self._run(column), name=column)

    async def _run(self, column: SampleColumn) -> None:
        while True:
            samples = await self.buffer.lacking(column)
            values = await self._values(column, samples)
            for sample, mine in zip(samples, values, strict=True):
                self.buffer.fill(column, sample.id, mine)

    async def _values(self, column: SampleColumn, samples: Sequence[TrainSample]) -> Sequence[tuple[float, ...]]:
        """Empty values for refused samples: the training step identifies them."""
        ask = self.trainer.reference if column is SampleColumn.REFERENCE else self.trainer.advantages
        attempt = 1
        while True:
            life = self.training.lives
            try:
                what = f"{column} of {len(samples)} samples"
                async with self.leases.hold("columns", what, self.column_s, Expiry.RESTART_PART):
                    return await ask(samples)
            except TrainerRefused:
                return [()] * len(samples)
            except (TrainerError, LeaseExpired) as error:
                if attempt == ATTEMPTS:
                    raise
                attempt += 1
                await self.training.mend(error if isinstance(error, TrainerError) else TrainerError(str(error)), life)
