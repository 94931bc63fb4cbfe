"""When a process of environments has too much memory, and what follows. Pure: figures and `now` in, decisions out."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

__all__ = ["MemoryRules", "MemoryWatch", "MemoryAction"]

SHARE = 0.7
"""Of a machine's memory for its environment hosts together, where the spec sets no bound."""

LEAST = 1e9
"""Bytes that a host may always have where the spec sets no bound: interpreter, imports and a few hundred small
environments take less."""

HARD = 1.25
"""Times its bound at which a host is not waited for any longer."""


class MemoryAction(StrEnum):
    KEEP = "keep"
    DRAIN = "drain"
    """From now on it gets no episodes."""
    RESTART = "restart"


@dataclass(frozen=True, slots=True)
class MemoryRules:
    """`given`: the bound of each host in bytes; None: an equal share of its machine's memory. A host that drains has
    `drain_s` for the episodes that it holds."""

    given: float | None = None
    drain_s: float = 600.0

    def bound(self, machine: int, hosts: int) -> float:
        """Of one of so many hosts on a machine with so many bytes; infinite if those are not known."""
        if self.given is not None:
            return self.given
        return max(LEAST, SHARE * machine / max(1, hosts)) if machine else math.inf

    def words(self, machine: int, hosts: int) -> str:
        """How the bound was chosen."""
        if self.given is not None:
            return "environments.memory_gb"
        return f"environments.memory_gb: auto, for {hosts} host{'s' * (hosts != 1)} on {machine / 1e9:.1f} GB"


@dataclass(slots=True)
class MemoryWatch:
    """One life of a host. Rule: once above its bound it gets no more episodes, and it is started again when it holds
    none, after `drain_s`, or when it is above `HARD` times its bound, whichever is first."""

    rules: MemoryRules
    since: float | None = None
    """When it began to drain."""

    def look(self, memory: float, bound: float, live: int, now: float) -> MemoryAction:
        if self.since is None and memory <= bound:
            return MemoryAction.KEEP
        first, self.since = self.since is None, now if self.since is None else self.since
        if not live or memory > HARD * bound or now - self.since >= self.rules.drain_s:
            return MemoryAction.RESTART
        return MemoryAction.DRAIN if first else MemoryAction.KEEP
