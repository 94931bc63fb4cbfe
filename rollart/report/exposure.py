"""Exposed seconds: what a run would save of its wall time if trajectories ended earlier. Pure, from a ledger's rows.

The run is a graph of its trajectories and training steps, retimed with the recorded durations:

  a trajectory begins  its recorded gap after its cause: the step whose groups gave it a slot, if it began right after
                       that, else the last batch that was complete, or step that ended, before it
  a trajectory ends    its recorded duration after it began, less the seconds saved
  a group ends         with its last trajectory
  a batch is complete  when each domain has as many ended groups as the recorded batch took from it, first come first
                       served, and the trainer is free; plus the recorded delay between this moment and the step's begin
                       (writing of samples, batches that wait for certain groups)
  a step ends          its recorded training and publishing after it began; under a schedule that publishes only when no
                       trajectory runs, the publishing after the last end of those that had begun with the step
  the run ends         its recorded remainder after the last step

With nothing saved this gives the recorded times exactly: by induction over steps, because every duration and delay is
the recorded one. Ends of groups enter through order statistics and maxima, so the wall time never grows with the
seconds saved, and a step saves at most the largest saving of a trajectory (twice that if its publish waits for others).
Seconds that are hidden by another trajectory of the batch, or by training, save nothing.

Not modelled: the durations themselves do not change. Trajectories that end earlier share engines with others at other
times, and leave their slots on environment hosts earlier. `rollart report offload --check` shows the resulting error on
a run: it simulates the run again with the function at 0 s. Over six schedules and rewards of 0.5 to 30 s, the error was
at most 0.3 % of the wall time.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import NamedTuple

from rollart.ledger.intervals import ResourceState

TRAINER = "trainer"

WAITS_FOR_SAMPLES = "waits_for_samples"
"""Cause of the trainer's idle time in its loop."""

ADMISSION_S = 0.25
"""Longest time from the release of a slot to the begin of the group that it admits, which is journaled first."""

CAUSE_TOLERANCE_S = 1e-6
"""Rounding of clock readings when events of the same moment are ordered, in seconds."""


class TrajectoryLife(NamedTuple):
    """A trajectory: `group` is empty if it left no sample, `version` None if it was not trained, `reward_s` None if the
    seconds that it waited for its reward are unknown."""

    domain: str
    began: float
    ended: float
    group: str = ""
    version: int | None = None
    reward_s: float | None = None


class Span(NamedTuple):
    """An interval of a resource."""

    role: str
    resource: str
    t0: float
    t1: float
    state: str


@dataclass(frozen=True, slots=True)
class TrainerStep:
    """A step of the trainer: `busy_s` seconds of streamed accumulation since the step before, then the whole batch at
    `whole`; trained at `trained`, published at `ended` as `version`. `taken`: groups of the batch by domain."""

    whole: float
    trained: float
    ended: float
    busy_s: float
    taken: Mapping[str, int]
    version: int | None


@dataclass(frozen=True, slots=True)
class _Member:
    """A trajectory: it began `gap_s` after its cause and took `seconds`. `cause` counts moments: 0 is the run's start,
    2 n + 1 the complete batch and 2 n + 2 the end of step n."""

    index: int
    cause: int
    gap_s: float
    seconds: float


