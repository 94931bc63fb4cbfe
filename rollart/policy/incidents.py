"""Grouping of environment-host failures into incidents, and the limit on losses to incidents. Pure: `now` in."""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field

TOGETHER_S = 10.0
"""Failures of hosts of one node that are at most this far apart belong to the node. A broken connection is detected at
once, a silent one by its health check, and a node whose memory is full kills its processes one by one."""

REMEMBERED = 1000
"""Host lives whose ends are remembered: an episode may learn of its host's end as late as its next step."""


@dataclass(slots=True)
class _Incident:
    name: str
    since: float
    hosts: set[str] = field(default_factory=set)


@dataclass(slots=True)
class IncidentTracker:
    """Hosts that ended, and the incident that each end belongs to.

    Rule: an end belongs to the last incident of its node if that incident began within `TOGETHER_S` and contains no end
    of the same host. Bound: an incident contains at most one end of a host, so a host that ends repeatedly causes as
    many incidents.
    """

    last: dict[str, _Incident] = field(default_factory=dict)
    """By node."""
    known: OrderedDict[str, str] = field(default_factory=OrderedDict)
    """By life."""

    def of(self, life: str, host: str, node: str, now: float) -> str:
        """The incident that ended this life of the host; the first call fixes its time."""
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
    """The last `size` attempts that ended, and the incident that ended each."""

    size: int
    attempts: deque[str] = field(default_factory=deque)
    """The incident of each attempt; '' for attempts that ended otherwise."""
    counts: dict[str, int] = field(default_factory=dict)
    """Attempts in the window by incident."""
    lost: int = 0
    """Attempts in the window that ended with an incident."""

    def add(self, incident: str) -> bool:
        """Record the end of an attempt. True if it is the first of its incident in the window, or belongs to none."""
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
    def shared_losses(self) -> int:
        """Attempts lost beyond the first of their incident; the first one counts as an ordinary fault."""
        return self.lost - self.incidents

    def too_many(self, *, share: float, incidents: int, least: int) -> bool:
        """True if at least `incidents` incidents took at least `least` attempts and more than `share` of the window."""
        many = self.incidents >= incidents and self.shared_losses >= least
        return many and self.shared_losses > share * len(self.attempts)
