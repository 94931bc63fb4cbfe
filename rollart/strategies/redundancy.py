"""Redundant rollouts: how many to run beyond need, which to cancel, and the resulting bias of the data.

A batch needs N groups of G trajectories. More groups (`num_env_groups`) and more members per group
(`group_size_redundancy`) keep one broken or slow environment from delaying the whole batch (RollArt §1.4, ROLL Flash
§2.1: more groups beat larger groups). Taking the first to finish has two costs. Sandbox time is wasted, up to r / (1 +
r) of it: so redundancy follows the observed health, and is zero while all is well. And the first to finish are short
and easy: so every cancellation is reported beside the kept trajectories.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rollart.control.domain import Domain
from rollart.control.groups import GroupRun, TrajectorySnapshot
from rollart.control.strategy import RolloutStrategy
from rollart.control.trajectory import TrajectoryState
from rollart.ledger.events import CANCELLED_AGAINST_KEPT
from rollart.model import AbortReason, Group, TrainSample
from rollart.ports import Recorder, RunEvent
from rollart.settings.rollout import RedundancySpec

NOTABLE = 0.33
"""Cliff's delta from which a difference causes a warning: 'medium' in the usual reading (0.147, 0.33, 0.474)."""

ENOUGH = 20
"""Trajectories on both sides before a difference is judged: with fewer, 0.33 is within chance."""


@dataclass(slots=True)
class HealthMeter:
    """Shares of bad ends per domain, with exponential decay over `memory` ends each."""

    memory: int = 200
    _seen: dict[str, tuple[float, float]] = field(default_factory=dict)

    def add(self, domain: str, *, bad: bool) -> None:
        keep = 1.0 - 1.0 / self.memory
        weight, ends = self._seen.get(domain, (0.0, 0.0))
        self._seen[domain] = (weight * keep + 1.0, ends * keep + bad)

    def rate(self, domain: str) -> tuple[float, float]:
        """(share of bad ends, number of ends behind it)."""
        weight, bad = self._seen.get(domain, (0.0, 0.0))
        return bad / weight if weight else 0.0, weight


CONFIDENCE = 0.95
"""Probability that enough trajectories end well without waiting for a bad one."""

MIN_ENDS = 50
"""Observed ends of a domain before anything is launched for its health."""

NEGLIGIBLE = 0.002
"""Share of bad ends up to which nothing is launched: retries are cheaper."""


@dataclass(frozen=True, slots=True)
class RedundantLaunch:
    """Extra groups, and extra members per group of all groups."""

    groups: int
    members: int


