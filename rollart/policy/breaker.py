"""When to stop asking a prefill engine whose hand-offs fail, and for how long."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["IN_A_ROW", "LONGEST_S", "SHORTEST_S", "HandoffCircuitBreaker"]

IN_A_ROW = 3
"""Hand-offs that fail one after the other before the engine is left alone: one is an expired lease or a lost packet."""

SHORTEST_S, LONGEST_S = 30.0, 300.0
"""The first back-off and the longest, each twice the one before: as long as a KV lease, and no longer than a restart
that somebody waits for."""


@dataclass(slots=True)
class HandoffCircuitBreaker:
    """One engine's hand-offs. After a back-off it is tried again: the next failure opens it for twice as long, the next
    success forgets all of it."""

    failures: int = 0
    until: float = 0.0
    back_off_s: float = 0.0

    def open(self, now: float) -> bool:
        """Whether the engine is left alone."""
        return now < self.until

    def failed(self, now: float, *, hopeless: bool = False) -> float | None:
        """Seconds for which the engine is left alone from now on; None if it goes on as it was. `hopeless`: the engine
        cannot hand over at all, and two more tries would show the same."""
        self.failures = max(self.failures + 1, IN_A_ROW if hopeless else 0)
        if self.failures < IN_A_ROW or self.open(now):
            return None
        self.back_off_s = min(max(2 * self.back_off_s, SHORTEST_S), LONGEST_S)
        self.until = now + self.back_off_s
        return self.back_off_s

    def succeeded(self) -> None:
        self.failures, self.until, self.back_off_s = 0, 0.0, 0.0
