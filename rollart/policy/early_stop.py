"""Early stop: conditions on the metrics of consecutive training steps."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rollart.model import Group

BASELINE_STEPS = 5
"""Steps whose mean length is the baseline of `length_drift`: a single batch is noise."""


@dataclass(frozen=True, slots=True)
class StopCondition:
    """True of a step whose `metric` is above (or below) a threshold; ends the run after `steps` such steps in a row."""

    metric: str
    above: float | None
    below: float | None
    steps: int

    def holds(self, value: float) -> bool:
        return value > self.above if self.above is not None else value < (self.below or 0.0)

    def text(self, value: float) -> str:
        side, limit = ("above", self.above) if self.above is not None else ("below", self.below)
        row = "" if self.steps == 1 else f" {self.steps} times in a row"
        return f"{self.metric} was {side} {limit:g}{row} ({value:.3g} last)"


@dataclass(slots=True)
class EarlyStopMonitor:
    """Takes the values of each step in order. A step without a value of the metric, or with NaN, neither continues nor
    ends a row."""

    conditions: Sequence[StopCondition]
    _rows: Counter[int] = field(default_factory=Counter)

    def step(self, values: Mapping[str, float | None]) -> str:
        """The first condition that is fulfilled with this step, as text; '' for none."""
        for number, condition in enumerate(self.conditions):
            value = values.get(condition.metric)
            if value is None or math.isnan(value):
                continue
            self._rows[number] = self._rows[number] + 1 if condition.holds(value) else 0
            if self._rows[number] >= condition.steps:
                return condition.text(value)
        return ""


@dataclass(slots=True)
class BatchStatistics:
    """Statistics of batches that trainers do not report. `length_drift` is relative to the mean of the first
    `BASELINE_STEPS` steps, and has no value before."""

    _lengths: list[float] = field(default_factory=list)

    def of(self, groups: Sequence[Group]) -> dict[str, float | None]:
        samples = [s for group in groups for s in group.samples]
        several = [[s.score for s in group.samples] for group in groups if len(group.samples) > 1]
        length = sum(sum(s.loss_mask) for s in samples) / len(samples)
        drift = None
        if len(self._lengths) < BASELINE_STEPS:
            self._lengths.append(length)
        else:
            drift = abs(length * len(self._lengths) / sum(self._lengths) - 1.0)
        found: dict[str, float | None] = {
            "zero_variance": sum(min(s) == max(s) for s in several) / len(several) if several else None,
            "length_drift": drift,
        }
        by_domain: dict[str, list[bool]] = {}
        for sample in samples:
            if sample.success is not None:
                by_domain.setdefault(sample.domain, []).append(sample.success)
        return found | mean_and_parts("success", {name: sum(v) / len(v) for name, v in by_domain.items()})


def mean_and_parts(name: str, by_domain: Mapping[str, float | None]) -> dict[str, float | None]:
    """`name`, the mean over the domains with a value, and `name.DOMAIN` of each."""
    known = [value for value in by_domain.values() if value is not None]
    mean = sum(known) / len(known) if known else None
    return {name: mean} | {f"{name}.{domain}": value for domain, value in by_domain.items()}
