"""Detection of a collapsed policy: training continues but changes nothing."""

from __future__ import annotations

from collections.abc import Mapping

STEPS = 3
"""Consecutive steps before the alarm: a single batch without a gradient may consist of groups with equal rewards."""

NO_ENTROPY = 1e-6
"""Nats per token below which the policy is deterministic."""


class CollapseAlarm:
    """Takes each step's metrics in order. The alarm is raised once per collapse, and again only after a step that
    learned."""

    def __init__(self) -> None:
        self._still: dict[str, int] = {}

    def step(self, metrics: Mapping[str, float]) -> str:
        """The cause as text, at the step that completes `STEPS` in a row; '' otherwise."""
        gradient, entropy = metrics.get("grad_norm"), metrics.get("entropy")
        signs = {
            f"its gradient was exactly 0 in {STEPS} steps in a row": gradient == 0.0,
            f"its entropy was below {NO_ENTROPY:g} in {STEPS} steps in a row": entropy is not None
            and entropy < NO_ENTROPY,
        }
        self._still = {why: self._still.get(why, 0) + 1 for why, seen in signs.items() if seen}
        return next((why for why, count in self._still.items() if count == STEPS), "")
