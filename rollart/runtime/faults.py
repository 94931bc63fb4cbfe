"""The rate of infrastructure faults, and the threshold at which a run stops rather than train on what is left."""

from __future__ import annotations

from dataclasses import dataclass, field

from rollart.errors import FaultRateExceeded
from rollart.model import AbortReason

__all__ = ["FaultMeter"]


INCIDENTS = 3
"""Ends of hosts before what they took is judged: two in a run are machines that failed."""

HALF = 0.5
"""Share of all attempts that the ends of hosts may take, or `max_rate` where that is more."""


@dataclass(slots=True)
class FaultMeter:
    """Counts attempts and infrastructure faults of the whole run. `max_rate` is a share of attempts; below
    `min_count` faults nothing is judged, so that one early crash does not end a run.

    The end of an environment host takes hundreds of episodes at once, whatever they were doing: they are one fault.
    From the third such end, and the `min_count`-th attempt that was lost so, a run also stops when more was lost so
    than ended otherwise. Bound: from then on no more than that and one host's episodes are lost so; where `max_rate` is
    above a half it is the bound, and 1 is none."""

    max_rate: float
    min_count: int
    attempts: int = 0
    faults: int = 0
    together: int = 0
    """Attempts lost to an end that was counted already."""
    details: dict[str, int] = field(default_factory=dict)
    incidents: set[str] = field(default_factory=set)

    def ended(self, reason: AbortReason | None, detail: str = "", *, incident: str = "") -> None:
        """An attempt ended: with a sample (None) or aborted. Only infrastructure faults count; those of one `incident`
        together once."""
        if incident in self.incidents:
            self.together += 1
            return
        if incident:
            self.incidents.add(incident)
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
        few = len(self.incidents) < INCIDENTS or self.together < self.min_count
        if not few and self.together > max(HALF, self.max_rate) * (self.attempts + self.together):
            raise FaultRateExceeded(
                f"{self.together} trajectories were lost with {len(self.incidents)} ends of environment hosts, more "
                f"than the {self.attempts} that ended otherwise",
                remedy="see rollart logs --role environment, then rollart launch --resume",
            )
