"""Hardware affinity: which pool a domain's trajectories decode in, and where they go when that is down.

RollArt's `hw_affinity={"FrozenLake": "H800", "default": "H20"}` (RollArt §1.3): a tag names a pool or a device type. A
domain without an entry follows `default`; without that one it may decode anywhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rollart.fleet import EnginePlacement

__all__ = ["HardwareAffinity"]


@dataclass(frozen=True, slots=True)
class HardwareAffinity:
    """`preferred`: domain -> pool or device type; `default` for domains that are not in it. `order`: compatible pools
    or device types to fall back to, best first; what it does not name comes after it, in any order: a fallback is
    worse than the plan, a stall is worst."""

    preferred: Mapping[str, str] = field(default_factory=dict)
    order: tuple[str, ...] = ()
    default: str | None = None

    def __bool__(self) -> bool:
        return bool(self.preferred) or self.default is not None

    def wants(self, domain: str) -> str | None:
        """The pool or device type that the domain prefers; None if any will do."""
        return self.preferred.get(domain, self.default)

    def rank(self, domain: str, seat: EnginePlacement) -> int:
        """0 where the domain prefers to be, then 1, 2, … down the fallback order. 0 everywhere without a wish."""
        wanted = self.wants(domain)
        if wanted is None or wanted in (seat.pool, seat.device):
            return 0
        for position, name in enumerate(self.order, start=1):
            if name in (seat.pool, seat.device):
                return position
        return len(self.order) + 1

    def best(self, domain: str, seats: Sequence[EnginePlacement]) -> int:
        """The lowest rank that some seat has: engines of that rank are the ones to choose among."""
        return min((self.rank(domain, seat) for seat in seats), default=0)
