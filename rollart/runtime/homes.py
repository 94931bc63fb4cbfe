"""What the gateway remembers of domains: homes given out, whether affinity had to fall back, how long answers are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from rollart.fleet import EnginePlacement
from rollart.policy.affinity import HardwareAffinity
from rollart.runtime.members import RegisteredEngine

__all__ = ["DomainRoutingStats", "EmitEvent"]

OUTPUT_MEAN_WEIGHT = 0.05
"""Weight of one turn in a domain's mean output: about twenty turns back, which follows a policy that learns to stop."""


POOL_COUNT_DECAY = 1 / 64
"""Weight of one home in a domain's counts: a pool that was away is owed a few dozen homes, not all that it missed,
which would herd every trajectory into it."""


class EmitEvent(Protocol):
    def __call__(self, kind: str, subject: str, **fields: str | int | float | None) -> None: ...


class DomainRoutingStats:
    """Synchronous; fed by `Turns`."""

    def __init__(self, tell: EmitEvent) -> None:
        self._tell = tell
        self._outputs: dict[str, float] = {}
        self._homes: dict[str, dict[str, float]] = {}
        self._fallen: set[str] = set()

    def homes(self, domain: str) -> Mapping[str, float]:
        """Homes given to the domain's trajectories since the shares last changed, by pool; recent ones count most."""
        return self._homes.get(domain, {})

    def start_over(self) -> None:
        """Other shares count from here on."""
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
        """A trajectory got its home. One event when a domain's cannot be where they should, one when they can again;
        none while they only wait for engines in `doubts`."""
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
        """Tokens that a turn is expected to generate: as the domain's turns of late, at first as many as it may."""
        return min(self._outputs.get(domain, most), most)
