"""Skew-aware dispatch during a run: prediction of long trajectories, and engines reserved for them (StreamRL §4.3).

Everything is learned from finished trajectories and turns of the run: lengths by prompt and domain, seconds per token
by kind of engine and batch size. A resumed run learns anew, which takes a few dozen trajectories.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rollart.fleet import EngineKind
from rollart.policy.dispatch import LONG_SHARE, BatchSpeed, DispatchGroup, split_instances
from rollart.policy.lengths import LengthRanker, QuantileWindow
from rollart.runtime.members import RegisteredEngine, SessionKv
from rollart.runtime.turn import TurnRequest

__all__ = ["SkewAwareDispatcher"]

MIN_PREDICTIONS = 32
"""Predictions before a trajectory may be classified as long: a few groups."""

PREDICTION_WINDOW = 512
"""Recent predictions whose upper share counts as long: about as many as trajectories are in flight."""


@dataclass(frozen=True, slots=True)
class _Reserved:
    """Engines reserved for long trajectories, and the most that each of them runs at a time."""

    engines: frozenset[str]
    batch: int


class SkewAwareDispatcher:
    """Synchronous; used by `KvAdmission`. Until lengths are learned, no trajectory is long and no engine reserved."""

    def __init__(self) -> None:
        self.ranker = LengthRanker()
        self._predicted = QuantileWindow(PREDICTION_WINDOW)
        self._speeds: dict[EngineKind, BatchSpeed] = {}
        self._reserved: dict[EngineKind, _Reserved] = {}

    def judge(self, turn: TurnRequest, *, again: bool) -> float:
        """Predict the tokens that the turn's trajectory will generate, and set `turn.long`. A prediction that repeats
        an earlier one (`again`) is not added to the window of recent predictions."""
        tokens = self.ranker.estimate(turn.prompt, turn.domain).p50
        known = len(self._predicted) >= MIN_PREDICTIONS
        turn.long = known and tokens > self._predicted.quantile(1 - LONG_SHARE)
        if not again:
            self._predicted.add(tokens)
        return tokens

    def over(self, kv: SessionKv, *, whole: bool) -> None:
        """Learn the length of a trajectory that finished (`whole`) or was stopped."""
        note = self.ranker.finished if whole else self.ranker.stopped
        note(kv.prompt, kv.domain, kv.said)

    def saw(self, member: RegisteredEngine, seconds: float, tokens: int) -> None:
        """Record the speed of a turn that generated `tokens` on this engine, at its present batch size."""
        if tokens > 0:
            self._speeds.setdefault(member.seat.kind, BatchSpeed()).saw(max(member.running, 1), seconds / tokens)

    def reserve(self, homes: Sequence[RegisteredEngine], live: int, limit: int) -> None:
        """Reserve engines of each kind anew, for `live` trajectories over all engines, at most `limit` per engine."""
        kinds: dict[EngineKind, list[RegisteredEngine]] = {}
        for member in homes:
            kinds.setdefault(member.seat.kind, []).append(member)
        self._reserved = {}
        lowest, highest = self._predicted.quantile(0.0) if self._predicted else 0.0, 0.0
        if len(self._predicted) >= MIN_PREDICTIONS:
            highest = self._predicted.quantile(1.0)
        if highest <= lowest:
            return  # no trajectory is predicted to be longer than another
        for kind, members in kinds.items():
            speed = self._speeds.get(kind)
            share = live * len(members) // max(len(homes), 1)
            long = math.ceil(LONG_SHARE * share)
            if len(members) < 2 or not speed or not 0 < long < share:
                continue
            found = split_instances(
                len(members),
                DispatchGroup(long, self.ranker.overall(1 - LONG_SHARE / 10), limit),
                DispatchGroup(share - long, self.ranker.overall((1 - LONG_SHARE) / 2), limit),
                speed.token_s,
            )
            names = sorted(m.engine.id for m in members)
            self._reserved[kind] = _Reserved(frozenset(names[: found.long_instances]), found.long_batch)

    def takes(self, member: RegisteredEngine, turn: TurnRequest, *, others_wait: bool) -> bool:
        """True if the engine may take this turn's trajectory. An engine reserved for the other class (long or not) may
        take it while no trajectory of that class waits. A reserved engine never exceeds its batch."""
        reserved = self._reserved.get(member.seat.kind)
        if reserved is None:
            return True
        for_long = member.engine.id in reserved.engines
        if for_long and member.kv.taken >= reserved.batch:
            return False
        return for_long == turn.long or not others_wait
