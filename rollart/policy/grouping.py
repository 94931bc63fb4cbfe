"""The life of a group (invariant I6): its members finish, are retried, or the whole group is dropped with a reason."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from rollart.model import AbortReason
from rollart.policy.staleness import StalenessBound

__all__ = ["GroupDecision", "GroupState", "TrajectorySnapshot"]

STALE_RESTARTS = 4
"""Restarts for staleness, per member, before a group is given up."""


@dataclass(frozen=True, slots=True)
class TrajectorySnapshot:
    """A trajectory when it was kept or cancelled; for a cancelled one, tokens, age and turns are lower bounds.
    `difficulty` is the mean reward of its group so far, `reward` its own; None where unknown."""

    id: str
    tokens: int
    age_s: float
    turns: int
    difficulty: float | None = None
    reward: float | None = None


class GroupDecision(enum.Enum):
    """The action for a group after an event."""

    WAIT = "wait"
    COMPLETE = "complete"
    RETRY = "retry"
    DROP = "drop"
    RESTART_STALE = "restart_stale"


@dataclass(slots=True)
class GroupState:
    """Counters of one group. `finished` maps a finished member to its v0; `attempts` counts failed attempts of the
    group, where all attempts that one incident (the end of a host) ended count once."""

    size: int
    max_attempts: int
    finished: dict[str, int] = field(default_factory=dict)
    attempts: int = 0
    stale: int = 0
    incidents: set[str] = field(default_factory=set)

    def finish(self, member: str, v0: int) -> GroupDecision:
        """A member is scored. Finishing one member twice is a bug of the caller."""
        assert member not in self.finished, f"{member} finished twice"
        self.finished[member] = v0
        return GroupDecision.COMPLETE if len(self.finished) == self.size else GroupDecision.WAIT

    def fail(self, reason: AbortReason, incident: str = "") -> GroupDecision:
        """A member's attempt failed: retry it in a fresh environment, or give the group up.

        An incident that ended several members counts once: several losses give no more evidence about the prompt than
        one.

        Staleness is not a failure of the prompt, so it has a bound of its own: a prompt whose trajectories outlive
        `STALE_RESTARTS` versions' worth of attempts is slower than the run can wait for.
        """
        if reason is AbortReason.STALE:
            self.stale += 1
            return GroupDecision.DROP if self.stale > STALE_RESTARTS * self.size else GroupDecision.RETRY
        if incident in self.incidents:
            return GroupDecision.RETRY
        if incident:
            self.incidents.add(incident)
        self.attempts += 1
        return GroupDecision.DROP if self.attempts >= self.max_attempts else GroupDecision.RETRY

    def published(self, version: int, bound: StalenessBound) -> GroupDecision:
        """A version was published. A group with a finished stale member can never be consumed whole, so it is dropped;
        otherwise its stale members in flight are restarted."""
        if any(bound.stale(v0, version) for v0 in self.finished.values()):
            return GroupDecision.DROP
        return GroupDecision.RESTART_STALE
