"""The rate of infrastructure faults, and the threshold at which a run stops rather than train on what is left."""

from __future__ import annotations

from dataclasses import dataclass, field

from rollart.errors import FaultRateExceeded
from rollart.model import AbortReason

__all__ = ["FaultMeter"]


@dataclass(slots=True)
class FaultMeter:
    """Counts attempts and infrastructure faults of the whole run. `max_rate` is a share of attempts; below
    `min_count` faults nothing is judged, so that one early crash does not end a run."""

    max_rate: float
    min_count: int
    attempts: int = 0
    faults: int = 0
    details: dict[str, int] = field(default_factory=dict)

    def ended(self, reason: AbortReason | None, detail: str = "") -> None:
        """An attempt ended: with a sample (None) or aborted. Only infrastructure faults count."""
        self.attempts += 1
        if reason is AbortReason.INFRA_FAULT:
            self.faults += 1
            self.details[detail] = self.details.get(detail, 0) + 1

    def check(self) -> None:
        """Raises `FaultRateExceeded` naming the most frequent fault."""
        if self.faults >= self.min_count and self.faults > self.max_rate * self.attempts:
            worst, count = max(self.details.items(), key=lambda kv: (kv[1], kv[0]))
            raise FaultRateExceeded(
                f"{self.faults} of {self.attempts} trajectories met an infrastructure fault "
                f"(limit {self.max_rate:.0%}); most often ({count}×): {worst}",
                remedy="mend the part it names, or raise faults.max_rate, then rollart launch --resume",
            )
