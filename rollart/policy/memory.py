"""Memory bounds of environment processes, and the actions above a bound. Pure: figures and `now` in, decisions out."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

__all__ = ["MemoryRules", "MemoryWatch", "MemoryAction"]

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
