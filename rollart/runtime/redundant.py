"""Redundant rollouts: the number of extra groups and members, and statistics of the cancelled ones."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections import deque
from collections.abc import Mapping, Sequence

from rollart.model import AbortReason, TrainSample
from rollart.policy.grouping import TrajectorySnapshot
from rollart.policy.redundancy import (
    CANCELLED_AGAINST_KEPT,
    HealthMeter,
    Redundancy,
    RedundantLaunch,
    TrajectoryEnding,
    bias_report,
)
from rollart.ports import Recorder, RunEvent
from rollart.runtime.domain import Domain
from rollart.runtime.groups import GroupRun
from rollart.runtime.trajectory import TrajectoryState

__all__ = ["SelectionBiasReport", "RedundancyController"]

REMEMBERED_TRAJECTORIES = 2000
"""Trajectories of either kind that a report covers: Cliff's delta is then known to about 0.03."""

RESIZE_ENDS = 8
"""Ends of a domain between two checks of its health: a check sums a binomial tail, and the bad share changes slowly."""

UNKNOWN_HOST = ""
"""Environments do not report the host that they ran on."""


class RedundancyController:
    """The extra groups and members to launch. Synchronous; called by the scheduler alone.

    Health counts attempts that met an infrastructure fault. Attempts cancelled by redundancy itself do not count:
    otherwise redundancy would sustain itself.
    """

    def __init__(
        self, domains: Sequence[Domain], settings: Redundancy, additional: Mapping[str, int] | None = None
    ) -> None:
        """`additional`: extra groups per domain that always run, whatever the health."""
        self._settings = settings
        self._additional = additional or {}
        self._health = HealthMeter()
        self._now = {d.name: self._sized(d) for d in domains}
        self._ends = dict.fromkeys(self._now, 0)

    def ended(self, domain: Domain, reason: AbortReason | None) -> None:
        """Count the end of an attempt: with a sample (None), or without one for `reason`."""
        if not self._settings.health:
            return
        if reason is None or reason is AbortReason.INFRA_FAULT:
            self._health.add(
                domain.name, UNKNOWN_HOST, TrajectoryEnding.GOOD if reason is None else TrajectoryEnding.FAILED
            )
            self._ends[domain.name] += 1
            if self._ends[domain.name] % RESIZE_ENDS == 0:
                self._now[domain.name] = self._sized(domain)

    def extra(self, domain: Domain) -> RedundantLaunch:
        """Groups beyond a batch, and members beyond a group's size, that are worth starting now."""
        return self._now[domain.name]

    def slots(self, ready: Mapping[str, int], domains: Mapping[str, Domain], *, batches: bool) -> dict[str, int]:
        """Samples per domain by which its window is wider now. With whole `batches` the number is 0 once a batch is
        ready: a group started then would be dropped."""
        if not self.by_groups:
            return {}
        return {
            name: 0 if batches and ready.get(name, 0) >= d.quota else self.extra(d).groups * d.group_size
            for name, d in domains.items()
        }

    @property
    def by_groups(self) -> bool:
        return self._settings.groups > 1 or any(self._additional.values())

    def _sized(self, domain: Domain) -> RedundantLaunch:
        bad, seen = self._health.rate(domain.name)
        extra = self._settings.extra(domain.quota // domain.group_size, domain.group_size, bad=bad, seen=seen)
        return dataclasses.replace(extra, groups=extra.groups + self._additional.get(domain.name, 0))


class SelectionBiasReport:
    """Compares recent cancelled or filtered trajectories (`kind`: the event) with recent kept ones."""

    def __init__(self, recorder: Recorder, kind: str = CANCELLED_AGAINST_KEPT, *, on: bool) -> None:
        self._recorder = recorder
        self._kind = kind
        self._on = on
        self._kept: deque[TrajectorySnapshot] = deque(maxlen=REMEMBERED_TRAJECTORIES)
        self._cancelled: deque[TrajectorySnapshot] = deque(maxlen=REMEMBERED_TRAJECTORIES)
        self._changed = False

    def kept(self, run: GroupRun) -> None:
        """Record the members of a complete group."""
        if self._on:
            self._kept.extend(_with_group_difficulty(run, seen) for seen in run.seen)

    def ended(self, run: GroupRun, live: TrajectoryState, sample: TrainSample) -> None:
        """Record a member whose sample its group may use."""
        if self._on:
            run.seen.append(trajectory_snapshot(live, sample))

    def dropped(self, run: GroupRun) -> None:
        """Record a surplus group: the work of its finished members is lost."""
        for seen in run.seen:
            self._cancel(_with_group_difficulty(run, seen))

    def cancelled(self, run: GroupRun, live: TrajectoryState, sample: TrainSample | None = None) -> None:
        """Record a member that was cancelled while it ran, or dropped once it was scored."""
        self._cancel(_with_group_difficulty(run, trajectory_snapshot(live, sample)))

    def report(self, version: int) -> None:
        """Emit one event per feature, if any trajectory was cancelled since the last report."""
        if not self._changed:
            return
        self._changed = False
        found = bias_report(self._kept, self._cancelled)
        now = asyncio.get_running_loop().time()
        for f in found.features:
            fields: dict[str, str | int | float | bool | None] = {
                "version": version,
                "kept": f.kept,
                "cancelled": f.cancelled,
                "kept_count": f.kept_count,
                "cancelled_count": f.cancelled_count,
                "delta": f.delta,
                "notable": f.notable(found.threshold),
            }
            self._recorder.event(RunEvent(now, self._kind, f.name, fields))

    def _cancel(self, trajectory: TrajectorySnapshot) -> None:
        self._cancelled.append(trajectory)
        self._changed = True


def trajectory_snapshot(live: TrajectoryState, sample: TrainSample | None = None) -> TrajectorySnapshot:
    """A snapshot of a trajectory in its present state."""
    age_s = asyncio.get_running_loop().time() - live.started
    reward = None if sample is None else sample.score
    return TrajectorySnapshot(live.id, live.action_tokens, age_s, len(live.turns), reward=reward)


def _with_group_difficulty(run: GroupRun, seen: TrajectorySnapshot) -> TrajectorySnapshot:
    """The snapshot with the mean reward of its group's present samples as difficulty."""
    rewards = [s.score for s in run.samples.values()]
    difficulty = math.fsum(rewards) / len(rewards) if rewards else None
    return TrajectorySnapshot(seen.id, seen.tokens, seen.age_s, seen.turns, difficulty, seen.reward)
