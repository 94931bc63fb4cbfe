"""Leases: every wait has an owner, a deadline and an action on expiry. `runtime.leases` drives this book."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field

__all__ = ["Expiry", "Lease", "LeaseBook"]


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


@dataclass(slots=True)
class LeaseBook:
    """The open leases, in the order they were granted."""

    open: dict[int, Lease] = field(default_factory=dict)
    granted: int = 0

    def grant(self, owner: str, waiting_for: str, *, now: float, seconds: float, action: Expiry) -> Lease:
        lease = Lease(self.granted + 1, owner, waiting_for, now, now + seconds, action)
        self.enter(lease)
        return lease

    def enter(self, lease: Lease) -> None:
        """Open a lease."""
        self.granted += 1
        lease.id = self.granted
        self.open[lease.id] = lease

    def end(self, lease: Lease) -> None:
        self.open.pop(lease.id, None)

    def expired(self, now: float) -> tuple[Lease, ...]:
        return tuple(lease for lease in self.open.values() if lease.deadline <= now)

    def oldest(self, count: int = 5) -> tuple[Lease, ...]:
        """The longest waits: the first ones that a watchdog reports."""
        return tuple(sorted(self.open.values(), key=lambda x: (x.granted, x.id))[:count])
