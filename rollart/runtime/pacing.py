"""The pace of a run under the schedule `paced`: batches wait for groups at their bound, and admission for a publish."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median

from rollart.errors import LeaseExpired
from rollart.policy.lease import Expiry
from rollart.policy.lengths import LengthRanker
from rollart.policy.pacing import PacedGroup
from rollart.ports import Recorder, RunEvent
from rollart.runtime.leases import Leases

__all__ = ["BatchPace", "StartPace", "IncompleteGroup"]

NAMED_GROUPS = 3
"""Groups that the lease of a wait names."""

STEPS = 8
"""Recent steps whose median is taken for the next one: long enough to ride out one slow step, short enough to follow a
policy whose answers grow."""

MIN_FINISHED_GROUPS = 8
"""Finished groups of a domain before admission trusts their durations: of fewer the 90th percentile is the maximum."""

EARLY_STEP_SHARE = 0.1
"""Share of a step after a publish in which a start loses too little time for a deferral to be worth it."""


@dataclass(frozen=True, slots=True)
class IncompleteGroup:
    """A group that holds slots and is not complete. `v0` is None while none of its members has sampled anything."""

    id: str
    v0: int | None
    samples: int
    domain: str

    def at(self, version: int) -> PacedGroup:
        """As a batch for `version` sees it: what has not begun will begin under that version at the earliest."""
        return PacedGroup(self.id, version if self.v0 is None else self.v0, self.samples)


@dataclass(slots=True)
class BatchPace:
    """Holds a batch back while it lacks groups whose bound it is. Owned by the buffer, which waits for one batch
    at a time. Each wait is under a lease: once it expires, that batch goes without, and its publish ends those groups
    as stale.
    """

    leases: Leases
    recorder: Recorder
    alpha: int
    wait_s: float
    unfinished: Callable[[], Sequence[IncompleteGroup]] = tuple
    """The scheduler's incomplete groups, of all domains."""
    given_up: int = -1
    """The version whose batch waits no longer."""

    async def hold(self, version: int, lacking: Sequence[PacedGroup], released: Awaitable[None]) -> None:
        """Wait for `released`, for `wait_s` at most."""
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


@dataclass(slots=True)
class StartPace:
    """Defers a prompt that would reach its bound unfinished if it started now, to the next publish: a start has the
    most time there, and the prompt starts whatever is expected of it. So a prompt is deferred once at most.

    Synchronous; the scheduler reports batches, publishes and complete groups. Durations are learned per prompt, drawn
    towards those of its domain (`LengthRanker`, in seconds).
    """

    alpha: int
    recorder: Recorder
    ranker: LengthRanker = field(default_factory=LengthRanker)
    training: set[str] = field(default_factory=set)
    """Groups of batches that are taken and not published."""
    _publishes: int = 0
    _published: float = 0.0
    _periods: deque[float] = field(default_factory=lambda: deque(maxlen=STEPS))
    _waits: deque[float] = field(default_factory=lambda: deque(maxlen=STEPS))
    _deferred: dict[str, int] = field(default_factory=dict)
    """By group, the publishes before it was deferred."""

    def taken(self, groups: Iterable[str], now: float) -> None:
        """A batch went to training."""
        self.training.update(groups)
        if self._publishes:
            self._waits.append(now - self._published)

    def ended(self, groups: Iterable[str]) -> None:
        """Groups left training, trained or refused."""
        self.training.difference_update(groups)

    def published(self, now: float) -> None:
        if self._publishes:
            self._periods.append(now - self._published)
        self._published = now
        self._publishes += 1

    def completed(self, prompt: str, domain: str, seconds: float) -> None:
        """A group began `seconds` ago and has its samples."""
        self.ranker.finished(prompt, domain, seconds)

    def starts(self, group: str, prompt: str, domain: str, now: float) -> bool:
        """False if the group is to start at the next publish. The caller asks only while a publish is sure to come."""
        if (deferred := self._deferred.get(group)) is not None:
            return deferred < self._publishes
        expected, left = self.ranker.estimate(prompt, domain), 0.0
        if self.alpha > 0 or not self.training:  # at 0 the batch in training was the last chance of all that begins now
            if not self._periods or not self._waits or expected.known < MIN_FINISHED_GROUPS:
                return True
            step, since = median(self._periods), now - self._published
            left = self.alpha * step + median(self._waits) - since
            if since <= EARLY_STEP_SHARE * step or expected.p90 <= left:
                return True
        self._deferred[group] = self._publishes
        fields: dict[str, str | int | float | bool | None] = {
            "domain": domain,
            "expected_s": expected.p90,
            "left_s": left,
        }
        self.recorder.event(RunEvent(now, "admission_deferred", group, fields))
        return False
