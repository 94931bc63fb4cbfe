"""The published schedules, and `paced`, as values: each sets a few independent switches.

A schedule determines when rollout, reward, training and weight updates may overlap, and how samples are kept fresh. The
runtime follows the switches and never tests a schedule's name. Sources: RollArt §4, §7.2 (sync, sync_plus, one_off,
areal and rollart as compared there), ROLL Flash §2 (roll_flash), AReaL (interruptible rollouts).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

from rollart.policy.staleness import StalenessBound


class TurnSynchrony(enum.StrEnum):
    """The condition for a trajectory's next turn."""

    LOCKSTEP = "lockstep"
    """Every trajectory of the batch: generate for all, then step all environments."""
    TRAJECTORY = "trajectory"
    """The trajectory's own environment only."""


class RewardTiming(enum.StrEnum):
    """When rewards are computed."""

    INLINE = "inline"
    """In a separate stage, once every trajectory of the batch has ended."""
    ASYNCHRONOUS = "asynchronous"
    """As each trajectory ends."""


class StalenessCheck(enum.StrEnum):
    """When n - v0 is compared with alpha."""

    NOWHERE = "nowhere"
    """The order of the stages allows no lag other than alpha; the buffer checks it nevertheless."""
    AT_START = "at_start"
    """At admission alone; a trajectory that outlives its bound is trained as it is."""
    AT_BATCH = "at_batch"
    """When a batch is formed: it omits groups that are too old; their trajectories run to their end, in vain."""
    EVERY_TURN = "every_turn"
    """At every turn and every publish; trajectories past the bound are aborted immediately (I2)."""


class Admission(enum.StrEnum):
    """How far rollout may run ahead of training."""

    ONE_BATCH = "one_batch"
    """One batch, once the previous one has been trained and published."""
    NEXT_BATCH = "next_batch"
    """One batch, once the previous one has been generated; the previous one is trained meanwhile."""
    WINDOW = "window"
    """Group by group, while samples that wait, run or are in training stay within (alpha + 1) batches (I4)."""


class InFlightHandling(enum.StrEnum):
    """The treatment of running trajectories by a weight update."""

    DRAINED = "drained"
    """None run: the update waits until all have ended."""
    RESUMED = "resumed"
    """Trajectories continue under the new weights, tokens kept, KV recomputed (I5)."""
    TURN_REDONE = "turn_redone"
    """The current turn is aborted and generated again from its history; finished turns are kept."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """`alpha` is in publishes."""

    name: str
    turns: TurnSynchrony
    rewarding: RewardTiming
    training_blocks_rollout: bool
    alpha: int
    judged: StalenessCheck
    admission: Admission
    in_flight: InFlightHandling
    paced: bool = False
    """Batches wait for groups at their bound, and a prompt that cannot end in time starts at the next publish."""

    @property
    def bound(self) -> StalenessBound:
        return StalenessBound(self.alpha)

    @property
    def windowed(self) -> bool:
        """True if groups start one by one, as slots of (alpha + 1) batches become free."""
        return self.admission is Admission.WINDOW

    @property
    def aborts_stale(self) -> bool:
        """True if trajectories past their bound are aborted (I2)."""
        return self.judged is StalenessCheck.EVERY_TURN

    @property
    def drops_stale(self) -> bool:
        """True if no batch may hold a group past its bound (I3): every schedule but AReaL's."""
        return self.judged is not StalenessCheck.AT_START

    def may_publish(self, *, running: int) -> bool:
        """True if a finished training step may update the engines now."""
        return self.in_flight is not InFlightHandling.DRAINED or running == 0


_BATCH_BY_BATCH = {
    "training_blocks_rollout": True,
    "judged": StalenessCheck.NOWHERE,
    "admission": Admission.ONE_BATCH,
    "in_flight": InFlightHandling.DRAINED,
}
_WINDOW = {
    "turns": TurnSynchrony.TRAJECTORY,
    "rewarding": RewardTiming.ASYNCHRONOUS,
    "training_blocks_rollout": False,
    "admission": Admission.WINDOW,
    "in_flight": InFlightHandling.RESUMED,
}

SCHEDULES: dict[str, dict[str, Any]] = {
    "sync": _BATCH_BY_BATCH | {"turns": TurnSynchrony.LOCKSTEP, "rewarding": RewardTiming.INLINE},
    "sync_plus": _BATCH_BY_BATCH | {"turns": TurnSynchrony.TRAJECTORY, "rewarding": RewardTiming.ASYNCHRONOUS},
    "one_off": _BATCH_BY_BATCH
    | {
        "turns": TurnSynchrony.TRAJECTORY,
        "rewarding": RewardTiming.ASYNCHRONOUS,
        "training_blocks_rollout": False,
        "admission": Admission.NEXT_BATCH,
    },
    "areal": _WINDOW | {"judged": StalenessCheck.AT_START},
    "rollart": _WINDOW | {"judged": StalenessCheck.EVERY_TURN},
    "paced": _WINDOW | {"judged": StalenessCheck.EVERY_TURN, "paced": True},
    "roll_flash": _WINDOW | {"judged": StalenessCheck.AT_BATCH, "in_flight": InFlightHandling.TURN_REDONE},
}
"""The switches of each schedule. RollArt §7.2 compares the first five of them."""

FIXED_LAG: dict[str, int] = {"sync": 0, "sync_plus": 0, "one_off": 1}
"""Schedules whose lag follows from the order of their stages."""


def resolve(name: str, staleness: int | None = None) -> Schedule:
    """The schedule of that name; `staleness` None takes its default (1 where it is free). ValueError names the rule."""
    name = {"async": "rollart"}.get(name, name)
    if name not in SCHEDULES:
        raise ValueError(f"unknown schedule '{name}': choose one of {', '.join(SCHEDULES)}")
    if name in FIXED_LAG:
        if staleness not in (None, FIXED_LAG[name]):
            raise ValueError(
                f"staleness is {staleness}, but schedule '{name}' always has {FIXED_LAG[name]}: leave it out, or "
                f"choose areal, rollart, paced or roll_flash"
            )
        return Schedule(name, alpha=FIXED_LAG[name], **SCHEDULES[name])
    alpha = 1 if staleness is None else staleness
    if alpha < 0:
        raise ValueError(f"staleness must be at least 0, got {alpha}")
    return Schedule(name, alpha=alpha, **SCHEDULES[name])
