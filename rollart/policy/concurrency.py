"""Trajectories that an engine may run at once, found by observing its KV cache: AIMD with hysteresis.

Too few trajectories leave the engine's batch half empty. Too many fill the KV cache, and an engine that preempts
computes the same prefill twice. The right number depends on lengths that are unknown in advance and change while the
policy learns, so it is searched for as TCP searches for a window: additive increase, multiplicative decrease.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

__all__ = ["CONCURRENCY", "AimdSettings", "LimitChange", "ConcurrencyDecision", "ConcurrencyLimits", "KvPressure"]


CONCURRENCY = "concurrency"
"""Event of a publish. `engines`, and the `least`, `median` and `most` of their limits; since the last such event:
`admitted` trajectories and how many of them `waited`, sessions `evicted`, requests `preempted`. `waiting` is the
current number."""


class LimitChange(enum.StrEnum):
    """The effect of a decision, and its cause."""

    UP = "up"
    DOWN_PREEMPTED = "down_preempted"
    DOWN_FULL = "down_full"
    HOLD_BAND = "hold_band"
    """KV use is between the two thresholds: the target."""
    HOLD_UNUSED = "hold_unused"
    """The engine has room but runs fewer trajectories than its limit by more than a step: a higher limit would have no
    effect."""
    HOLD_WAITING = "hold_waiting"
    """Requests wait inside an engine with free KV: another limit binds (its batch), and further requests would only
    queue there."""
    HOLD_SETTLING = "hold_settling"
    """The effect of the last decision is not visible yet."""


@dataclass(frozen=True, slots=True)
class AimdSettings:
    """Limits are trajectories in flight per engine; times are seconds of the caller's clock."""

    start: int = 32
    least: int = 1
    most: int = 1024
    increase: int = 4
    decrease: float = 0.75
    low: float = 0.80
    high: float = 0.95
    """KV use below `low` raises the limit, use from `high` on lowers it; between them nothing changes."""
    interval_s: float = 5.0
    """Between increases: a few turns, so that KV use reflects the last increase."""
    settle_s: float = 30.0
    """After a decrease: trajectories in flight are not aborted, so use falls only as they end."""

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.start <= self.most:
            raise ValueError(f"1 <= least {self.least} <= start {self.start} <= most {self.most} does not hold")
        if self.increase < 1 or not 0 < self.decrease < 1:
            raise ValueError(f"increase {self.increase} must be at least 1 and decrease {self.decrease} within (0, 1)")
        if not 0 <= self.low < self.high <= 1:
            raise ValueError(f"0 <= low {self.low} < high {self.high} <= 1 does not hold")
        if self.interval_s < 0 or self.settle_s < self.interval_s:
            raise ValueError(
                f"settle_s {self.settle_s} must be at least interval_s {self.interval_s}, neither negative"
            )


@dataclass(frozen=True, slots=True)
class KvPressure:
    """An engine's report: share of KV blocks in use, preemptions since it started, requests running and waiting."""

    kv_used: float
    preemptions: int
    running: int
    waiting: int


@dataclass(frozen=True, slots=True)
class ConcurrencyDecision:
    """The engine's limit from now on."""

    limit: int
    change: LimitChange


@dataclass(slots=True)
class _Engine:
    limit: int
    preemptions: int
    up_after: float
    down_after: float


@dataclass(slots=True)
class ConcurrencyLimits:
    """One AIMD search per engine; engines do not share a limit, because their hardware and their KV differ.

    Bound: `least` <= limit <= `most`, always. Lowering a limit aborts nothing: the caller admits no trajectory until
    fewer are in flight. An engine whose preemption count falls has restarted: it keeps its limit, and counting
    restarts.
    """

    settings: AimdSettings = field(default_factory=AimdSettings)
    _engines: dict[str, _Engine] = field(default_factory=dict)

    def limit(self, engine: str) -> int:
        known = self._engines.get(engine)
        return self.settings.start if known is None else known.limit

    def begin(self, engine: str, limit: int, *, now: float) -> None:
        """Set an engine's initial limit. No effect once the engine was observed."""
        if engine not in self._engines:
            limit = min(max(limit, self.settings.least), self.settings.most)
            self._engines[engine] = _Engine(limit, 0, now, now)

    def forget(self, engine: str) -> None:
        """Remove an engine that is gone for good."""
        self._engines.pop(engine, None)

    def observe(self, engine: str, pressure: KvPressure, *, now: float) -> ConcurrencyDecision:
        """Process a report of one engine at `now`; reports may come at any rate."""
        state = self._engines.get(engine)
        if state is None:
            state = self._engines[engine] = _Engine(self.settings.start, pressure.preemptions, now, now)
        preempted = pressure.preemptions > state.preemptions
        # Counted even while settling: preemptions of an engine that drains are those of its old limit.
        state.preemptions = pressure.preemptions
        change = self._classify(pressure, preempted, state.limit)
        if change in (LimitChange.DOWN_PREEMPTED, LimitChange.DOWN_FULL):
            if now < state.down_after:
                return ConcurrencyDecision(state.limit, LimitChange.HOLD_SETTLING)
            state.limit = max(int(state.limit * self.settings.decrease), self.settings.least)
            state.up_after = state.down_after = now + self.settings.settle_s
        elif change is LimitChange.UP:
            if now < state.up_after:
                return ConcurrencyDecision(state.limit, LimitChange.HOLD_SETTLING)
            state.limit = min(state.limit + self.settings.increase, self.settings.most)
            state.up_after = now + self.settings.interval_s
        return ConcurrencyDecision(state.limit, change)

    def _classify(self, pressure: KvPressure, preempted: bool, limit: int) -> LimitChange:
        if preempted:
            return LimitChange.DOWN_PREEMPTED
        if pressure.kv_used >= self.settings.high:
            return LimitChange.DOWN_FULL
        if pressure.kv_used > self.settings.low:
            return LimitChange.HOLD_BAND
        if pressure.waiting > 0:
            return LimitChange.HOLD_WAITING
        if pressure.running + self.settings.increase < limit:
            return LimitChange.HOLD_UNUSED
        return LimitChange.UP
