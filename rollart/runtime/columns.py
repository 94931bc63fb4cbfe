"""Columns that are filled while a batch is rolled out: reference log-probabilities and advantages (AsyncFlow §6.1).

Each column has a separate task over the sample table, which takes every row once, as soon as the row's inputs are
written. Training takes the rows whose columns are all written. The training step would compute bitwise
equal values, so only the timing of a run depends on these tasks; a resume fills the columns again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from rollart.errors import LeaseExpired, TrainerError, TrainerRefused
from rollart.model import TrainSample
from rollart.policy.lease import Expiry
from rollart.ports import Trainer
from rollart.runtime.buffer import SampleBuffer, SampleColumn
from rollart.runtime.leases import Leases
from rollart.runtime.training import Training

__all__ = ["ColumnFiller"]

ATTEMPTS = 3
"""Attempts at the same rows, each after a restart of the trainer; then the run ends with the last error."""


class ColumnFiller:
    """One loop per column. Each loop waits for rows (unblocked by new samples) and for the trainer; if the trainer
    fails, it waits until training has restarted it. Invariant: a row is taken once per column, and written once unless
    it has left the table by then.
    """

    def __init__(
        self,
        columns: Sequence[SampleColumn],
        trainer: Trainer,
        buffer: SampleBuffer,
        leases: Leases,
        *,
        column_s: float,
        training: Training,
    ) -> None:
        """`column_s`: longest call of the trainer, seconds. `training` restarts the trainer."""
        self._columns = columns
        self._trainer = trainer
        self._buffer = buffer
        self._leases = leases
        self._column_s = column_s
        self._training = training

    async def run(self) -> None:
        """Fill the columns until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for column in self._columns:
                tasks.create_task(self._run(column), name=column)

    async def _run(self, column: SampleColumn) -> None:
        while True:
            samples = await self._buffer.lacking(column)
            values = await self._values(column, samples)
            for sample, mine in zip(samples, values, strict=True):
                self._buffer.fill(column, sample.id, mine)

    async def _values(self, column: SampleColumn, samples: Sequence[TrainSample]) -> Sequence[tuple[float, ...]]:
        """Empty values for refused samples: the training step identifies them."""
        ask = self._trainer.reference if column is SampleColumn.REFERENCE else self._trainer.advantages
        attempt = 1
        while True:
            life = self._training.lives
            try:
                what = f"{column} of {len(samples)} samples"
                async with self._leases.hold("columns", what, self._column_s, Expiry.RESTART_PART):
                    return await ask(samples)
            except TrainerRefused:
                return [()] * len(samples)
            except (TrainerError, LeaseExpired) as error:
                if attempt == ATTEMPTS:
                    raise
                attempt += 1
                await self._training.mend(error if isinstance(error, TrainerError) else TrainerError(str(error)), life)
