"""The number of workers for a function, from its number of concurrent calls. Pure: the caller has the clock.

Knative's pod autoscaler (KPA) with its constants: the mean concurrency of a stable window decides, unless a short panic
window requires twice the ready number; the number then only grows until a whole stable window has passed without
another panic.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

__all__ = ["Autoscaler", "ScalePolicy"]


@dataclass(frozen=True, slots=True)
class ScalePolicy:
    """Knative's constants (config-autoscaler). Windows and delays in seconds.

    One worker carries `target` concurrent calls times `utilisation`; a worker of this package serves one call at a
    time. Steps of RL training are shorter than the daily cycles of web traffic: scale the windows to their length.
    """

    target: float = 1.0
    utilisation: float = 0.7
    stable_s: float = 60.0
    panic_share: float = 0.1
    panic_threshold: float = 2.0
    max_up: float = 1000.0
    max_down: float = 2.0
    grace_s: float = 30.0
    """Seconds that the last worker stays after the last call."""
    down_delay_s: float = 0.0
    """Seconds over which the maximum of the wanted numbers applies."""

    def __post_init__(self) -> None:
        if not (0 < self.utilisation <= 1 and self.target > 0 and 0 < self.panic_share <= 1 and self.stable_s > 0):
            raise ValueError("target, stable_s above 0; utilisation, panic_share in (0, 1]")
        if self.max_up <= 1 or self.max_down <= 1 or self.panic_threshold <= 1:
            raise ValueError("max_up, max_down and panic_threshold are factors above 1")


class Autoscaler:
    """The autoscaler of one function. Call `observe` at every tick, then `wanted`. Times must not decrease."""

    def __init__(self, policy: ScalePolicy | None = None) -> None:
        self._policy = policy or ScalePolicy()
        self._seen: deque[tuple[float, float]] = deque()
        self._panic_since: float | None = None
        self._panic_most = 0
        self._last_call = -math.inf
        self._asked: deque[tuple[float, int]] = deque()

    @property
    def panicking(self) -> bool:
        return self._panic_since is not None

    def observe(self, t: float, concurrency: float) -> None:
        """Record the running and waiting calls, at time `t` or on average since the last tick."""
        if self._seen and t < self._seen[-1][0]:
            raise ValueError(f"time went back from {self._seen[-1][0]:g} to {t:g}")
        self._seen.append((t, concurrency))
        while self._seen[0][0] <= t - self._policy.stable_s:
            self._seen.popleft()
        if concurrency > 0:
            self._last_call = t

    def wanted(self, t: float, ready: int) -> int:
        """The wanted number of workers at `t`, with `ready` of them up."""
        policy = self._policy
        carried = policy.target * policy.utilisation
        stable = self._mean(t - policy.stable_s) / carried
        panic = self._mean(t - policy.stable_s * policy.panic_share) / carried
        most = math.ceil(policy.max_up * max(1, ready))
        least = math.floor(ready / policy.max_down)
        calm = _between(_ceil(stable), least, most)
        urgent = _between(_ceil(panic), least, most)
        if urgent >= policy.panic_threshold * max(1, ready):
            self._panic_since = t
            self._panic_most = max(self._panic_most, urgent)
        elif self._panic_since is not None and t - self._panic_since >= policy.stable_s:
            self._panic_since, self._panic_most = None, 0
        number = calm
        if self.panicking:
            self._panic_most = number = max(self._panic_most, urgent, calm)
        if number == 0 and t - self._last_call < policy.grace_s:
            number = min(1, ready)
        return self._delayed(t, number)

    def _mean(self, since: float) -> float:
        values = [value for t, value in self._seen if t > since]
        return sum(values) / len(values) if values else 0.0

    def _delayed(self, t: float, number: int) -> int:
        self._asked.append((t, number))
        while self._asked[0][0] < t - self._policy.down_delay_s:
            self._asked.popleft()
        return max(n for _, n in self._asked)


def _ceil(value: float) -> int:
    return math.ceil(value - 1e-9)


def _between(value: int, least: int, most: int) -> int:
    return max(least, min(value, most))
