"""Which versions stay on disk: the last ones, every n-th and the best one.

Bound: at version v at most `keep` + ⌈(v + 1) / every⌉ + 1 versions, beside those in use.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rollart.policy.early_stop import mean_and_parts

SUCCESS, REWARD = "success", "reward"
"""Metrics of the best version: each is the mean over the domains, or one domain's with `.DOMAIN`."""

MIN_KEPT = 2
"""The newest version, and the one before it: a resume goes back to it if the newest one is damaged."""


def metric_value(metric: str, of: str, by_domain: Mapping[str, float | None]) -> float | None:
    """The value of `metric` in values of kind `of` (success or reward) by domain; None if it is not of that kind, or
    unknown."""
    return mean_and_parts(of, by_domain).get(metric)


def references(version: int, reset: int) -> set[int]:
    """The reference policies of `version` and of the version before, which a resume goes back to if `version` is
    damaged: the latest multiples of `reset`, or version 0 if that is 0."""
    return {v - v % reset if reset else 0 for v in (max(0, version - 1), version)}


@dataclass(slots=True)
class CheckpointPolicy:
    """Versions to keep. `best`: score and number of the best version so far; of equal scores the later version's."""

    keep: int = MIN_KEPT
    every: int | None = None
    best: tuple[float, int] | None = None

    def scored(self, version: int, score: float) -> bool:
        """Take the score of a version; true if it is the best so far."""
        better = self.best is None or (score, version) > self.best
        if better:
            self.best = score, version
        return better

    def kept(self, version: int) -> list[int]:
        """The versions to keep when `version` is the newest, ascending."""
        every = range(0, version + 1, self.every) if self.every else ()
        best = () if self.best is None else (self.best[1],)
        return sorted({*range(max(0, version - self.keep + 1), version + 1), *every, *best})
