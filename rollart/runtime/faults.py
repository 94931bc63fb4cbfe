"""The rate of infrastructure faults, and the threshold at which a run stops rather than train on what is left."""

from __future__ import annotations

from dataclasses import dataclass, field

from rollart.errors import FaultRateExceeded
from rollart.model import AbortReason
from rollart.policy.incidents import IncidentWindow

__all__ = ["WINDOW", "FaultMeter"]


MIN_INCIDENTS = 3
"""Ends of hosts before what they took is judged: two at about the same time are machines that failed."""

MAX_INCIDENT_SHARE = 0.5
"""Share of attempts that the ends of hosts may take, or `max_rate` where that is more."""

WINDOW = 1000
"""Attempts that are looked back on for what ends of hosts took, at least."""


@dataclass(slots=True)
class FaultMeter:
    """Counts attempts and infrastructure faults of the whole run. `max_rate` is a share of attempts; below
    `min_count` faults nothing is judged, so that one early crash does not end a run.

    The end of an environment host takes hundreds of episodes at once, whatever they were doing: they are one fault, and
    so are all that one node takes with several hosts (`policy.incidents`). A run also stops when, of the last `window`
    attempts that ended, more were lost so than ended otherwise, with three incidents or more and `min_count` attempts.
    Bound: of any `window` attempts in a row no more than half of them and one incident's episodes are lost so; where
    `max_rate` is above a half it is the bound, and 1 is none. What was before the window is forgotten: an outage of the
    first day stops no run on its second."""

    max_rate: float
    min_count: int
    window: int = WINDOW
    attempts: int = 0
    faults: int = 0
    details: dict[str, int] = field(default_factory=dict)
    losses: IncidentWindow = field(init=False)

    def __post_init__(self) -> None:
        self.losses = IncidentWindow(self.window)

    @property
    def together(self) -> int:
        """Attempts of the window that were lost to an end that was counted already."""
        return self.losses.together

    def ended(self, reason: AbortReason | None, detail: str = "", *, incident: str = "") -> None:
        """An attempt ended: with a sample (None) or aborted. Only infrastructure faults count; those of one `incident`
        together once."""
        if not self.losses.add(incident):
            return
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
        limit = max(MAX_INCIDENT_SHARE, self.max_rate)
        if self.losses.too_many(share=limit, incidents=MIN_INCIDENTS, least=self.min_count):
            raise FaultRateExceeded(
                f"{self.together} of the last {len(self.losses.attempts)} trajectories were lost with "
                f"{self.losses.incidents} ends of environment hosts (limit {limit:.0%})",
                remedy="see rollart logs --role environment, then rollart launch --resume",
            )
