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

__all__ = ["Hold", "Leases"]

COMPACT_AT = 1024
"""Ended holds that may lie behind an open one before they are swept out: about 0.2 MB."""


class Leases:
    """Hands out leases on one loop. Any task may call `hold`; the body is unblocked by its own end or by the
    deadline, whichever comes first; then `LeaseExpired` is raised in it and a `lease_expired` event recorded.

    Invariant: a lease is in the book exactly while its body runs.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._lines: dict[float, _Line] = {}
        self.book = LeaseBook()

    def hold(self, owner: str, waiting_for: str, seconds: float, action: Expiry) -> Hold:
        """`async with leases.hold("lake-7.2", "step of its environment", 30.0, Expiry.GAP_FILL): ...`"""
        return Hold(self, owner, waiting_for, seconds, action)

    def describe(self) -> list[str]:
        """Who has waited longest for what, one line each."""
        now = asyncio.get_running_loop().time()
        return [lease.describe(now) for lease in self.book.oldest()]

    def enqueue(self, hold: Hold, loop: asyncio.AbstractEventLoop) -> None:
        """For `Hold`: it expires when its lease's deadline passes."""
        line = self._lines.get(hold.seconds)
        if line is None:
            line = self._lines[hold.seconds] = _Line(loop)
        line.add(hold, len(self.book.open))

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


class Hold:
    """The async context manager behind `Leases.hold`; used once, by one task.

    Like `asyncio.timeout`, but without a timer of its own: leases of equal length expire in the order they were
    granted, so one timer per length serves them all. Nine of these are taken per trajectory.
    """

    __slots__ = ("_cancelling", "_expired", "_leases", "_task", "action", "ended", "lease", "owner", "seconds", "what")

    def __init__(self, leases: Leases, owner: str, what: str, seconds: float, action: Expiry) -> None:
        self._leases = leases
        self.owner = owner
        self.what = what
        self.seconds = seconds
        self.action = action
        self.ended = False
        self._expired = False

    async def __aenter__(self) -> Lease:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._cancelling = task.cancelling()
        loop = asyncio.get_running_loop()
        self.lease = self._leases.book.grant(
            self.owner, self.what, now=loop.time(), seconds=self.seconds, action=self.action
        )
        self._leases.enqueue(self, loop)
        return self.lease

    def expire(self) -> None:
        """The deadline passed: the body is cancelled, and `__aexit__` makes `LeaseExpired` of that."""
        self._expired = True
        self._task.cancel()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.ended = True
        self._leases.book.end(self.lease)
        # Somebody else's cancellation that came in the same instant stays a cancellation.
        if self._expired and self._task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            now = asyncio.get_running_loop().time()
            self._leases.record_expiry(self.lease, now)
            raise LeaseExpired(self.owner, self.what, now - self.lease.granted) from None


class _Line:
    """The holds of one length, in the order of their deadlines, and the timer for the first that is still open."""

    __slots__ = ("_holds", "_loop", "_timer")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._holds: deque[Hold] = deque()
        self._timer: asyncio.TimerHandle | None = None

    def add(self, hold: Hold, open_leases: int) -> None:
        holds = self._holds
        if len(holds) > 2 * open_leases + COMPACT_AT:
            self._holds = holds = deque(h for h in holds if not h.ended)
        holds.append(hold)
        if self._timer is None:
            self._timer = self._loop.call_at(hold.lease.deadline, self._due)

    def _due(self) -> None:
        """Expire what is due, then wait for the next that is open; no timer while none is."""
        now = self._loop.time()
        holds = self._holds
        while holds and (holds[0].ended or holds[0].lease.deadline <= now):
            hold = holds.popleft()
            if not hold.ended:
                hold.expire()
        self._timer = self._loop.call_at(holds[0].lease.deadline, self._due) if holds else None
