"""Circuit breaker for prefill engines whose hand-offs fail."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["IN_A_ROW", "LONGEST_S", "SHORTEST_S", "HandoffCircuitBreaker"]

IN_A_ROW = 3
"""Consecutive failed hand-offs that open the breaker: a single failure may be an expired lease or a lost packet."""

SHORTEST_S, LONGEST_S = 30.0, 300.0
"""The first and the longest back-off; each back-off is twice the previous one. The range spans a KV lease at one end
and a tolerable wait for a restart at the other."""


@dataclass(slots=True)
class HandoffCircuitBreaker:
    """The hand-offs of one engine. After a back-off the engine is tried again: the next failure doubles the back-off,
    and the next success resets the breaker."""

    failures: int = 0
    until: float = 0.0
    back_off_s: float = 0.0

    def open(self, now: float) -> bool:
        """True while the engine receives no hand-offs."""
        return now < self.until

    def failed(self, now: float, *, hopeless: bool = False) -> float | None:
        """Record a failure. Returns the back-off in seconds if the breaker opens now, else None. `hopeless` marks a
        failure that would repeat: the engine cannot hand over at all, so the breaker opens at once."""
        self.failures = max(self.failures + 1, IN_A_ROW if hopeless else 0)
        if self.failures < IN_A_ROW or self.open(now):
            return None
        self.back_off_s = min(max(2 * self.back_off_s, SHORTEST_S), LONGEST_S)
        self.until = now + self.back_off_s
        return self.back_off_s

    def succeeded(self) -> None:
        self.failures, self.until, self.back_off_s = 0, 0.0, 0.0
