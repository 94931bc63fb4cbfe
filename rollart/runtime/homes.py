"""Routing statistics of domains: assignments by pool, affinity fallbacks, and output lengths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from rollart.fleet import EnginePlacement
from rollart.policy.affinity import HardwareAffinity
from rollart.runtime.members import RegisteredEngine

__all__ = ["DomainRoutingStats", "EmitEvent"]

OUTPUT_MEAN_WEIGHT = 0.05
"""Weight of one turn in a domain's mean output: about twenty turns back, so that it follows a changing policy."""


POOL_COUNT_DECAY = 1 / 64
"""Weight of one assignment in a domain's counts: a returning pool is owed a few dozen assignments. Owing it all that it
missed would send every trajectory to it."""


class EmitEvent(Protocol):
    def __call__(self, kind: str, subject: str, **fields: str | int | float | None) -> None: ...


class DomainRoutingStats:
    """Synchronous; updated by `TurnRouter`."""

    def __init__(self, tell: EmitEvent) -> None:
        self._tell = tell
        self._outputs: dict[str, float] = {}
        self._homes: dict[str, dict[str, float]] = {}
        self._fallen: set[str] = set()

    def homes(self, domain: str) -> Mapping[str, float]:
        """Assignments of the domain's trajectories since the shares last changed, by pool; recent ones count most."""
        return self._homes.get(domain, {})

    def start_over(self) -> None:
        """Reset the assignments, since the shares change."""
        self._homes.clear()

    def homed(
        self,
        domain: str,
        member: RegisteredEngine,
        affinity: HardwareAffinity,
        *,
        preferred: bool,
        doubts: Sequence[EnginePlacement] = (),
    ) -> None:
        """Record an assignment. One event when a domain leaves its preferred pool, and one when it is back; none while
        it only waits for suspected engines (`doubts`)."""
        pool = member.seat.pool
        homes = self._homes.setdefault(domain, {})
        for other in homes:
            homes[other] *= 1 - POOL_COUNT_DECAY
        homes[pool] = homes.get(pool, 0.0) + 1
        wanted = affinity.wants(domain)
        if wanted is None or preferred == (domain not in self._fallen):
            return
        if not preferred and any(affinity.rank(domain, seat) == 0 for seat in doubts):
            return
        if preferred:
            self._fallen.discard(domain)
            self._tell("affinity_restored", domain, preferred=wanted)
        else:
            self._fallen.add(domain)
            self._tell("affinity_fallback", domain, preferred=wanted, pool=pool, engine=member.engine.id)

    def answered(self, domain: str, tokens: int) -> None:
        seen = self._outputs.get(domain)
        self._outputs[domain] = tokens if seen is None else seen + OUTPUT_MEAN_WEIGHT * (tokens - seen)

    def output(self, domain: str, most: int) -> float:
        """Expected output tokens of a turn: the domain's recent mean, or at first the maximum."""
        return min(self._outputs.get(domain, most), most)
