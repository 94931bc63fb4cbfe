"""An item under way, those who wait for it, and the calls that carry it: the state that a line and its lanes share."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from serverless.types import Cause, Outcome
from serverless.wire import WireItem

__all__ = ["PipelineCall", "PendingItem", "CallAttempt", "Waiter"]


@dataclass(slots=True, eq=False)
class Waiter:
    """One `submit`: its own outcome, its own deadline."""

    entry: PendingItem
    outcome: asyncio.Future[Outcome]
    expires: float
    deadline_s: float


@dataclass(slots=True, eq=False)
class PendingItem:
    """One piece of work: an item that one or more submits wait for, until `expires`, the latest of their deadlines.

    `lane` is the first provider that has not failed it, `on` the one that it was sent to last, `done` that nobody waits
    any more, `alone` that it was in a call that failed as a whole and shares none again.
    """

    wire: WireItem
    size: int
    key: bytes | None
    prompt: str
    expires: float
    since: float
    waiters: list[Waiter] = field(default_factory=list)
    cause: Cause = Cause.CALL
    lane: int = 0
    on: int = 0
    attempts: int = 0
    throttles: int = 0
    retried: bool = False
    alone: bool = False
    done: bool = False
    call: PipelineCall | None = None
    retry: asyncio.TimerHandle | None = None


@dataclass(slots=True, eq=False)
class PipelineCall:
    """A logical call: a list of entries, carried by one try or, hedged, by two. `alive` is how many entries still wait.

    `limit` is the time limit of its only item, where it has one.
    """

    entries: list[PendingItem]
    event: list[WireItem]
    cause: Cause
    expires: float
    limit: float | None
    alive: int
    lane: int
    counted: bool
    """Whether it was an attempt of its items: one that looks for the guilty item of a batch is not."""
    done: bool = False
    tries: list[CallAttempt] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class CallAttempt:
    """One invocation."""

    call: PipelineCall
    cause: Cause
    began: float
    trial: bool
    number: int = 0
    reported: bool = False
    task: asyncio.Task[None] | None = None