class RunTiming:
    """The timing of a run, whose trajectories are named by their positions in `lives`."""

    def __init__(
        self,
        spans: Iterable[Span],
        lives: Sequence[TrajectoryLife],
        *,
        drained: bool = False,
        next_batch: bool = False,
    ) -> None:
        """`drained`: the run's schedule publishes only when no trajectory runs; `next_batch`: it admits groups when a
        batch is taken, and not when it is published."""
        self._drained = drained
        groups: dict[str, list[int]] = defaultdict(list)
        for index, life in enumerate(lives):
            if life.version is not None:
                groups[life.group].append(index)
        by_version: dict[int, list[str]] = defaultdict(list)
        for name, members in groups.items():
            by_version[lives[members[0]].version or 0].append(name)
        self._steps = list(_steps(spans, lives, groups, by_version))
        self._moments = [0.0, *(moment for step in self._steps for moment in (step.whole, step.ended))]
        self._groups: dict[int, list[tuple[str, list[_Member]]]] = defaultdict(list)
        """Groups with their domains, by the cause of the last trajectory that began."""
        by_domain: dict[str, list[list[int]]] = defaultdict(list)
        for members in groups.values():
            by_domain[lives[members[0]].domain].append(members)
        step_of_version = {step.version: n for n, step in enumerate(self._steps)}
        for domain, ordered in by_domain.items():
            ordered.sort(key=lambda members: min(lives[i].began for i in members))
            for admitted, members in zip(self._admissions(domain, ordered, lives, next_batch), ordered, strict=True):
                # Before the batch that took it was complete, also where clock readings are equal.
                latest = 2 * step_of_version.get(lives[members[0]].version, len(self._steps))
                found = [self._member(index, lives[index], admitted, latest) for index in members]
                self._groups[max(m.cause for m in found)].append((domain, found))
        self._waits_s = [(0.0, 0.0)] * len(self._steps)
        """Delays of each step: from the complete batch to its begin, and to its end from the earliest possible end."""
        recorded = self._play({}, as_recorded=True)
        self._waits_s = [
            (max(0.0, step.whole - complete), max(0.0, step.ended - trained))
            for step, (complete, trained) in zip(self._steps, recorded, strict=True)
        ]

    def _admissions(
        self, domain: str, groups: Sequence[Sequence[int]], lives: Sequence[TrajectoryLife], next_batch: bool
    ) -> list[int]:
        """The moment that admitted each group, in order of their begins: the first ones began with the run, and each
        later one when as many groups had been consumed as had begun before it, without the first ones."""
        taken = [step.taken.get(domain, 0) for step in self._steps]
        free = [2 * n + (1 if next_batch else 2) for n, count in enumerate(taken) for _ in range(count)]
        until = self._moments[free[0]] if free else math.inf
        first = sum(min(lives[i].began for i in members) < until for members in groups)
        return [0] * first + [free[min(n, len(free) - 1)] for n in range(len(groups) - first)]

    def _member(self, index: int, life: TrajectoryLife, admitted: int, latest: int) -> _Member:
        cause = min(latest, max(0, bisect_right(self._moments, life.began + CAUSE_TOLERANCE_S) - 1))
        # Under a drained schedule a trajectory never begins before the publish that admitted it.
        if not self._drained and admitted < cause and life.began - self._moments[admitted] <= ADMISSION_S:
            cause = admitted
        return _Member(index, cause, life.began - self._moments[cause], life.ended - life.began)

    @property
    def training_s(self) -> float:
        """Seconds of training, of steps that took groups."""
        return math.fsum(step.busy_s + step.trained - step.whole for step in self._steps if step.taken)

    @property
    def publishing_s(self) -> float:
        """Seconds of publishing, of steps that took groups; without the wait for running trajectories before it."""
        return math.fsum(waits[1] for step, waits in zip(self._steps, self._waits_s, strict=True) if step.taken)

    def exposed_s(self, saved: Mapping[int, float], *, training: bool = False, publishing: bool = False) -> float:
        """Seconds of wall time saved if trajectory i ended `saved[i]` seconds earlier; negative if trajectories end
        later. With `training` or `publishing`, these take no time in steps that take groups. 0 for a run without a
        step."""
        if not self._steps:
            return 0.0
        _, trained = self._play(saved, training=training, publishing=publishing)[-1]
        instant = publishing and self._steps[-1].taken
        return self._steps[-1].ended - trained - (0.0 if instant else self._waits_s[-1][1])

    def _play(
        self,
        saved: Mapping[int, float],
        *,
        as_recorded: bool = False,
        training: bool = False,
        publishing: bool = False,
    ) -> list[tuple[float, float]]:
        """Of each step the moment when its batch is complete, and when it is trained and may be published.
        `as_recorded`: every step builds on the recorded moments before it; `training`, `publishing`: without them."""
        moments, found = [0.0], []
        ready: dict[str, list[float]] = defaultdict(list)
        for n, step in enumerate(self._steps):
            self._end_groups(moments, saved, ready)
            works = not (training and step.taken)
            complete = moments[-1] + (step.busy_s if works else 0.0)
            for domain, count in step.taken.items():
                for _ in range(min(count, len(ready[domain]))):
                    complete = max(complete, heapq.heappop(ready[domain]))
            moments.append(step.whole if as_recorded else complete + self._waits_s[n][0])
            trained = moments[-1] + (step.trained - step.whole if works else 0.0)
            self._end_groups(moments, saved, ready)
            if self._drained:
                trained = max([trained, *(end for ends in ready.values() for end in ends)])
            published = trained if publishing and step.taken else trained + self._waits_s[n][1]
            moments.append(step.ended if as_recorded else published)
            found.append((complete, trained))
        return found

    def _end_groups(self, moments: Sequence[float], saved: Mapping[int, float], ready: dict[str, list[float]]) -> None:
        """Add the ends of the groups whose last trajectory began after the latest moment."""
        for domain, members in self._groups.get(len(moments) - 1, ()):
            ends = (moments[m.cause] + m.gap_s + m.seconds - saved.get(m.index, 0.0) for m in members)
            heapq.heappush(ready[domain], max(ends))


def _steps(
    spans: Iterable[Span],
    lives: Sequence[TrajectoryLife],
    groups: Mapping[str, Sequence[int]],
    by_version: Mapping[int, Sequence[str]],
) -> Iterable[TrainerStep]:
    """The trainer's steps, each ended by a publish. A step without a version, such as one that a crash repeated, took
    no group."""
    by_resource: dict[str, list[Span]] = defaultdict(list)
    for span in spans:
        if span.role == TRAINER:
            by_resource[span.resource].append(span)
    if not by_resource:
        return
    # Devices that engines lend to training have its role too, for a part of the run.
    trainer = max(sorted(by_resource), key=lambda name: sum(s.t1 - s.t0 for s in by_resource[name]))
    versions = deque(sorted(by_version))
    busy_s, block_s, whole = 0.0, 0.0, None
    ordered = sorted(by_resource[trainer], key=lambda s: s.t0)
    for span, after in zip_longest(ordered, ordered[1:]):
        if span.state == ResourceState.BUSY:
            whole = span.t0 if whole is None else whole
            block_s += span.t1 - span.t0
        elif span.state != ResourceState.SYNC:  # a streamed batch waits for its next group
            busy_s, block_s, whole = busy_s + block_s, 0.0, None
        elif after is None or after.state != span.state:
            whole = span.t0 if whole is None else whole
            trained = whole + block_s
            taken, version = Counter[str](), None
            if versions:
                batch = [groups[name] for name in by_version[versions[0]]]
                if max(lives[i].ended for members in batch for i in members) <= whole + CAUSE_TOLERANCE_S:
                    taken = Counter(lives[members[0]].domain for members in batch)
                    version = versions.popleft()
            yield TrainerStep(whole, trained, span.t1, busy_s, taken, version)
            busy_s, block_s, whole = 0.0, 0.0, None
