"""How many environments to reset ahead of admission: the look-ahead rule of `policy.pipeline`."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from rollart.policy.pipeline import prefetched_environments

__all__ = ["MOST_AHEAD", "PrefetchDepth", "environments_to_prefetch"]

MOST_AHEAD = 4
"""Most batches of environments that the rule keeps ahead: each holds memory on some host all the time."""

SEEN = 64
"""Window of the rule, in resets per domain: enough for a 90th percentile, few enough to follow a change."""


@dataclass(slots=True)
class PrefetchDepth:
    """The prefetch depth of one domain: `fixed` environments, or computed from measurements (None)."""

    fixed: int | None
    quota: int
    resets_s: deque[float] = field(default_factory=lambda: deque(maxlen=SEEN))
    period_s: float | None = None
    """Seconds from one admission of a batch to the next: the mean of the last period and the previous value."""
    admitted_at: float | None = None

    def reset(self, seconds: float) -> None:
        self.resets_s.append(seconds)

    def published(self, now: float) -> None:
        """The slots of a batch are free."""
        if self.admitted_at is not None:
            seen = now - self.admitted_at
            self.period_s = seen if self.period_s is None else (self.period_s + seen) / 2
        self.admitted_at = now

    def wanted(self) -> int:
        """Environments to keep reset, or in reset, for prompts that are not admitted yet."""
        if self.fixed is not None:
            return self.fixed
        return environments_to_prefetch(self.quota, self.period_s, self.resets_s)


def environments_to_prefetch(quota: int, period_s: float | None, resets_s: Sequence[float]) -> int:
    """Whole batches of environments: slots are freed a batch at a time, one batch every `period_s`, and the resets of a
    batch should have ended by then. The number of batches is `prefetched_environments` of the mean reset with its 90th
    percentile as jitter, at most `MOST_AHEAD`; one while no period is known; none before the first measured reset."""
    if not resets_s or max(resets_s) <= 0:
        return 0
    if period_s is None or period_s <= 0:
        return quota
    mean = math.fsum(resets_s) / len(resets_s)
    slow = sorted(resets_s)[math.ceil(0.9 * len(resets_s)) - 1]
    return quota * prefetched_environments(period_s, mean, jitter_s=max(slow - mean, 0.0), most=MOST_AHEAD)