def redundant_launch(
    wanted: RedundancySpec, groups: int, group_size: int, *, bad: float, seen: float
) -> RedundantLaunch:
    """How much to launch beyond `groups` x `group_size` now, given the share of bad ends and the number of ends
    behind it.

    With `health`: the smallest extra number with P[Binomial(n + extra, 1 - bad) >= n] >= confidence: per group for
    members, then over groups with the remaining risk of a group. Members of different hosts fail at different
    rates; taking their mean is on the safe side (Hoeffding 1956). With both kinds, members come first, for half of
    the factors' product.
    """
    most = RedundantLaunch(_times(groups, wanted.groups) - groups, _times(group_size, wanted.size) - group_size)
    if not wanted.health:
        return most
    if seen < MIN_ENDS or bad <= NEGLIGIBLE:
        return RedundantLaunch(0, 0)
    room = int((wanted.groups * wanted.size - 1.0) * groups * group_size + 1e-9)
    members = extra = 0
    if wanted.size > 1:
        limit = (room // 2 if wanted.groups > 1 else room) // groups
        members = _smallest(group_size, 1.0 - bad, limit)
        room -= members * groups
    if wanted.groups > 1:
        whole = _at_least(group_size, group_size + members, 1.0 - bad)
        extra = _smallest(groups, whole, room // (group_size + members))
    return RedundantLaunch(min(extra, most.groups), min(members, most.members))


def _times(count: int, factor: float) -> int:
    return math.floor(count * factor + 1e-9)


@dataclass(frozen=True, slots=True)
class BiasFeature:
    """One figure of kept and cancelled trajectories. `delta` is Cliff's: P(cancelled > kept) - P(cancelled < kept),
    from -1 to 1; it uses ranks, because lengths have heavy tails."""

    name: str
    kept: float
    cancelled: float
    kept_count: int
    cancelled_count: int
    delta: float

    @property
    def notable(self) -> bool:
        return min(self.kept_count, self.cancelled_count) >= ENOUGH and abs(self.delta) >= NOTABLE


def bias_report(kept: Sequence[TrajectorySnapshot], cancelled: Sequence[TrajectorySnapshot]) -> list[BiasFeature]:
    """Differences between cancelled and kept trajectories: means and effect size per figure that both sides know."""
    features = []
    for name in ("tokens", "age_s", "turns", "difficulty", "reward"):
        ours = [float(v) for t in kept if (v := getattr(t, name)) is not None]
        theirs = [float(v) for t in cancelled if (v := getattr(t, name)) is not None]
        if ours and theirs:
            means = math.fsum(ours) / len(ours), math.fsum(theirs) / len(theirs)
            features.append(BiasFeature(name, *means, len(ours), len(theirs), _cliff(theirs, ours)))
    return features


def _cliff(a: Sequence[float], b: Sequence[float]) -> float:
    """P(a > b) - P(a < b) over all pairs, in O(n log n)."""
    ranked = sorted(b)
    above = sum(bisect_left(ranked, x) for x in a)
    below = sum(len(ranked) - bisect_right(ranked, x) for x in a)
    return (above - below) / (len(a) * len(b))


def _smallest(need: int, good: float, most: int) -> int:
    """The smallest extra number that reaches the confidence, at most `most`."""
    return next((extra for extra in range(most) if _at_least(need, need + extra, good) >= CONFIDENCE), most)


def _at_least(need: int, count: int, good: float) -> float:
    """P[Binomial(count, good) >= need], summed over the small number of bad outcomes."""
    if good >= 1.0:
        return 1.0
    if good <= 0.0:
        return float(need <= 0)
    logs = [
        math.lgamma(count + 1)
        - math.lgamma(k + 1)
        - math.lgamma(count - k + 1)
        + k * math.log1p(-good)
        + (count - k) * math.log(good)
        for k in range(count - need + 1)
    ]
    return min(math.fsum(map(math.exp, logs)), 1.0)


REMEMBERED_TRAJECTORIES = 2000
"""Trajectories of either kind that a report covers: Cliff's delta is then known to about 0.03."""

RESIZE_ENDS = 8
"""Ends of a domain between two checks of its health: a check sums a binomial tail, and the bad share changes slowly."""


class RedundancyController(RolloutStrategy):
    """The extra groups and members to launch.

    Health counts attempts that met an infrastructure fault. Attempts cancelled by redundancy itself do not count:
    otherwise redundancy would sustain itself.
    """

    def __init__(
        self, domains: Sequence[Domain], settings: RedundancySpec, additional: Mapping[str, int] | None = None
    ) -> None:
        """`additional`: extra groups per domain that always run, whatever the health."""
        self._settings = settings
        self._additional = additional or {}
        self._health = HealthMeter()
        self._now = {d.name: self._sized(d) for d in domains}
        self._ends = dict.fromkeys(self._now, 0)

    def attempt_ended(self, domain: Domain, reason: AbortReason | None) -> None:
        if not self._settings.health:
            return
        if reason is None or reason is AbortReason.INFRA_FAULT:
            self._health.add(domain.name, bad=reason is not None)
            self._ends[domain.name] += 1
            if self._ends[domain.name] % RESIZE_ENDS == 0:
                self._now[domain.name] = self._sized(domain)

    def extra_groups(self, domain: Domain) -> int:
        return self._now[domain.name].groups

    def extra_members(self, domain: Domain) -> int:
        return self._now[domain.name].members

    @property
    def by_groups(self) -> bool:
        return self._settings.groups > 1 or any(self._additional.values())

    def _sized(self, domain: Domain) -> RedundantLaunch:
        bad, seen = self._health.rate(domain.name)
        extra = redundant_launch(
            self._settings, domain.quota // domain.group_size, domain.group_size, bad=bad, seen=seen
        )
        return dataclasses.replace(extra, groups=extra.groups + self._additional.get(domain.name, 0))


class SelectionBiasReport(RolloutStrategy):
    """Compares recent cancelled or filtered trajectories (`kind`: the event) with recent kept ones."""

    def __init__(self, recorder: Recorder, kind: str = CANCELLED_AGAINST_KEPT) -> None:
        self._recorder = recorder
        self._kind = kind
        self._kept: deque[TrajectorySnapshot] = deque(maxlen=REMEMBERED_TRAJECTORIES)
        self._cancelled: deque[TrajectorySnapshot] = deque(maxlen=REMEMBERED_TRAJECTORIES)
        self._changed = False

    def kept(self, run: GroupRun) -> None:
        self._kept.extend(_with_group_difficulty(run, snapshot) for snapshot in run.snapshots)

    def sampled(self, run: GroupRun, state: TrajectoryState, sample: TrainSample) -> None:
        run.snapshots.append(trajectory_snapshot(state, sample))

    def surplus(self, run: GroupRun) -> None:
        """The work of its finished members is lost."""
        for snapshot in run.snapshots:
            self._cancel(_with_group_difficulty(run, snapshot))

    def cancelled(self, run: GroupRun, state: TrajectoryState, sample: TrainSample | None = None) -> None:
        self._cancel(_with_group_difficulty(run, trajectory_snapshot(state, sample)))

    def published(self, version: int, consumed: Sequence[Group]) -> None:
        self.ended(version)

    def ended(self, version: int) -> None:
        """Emit one event per feature, if any trajectory was cancelled since the last report."""
        if not self._changed:
            return
        self._changed = False
        now = asyncio.get_running_loop().time()
        for f in bias_report(self._kept, self._cancelled):
            figures = dataclasses.asdict(f)
            del figures["name"]
            fields = {"version": version, **figures, "notable": f.notable}
            self._recorder.event(RunEvent(now, self._kind, f.name, fields))

    def _cancel(self, trajectory: TrajectorySnapshot) -> None:
        self._cancelled.append(trajectory)
        self._changed = True


def trajectory_snapshot(state: TrajectoryState, sample: TrainSample | None = None) -> TrajectorySnapshot:
    """A snapshot of a trajectory in its present state."""
    age_s = asyncio.get_running_loop().time() - state.started
    reward = None if sample is None else sample.score
    return TrajectorySnapshot(state.id, state.action_tokens, age_s, len(state.turns), reward=reward)


def _with_group_difficulty(run: GroupRun, seen: TrajectorySnapshot) -> TrajectorySnapshot:
    """The snapshot with the mean reward of its group's present samples as difficulty."""
    rewards = [s.score for s in run.samples.values()]
    difficulty = math.fsum(rewards) / len(rewards) if rewards else None
    return TrajectorySnapshot(seen.id, seen.tokens, seen.age_s, seen.turns, difficulty, seen.reward)
