"""The training loop: take a batch, train it, publish it. One step at a time, beside the rollouts.

Where the trainer streams, the batch is taken group by group and its gradient accumulated while the rest of it is still
rolled out; what is left when the last group comes is that group's share and the update.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field

from rollart.errors import LeaseExpired, PartDied, TrainerError, TrainerRefused
from rollart.ledger.clock import ResourceClock
from rollart.ledger.intervals import State
from rollart.model import Group, TrainReport
from rollart.policy.lease import Expiry
from rollart.ports import Trainer
from rollart.runtime.buffer import SampleBuffer
from rollart.runtime.leases import Leases
from rollart.runtime.publish import Publisher

__all__ = ["StepDone", "Training"]


REFUSALS = 3
"""Batches that a trainer may refuse in a row: one is bad luck, three are a setting."""


@dataclass(frozen=True, slots=True)
class StepDone:
    """One training step, for progress lines and reports. Times are loop seconds: `t0` is when its batch was whole,
    after `waited_s`; what was accumulated before counts as waiting."""

    step: int
    version: int
    groups: tuple[Group, ...]
    report: TrainReport
    t0: float
    t1: float
    waited_s: float


@dataclass(slots=True)
class _Streamed:
    """A batch that grows: its groups so far, and how many of them the trainer has (None: no step is under way there).
    `since` is when the last of them came."""

    groups: list[Group] = field(default_factory=list)
    given: int | None = None
    whole: bool = False
    finishing: bool = False
    since: float = 0.0
    refusals: int = 0
    empty: int = 0

    def refused(self) -> list[Group]:
        """The trainer refuses: at the end all of them, before that those which it was just given. They leave."""
        if self.finishing:
            self.empty += 1
            self.given, self.finishing = None, False
        else:
            self.refusals += 1
        gone = self.groups[self.given or 0 :]
        del self.groups[self.given or 0 :]
        self.whole = False
        return gone


class Training:
    """Consumes batches from the buffer, produces versions. Waits for a batch (unblocked by rollouts), for the trainer
    and for the publish. A trainer that dies is restarted by `recover` and the same batch, or what there is of it, is
    trained again from the same version: nothing of it was committed, so nothing is trained twice.
    """

    def __init__(
        self,
        trainer: Trainer,
        buffer: SampleBuffer,
        publisher: Publisher,
        leases: Leases,
        *,
        clock: ResourceClock,
        train_s: float,
        recover: Callable[[], Awaitable[None]],
        on_step: Callable[[StepDone], None],
        on_refused: Callable[[Sequence[Group], str], None],
        on_taken: Callable[[Sequence[Group]], None] = lambda _: None,
        attempts: int = 3,
    ) -> None:
        self._trainer = trainer
        self._buffer = buffer
        self._publisher = publisher
        self._leases = leases
        self._clock = clock
        self._train_s = train_s
        self._recover = recover
        self._on_step = on_step
        self._on_refused = on_refused
        self._on_taken = on_taken
        self._attempts = attempts

    async def run(self, *, first_step: int, version: int, steps: int) -> None:
        """Steps `first_step` .. `steps` - 1, from `version`."""
        loop = asyncio.get_running_loop()
        for step in range(first_step, steps):
            waiting = loop.time()
            self._clock.enter(State.IDLE, "waits_for_samples")
            train = self._stream_some if self._trainer.streams else self._train_some
            groups, report, began = await train(version, step)
            version += 1
            done = StepDone(step, version, groups, report, began, loop.time(), began - waiting)
            self._on_step(done)
        self._clock.enter(State.IDLE, "run_over")

    async def _train_some(self, version: int, step: int) -> tuple[tuple[Group, ...], TrainReport, float]:
        """The first batch that the trainer takes. One that it refuses is dropped with its reason, so that neither this
        run nor its resume meets it again; `REFUSALS` in a row end the run."""
        loop = asyncio.get_running_loop()
        for refused in range(1, REFUSALS + 1):
            with self._leases.note("training", f"a batch for step {step}"):
                groups = await self._buffer.take(version)
            self._on_taken(groups)
            began = loop.time()
            try:
                return groups, await self._step(groups, version, step), began
            except TrainerRefused as error:
                self._on_refused(groups, str(error))
                if refused == REFUSALS:
                    raise
                self._clock.enter(State.IDLE, "waits_for_samples")
        raise AssertionError("unreachable: the last refusal raises")

    async def _stream_some(self, version: int, step: int) -> tuple[tuple[Group, ...], TrainReport, float]:
        """The same group by group. Groups that the trainer refuses are dropped, and others take their place; what it
        refuses at the end is the whole batch."""
        state, failures = _Streamed(), 0
        while True:
            try:
                if not state.whole and (state.given or 0) == len(state.groups):
                    await self._grow(state, version, step)
                await self._feed(state, version, step)
                if not state.whole:
                    continue
                report = await self._finish(state, step)
                self._clock.enter(State.SYNC)
                await self._publisher.publish(version + 1, step + 1, state.groups, report.metrics)
                return tuple(state.groups), report, state.since
            except TrainerRefused as error:
                self._on_refused(state.refused(), str(error))
                if REFUSALS in (state.refusals, state.empty):
                    raise
            except (TrainerError, LeaseExpired):
                failures += 1
                if failures == self._attempts:
                    raise
                state.given = None
                await self._restart()

    async def _grow(self, state: _Streamed, version: int, step: int) -> None:
        """Wait for more groups; notes when there are all."""
        self._clock.enter(State.IDLE, "waits_for_samples")
        with self._leases.note("training", f"groups for step {step}"):
            more = await self._buffer.grow(version, state.groups)
        state.whole = not more
        if more:
            state.groups += more
            state.since = asyncio.get_running_loop().time()
        else:
            self._on_taken(state.groups)

    async def _feed(self, state: _Streamed, version: int, step: int) -> None:
        """Give the trainer what it has not got; all of it, if there is no step under way."""
        if state.given is None:
            async with self._lease(step):
                await self._trainer.begin(version)
            state.given = 0
        if fresh := state.groups[state.given :]:
            async with self._lease(step):
                await self._trainer.accumulate([s for g in fresh for s in g.samples])
            state.given, state.refusals = len(state.groups), 0

    async def _finish(self, state: _Streamed, step: int) -> TrainReport:
        async with self._lease(step):
            state.finishing = True
            report = await self._trainer.finish()
        state.finishing, state.given = False, None
        return report

    def _lease(self, step: int) -> AbstractAsyncContextManager[object]:
        self._clock.enter(State.BUSY)
        return self._leases.hold("training", f"step {step} of the trainer", self._train_s, Expiry.RESTART_PART)

    async def _step(self, groups: Sequence[Group], version: int, step: int) -> TrainReport:
        samples = [s for g in groups for s in g.samples]
        for attempt in range(1, self._attempts + 1):
            try:
                async with self._lease(step):
                    report = await self._trainer.train(samples, version)
                self._clock.enter(State.SYNC)
                await self._publisher.publish(version + 1, step + 1, groups, report.metrics)
                return report
            except TrainerRefused:
                raise
            except (TrainerError, LeaseExpired):
                if attempt == self._attempts:
                    raise
                await self._restart()
        raise AssertionError("unreachable: the last attempt returns or raises")

    async def _restart(self) -> None:
        """Bring the trainer back; a restart that fails is tried again. `recover` bounds how often in all."""
        for attempt in range(1, self._attempts + 1):
            self._clock.enter(State.DOWN, "trainer_restart")
            try:
                await self._recover()
                return
            except (PartDied, TrainerError, LeaseExpired):
                if attempt == self._attempts:
                    raise
