"""The schedule `paced`: batches wait for groups at their staleness bound, and admission waits for a publish, so that no
group expires because of its length.

A group begun under v0 can be trained from version v0 + alpha at the latest: that version is its deadline. Batches are
consumed one per version, `quota` samples of a domain each, so deadlines are kept exactly if every batch holds enough of
the groups with early deadlines (earliest deadline first). With count(k) = samples of the domain, complete or not, whose
deadline is at most k versions away, the batch for the current version needs

    need(0) = count(0)                             all groups for which it is the last batch, and
    need(k) = min(quota, count(k) - k * quota)     of those with k = 1 .. alpha versions left.

The admission window keeps count(k) <= (k + 1) * quota, by induction over batches: at admission k = alpha, and a batch
that holds need(k + 1) leaves at most (k + 1) * quota of them. So need(k) never exceeds the quota, and a batch of
`quota` samples can always meet it. Where more slots than the window's exist (redundant groups), or batches are smaller
than their quota (token budgets, deadlines), need(0) may exceed the quota: then the batch is larger.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from rollart.control.groups import GroupRun, IncompleteGroup, PacedGroup, PendingPrompt
from rollart.control.strategy import RolloutStrategy
from rollart.errors import LeaseExpired
from rollart.leases import Expiry, Leases
from rollart.model import Group
from rollart.policy.lengths import LengthRanker
from rollart.ports import Recorder, RunEvent


def last_chance(v0: int, version: int, alpha: int) -> bool:
    """True if no batch after the one for `version` may hold a group begun under `v0`."""
    return v0 <= version - alpha


def groups_to_wait_for(
    ready: Iterable[PacedGroup], unfinished: Sequence[PacedGroup], *, quota: int, version: int, alpha: int
) -> tuple[PacedGroup, ...]:
    """The unfinished groups that the batch for `version` waits for, if it takes the oldest of `ready` first.

    Empty: the batch need not wait. Otherwise the groups of the earliest deadline that would be missed.
    """
    complete = list(ready)
    for k, need in enumerate(_needs([*complete, *unfinished], quota=quota, version=version, alpha=alpha)):
        held = _count(complete, version - alpha + k)
        if (held if k == 0 else min(held, quota)) < need:
            return tuple(m for m in unfinished if m.v0 <= version - alpha + k)
    return ()


def may_join(
    candidate: PacedGroup,
    taken: Sequence[PacedGroup],
    others: Iterable[PacedGroup],
    *,
    quota: int,
    version: int,
    alpha: int,
) -> bool:
    """True if a growing batch can take `candidate` beside `taken` and keep room for every group that needs it.
    `others`: the rest of the domain's groups, complete or not."""
    if last_chance(candidate.v0, version, alpha):
        return True
    batch = [*taken, candidate]
    room = quota - sum(m.samples for m in batch)
    needs = _needs([*batch, *others], quota=quota, version=version, alpha=alpha)
    return room >= 0 and all(need - _count(batch, version - alpha + k) <= room for k, need in enumerate(needs) if need)


def _needs(members: Sequence[PacedGroup], *, quota: int, version: int, alpha: int) -> list[int]:
    counts = [_count(members, version - alpha + k) for k in range(alpha + 1)]
    return [counts[0], *(max(min(quota, counts[k] - k * quota), 0) for k in range(1, alpha + 1))]


def _count(members: Iterable[PacedGroup], v0: int) -> int:
    return sum(m.samples for m in members if m.v0 <= v0)


NAMED_GROUPS = 3
"""Number of groups named in the lease of a wait."""

STEPS = 8
"""Number of recent steps whose median predicts the next one: enough to ride out one slow step, few enough to follow a
policy whose responses grow longer."""

MIN_FINISHED_GROUPS = 8
"""Finished groups of a domain before admission trusts their durations: of fewer, the 90th percentile is the maximum."""

EARLY_STEP_SHARE = 0.1
"""Share of a step after a publish within which a start loses too little time for a deferral to pay."""


