"""The staleness bound (invariants I2 and I3).

A trajectory that sampled its first token under version v0 may be trained into version n + 1 only while n - v0 <= alpha,
where n is the current (last published) version.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StalenessBound:
    """alpha >= 0: how many publishes a trajectory may live through. 0 is strictly on-policy."""

    alpha: int

    def __post_init__(self) -> None:
        if self.alpha < 0:
            raise ValueError(f"staleness must be at least 0, got {self.alpha}")

    def stale(self, v0: int | None, version: int) -> bool:
        """True if work begun under `v0` may no longer be trained at `version`. None = nothing sampled yet."""
        return v0 is not None and version - v0 > self.alpha
