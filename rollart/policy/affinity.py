"""Hardware affinity: the pool in which a domain's trajectories decode, and the fallback order when that pool is down.

RollArt's `hw_affinity={"FrozenLake": "H800", "default": "H20"}` (RollArt §1.3): a tag names a pool or a device type. A
domain without an entry follows `default`; without a default it may decode anywhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rollart.fleet import EnginePlacement

__all__ = ["HardwareAffinity"]


@dataclass(frozen=True, slots=True)
class HardwareAffinity:
    """`preferred` maps a domain to a pool or device type; `default` applies to the other domains. `order` lists
    compatible pools or device types to fall back to, best first. Pools that `order` does not name come last, in any
    order: a fallback is worse than the plan, and a stall is worst."""

    preferred: Mapping[str, str] = field(default_factory=dict)
    order: tuple[str, ...] = ()
    default: str | None = None

    def __bool__(self) -> bool:
        return bool(self.preferred) or self.default is not None

    def wants(self, domain: str) -> str | None:
        """The pool or device type that the domain prefers; None if it has no preference."""
        return self.preferred.get(domain, self.default)

    def rank(self, domain: str, placement: EnginePlacement) -> int:
        """0 for the domain's preferred hardware, then 1, 2, … down the fallback order; always 0 without a
        preference."""
        wanted = self.wants(domain)
        if wanted is None or wanted in (placement.pool, placement.device):
            return 0
        for position, name in enumerate(self.order, start=1):
            if name in (placement.pool, placement.device):
                return position
        return len(self.order) + 1

    def best(self, domain: str, placements: Sequence[EnginePlacement]) -> int:
        """The lowest rank among the engines; the choice is made among engines of this rank."""
        return min((self.rank(domain, placement) for placement in placements), default=0)
