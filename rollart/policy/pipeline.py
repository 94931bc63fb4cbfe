"""Look-ahead for work that crosses a slow link (Adaptra, arXiv 2504.19232): the number of items that must be in flight.

A static order absorbs a delay only up to its slack. `in_flight` is that rule for any hop between a producer and a
consumer; `benchmarks.papers.pipelining` has the paper's form, the quotas of a pipeline of F/B/W stages. Docstrings give
times in seconds; every function works in any unit.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Literal

ROUNDING = 1e-9
"""Share of one unit of work below which a look-ahead is not rounded up: (0.1 + 2 x 0.1) / 0.1 is 3 in spite of
floating-point error."""


InFlight = Literal["auto"] | int
"""Buckets in transfer at a time: computed by the rule, or a number."""

MOST_BUCKETS = 64
"""Most connections to a store, whatever the memory: small buckets would otherwise open hundreds."""

AHEAD_BYTES = 4 * 2**30
"""Host memory for buckets in transfer: sixteen of the default size. An engine's weights are not included."""

FIRST_BUCKETS = 2
"""Depth before both measurements exist: one bucket in transfer, one being applied."""

SEEN_BUCKETS = 64
"""Window of the rule, in applied buckets."""

SEEN_VERSIONS = 8
"""Window of the rule, in first buckets of versions: small, because a link's speed an hour ago is no longer
informative."""


def in_flight(work_s: float, delay_s: float, *, jitter_s: float = 0.0, most: int | None = None) -> int:
    """The fewest items in flight on a hop that keep its consumer busy: ceil((work + 2 delay) / work).

    The consumer works `work_s` on an item; then the request for another one takes `delay_s` to its producer, and the
    item takes as long back, each `jitter_s` more in the worst case. With one item less the consumer waits in every
    round.

    `most` (memory) takes precedence over the rule; a hop whose work takes no time needs a `most`. ValueError for
    negative or infinite times, and for no work without `most`.
    """
    if not (0 <= work_s < math.inf and 0 <= delay_s < math.inf and 0 <= jitter_s < math.inf):
        raise ValueError(f"work {work_s} s, delay {delay_s} s, jitter {jitter_s} s: finite and not negative")
    round_trip = 2 * (delay_s + jitter_s)
    if round_trip <= 0:
        return 1
    need = (work_s + round_trip) / work_s if work_s > 0 else math.inf
    if most is not None and need >= most:
        return most
    if math.isinf(need):
        raise ValueError(f"a consumer that takes {work_s} s is never kept busy by a finite look-ahead: give `most`")
    return math.ceil(need * (1 - ROUNDING))


def weight_buckets_in_flight(
    load_s: float, delay_s: float, *, bucket_bytes: float, memory_bytes: float, jitter_s: float = 0.0
) -> int:
    """Weight buckets in transfer to an engine that takes `load_s` to load one: as many as keep it loading, within its
    spare memory. ValueError where not even one bucket fits."""
    if bucket_bytes <= 0 or memory_bytes < bucket_bytes:
        raise ValueError(
            f"a weight bucket of {bucket_bytes:.4g} bytes in {memory_bytes:.4g} bytes of memory: use smaller buckets"
        )
    return in_flight(load_s, delay_s, jitter_s=jitter_s, most=int(memory_bytes // bucket_bytes))


@dataclass(slots=True)
class BucketDepth:
    """One end of a weight transfer: a trainer that pushes, or a host that pulls. `fixed` buckets, or `auto`.

    Two durations are measured per bucket: the round trip of its transfer, and the local time to apply it (checking and
    writing it to disk or loading it onto a device; reading it from disk where it is pushed). Buckets that share a link
    slow each other, so the transfer time of one bucket among n is no measure of the link, and a rule based on it would
    raise its own result. Under `auto` the first bucket of each version is therefore moved alone and measured (a probe
    of one bucket a version); the slowest of the last probes gives the jitter.

    The depth is between 1 and the smaller of `MOST_BUCKETS` and the buckets that fit into `memory_bytes`, but always at
    least 1. A `fixed` number is not checked against the memory. ValueError for less than 1.
    """

    fixed: InFlight = "auto"
    memory_bytes: float = AHEAD_BYTES
    alone_s: deque[float] = field(default_factory=lambda: deque(maxlen=SEEN_VERSIONS))
    """Transfers of a version's first bucket: received, from the request on, or sent."""
    applied_s: deque[float] = field(default_factory=lambda: deque(maxlen=SEEN_BUCKETS))
    """Local times for one bucket."""

    def __post_init__(self) -> None:
        if self.fixed != "auto" and self.fixed < 1:
            raise ValueError(f"{self.fixed} weight buckets in flight (rule: `auto` or at least 1)")

    def depth(self, moved: int, bucket_bytes: float) -> int:
        """Buckets of a version that may be in transfer, when `moved` of them were received (or sent) already."""
        if self.fixed != "auto":
            return self.fixed
        memory = max(self.memory_bytes, bucket_bytes)
        if moved == 0:
            return 1
        if not self.alone_s or not self.applied_s:
            return min(FIRST_BUCKETS, int(memory // bucket_bytes))
        way_s = math.fsum(self.alone_s) / len(self.alone_s)
        need = weight_buckets_in_flight(
            math.fsum(self.applied_s) / len(self.applied_s),
            way_s / 2,
            bucket_bytes=bucket_bytes,
            memory_bytes=memory,
            jitter_s=max(max(self.alone_s) - way_s, 0.0) / 2,
        )
        return min(need, MOST_BUCKETS)


def mean_and_jitter(seconds: Collection[float]) -> tuple[float, float]:
    """The mean of measured durations, and by how much their 90th percentile exceeds it."""
    mean = math.fsum(seconds) / len(seconds)
    return mean, max(sorted(seconds)[math.ceil(0.9 * len(seconds)) - 1] - mean, 0.0)
