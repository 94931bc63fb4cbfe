"""Waiting under a lease: an owner, a deadline, and an attributed event with an action when it passes."""

from __future__ import annotations

import asyncio
import enum
import math
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType

from rollart.errors import LeaseExpired
from rollart.ports import Recorder, RunEvent


class Expiry(enum.StrEnum):
    """Action on the expiry of a lease: bounded and automatic."""

    RETRY = "retry"
    GAP_FILL = "gap_fill"
    RESTART_PART = "restart_part"
    FAIL_RUN = "fail_run"


@dataclass(slots=True, eq=False)
class Lease:
    """Times are loop seconds. `waiting_for` is a phrase for people: 'generate on engine-0'. A lease does not change
    once granted, but it is not frozen: two are made per turn of every trajectory, and frozen dataclasses are slower."""

    id: int
    owner: str
    waiting_for: str
    granted: float
    deadline: float
    action: Expiry

    def describe(self, now: float) -> str:
        limit = "no deadline" if math.isinf(self.deadline) else f"deadline in {self.deadline - now:.1f} s"
        return f"{self.owner} waits {now - self.granted:.1f} s for {self.waiting_for} ({limit})"


REPORTED = 5
"""Waits that `Leases.describe` lists."""

COMPACT_AT = 1024
"""Ended holds that may queue behind an open hold before they are removed: about 0.2 MB."""


class Leases:
    """Grants leases on one loop. Any task may call `hold`. The wait ends with the body or at the deadline, whichever
    comes first. At the deadline a `lease_expired` event is recorded, whatever the body does, and `LeaseExpired` is
    raised in the body.

    Invariant: a lease is in `open` exactly while its body runs.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self._lines: dict[float, _ExpiryQueue] = {}
        self.open: dict[int, Lease] = {}
        """In the order in which they were granted."""
        self.granted = 0

    def hold(self, owner: str, waiting_for: str, seconds: float, action: Expiry) -> HeldLease:
        """`async with leases.hold("lake-7.2", "a step of its environment", 30.0, Expiry.GAP_FILL): ...`"""
        return HeldLease(self, owner, waiting_for, seconds, action)

    def describe(self) -> list[str]:
        """The longest waits, one line each: owner, duration and object of the wait."""
        now = asyncio.get_running_loop().time()
        oldest = sorted(self.open.values(), key=lambda lease: (lease.granted, lease.id))[:REPORTED]
        return [lease.describe(now) for lease in oldest]

    def moved(self, seconds: float) -> None:
        """The loop was suspended for `seconds`: move every deadline by as much. The timers move with its clock."""
        now = asyncio.get_running_loop().time()
        for lease in self.open.values():
            lease.deadline += min(seconds, now - lease.granted)

    @contextmanager
    def note(self, owner: str, waiting_for: str) -> Iterator[None]:
        """A wait with a bound elsewhere (a watchdog, a queue with a rule): it is in `open`, but has no timer."""
        now = asyncio.get_running_loop().time()
        self.granted = number = self.granted + 1
        self.open[number] = Lease(number, owner, waiting_for, now, math.inf, Expiry.FAIL_RUN)
        try:
            yield
        finally:
            del self.open[number]


class HeldLease(Lease):
    """The context manager returned by `Leases.hold`; used once, by one task. It never waits itself, so `with` and
    `async with` are equivalent. `with` saves two coroutines, which matters for the leases of turns.

    It differs from `asyncio.timeout` in having no timer of its own: leases of equal length expire in the order in which
    they were granted, so one timer serves all leases of a length. Each turn takes two leases.
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
        leases.granted = self.id = leases.granted + 1
        leases.open[self.id] = self
        line = leases._lines.get(self.seconds)
        if line is None:
            line = leases._lines[self.seconds] = _ExpiryQueue(loop, leases)
        holds = line.holds
        holds.append(self)
        if line.timer is None or len(holds) > line.sweep_at:
            line.look()
        return self

    async def __aenter__(self) -> HeldLease:
        return self.__enter__()

    def renew(self, most_s: float) -> None:
        """Restart the deadline after progress: `seconds` from now on, but no more than `most_s` since the grant."""
        if self.ended:
            return
        self.deadline = max(self.deadline, min(asyncio.get_running_loop().time() + self.seconds, self.granted + most_s))
        self._leases._lines[self.seconds].renewed = True

    def expire(self) -> None:
        """Handle the passed deadline: cancel the body; `__exit__` turns the cancellation into `LeaseExpired`."""
        self._expired = True
        now = asyncio.get_running_loop().time()
        fields: dict[str, str | float] = {"waiting_for": self.waiting_for, "seconds": round(now - self.granted, 3)}
        fields["action"] = str(self.action)
        self._leases.recorder.event(RunEvent(now, "lease_expired", self.owner, fields))
        self._task.cancel()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.ended = True
        del self._leases.open[self.id]
        # Another cancellation of the task at the same instant stays a cancellation.
        if self._expired and self._task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise LeaseExpired(self.owner, self.waiting_for, asyncio.get_running_loop().time() - self.granted) from None

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.__exit__(kind, error, trace)


class _ExpiryQueue:
    """The holds of one length, in the order of their deadlines, and the timer of the first open hold."""

    __slots__ = ("_leases", "_loop", "holds", "renewed", "sweep_at", "timer")

    def __init__(self, loop: asyncio.AbstractEventLoop, leases: Leases) -> None:
        self._loop = loop
        self._leases = leases
        self.sweep_at = COMPACT_AT
        self.holds: deque[HeldLease] = deque()
        self.renewed = False
        """True if a deadline was renewed: the holds are sorted before the next expiry."""
        self.timer: asyncio.TimerHandle | None = None

    def look(self) -> None:
        """Set the timer if none is set, and remove ended holds if the queue is long."""
        if len(self.holds) > self.sweep_at:
            self.holds = deque(h for h in self.holds if not h.ended)
            self.sweep_at = 2 * len(self._leases.open) + COMPACT_AT
        if self.timer is None:
            self.timer = self._loop.call_at(self.holds[0].deadline, self._due)

    def _due(self) -> None:
        """Expire the holds that are due, then set the timer for the next open hold, if there is one."""
        now = self._loop.time()
        if self.renewed:
            self.holds, self.renewed = deque(sorted(self.holds, key=lambda hold: hold.deadline)), False
        holds = self.holds
        while holds and (holds[0].ended or holds[0].deadline <= now):
            hold = holds.popleft()
            if not hold.ended:
                hold.expire()
        self.timer = self._loop.call_at(holds[0].deadline, self._due) if holds else None
