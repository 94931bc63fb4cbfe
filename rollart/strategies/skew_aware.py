"""Skew-aware dispatch: the trajectories with the longest predictions go to dedicated engines (StreamRL, arXiv
2504.15930, §4.3).

Dedicated instances have smaller batches, so long trajectories decode fast and delay no other trajectory; within an
instance the longest start first. Everything is learned from finished trajectories and turns of the run: lengths by
prompt and domain (`policy.lengths`), seconds per token by kind of engine and batch size. A resumed run learns anew,
which takes a few dozen trajectories.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rollart.fleet import EngineKind
from rollart.policy.lengths import LengthRanker, QuantileWindow
from rollart.serving.engine_registry import RegisteredEngine, SessionKv, TurnRequest
from rollart.serving.kv_admission import TrajectoryDispatch

LONG_SHARE = 0.2
"""Share of the trajectories, by predicted length, that are called long (StreamRL's alpha)."""


@dataclass(frozen=True, slots=True)
class DispatchGroup:
    """Trajectories that are served alike: their number, the tokens that each is assumed to generate (StreamRL: P90 of
    the long group, P50 of the rest), and the largest batch whose KV cache fits an instance."""

    trajectories: int
    tokens: float
    most_batch: int


@dataclass(frozen=True, slots=True)
class InstanceSplit:
    """Instances and batch size of each group, and the seconds until both are done."""

    long_instances: int
    long_batch: int
    rest_instances: int
    rest_batch: int
    seconds: float


def split_instances(
    instances: int, long: DispatchGroup, rest: DispatchGroup, token_s: Callable[[int], float]
) -> InstanceSplit:
    """The division N_l + N_r = N of equal instances, and the batch sizes, that finish first. A group takes `PTL(bs) x L
    x ceil(M / bs)` for the M trajectories of each of its instances.

    `token_s(bs)` is the seconds per generated token of one trajectory in a batch of bs. Ties go to the smaller sum of
    both groups' times, then to fewer instances for the long group. There are at least two instances, and each group
    has a trajectory.
    """
    times_long = _times(long, instances, token_s)
    times_rest = _times(rest, instances, token_s)
    best: tuple[float, float, int] | None = None
    for n in range(1, instances):
        a, b = times_long[n][0], times_rest[instances - n][0]
        if best is None or (max(a, b), a + b, n) < best:
            best = (max(a, b), a + b, n)
    assert best is not None
    seconds, _, n = best
    return InstanceSplit(n, times_long[n][1], instances - n, times_rest[instances - n][1], seconds)


@dataclass(slots=True)
class BatchSpeed:
    """Seconds per token of one trajectory in a batch of bs: a line fitted to the observations by least squares, recent
    ones weighing most; neither intercept nor slope is below 0."""

    memory: float = 0.99
    """Factor on an observation's weight with each later one: an effective window of about a hundred."""
    _n: float = 0.0
    _x: float = 0.0
    _y: float = 0.0
    _xx: float = 0.0
    _xy: float = 0.0

    def saw(self, batch: int, token_s: float) -> None:
        m = self.memory
        self._n, self._x, self._y = m * self._n + 1, m * self._x + batch, m * self._y + token_s
        self._xx, self._xy = m * self._xx + batch * batch, m * self._xy + batch * token_s

    def __bool__(self) -> bool:
        return self._n > 0

    def token_s(self, batch: int) -> float:
        mean, y = self._x / self._n, self._y / self._n
        spread = self._xx / self._n - mean * mean
        slope = (self._xy / self._n - mean * y) / spread if spread > 1e-9 * mean * mean else 0.0
        slope = min(max(slope, 0.0), y / mean)
        return y + slope * (batch - mean)


def _times(group: DispatchGroup, instances: int, token_s: Callable[[int], float]) -> list[tuple[float, int]]:
    """For each number of instances 0..N: the least seconds, and the smallest batch size that attains them."""
    most = min(group.most_batch, group.trajectories)
    per_token = [token_s(batch) for batch in range(1, most + 1)]
    times = [(math.inf, 0)]
    for n in range(1, instances + 1):
        share = math.ceil(group.trajectories / n)
        sizes = range(1, min(most, share) + 1)
        times.append(min((per_token[bs - 1] * group.tokens * math.ceil(share / bs), bs) for bs in sizes))
    return times


MIN_PREDICTIONS = 32
"""Predictions before a trajectory may be classified as long: a few groups."""

PREDICTION_WINDOW = 512
"""Recent predictions whose upper share counts as long: about as many as trajectories are in flight."""


@dataclass(frozen=True, slots=True)
class _Reserved:
    """Engines reserved for long trajectories, and the most that each of them runs at a time."""

    engines: frozenset[str]
    batch: int


class SkewAwareDispatcher(TrajectoryDispatch):
    """The longest trajectories go first and have reserved engines.

    Until lengths are learned, no trajectory is long and no engine reserved."""

    by_length = True

    def __init__(self) -> None:
        self.ranker = LengthRanker()
        self._predicted = QuantileWindow(PREDICTION_WINDOW)
        self._speeds: dict[EngineKind, BatchSpeed] = {}
        self._reserved: dict[EngineKind, _Reserved] = {}

    @property
    def predictions(self) -> int:
        """Recent trajectories that a prediction is compared with."""
        return len(self._predicted)

    def predict(self, turn: TurnRequest, *, again: bool) -> float:
        """Predict the tokens that the turn's trajectory will generate, and set `turn.long`. A prediction that repeats
        an earlier one (`again`) is not added to the window of recent predictions."""
        tokens = self.ranker.estimate(turn.prompt, turn.domain).p50
        known = len(self._predicted) >= MIN_PREDICTIONS
        turn.long = known and tokens > self._predicted.quantile(1 - LONG_SHARE)
        if not again:
            self._predicted.add(tokens)
        return tokens

    def trajectory_ended(self, kv: SessionKv, *, whole: bool) -> None:
        """Learn the length of a trajectory that finished (`whole`) or was stopped."""
        note = self.ranker.finished if whole else self.ranker.stopped
        note(kv.prompt, kv.domain, kv.generated)

    def turn_ended(self, member: RegisteredEngine, seconds: float, tokens: int) -> None:
        """Record the speed of a turn that generated `tokens` on this engine, at its present batch size."""
        if tokens > 0:
            self._speeds.setdefault(member.seat.kind, BatchSpeed()).saw(max(member.running, 1), seconds / tokens)

    def reserve(self, engines: Sequence[RegisteredEngine], live: int, limit: int) -> None:
        """Reserve engines of each kind anew, for `live` trajectories over all engines, at most `limit` per engine."""
        kinds: dict[EngineKind, list[RegisteredEngine]] = {}
        for member in engines:
            kinds.setdefault(member.seat.kind, []).append(member)
        self._reserved = {}
        lowest, highest = self._predicted.quantile(0.0) if self._predicted else 0.0, 0.0
        if len(self._predicted) >= MIN_PREDICTIONS:
            highest = self._predicted.quantile(1.0)
        if highest <= lowest:
            return  # no trajectory is predicted to be longer than another
        for kind, members in kinds.items():
            speed = self._speeds.get(kind)
            share = live * len(members) // max(len(engines), 1)
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
