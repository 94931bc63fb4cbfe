"""A run's dollars against its budget: the forecast to the last step, and the alarms before the budget breaks."""

from __future__ import annotations

import enum
import math
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import fmean

WINDOW = 50
"""Latest steps from which the forecast is made: the length of trajectories drifts while a policy learns."""

LEAST_STEPS = 4
"""Steps before the first forecast: the interval of two is ten times their difference."""

AT_END = "usd_at_end"
"""Field of a step's event with the forecast's mean."""

Z = 1.959964
"""The 97.5 % quantile of the normal distribution."""


@dataclass(frozen=True, slots=True)
class SpendForecast:
    """Dollars of the whole run at its last step: a mean and half of its 95 % interval."""

    usd: float
    half: float

    @property
    def least(self) -> float:
        return self.usd - self.half

    @property
    def fields(self) -> dict[str, float]:
        """As fields of a step's event."""
        return {AT_END: self.usd, f"{AT_END}_half": self.half}


def recorded_forecast(step: Mapping[str, str | int | float | bool | None]) -> SpendForecast | None:
    """The forecast in the fields of a step's event; None if it has none."""
    usd, half = step.get(AT_END), step.get(f"{AT_END}_half")
    return SpendForecast(usd, half) if isinstance(usd, float) and isinstance(half, float) else None


class SpendMeter:
    """Forecasts a run's dollars from those of its latest steps in this life; start-up counts as spent, not as a
    step's."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._per_step: deque[float] = deque(maxlen=WINDOW)
        self._last: tuple[int, float] | None = None

    def step(self, step: int, usd: float) -> SpendForecast | None:
        """Step number `step` has ended with `usd` dollars spent in all; the forecast, None before `LEAST_STEPS`.

        The remaining steps cost as much as the latest ones did: the interval is Student's prediction interval of their
        sum, so it narrows to 0 at the last step."""
        if self._last is not None and step > self._last[0]:
            self._per_step.append((usd - self._last[1]) / (step - self._last[0]))
        self._last = (step, usd)
        n, left = len(self._per_step), max(0, self._steps - step)
        if n < LEAST_STEPS:
            return None
        mean = fmean(self._per_step)
        if not left:
            return SpendForecast(usd, 0.0)
        deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in self._per_step) / (n - 1))
        half = students_t(n - 1) * deviation * math.sqrt(left + left * left / n)
        return SpendForecast(usd + mean * left, half)


def students_t(freedom: int) -> float:
    """The 97.5 % quantile of Student's t for at least 3 degrees of freedom, within 1 % (Abramowitz and Stegun 26.7.5):
    scipy would take the controller's loop a tenth of a second to import."""
    z, n = Z, freedom
    return (
        z
        + (z**3 + z) / (4 * n)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3)
    )


class BudgetAlarm(enum.StrEnum):
    """Reasons for a notice, each given once in a life of a run."""

    FORECAST = "forecast"
    """The forecast's whole interval is above the budget."""
    WARN_AT = "warn_at"
    """The share `budget.warn_at` is spent."""
    EXCEEDED = "exceeded"
    """More than the budget is spent: the run ends."""


class BudgetAlarms:
    """The alarms of a budget. Where steps differ so much that the forecast says little, `warn_at` warns first."""

    def __init__(self, usd: float, warn_at: float) -> None:
        self._usd, self._warn_at = usd, warn_at
        self._given: set[BudgetAlarm] = set()

    def due(self, spent: float, forecast: SpendForecast | None) -> Iterator[BudgetAlarm]:
        """Alarms that were not given yet, in the order of the enumeration. A broken budget gives its own alone."""
        if spent > self._usd:
            raised = {BudgetAlarm.EXCEEDED}
        else:
            raised = {BudgetAlarm.WARN_AT} if spent >= self._warn_at * self._usd else set()
            raised |= {BudgetAlarm.FORECAST} if forecast is not None and forecast.least > self._usd else set()
        for alarm in BudgetAlarm:
            if alarm in raised - self._given:
                self._given.add(alarm)
                yield alarm
