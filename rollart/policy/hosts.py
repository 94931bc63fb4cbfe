"""Selection and memory of environment hosts. Pure: figures and `now` in, decisions out.

An episode goes to the least loaded host among the hosts that do no worse than their peers. Two measures judge a host,
each against the median of the other hosts: the share of its episodes that end in a fault (a moving average), and the
overhead of its calls beyond the environment's own time (the median of the last samples). Where all hosts are equally
bad, the cause is the environments or the machine, and quarantining one host would not help. A host above its memory
bound is drained and restarted.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

BUSY = 0.7
"""Average share of its core that a host's environments may take: beyond it, turns wait for each other."""


def hosts_for(*, cores: float, most: int, episodes: int, per_host: int) -> int:
    """Hosts for environments that keep `cores` busy, on a pool with at most `most` hosts, and for `episodes` at a time.
    A host is a process of one interpreter, so it uses about one core. Room for all episodes takes precedence over
    cores."""
    return max(1, min(math.ceil(cores / BUSY), most), math.ceil(episodes / per_host))


@dataclass(frozen=True, slots=True)
class HostRules:
    """When a host is quarantined, and for how long."""

    weight: float = 0.2
    """Weight of a new episode in the moving average: about the last nine episodes count."""
    min_samples: int = 5
    """Episodes, or sampled calls, before a host is judged: one broken seed is no broken host."""
    apart_s: float = 0.2
    """Minimum interval between two sampled calls. After a loop was blocked (the host's or the controller's), a hundred
    or more delayed calls return at once: together they count as one observation, one of `min_samples`."""
    failing: float = 0.4
    """Excess of its share of failed episodes over that of its peers."""
    slow: float = 8.0
    """Factor on the overhead of its peers, in addition to `slow_floor_s`."""
    slow_floor_s: float = 0.5
    """Tolerated overhead: a turn of a policy takes as long."""
    shortest_s: float = 10.0
    longest_s: float = 600.0
    """The first and the longest back-off; each is twice the previous one."""
    probes: int = 1
    """Concurrent episodes on a host whose back-off is over."""
    crowd: int = 2
    crowd_from: int = 8
    """How far a host that has an episode's images may be ahead of the least loaded host."""
    proofs: int = 3
    """Consecutive successful episodes that end a host's probation."""


@dataclass(slots=True)
class HostRecord:
    """The track record of one host."""

    failures: float = 0.0
    overheads: tuple[float, ...] = ()
    """Overheads of the last sampled calls, at most `min_samples`."""
    sampled_at: float = -math.inf
    episodes: int = 0
    until: float = 0.0
    back_off_s: float = 0.0
    proofs: int = 0
    """Episodes that must still succeed; above 0 the host is quarantined or on probation."""
    cause: str = ""

    @property
    def overhead_s(self) -> float:
        return statistics.median(self.overheads) if self.overheads else 0.0

    def quarantined(self, now: float) -> bool:
        return self.proofs > 0 and now < self.until


