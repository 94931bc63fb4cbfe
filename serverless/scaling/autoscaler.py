"""The number of workers for a function, from its number of concurrent calls. Pure: the caller has the clock.

Knative's pod autoscaler (KPA) with its constants: the mean concurrency of a stable window decides, unless a short panic
window requires twice the ready number; the number then only grows until a whole stable window has passed without
another panic.
"""

from __future__ import annotations

import math
from collections import deque

from serverless.scaling.settings import ReactiveSpec

KNATIVE = ReactiveSpec(stable_s=60.0, panic_share=0.1, grace_s=30.0)
"""Knative's constants (config-autoscaler)."""


class Autoscaler:
    """The autoscaler of one function. Call `observe` at every tick, then `wanted`. Times must not decrease.

    One worker carries `target` concurrent calls times `utilisation`; a worker of this package serves one call at a
    time. Steps of RL training are shorter than the daily cycles of web traffic: scale the windows to their length.
    """

    def __init__(self, settings: ReactiveSpec = KNATIVE) -> None:
        self._settings = settings
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
        while self._seen[0][0] <= t - self._settings.stable_s:
            self._seen.popleft()
        if concurrency > 0:
            self._last_call = t

    def wanted(self, t: float, ready: int) -> int:
        """The wanted number of workers at `t`, with `ready` of them up."""
        settings = self._settings
        carried = settings.target * settings.utilisation
        stable = self._mean(t - settings.stable_s) / carried
        panic = self._mean(t - settings.stable_s * settings.panic_share) / carried
        most = math.ceil(settings.max_up * max(1, ready))
        least = math.floor(ready / settings.max_down)
        calm = max(least, min(math.ceil(stable - 1e-9), most))
        urgent = max(least, min(math.ceil(panic - 1e-9), most))
        if urgent >= settings.panic_threshold * max(1, ready):
            self._panic_since = t
            self._panic_most = max(self._panic_most, urgent)
        elif self._panic_since is not None and t - self._panic_since >= settings.stable_s:
            self._panic_since, self._panic_most = None, 0
        number = calm
        if self.panicking:
            self._panic_most = number = max(self._panic_most, urgent, calm)
        if number == 0 and t - self._last_call < settings.grace_s:
            number = min(1, ready)
        self._asked.append((t, number))
        while self._asked[0][0] < t - settings.down_delay_s:
            self._asked.popleft()
        return max(n for _, n in self._asked)

    def _mean(self, since: float) -> float:
        values = [value for t, value in self._seen if t > since]
        return sum(values) / len(values) if values else 0.0
