"""The rate of infrastructure faults, and the threshold at which a run stops instead of training on the remainder."""

from __future__ import annotations

from dataclasses import dataclass, field

from rollart.errors import FaultRateExceeded
from rollart.model import AbortReason
from rollart.policy.incidents import IncidentWindow

__all__ = ["WINDOW", "FaultMeter"]


MIN_INCIDENTS = 3
"""Minimum number of incidents whose losses can stop a run: two at about the same time are ordinary machine failures."""

MAX_INCIDENT_SHARE = 0.5
"""Maximum share of attempts that may be lost to incidents, unless `max_rate` is higher."""

WINDOW = 1000
"""Minimum number of recent attempts over which losses to incidents are counted."""


@dataclass(slots=True)
class FaultMeter:
    """Counts attempts and infrastructure faults of the whole run. `max_rate` is a share of attempts. With fewer than
    `min_count` faults the rate is not checked, so that one early crash does not end a run.

    The end of an environment host aborts hundreds of episodes at once, in any state. All episodes of one incident count
    as one fault; the ends of several hosts of a node are one incident (`policy.incidents`). A run also stops when more
    than half of the last `window` ended attempts were lost to incidents (the first attempt of each incident not
    counted), if at least `MIN_INCIDENTS` incidents and `min_count` such attempts are in the window. Bound: among any
    `window` consecutive attempts, at most half plus the episodes of one incident are lost to incidents; a `max_rate`
    above one half replaces the half, and 1 disables the limit. Older attempts are forgotten: an outage on the first day
    does not stop a run on its second day."""

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
        """Attempts in the window that were lost to an incident beyond its first attempt."""
        return self.losses.together

    def ended(self, reason: AbortReason | None, detail: str = "", *, incident: str = "") -> None:
        """An attempt ended: with a sample (None) or aborted. Only infrastructure faults count; all attempts of one
        `incident` count once."""
        if not self.losses.add(incident):
            return
        self.attempts += 1
        if reason is AbortReason.INFRA_FAULT:
            self.faults += 1
            self.details[detail] = self.details.get(detail, 0) + 1

    def check(self) -> None:
        """Raise `FaultRateExceeded` if a limit is exceeded; an exceeded fault rate names the most frequent fault."""
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
