"""The keep-alive of an idle worker as a ski-rental problem: idle seconds are the rent, a cold start is the price. Pure.

A worker that is kept until its idle time has cost one cold start never costs more than twice the optimum with a known
next call (Karlin et al., 1988). With a forecast of the next call, the bound is relaxed for a lower cost if the forecast
is right (Purohit, Svitkina and Kumar, 2018).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["KeepAlive"]


@dataclass(frozen=True, slots=True)
class KeepAlive:
    """The prices of the ski-rental problem. `idle_usd_per_s` is the cost of an idle worker, `cold_usd` that of a cold
    start: its billed seconds and the cost of waiting for it (idle GPU-seconds times their price). `trust` in (0, 1]: 1
    ignores forecasts; smaller values follow them more closely and cost up to 1 + 1/trust times the optimum if they are
    wrong."""

    idle_usd_per_s: float
    cold_usd: float
    trust: float = 0.5

    def __post_init__(self) -> None:
        if not (self.idle_usd_per_s >= 0 and self.cold_usd >= 0 and 0 < self.trust <= 1):
            raise ValueError("costs are at least 0, trust is in (0, 1]")

    @property
    def break_even_s(self) -> float:
        """The idle seconds that cost as much as a cold start. Infinite where idling is free."""
        return self.cold_usd / self.idle_usd_per_s if self.idle_usd_per_s > 0 else math.inf

    def seconds(self, forecast_s: float | None = None) -> float:
        """Keep-alive in seconds of an idle worker. `forecast_s` is the expected time until the next call."""
        even = self.break_even_s
        if forecast_s is None or not math.isfinite(even):
            return even
        return even * self.trust if forecast_s > even else even / self.trust

    def cost(self, gap_s: float, kept_s: float) -> float:
        """Cost in US dollars of a gap of `gap_s` between two calls if the worker is kept for `kept_s`."""
        if gap_s <= kept_s:
            return gap_s * self.idle_usd_per_s
        return kept_s * self.idle_usd_per_s + self.cold_usd
