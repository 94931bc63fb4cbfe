"""How long an idle worker is worth keeping: the ski-rental problem, in which every idle second is rent and a cold start
is the price of the skis. Pure.

Kept for as long as its idling costs what a cold start does, a worker never costs more than twice of what one who knew
the next call would have paid (Karlin et al., 1988). With a forecast of the next call the same bound is traded for less
cost while the forecast is right (Purohit, Svitkina and Kumar, 2018).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["KeepAlive"]


@dataclass(frozen=True, slots=True)
class KeepAlive:
    """`idle_usd_per_s` is what an idle worker costs, `cold_usd` what a cold start does: what is billed of it, and what
    waiting for it is worth (GPU-seconds that stand still, times their price). `trust` in (0, 1]: 1 ignores forecasts;
    smaller ones follow them further and lose up to 1 + 1/trust times the optimum where they are wrong."""

    idle_usd_per_s: float
    cold_usd: float
    trust: float = 0.5

    def __post_init__(self) -> None:
        if not (self.idle_usd_per_s >= 0 and self.cold_usd >= 0 and 0 < self.trust <= 1):
            raise ValueError("costs are at least 0, trust is in (0, 1]")

    @property
    def break_even_s(self) -> float:
        """Idle seconds that cost a cold start. Infinite where idling costs nothing."""
        return self.cold_usd / self.idle_usd_per_s if self.idle_usd_per_s > 0 else math.inf

    def seconds(self, forecast_s: float | None = None) -> float:
        """How long to keep a worker that nothing calls; `forecast_s` is when the next call is expected."""
        even = self.break_even_s
        if forecast_s is None or not math.isfinite(even):
            return even
        return even * self.trust if forecast_s > even else even / self.trust

    def cost(self, gap_s: float, kept_s: float) -> float:
        """What a gap between two calls costs one who keeps the worker for `kept_s`."""
        if gap_s <= kept_s:
            return gap_s * self.idle_usd_per_s
        return kept_s * self.idle_usd_per_s + self.cold_usd
