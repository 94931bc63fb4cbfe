"""Which host an episode goes to: the least loaded of those that do no worse than their peers.

A host is judged by the share of its episodes that end in a fault, a moving average, and by the time that its calls take
beside the environment's own, the median of the last that were looked at; both against the median of the others: where
all are as bad, it is the environments or the machine, and leaving one out would help nobody. Pure: `now` in, decisions
out.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

__all__ = ["BUSY", "HostRules", "HostSelector", "HostRecord", "hosts_for"]

BUSY = 0.7
"""Share of its core that a host's environments may take on average: beyond it, a turn waits for others' turns."""


def hosts_for(*, cores: float, most: int, episodes: int, per_host: int) -> int:
    """Hosts for environments that keep `cores` busy, on a pool with `most` of them, and for so many episodes at a time.
    A host is a process of one interpreter, so that it uses about one core; room for all episodes goes before cores."""
    return max(1, min(math.ceil(cores / BUSY), most), math.ceil(episodes / per_host))


@dataclass(frozen=True, slots=True)
class HostRules:
    """When a host is left alone, and for how long."""

    weight: float = 0.2
    """Of what is new in the moving average: about the last nine episodes count."""
    seen: int = 5
    """Episodes, or calls that were looked at, before a host is judged: one broken seed is no broken host."""
    apart_s: float = 0.2
    """Between two calls that are looked at. A loop that stood still, the host's or the controller's, answers what has
    waited all at once, a hundred calls or more: together they are one observation, and one of `seen`."""
    failing: float = 0.4
    """Share of episodes that fail beyond that of its peers."""
    slow: float = 8.0
    """Times the overhead of its peers, beside `slow_floor_s`."""
    slow_floor_s: float = 0.5
    """Overhead that nobody minds: a turn of a policy takes as long."""
    shortest_s: float = 10.0
    longest_s: float = 600.0
    """The first back-off and the longest, each twice the one before."""
    probes: int = 1
    """Episodes at a time of a host whose back-off is over."""
    crowd: int = 2
    crowd_from: int = 8
    """How far a host that has an episode's images may be ahead of the emptiest."""
    proofs: int = 3
    """Episodes in a row that go well before it counts as the others do."""


@dataclass(slots=True)
class HostRecord:
    """How one host does."""

    failures: float = 0.0
    overheads: tuple[float, ...] = ()
    """Of the last calls that were looked at, `seen` at most."""
    looked: float = -math.inf
    episodes: int = 0
    until: float = 0.0
    back_off_s: float = 0.0
    proofs: int = 0
    """Episodes that must still go well; above 0 it is left alone or on probation."""
    cause: str = ""

    @property
    def overhead_s(self) -> float:
        return statistics.median(self.overheads) if self.overheads else 0.0

    def quarantined(self, now: float) -> bool:
        return self.proofs > 0 and now < self.until

    def probation(self, now: float) -> bool:
        return self.proofs > 0 and now >= self.until


@dataclass(slots=True)
class HostSelector:
    """The hosts of a run and how each does.

    Bounds: of n hosts at most n // 2 are left alone at a time, so one host never is and never all are; `choose` finds a
    place whenever there is one, with a host that is left alone only if no other has room. Ties go to the host that was
    named first.
    """

    rules: HostRules = field(default_factory=HostRules)
    standing: dict[str, HostRecord] = field(default_factory=dict)

    def join(self, host: str) -> None:
        self.standing.setdefault(host, HostRecord())

    def leave(self, host: str, now: float) -> None:
        """It is gone for good. Fewer hosts may be left alone now: the first whose time is over comes back."""
        self.standing.pop(host, None)
        while len(away := self._away(now)) > len(self.standing) // 2:
            self.standing[min(away, key=lambda name: self.standing[name].until)].until = now

    def restarted(self, host: str) -> None:
        """It is a new process: what the old one did says nothing of its speed. Its faults stay: they are why."""
        self.standing[host].overheads = ()

    def called(self, host: str, overhead_s: float, now: float) -> str | None:
        """A call took so long beside its environment. The cause, if the host is left alone from now on."""
        one, seen = self.standing[host], self.rules.seen
        if now < one.looked + self.rules.apart_s:
            return None
        one.looked, one.overheads = now, (*one.overheads, overhead_s)[-seen:]
        if len(one.overheads) < seen or one.overhead_s <= self.rules.slow_floor_s:
            return None
        peers = self._median(host, lambda other: other.overhead_s, lambda other: len(other.overheads))
        if peers is None or one.overhead_s <= self.rules.slow * peers:
            return None
        return self._leave_alone(
            host, now, f"calls take {one.overhead_s:.2f} s beside their environments, elsewhere {peers:.2f} s"
        )

    def ended(self, host: str, *, fault: bool, now: float) -> str | None:
        """An episode is over. The cause, if the host is left alone from now on."""
        one = self.standing[host]
        one.episodes += 1
        one.failures += self._share(one.episodes) * (float(fault) - one.failures)
        if one.proofs:
            return self._tried(host, one, fault, now)
        if not fault or one.episodes < self.rules.seen:
            return None
        peers = self._median(host, lambda other: other.failures, lambda other: other.episodes)
        if peers is None or one.failures - peers < self.rules.failing:
            return None
        return self._leave_alone(host, now, f"{one.failures:.0%} of its episodes end in a fault, elsewhere {peers:.0%}")

    def choose(
        self, room: Mapping[str, tuple[int, int]], now: float, missing: Mapping[str, int] | None = None
    ) -> str | None:
        """A host for an episode. `room`: by host that is up, the episodes that it holds and the most that it may hold.
        `missing`: images that it needs and a host lacks. Those that lack fewest are chosen among, except that one with
        more than `crowd` times the episodes of the emptiest and `crowd_from` more is as good as without. None if all
        are full."""
        if missing:
            least = min((live for live, most in room.values() if live < most), default=0)
            bound = self.rules.crowd * least + self.rules.crowd_from
            fewest = min(
                (missing.get(n, 0) for n, (live, _) in room.items() if self._serves(n, now) and live <= bound),
                default=0,
            )
            near = {n: r for n, r in room.items() if missing.get(n, 0) <= fewest and r[0] <= min(bound, r[1] - 1)}
            near = {n: r for n, r in near.items() if self._serves(n, now)}
            if near:
                return self.choose(near, now)
        return self._least(room, now)

    def _least(self, room: Mapping[str, tuple[int, int]], now: float) -> str | None:
        """In one pass: with thousands of hosts this is what an episode's beginning costs."""
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

    def _serves(self, host: str, now: float) -> bool:
        """Whether nothing is said against it."""
        return not self.standing[host].proofs

    def _tried(self, host: str, one: HostRecord, fault: bool, now: float) -> str | None:
        if now < one.until:  # an episode of before
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

    def _share(self, count: int) -> float:
        return max(self.rules.weight, 1.0 / count)

    def _median(
        self, host: str, value: Callable[[HostRecord], float], seen: Callable[[HostRecord], int]
    ) -> float | None:
        """Of the other hosts that were seen often enough and count; None if there is none."""
        values = [
            value(other)
            for name, other in self.standing.items()
            if name != host and not other.proofs and seen(other) >= self.rules.seen
        ]
        return statistics.median(values) if values else None
