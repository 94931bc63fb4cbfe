"""Waiting under a lease: an owner, a deadline, and an attributed event when it passes."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from rollart.errors import LeaseExpired
from rollart.policy.lease import Expiry, Lease, LeaseBook
from rollart.ports import Recorder, RunEvent

__all__ = ["HeldLease", "Leases"]

COMPACT_AT = 1024
"""Ended holds that may lie behind an open one before they are swept out: about 0.2 MB."""


class Leases:
    """Hands out leases on one loop. Any task may call `hold`; the body is unblocked by its own end or by the
    deadline, whichever comes first: then a `lease_expired` event is recorded, whatever the body does, and
    `LeaseExpired` raised in it.

    Invariant: a lease is in the book exactly while its body runs.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._lines: dict[float, _ExpiryQueue] = {}
        self.book = LeaseBook()

    def hold(self, owner: str, waiting_for: str, seconds: float, action: Expiry) -> HeldLease:
        """`async with leases.hold("lake-7.2", "a step of its environment", 30.0, Expiry.GAP_FILL): ...`"""
        return HeldLease(self, owner, waiting_for, seconds, action)

    def describe(self) -> list[str]:
        """Who has waited longest for what, one line each."""
        now = asyncio.get_running_loop().time()
        return [lease.describe(now) for lease in self.book.oldest()]

    def moved(self, seconds: float) -> None:
        """The loop did not run for so long: every deadline is as much later. Their timers move with the loop's."""
        now = asyncio.get_running_loop().time()
        for lease in self.book.open.values():
            lease.deadline += min(seconds, now - lease.granted)

    def record_expiry(self, lease: Lease, now: float) -> None:
        self._recorder.event(
            RunEvent(
                now,
                "lease_expired",
                lease.owner,
                {
                    "waiting_for": lease.waiting_for,
                    "seconds": round(now - lease.granted, 3),
                    "action": str(lease.action),
                },
            )
        )

    @contextmanager
    def note(self, owner: str, waiting_for: str) -> Iterator[None]:
        """A wait that something else bounds (a watchdog, a queue with its own rule): in the book, without a timer."""
        now = asyncio.get_running_loop().time()
        lease = self.book.grant(owner, waiting_for, now=now, seconds=math.inf, action=Expiry.FAIL_RUN)
        try:
            yield
        finally:
            self.book.end(lease)


class HeldLease(Lease):
    """The context manager behind `Leases.hold`; used once, by one task. It never waits itself, so `with` and
    `async with` are the same; the former costs two coroutines less, which counts where a turn takes it.

    Like `asyncio.timeout`, but without a timer of its own: leases of equal length expire in the order they were
    granted, so one timer per length serves them all. Two of these are taken per turn.
    """

    __slots__ = ("_cancelling", "_expired", "_leases", "_task", "ended", "seconds")

    def __init__(self, leases: Leases, owner: str, what: str, seconds: float, action: Expiry) -> None:
        self._leases = leases
        self.owner = owner
        self.waiting_for = what
        self.seconds = seconds
        self.action = action
        self.ended = False
        self._expired = False

    def __enter__(self) -> HeldLease:
        loop = asyncio.get_running_loop()
        task = asyncio.current_task(loop)
        assert task is not None
        self._task = task
        self._cancelling = task.cancelling()
        self.granted = now = loop.time()
        self.deadline = now + self.seconds
        leases = self._leases
        book = leases.book
        book.granted = self.id = book.granted + 1
        book.open[self.id] = self
        line = leases._lines.get(self.seconds)
        if line is None:
            line = leases._lines[self.seconds] = _ExpiryQueue(loop, book)
        holds = line.holds
        holds.append(self)
        if line.timer is None or len(holds) > line.sweep_at:
            line.look()
        return self

    async def __aenter__(self) -> HeldLease:
        return self.__enter__()

    def renew(self, most_s: float) -> None:
        """What is waited for comes nearer: the whole time from now on, but no more than `most_s` in all."""
        if self.ended:
            return
        self.deadline = max(self.deadline, min(asyncio.get_running_loop().time() + self.seconds, self.granted + most_s))
        self._leases._lines[self.seconds].renewed = True

    def expire(self) -> None:
        """The deadline passed: the body is cancelled, and `__exit__` makes `LeaseExpired` of that."""
        self._expired = True
        self._leases.record_expiry(self, asyncio.get_running_loop().time())
        self._task.cancel()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.ended = True
        del self._leases.book.open[self.id]
        # A foreign cancellation that came in the same instant stays a cancellation.
        if self._expired and self._task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise LeaseExpired(self.owner, self.waiting_for, asyncio.get_running_loop().time() - self.granted) from None

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.__exit__(kind, error, trace)


class _ExpiryQueue:
    """The holds of one length, in the order of their deadlines, and the timer for the first that is still open."""

    __slots__ = ("_book", "_loop", "holds", "renewed", "sweep_at", "timer")

    def __init__(self, loop: asyncio.AbstractEventLoop, book: LeaseBook) -> None:
        self._loop = loop
        self._book = book
        self.sweep_at = COMPACT_AT
        self.holds: deque[HeldLease] = deque()
        self.renewed = False
        """Whether a deadline was moved: the holds are in order again before the next look at them."""
        self.timer: asyncio.TimerHandle | None = None

    def look(self) -> None:
        """A hold was added while no timer is set, or while many are kept: ended ones are swept out."""
        if len(self.holds) > self.sweep_at:
            self.holds = deque(h for h in self.holds if not h.ended)
            self.sweep_at = 2 * len(self._book.open) + COMPACT_AT
        if self.timer is None:
            self.timer = self._loop.call_at(self.holds[0].deadline, self._due)

    def _due(self) -> None:
        """Expire what is due, then wait for the next that is open; no timer while none is."""
        now = self._loop.time()
        if self.renewed:
            self.holds, self.renewed = deque(sorted(self.holds, key=lambda hold: hold.deadline)), False
        holds = self.holds
        while holds and (holds[0].ended or holds[0].deadline <= now):
            hold = holds.popleft()
            if not hold.ended:
                hold.expire()
        self.timer = self._loop.call_at(holds[0].deadline, self._due) if holds else None
