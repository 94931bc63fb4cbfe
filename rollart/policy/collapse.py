"""Detection of training that brings little: of a collapsed policy, and of samples that are too stale."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping

STEPS = 3
"""Consecutive steps before the alarm: a single batch without a gradient may consist of groups with equal rewards."""

NO_ENTROPY = 1e-6
"""Nats per token below which the policy is deterministic."""


WINDOW = 10
"""Steps of the median effective share: single steps fall to 0.6 also where nothing is lost."""

LEAST_EFFECTIVE = 0.75
"""Median effective share below which samples are too stale. The quickstart's first 40 steps (one seed each) have 0.91
at staleness 1, 0.76 at 4, with 0.70 to 0.74 in the first three windows, and 0.58 at 8. It finds heavy losses alone:
staleness 1 too needs more samples than `sync`."""


class CollapseAlarm:
    """Takes each step's metrics in order. The alarm is raised once per collapse, and again only after a step that
    learned. `rewarded`: the loss learns from the differences of rewards."""

    def __init__(self, *, rewarded: bool = True) -> None:
        self._rewarded = rewarded
        self._still: dict[str, int] = {}

    def step(self, metrics: Mapping[str, float]) -> str:
        """The cause as text, at the step that completes `STEPS` in a row; '' otherwise."""
        gradient, entropy = metrics.get("grad_norm"), metrics.get("entropy")
        signs = {
            f"its gradient was exactly 0 in {STEPS} steps in a row": gradient == 0.0,
            f"its entropy was below {NO_ENTROPY:g} in {STEPS} steps in a row": entropy is not None
            and entropy < NO_ENTROPY,
            # An entropy bonus or a penalty then has a gradient, and moves the policy on its own.
            f"all rewards of a batch were alike in {STEPS} steps in a row": self._rewarded
            and metrics.get("advantage_abs") == 0.0,
        }
        self._still = {why: self._still.get(why, 0) + 1 for why, seen in signs.items() if seen}
        return next((why for why, count in self._still.items() if count == STEPS), "")


class StalenessAlarm:
    """Takes each step's metrics in order. The alarm is raised once, and again only after a window in which samples were
    fresh enough."""

    def __init__(self) -> None:
        self._shares: deque[float] = deque(maxlen=WINDOW)
        self._raised = False

    def step(self, metrics: Mapping[str, float]) -> float | None:
        """The median effective share of the last `WINDOW` steps when it falls below `LEAST_EFFECTIVE`; else None."""
        if "effective_share" not in metrics:
            return None
        self._shares.append(metrics["effective_share"])
        if len(self._shares) < WINDOW:
            return None
        median = statistics.median(self._shares)
        was, self._raised = self._raised, median < LEAST_EFFECTIVE
        return median if self._raised and not was else None
