"""A pending item, its waiters and the calls that carry it: the state shared by a function queue and its provider
queues."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from serverless.types import Cause, Outcome
from serverless.wire import WireItem

__all__ = ["PipelineCall", "PendingItem", "CallAttempt", "Waiter"]


@dataclass(slots=True, eq=False)
class Waiter:
    """One `submit`, with its own outcome and deadline."""

    entry: PendingItem
    outcome: asyncio.Future[Outcome]
    expires: float
    deadline_s: float


@dataclass(slots=True, eq=False)
class PendingItem:
    """An item that one or more submits wait for, until `expires`, the latest of their deadlines.

    `provider_index` is the index of the first provider that has not failed the item, `sent_to` that of the provider
    that it was last sent to. `done` is set when no submit waits for it any more. `alone` is set after a call of several
    items that failed as a whole: the item then shares no further call.
    """

    wire: WireItem
    size: int
    key: bytes | None
    prompt: str
    expires: float
    since: float
    waiters: list[Waiter] = field(default_factory=list)
    cause: Cause = Cause.CALL
    provider_index: int = 0
    sent_to: int = 0
    attempts: int = 0
    throttles: int = 0
    retried: bool = False
    alone: bool = False
    done: bool = False
    call: PipelineCall | None = None
    retry: asyncio.TimerHandle | None = None


@dataclass(slots=True, eq=False)
class PipelineCall:
    """A logical call of several items, carried by one attempt, or by two if it is hedged. `alive` counts the items that
    are still waited for. `limit` is the time limit of its only item, if there is one."""

    entries: list[PendingItem]
    event: list[WireItem]
    cause: Cause
    expires: float
    limit: float | None
    alive: int
    provider_index: int
    counted: bool
    """True if the call counts as an attempt of its items. A call that isolates the failing item of a batch does not."""
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
