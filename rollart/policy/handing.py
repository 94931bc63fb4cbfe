"""Depth of the hand-off queue of a decode engine: the look-ahead rule of `policy.pipeline`."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from rollart.policy.pipeline import handoff_depth

__all__ = ["EMPTY_HANDOFFS", "HANDOFFS", "MOST_HANDED", "UNUSED_PREFILL", "HandoffCounts", "HandoffDepth"]

HANDOFFS = "handoffs"
"""Event at each publish: hand-offs since the previous event that were decoded, `failed`, or transferred no KV
(`empty`)."""

EMPTY_HANDOFFS = "handoffs_pull_nothing"
"""Event, once: prefill engines work, and no decode engine pulled a token of the KV that they computed."""

UNUSED_PREFILL = "prefill_unused"
"""Event, once: prefill engines serve, and the router gave them no turn."""

ENOUGH = 20
"""Hand-offs without any pulled KV before `EMPTY_HANDOFFS` is emitted."""

MANY = 200
"""Turns prefilled on their decode engine before `UNUSED_PREFILL` is emitted."""

MOST_HANDED = 64
"""Most hand-offs that the rule queues for one engine: each keeps the KV of its context on a prefill engine
meanwhile."""

FIRST = 2
"""Depth before the first measurement: one hand-off in transfer, one waiting."""

SEEN = 64
"""Window of the rule, in prefills and ends of turns: enough for a 90th percentile, few enough to follow a change."""


@dataclass(slots=True)
class HandoffDepth:
    """The hand-off depth of one decode engine: `fixed`, or computed from measurements (None).

    The engine admits a turn when another turn ends, so `admit_s` is the mean time between two ends. The round trip is
    the duration of a remote prefill, with its 90th percentile as jitter. A depth n that is too small corrects itself:
    the engine then ends n turns in the time of one prefill, and the rule yields n + 1.
    """

    fixed: int | None = None
    prefills_s: deque[float] = field(default_factory=lambda: deque(maxlen=SEEN))
    gaps_s: deque[float] = field(default_factory=lambda: deque(maxlen=SEEN))
    ended_at: float | None = None

    def prefilled(self, seconds: float) -> None:
        """Record a remote prefill: seconds from the request to its answer."""
        self.prefills_s.append(seconds)

    def ended(self, now: float, *, idle: bool) -> None:
        """A turn left the engine. `idle`: no turn runs there any more, and the time until the next start is not counted
        as a gap."""
        if self.ended_at is not None:
            self.gaps_s.append(now - self.ended_at)
        self.ended_at = None if idle else now

    def depth(self) -> int:
        """Hand-offs that may be queued or in transfer, between 1 and `MOST_HANDED`."""
        if self.fixed is not None:
            return self.fixed
        if not self.prefills_s or not self.gaps_s:
            return FIRST
        mean = math.fsum(self.prefills_s) / len(self.prefills_s)
        slow = sorted(self.prefills_s)[math.ceil(0.9 * len(self.prefills_s)) - 1]
        admit_s = math.fsum(self.gaps_s) / len(self.gaps_s)
        return handoff_depth(admit_s, mean / 2, jitter_s=max(slow - mean, 0.0) / 2, most=MOST_HANDED)


@dataclass(slots=True)
class HandoffCounts:
    """Outcomes of hand-offs since the last `report`, and in total."""

    decoded: int = 0
    failed: int = 0
    empty: int = 0
    seen: int = 0
    pulled: bool = False
    reported: bool = False

    def ended(self, *, pulled: int) -> None:
        """A turn was decoded with `pulled` tokens of KV from its prefill engine."""
        self.decoded += 1
        self.seen += 1
        self.empty += pulled <= 0
        self.pulled = self.pulled or pulled > 0

    def report(self, version: int, emit: Callable[..., None], routes: Mapping[str, int]) -> None:
        """Emit the events of a publish. `routes` counts routed turns by reason (`policy.routing.TurnPath.why`). Nothing
        is emitted where no KV was handed over and no prefill engine was idle."""
        if self.decoded or self.failed:
            emit(HANDOFFS, f"v{version}", decoded=self.decoded, failed=self.failed, empty=self.empty)
        if self.seen >= ENOUGH and not self.pulled and not self.reported:
            self.reported = True
            emit(
                EMPTY_HANDOFFS,
                f"v{version}",
                count=self.seen,
                remedy="see the KV connector in the engines' logs, or use engines.count in place of engines.prefill "
                "and engines.decode",
            )
        local = routes.get("local", 0)
        if local >= MANY and not routes.get("remote") and not self.reported:
            self.reported = True
            emit(
                UNUSED_PREFILL,
                f"v{version}",
                count=local,
                remedy="use engines.count in place of engines.prefill and engines.decode, or another placement.router",
            )
        self.decoded = self.failed = self.empty = 0