@dataclass(slots=True)
class HostSelector:
    """The hosts of a run and their track records.

    Bounds: of n hosts at most n // 2 are quarantined at a time, so a single host is never quarantined, and never all
    hosts. `choose` finds a host whenever one has room, and picks a quarantined host only if no other has room. Ties go
    to the host that joined first.
    """

    rules: HostRules = field(default_factory=HostRules)
    standing: dict[str, HostRecord] = field(default_factory=dict)

    def join(self, host: str) -> None:
        self.standing.setdefault(host, HostRecord())

    def leave(self, host: str, now: float) -> None:
        """Remove a host for good. Fewer hosts may be quarantined now: the host whose back-off ends first returns."""
        self.standing.pop(host, None)
        while len(away := self._away(now)) > len(self.standing) // 2:
            self.standing[min(away, key=lambda name: self.standing[name].until)].until = now

    def restarted(self, host: str) -> None:
        """The host is a new process: the old process's overheads are discarded. Its faults stay: they caused the
        restart."""
        self.standing[host].overheads = ()

    def called(self, host: str, overhead_s: float, now: float) -> str | None:
        """Record a call's overhead beyond its environment's time. Returns the cause if the host is quarantined from now
        on."""
        one, count = self.standing[host], self.rules.min_samples
        if now < one.sampled_at + self.rules.apart_s:
            return None
        one.sampled_at, one.overheads = now, (*one.overheads, overhead_s)[-count:]
        if len(one.overheads) < count or one.overhead_s <= self.rules.slow_floor_s:
            return None
        peers = self._median(host, lambda other: other.overhead_s, lambda other: len(other.overheads))
        if peers is None or one.overhead_s <= self.rules.slow * peers:
            return None
        return self._leave_alone(
            host, now, f"calls take {one.overhead_s:.2f} s beside their environments, elsewhere {peers:.2f} s"
        )

    def ended(self, host: str, *, fault: bool, now: float) -> str | None:
        """Record the end of an episode. Returns the cause if the host is quarantined from now on."""
        one = self.standing[host]
        one.episodes += 1
        one.failures += max(self.rules.weight, 1.0 / one.episodes) * (float(fault) - one.failures)
        if one.proofs:
            return self._tried(host, one, fault, now)
        if not fault or one.episodes < self.rules.min_samples:
            return None
        peers = self._median(host, lambda other: other.failures, lambda other: other.episodes)
        if peers is None or one.failures - peers < self.rules.failing:
            return None
        return self._leave_alone(host, now, f"{one.failures:.0%} of its episodes end in a fault, elsewhere {peers:.0%}")

    def choose(
        self, room: Mapping[str, tuple[int, int]], now: float, missing: Mapping[str, int] | None = None
    ) -> str | None:
        """A host for an episode, or None if all are full. `room` maps each host that is up to its live episodes and its
        capacity; `missing` counts the images that the episode needs and a host lacks. Among the hosts that lack fewest
        images the least loaded is chosen. A host with more than `crowd` times the episodes of the least loaded host,
        plus `crowd_from`, counts as lacking its images."""
        if missing:
            least = min((live for live, most in room.values() if live < most), default=0)
            bound = self.rules.crowd * least + self.rules.crowd_from
            fewest = min(
                (missing.get(n, 0) for n, (live, _) in room.items() if not self.standing[n].proofs and live <= bound),
                default=0,
            )
            near = {n: r for n, r in room.items() if missing.get(n, 0) <= fewest and r[0] <= min(bound, r[1] - 1)}
            near = {n: r for n, r in near.items() if not self.standing[n].proofs}
            if near:
                return self.choose(near, now)
        return self._least(room, now)

    def _least(self, room: Mapping[str, tuple[int, int]], now: float) -> str | None:
        """The least loaded host, in one pass: with thousands of hosts this dominates the cost of starting an
        episode."""
        well = probed = tried = anyone = None
        least: dict[str, float] = dict.fromkeys(("well", "probed", "tried", "anyone"), math.inf)
        for name, (live, most) in room.items():
            if live >= most:
                continue
            one = self.standing[name]
            if not one.proofs:
                if live < least["well"]:
                    well, least["well"] = name, live
                continue
            if live < least["anyone"]:
                anyone, least["anyone"] = name, live
            if now >= one.until:
                if live < least["tried"]:
                    tried, least["tried"] = name, live
                if live < min(least["probed"], self.rules.probes):
                    probed, least["probed"] = name, live
        if well is not None:
            return probed if probed is not None and least["probed"] <= least["well"] else well
        return tried or anyone

    def _tried(self, host: str, one: HostRecord, fault: bool, now: float) -> str | None:
        if now < one.until:  # the episode began before the back-off
            return None
        if fault:
            return self._leave_alone(host, now, "it failed again on probation")
        one.proofs -= 1
        if not one.proofs:
            one.failures, one.back_off_s, one.cause = 0.0, 0.0, ""
        return None

    def _leave_alone(self, host: str, now: float, cause: str) -> str | None:
        one = self.standing[host]
        others = [name for name in self._away(now) if name != host]
        if one.quarantined(now) or len(others) + 1 > len(self.standing) // 2:
            return None
        one.back_off_s = min(max(2 * one.back_off_s, self.rules.shortest_s), self.rules.longest_s)
        one.until, one.proofs, one.cause = now + one.back_off_s, self.rules.proofs, cause
        one.overheads = ()
        return cause

    def _away(self, now: float) -> list[str]:
        return [name for name, one in self.standing.items() if one.quarantined(now)]

    def _median(
        self, host: str, value: Callable[[HostRecord], float], count: Callable[[HostRecord], int]
    ) -> float | None:
        """Median over the other hosts that have enough observations and serve normally; None if there is none."""
        values = [
            value(other)
            for name, other in self.standing.items()
            if name != host and not other.proofs and count(other) >= self.rules.min_samples
        ]
        return statistics.median(values) if values else None


SHARE = 0.7
"""Share of a machine's memory for all of its environment hosts, where the spec sets no bound."""

LEAST = 1e9
"""Minimum bound of a host in bytes, where the spec sets none: interpreter, imports and a few hundred small environments
take less."""

HARD = 1.25
"""Factor on the bound above which a host is restarted without waiting for its episodes."""


class MemoryAction(StrEnum):
    KEEP = "keep"
    DRAIN = "drain"
    """The host gets no further episodes."""
    RESTART = "restart"


@dataclass(frozen=True, slots=True)
class MemoryRules:
    """`given`: the bound of each host in bytes; None: an equal share of its machine's memory. A draining host has
    `drain_s` for its remaining episodes."""

    given: float | None = None
    drain_s: float = 600.0

    def bound(self, machine: int, hosts: int) -> float:
        """The bound of one of `hosts` hosts on a machine with `machine` bytes; infinite if the size is unknown."""
        if self.given is not None:
            return self.given
        return max(LEAST, SHARE * machine / max(1, hosts)) if machine else math.inf

    def describe(self, machine: int, hosts: int) -> str:
        """The origin of the bound, as text."""
        if self.given is not None:
            return "environments.memory_gb"
        return f"environments.memory_gb: auto, for {hosts} host{'s' * (hosts != 1)} on {machine / 1e9:.1f} GB"


@dataclass(slots=True)
class MemoryWatch:
    """Memory state of one life of a host. Rule: above its bound the host gets no further episodes. It is restarted when
    it is empty, after `drain_s`, or above `HARD` times its bound, whichever is first."""

    rules: MemoryRules
    since: float | None = None
    """Start of draining."""

    def check(self, memory: float, bound: float, live: int, now: float) -> MemoryAction:
        if self.since is None and memory <= bound:
            return MemoryAction.KEEP
        first, self.since = self.since is None, now if self.since is None else self.since
        if not live or memory > HARD * bound or now - self.since >= self.rules.drain_s:
            return MemoryAction.RESTART
        return MemoryAction.DRAIN if first else MemoryAction.KEEP
