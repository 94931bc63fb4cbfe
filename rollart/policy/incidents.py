"""Which ends of environment hosts are one incident, and when incidents have taken too much. Pure: `now` in."""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field

__all__ = ["IncidentTracker", "IncidentWindow"]

TOGETHER_S = 10.0
"""Ends of hosts of one node that are no further apart are the node's: a connection that breaks is known at once, a
silent one by its health check, and a node whose memory is full kills its processes one by one."""

REMEMBERED = 1000
"""Lives whose ends are remembered: an episode may learn of its host's end as late as its next step."""


@dataclass(slots=True)
class _Incident:
    name: str
    since: float
    hosts: set[str] = field(default_factory=set)


@dataclass(slots=True)
class IncidentTracker:
    """Hosts that ended, and the incident that each end belongs to.

    Rule: an end belongs to the last incident of its node if that began within `TOGETHER_S` and has no end of the same
    host. Bound: an incident has one end of a host at most, so a host that ends over and over is as many.
    """

    last: dict[str, _Incident] = field(default_factory=dict)
    """By node."""
    known: OrderedDict[str, str] = field(default_factory=OrderedDict)
    """By life."""

    def of(self, life: str, host: str, node: str, now: float) -> str:
        """The incident that took this life of the host; the first who asks says when."""
        if (found := self.known.get(life)) is not None:
            return found
        incident = self.last.get(node)
        if incident is None or now - incident.since > TOGETHER_S or host in incident.hosts:
            incident = self.last[node] = _Incident(life, now)
        incident.hosts.add(host)
        self.known[life] = incident.name
        while len(self.known) > REMEMBERED:
            self.known.popitem(last=False)
        return incident.name


@dataclass(slots=True)
class IncidentWindow:
    """The last `size` attempts that ended, and which of them ended with which incident."""

    size: int
    attempts: deque[str] = field(default_factory=deque)
    """The incident of each; '' for those that ended otherwise."""
    counts: dict[str, int] = field(default_factory=dict)
    """Attempts in the window by incident."""
    lost: int = 0
    """Attempts in the window that ended with an incident."""

    def add(self, incident: str) -> bool:
        """An attempt ended. Whether it is the first of its incident in the window; True for none."""
        first = incident not in self.counts
        self.attempts.append(incident)
        if incident:
            self.counts[incident] = self.counts.get(incident, 0) + 1
            self.lost += 1
        while len(self.attempts) > self.size:
            old = self.attempts.popleft()
            if not old:
                continue
            self.lost -= 1
            self.counts[old] -= 1
            if not self.counts[old]:
                del self.counts[old]
        return first or not incident

    @property
    def incidents(self) -> int:
        return len(self.counts)

    @property
    def together(self) -> int:
        """Attempts that were lost beside the first of their incident, which is a fault like others."""
        return self.lost - self.incidents

    def too_many(self, *, share: float, incidents: int, least: int) -> bool:
        """Whether incidents, at least so many, took more than that share of the window, and at least so many
        attempts."""
        many = self.incidents >= incidents and self.together >= least
        return many and self.together > share * len(self.attempts)