@dataclass(slots=True)
class BatchPace:
    """Holds a batch back while it lacks groups for which it is the last batch within their bound. Owned by the buffer,
    which waits for one batch at a time. Each wait has a lease: once it expires, the batch is trained without those
    groups, and its publish drops them as stale.
    """

    leases: Leases
    recorder: Recorder
    alpha: int
    wait_s: float
    unfinished: Callable[[], Sequence[IncompleteGroup]] = tuple
    """The scheduler's incomplete groups, of all domains."""
    given_up: int = -1
    """The version whose batch no longer waits."""

    async def hold(self, version: int, lacking: Sequence[PacedGroup], released: Awaitable[None]) -> None:
        """Wait for `released`, at most `wait_s` seconds."""
        loop = asyncio.get_running_loop()
        began, names = loop.time(), ", ".join(m.id for m in lacking[:NAMED_GROUPS])
        what = f"{len(lacking)} groups at their staleness bound ({names}{', …' if len(lacking) > NAMED_GROUPS else ''})"
        expired = False
        try:
            with self.leases.hold("training", what, self.wait_s, Expiry.GAP_FILL):
                await released
        except LeaseExpired:
            self.given_up, expired = version, True
        fields = {"seconds": loop.time() - began, "groups": len(lacking), "expired": expired}
        self.recorder.event(RunEvent(loop.time(), "batch_paced", f"v{version}", fields))


class StartPace(RolloutStrategy):
    """Defers a prompt that would reach its bound unfinished if it started now. It starts at the next publish, where it
    has the most time, whatever its expected duration: a prompt is deferred at most once.

    Durations are estimated per prompt and shrunk towards those of its domain (`LengthRanker`, in seconds).
    """

    def __init__(self, alpha: int, recorder: Recorder) -> None:
        self._alpha = alpha
        self._recorder = recorder
        self._ranker = LengthRanker()
        self._training: set[str] = set()
        """Groups of batches that were taken and are not yet published."""
        self._publishes = 0
        self._published = 0.0
        self._periods: deque[float] = deque(maxlen=STEPS)
        self._waits: deque[float] = deque(maxlen=STEPS)
        self._deferred: dict[str, int] = {}
        """By group, the number of publishes before it was deferred."""

    def taken(self, groups: Sequence[Group]) -> None:
        self._training.update(g.id for g in groups)
        if self._publishes:
            self._waits.append(asyncio.get_running_loop().time() - self._published)

    def refused(self, groups: Sequence[Group]) -> None:
        self._training.difference_update(g.id for g in groups)

    def published(self, version: int, consumed: Sequence[Group]) -> None:
        self._training.difference_update(g.id for g in consumed)
        now = asyncio.get_running_loop().time()
        if self._publishes:
            self._periods.append(now - self._published)
        self._published = now
        self._publishes += 1

    def completed(self, run: GroupRun) -> None:
        seconds = asyncio.get_running_loop().time() - run.opened
        self._ranker.finished(str(run.seed), run.domain.name, seconds)

    def defers(self, prompt: PendingPrompt, *, whole: bool) -> bool:
        """Needs a publish that is sure to come: a batch is in training, or every domain has a `whole` batch."""
        if not self._training and not whole:
            return False
        if (deferred := self._deferred.get(prompt.group)) is not None:
            return deferred >= self._publishes
        now = asyncio.get_running_loop().time()
        expected, left = self._ranker.estimate(str(prompt.seed), prompt.domain.name), 0.0
        if self._alpha > 0 or not self._training:  # with alpha 0, a new group is too late for that batch
            if not self._periods or not self._waits or expected.known < MIN_FINISHED_GROUPS:
                return False
            step, since = median(self._periods), now - self._published
            left = self._alpha * step + median(self._waits) - since
            if since <= EARLY_STEP_SHARE * step or expected.p90 <= left:
                return False
        self._deferred[prompt.group] = self._publishes
        fields: dict[str, str | int | float | bool | None] = {
            "domain": prompt.domain.name,
            "expected_s": expected.p90,
            "left_s": left,
        }
        self._recorder.event(RunEvent(now, "admission_deferred", prompt.group, fields))
        return True
