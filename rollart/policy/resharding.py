"""Whether a change of tensor parallelism pays: the cost of preemption against the cost of draining and starting.

`policy.parallelism.next_tensor_parallelism` gives RollPacker's decision; here a change moves whole engines, so it is
weighed against its cost. Units: engine-seconds, of engines of the current size.
"""

from __future__ import annotations

from dataclasses import dataclass

from rollart.fleet import EngineRole, FleetMove, FleetMoveKind

__all__ = [
    "LEAST_GAIN",
    "EngineCounters",
    "StepMeasurement",
    "resharding_moves",
    "preemption_loss_s",
    "resharding_pays",
]

LEAST_GAIN = 0.02
"""Assumed share of engine time that smaller engines save, by fewer all-reduces. The true share depends on the batch;
this is the least that is worth a change."""


@dataclass(frozen=True, slots=True)
class EngineCounters:
    """Counters of the engines of one kind, since some moment."""

    preemptions: int = 0
    computed_tokens: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0

    def __add__(self, other: EngineCounters) -> EngineCounters:
        return EngineCounters(
            self.preemptions + other.preemptions,
            self.computed_tokens + other.computed_tokens,
            self.prefill_s + other.prefill_s,
            self.decode_s + other.decode_s,
        )

    def since(self, before: EngineCounters) -> EngineCounters:
        """The increase since `before`; all of it where an engine restarted in between."""
        if self.preemptions < before.preemptions or self.computed_tokens < before.computed_tokens:
            return self
        return EngineCounters(
            self.preemptions - before.preemptions,
            self.computed_tokens - before.computed_tokens,
            max(self.prefill_s - before.prefill_s, 0.0),
            max(self.decode_s - before.decode_s, 0.0),
        )


@dataclass(frozen=True, slots=True)
class StepMeasurement:
    """One step of one kind of engine: its seconds, the engines that served, their counters, and the mean context of a
    turn in tokens. `speedup`: how much faster the same devices generate in engines of twice the size when the KV memory
    is full in both, since a larger engine keeps more KV and runs larger batches; 1 if unknown."""

    step_s: float
    engines: int
    did: EngineCounters
    context: float
    speedup: float = 1.0


def preemption_loss_s(seen: StepMeasurement) -> float:
    """Engine-seconds spent on computing preempted requests again: one context per preemption, at the measured prefill
    time per token; never more than all prefills."""
    did = seen.did
    if not did.preemptions or not did.computed_tokens:
        return 0.0
    return min(did.preemptions * seen.context * did.prefill_s / did.computed_tokens, did.prefill_s)


def resharding_pays(seen: StepMeasurement, *, grows: bool, move_s: float, horizon_s: float) -> tuple[bool, str]:
    """Whether to change, and the reason as text. Larger engines save at most the preemption loss and, of the remaining
    compute, the gain of larger batches; smaller ones save `LEAST_GAIN` of the time; either over the steps of the
    horizon. Each engine is unavailable for `move_s`, once."""
    if seen.step_s <= 0:
        return False, "no time has passed"
    lost = preemption_loss_s(seen)
    busy = seen.did.prefill_s + seen.did.decode_s - lost
    per_step = lost + busy * (1 - 1 / seen.speedup) if grows else LEAST_GAIN * seen.step_s * seen.engines
    gain, cost = per_step * horizon_s / seen.step_s, move_s * seen.engines
    text = f"{gain:.0f} engine-seconds in {horizon_s:.0f} s for {cost:.0f} of moving {seen.engines} engines"
    return gain > cost, text


def resharding_moves(pool: str, role: EngineRole, tp: int, to: int, engines: int) -> list[FleetMove]:
    """Drains and starts with as few engines unavailable at a time as possible: two drains and a start of twice the
    size, or a drain and two starts of half the size. An odd engine keeps its size."""
    drain = FleetMove(FleetMoveKind.DRAIN, pool, tp, 1, before=role)
    start = FleetMove(FleetMoveKind.START, pool, to, 1, after=role)
    if to > tp:
        return [drain, drain, start] * (engines // 2)
    return [drain, start, start] * engines
