"""Links on virtual time: latency, bandwidth, and fair sharing among transfers. Exact, one timer per link.

A transfer is one or more streams (one per tensor-parallel rank, say). A stream gets at most `stream_gb_per_s` and an
equal share of the link.

The profiles below are of one published system, for the simulations of its paper; runs have the links of their cluster.
Three figures are tuned, once, to Mooncake's published table (RA-7): `TCP.gb_per_s` to 61.02 GB in 29.649 s,
`RDMA.gb_per_s` to 9.442 s, and `RDMA.stream_gb_per_s` to the ratio 1.264 of 15.26 GB, whose model has one rank. That a
rank is a stream follows from the published TP sizes (1, 2, 4 for 8B, 14B, 32B); the ratio of 27.51 GB is then a
prediction (2.53, published 2.482). Both are far below the wire: 200 Gb/s is 25 GB/s, 400 Gb/s is 50.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush


@dataclass(frozen=True, slots=True)
class LinkProfile:
    """GB/s of the link in one direction, GB/s of one stream at most, and seconds before the first byte."""

    gb_per_s: float
    stream_gb_per_s: float = math.inf
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        if not (0 < self.gb_per_s < math.inf and self.stream_gb_per_s > 0 and 0 <= self.latency_s < math.inf):
            raise ValueError(f"{self} (rule: rates above 0, that of the link finite, latency at least 0)")


TCP = LinkProfile(gb_per_s=61.02 / 29.649)
"""Weights over 200 Gb/s Ethernet, TCP, as Mooncake moves them (RA-7)."""
RDMA = LinkProfile(gb_per_s=61.02 / 9.442, stream_gb_per_s=15.26 / (15.26 / TCP.gb_per_s / 1.264))
"""Weights over 400 Gb/s InfiniBand (RA-7)."""


@dataclass(slots=True, eq=False)
class LinkTransfer:
    """A transfer in flight."""

    streams: int
    done: Callable[[], None]
    over: bool = False


class SharedLink:
    """Owns its transfers and one timer. `transfer` waits for the last byte; `send` calls back then.

    A stalled link (`rate` 0) keeps its transfers, which continue afterwards. Invariant: the rates of all streams add up
    to at most `gb_per_s` × `rate`.
    """

    def __init__(self, profile: LinkProfile) -> None:
        self.profile = profile
        self._streams = 0
        self._service = 0.0
        """GB that each stream has received since the link was last idle."""
        self._ends: list[tuple[float, int, LinkTransfer]] = []
        self._sent = 0
        self._at = 0.0
        self._rate = 1.0
        self._timer: asyncio.TimerHandle | None = None
        self.moved_gb = self.busy_s = 0.0

    @property
    def rate(self) -> float:
        """The share of its bandwidth that the link has now; 0 is an outage."""
        return self._rate

    @rate.setter
    def rate(self, share: float) -> None:
        if not 0 <= share < math.inf:
            raise ValueError(f"a link's rate is {share} (rule: a finite share, at least 0)")
        self._catch_up()
        self._rate = share
        self._plan()

    async def transfer(self, gb: float, streams: int = 1) -> None:
        """Move `gb` in `streams` equal streams. A cancelled transfer leaves the link at once."""
        if self.profile.latency_s:
            await asyncio.sleep(self.profile.latency_s)
        if gb <= 0:
            return
        future = asyncio.get_running_loop().create_future()
        flow = self._join(gb, streams, lambda: None if future.done() else future.set_result(None))
        try:
            await future
        finally:
            if not flow.over:
                self._catch_up()
            if not flow.over:
                self._leave(flow)
                self._plan()

    def send(self, gb: float, done: Callable[[], None], streams: int = 1) -> None:
        """Transfer without a task: `done` is called at the end. It may send again, and must not raise."""
        loop = asyncio.get_running_loop()
        if gb <= 0:
            loop.call_later(self.profile.latency_s, done)
        elif self.profile.latency_s:
            loop.call_later(self.profile.latency_s, self._join, gb, streams, done)
        else:
            self._join(gb, streams, done)

    def _join(self, gb: float, streams: int, done: Callable[[], None]) -> LinkTransfer:
        self._catch_up()
        self._streams += streams
        self._sent += 1
        flow = LinkTransfer(streams, done)
        heappush(self._ends, (self._service + gb / streams, self._sent, flow))
        self._plan()
        return flow

    def _leave(self, flow: LinkTransfer) -> None:
        flow.over = True
        self._streams -= flow.streams
        if not self._streams:
            self._ends.clear()
            self._service = 0.0

    def _speed(self) -> float:
        """GB/s of one stream."""
        return self._rate * min(self.profile.stream_gb_per_s, self.profile.gb_per_s / self._streams)

    def _catch_up(self) -> None:
        now = asyncio.get_running_loop().time()
        while self._streams:
            while self._ends[0][2].over:
                heappop(self._ends)
            speed, end = self._speed(), self._ends[0][0]
            until = self._at + (end - self._service) / speed if speed else math.inf
            if until > now:
                self._pass(now, self._service + speed * (now - self._at))
                return
            self._pass(until, end)
            flow = heappop(self._ends)[2]
            self._leave(flow)
            flow.done()
        self._at = now

    def _pass(self, at: float, service: float) -> None:
        self.moved_gb += self._streams * (service - self._service)
        self.busy_s += at - self._at
        self._at, self._service = at, service

    def _plan(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._streams or not self._rate:
            return
        while self._ends[0][2].over:
            heappop(self._ends)
        when = self._at + (self._ends[0][0] - self._service) / self._speed()
        self._timer = asyncio.get_running_loop().call_at(when, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._catch_up()
        self._plan()
