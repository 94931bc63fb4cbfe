"""A worker's slot in its pool, and the clock of its states."""

from __future__ import annotations

import asyncio
import enum
from dataclasses import dataclass, field

from serverless.backends._limit import ReusableTimeout
from serverless.backends.worker import Worker
from serverless.meter import WorkerState

__all__ = ["METERED_STATES", "WorkerSlot", "WorkerSlotState"]


class WorkerSlotState(enum.Enum):
    STARTING = enum.auto()
    IDLE = enum.auto()
    BUSY = enum.auto()
    GONE = enum.auto()


@dataclass(slots=True, eq=False)
class WorkerSlot:
    """A worker and its clock: `since` is the start of its present state, `cold_s` its start-up time until a call pays
    it."""

    slot: int
    name: str
    since: float
    state: WorkerSlotState = WorkerSlotState.STARTING
    worker: Worker | None = None
    cold_s: float = 0.0
    init_s: float = 0.0
    task: asyncio.Task[None] | None = None
    limit: ReusableTimeout = field(default_factory=ReusableTimeout)
    queued_s: float = 0.0
    """Seconds that the call it serves waited for it."""
    ahead: bool = False
    """Started before any call requested it: its start is billed separately, as no call has waited for it."""


METERED_STATES = {
    WorkerSlotState.STARTING: WorkerState.COLD,
    WorkerSlotState.IDLE: WorkerState.IDLE,
    WorkerSlotState.BUSY: WorkerState.BUSY,
}
