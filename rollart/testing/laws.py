"""Laws of the ledger that tests hold: each resource is in exactly one state at a time, and every sum agrees."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from rollart.ledger.intervals import IntervalSum
from rollart.ports import Interval


@dataclass(frozen=True, slots=True)
class TilingError:
    """A stretch in which a resource's intervals do not tile its span."""

    resource: str
    kind: Literal["gap", "overlap", "backwards"]
    t0: float
    t1: float


def find_tiling_errors(
    intervals: Iterable[Interval], *, start: float | None = None, end: float | None = None, tolerance: float = 1e-9
) -> list[TilingError]:
    """Gaps, overlaps, and intervals that end before they begin.

    Each resource must be covered from its first interval to its last, or over [start, end] where these are given.
    """
    by_resource: dict[str, list[Interval]] = defaultdict(list)
    for interval in intervals:
        by_resource[interval.resource].append(interval)
    found: list[TilingError] = []
    for resource, own in by_resource.items():
        found += [TilingError(resource, "backwards", i.t0, i.t1) for i in own if i.t1 < i.t0]
        own.sort(key=lambda i: (i.t0, i.t1))
        at = own[0].t0 if start is None else start
        for interval in own:
            if interval.t0 > at + tolerance:
                found.append(TilingError(resource, "gap", at, interval.t0))
            elif interval.t0 < at - tolerance:
                found.append(TilingError(resource, "overlap", interval.t0, at))
            at = max(at, interval.t1)
        if end is not None and abs(end - at) > tolerance:
            found.append(TilingError(resource, "gap" if at < end else "overlap", min(at, end), max(at, end)))
    return found


def sum_intervals(intervals: Iterable[Interval]) -> list[IntervalSum]:
    """Intervals added up by (role, resource, state, cause), in that order."""
    groups: dict[tuple[str, str, str, str], list[Interval]] = defaultdict(list)
    for i in intervals:
        groups[i.role, i.resource, i.state, i.cause].append(i)
    return [
        IntervalSum(
            *key,
            seconds=math.fsum(i.seconds for i in own),
            unit_seconds=math.fsum(i.seconds * i.units for i in own),
            usd=math.fsum(i.usd for i in own),
            t0=min(i.t0 for i in own),
            t1=max(i.t1 for i in own),
        )
        for key, own in sorted(groups.items())
    ]
