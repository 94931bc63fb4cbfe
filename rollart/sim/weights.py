"""The transfer of new weights: pushed once into a store, bucket by bucket, and pulled from it by every engine.

Push and pull overlap rollout: an engine fetches a bucket as soon as it is in the store. The exposed time is the wait of
a paused engine: for buckets that have not arrived yet, and for loading them onto its devices.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass, field

from rollart.errors import TrainerError
from rollart.model import WeightsRef
from rollart.policy.pipeline import AHEAD_BYTES, BucketDepth, InFlight
from rollart.sim.links import RDMA, SharedLink


@dataclass(slots=True)
class VersionTransfer:
    """The transfer times of one version: seconds of its push; by engine, seconds of pulls (summed over its buckets, as
    RA-16 counts) and seconds that the engine was paused."""

    version: int
    push_s: float = math.nan
    pull_s: dict[str, float] = field(default_factory=dict)
    exposed_s: dict[str, float] = field(default_factory=dict)
    pulled_gb: float = 0.0
    """By all engines."""


@dataclass(slots=True)
class _Pull:
    """Buckets of one version at one engine: in its host's memory, until they are loaded."""

    version: int
    arrived: int = 0
    moving: int = 0
    wanted: bool = False
    """True if the engine is paused and waits for this version."""
    complete: asyncio.Event = field(default_factory=asyncio.Event)


class WeightTransfer:
    """Called by the trainer (`push`, which waits for the store to have all) and by engines (`load`, which waits for the
    weights to be on the devices; unblocked by the pulls that `push` sets off).

    `gb` in buckets of `bucket_gb`; an engine pulls in `streams` streams from the link that `pull` gives for it. Loading
    runs at `load_gb_per_s` per engine: by default the rate of RDMA (`links`), which makes a third of RA-16's pull
    exposed; tuned by that choice only. Without `prefetch` an engine pulls only while it is paused.
    """

    def __init__(
        self,
        gb: float,
        *,
        push: SharedLink,
        pull: Callable[[str], SharedLink],
        bucket_gb: float = 1.0,
        streams: int = 1,
        load_gb_per_s: float = RDMA.gb_per_s,
        prefetch: bool = True,
        in_flight: InFlight = 1,
        ahead_gb: float = AHEAD_BYTES / 1e9,
    ) -> None:
        """`in_flight`: buckets in flight to an engine at a time: a number, or `auto`, by the rule of real hosts
        (`policy.pipeline`), within `ahead_gb` of memory. It matters for links with latency, or with streams slower than
        the link."""
        self._ahead = BucketDepth(in_flight, ahead_gb * 1e9)
        self._depths: dict[str, BucketDepth] = {}
        """By engine: each has its own path."""
        if not (gb > 0 and bucket_gb > 0 and load_gb_per_s > 0):
            raise ValueError(f"{gb} GB in buckets of {bucket_gb}, {load_gb_per_s} GB/s (rule: all above 0)")
        self.gb = gb
        self.buckets = math.ceil(gb / bucket_gb)
        self._bucket_gb = gb / self.buckets
        self.push_link, self._pull = push, pull
        self._streams = streams
        self._load_s = gb / load_gb_per_s
        self._prefetch = prefetch
        self._stored: dict[int, int] = {}
        """Buckets in the store, by version that is being pushed or was."""
        self._pulls: dict[str, dict[int, _Pull]] = {}
        """By engine, the pulls of versions that it has not loaded: the newest two, and the version that it waits
        for."""
        self.moved: dict[int, VersionTransfer] = {}

    def subscribe(self, engine: str) -> None:
        """The engine fetches new versions from now on."""
        self._pulls.setdefault(engine, {})
        if engine not in self._depths:
            self._depths[engine] = BucketDepth(self._ahead.fixed, self._ahead.memory_bytes)

    def unsubscribe(self, engine: str) -> None:
        """Remove an engine with all that it had fetched."""
        self._pulls.pop(engine, None)
        self._depths.pop(engine, None)

    async def push(self, version: int, *, lost: Callable[[], bool] = lambda: False) -> None:
        """Push every bucket once, one after the other. `TrainerError` if the pushed version is lost."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        report = self.moved[version] = VersionTransfer(version)
        self._stored = {v: n for v, n in self._stored.items() if v >= version - 1} | {version: 0}
        for _ in range(self.buckets):
            await self.push_link.transfer(self._bucket_gb)
            if lost():
                raise TrainerError(f"the trainer died while v{version} was pushed")
            self._stored[version] += 1
            for engine in list(self._pulls):
                self._fetch(engine, version)
        report.push_s = loop.time() - began

    async def load(self, engine: str, weights: WeightsRef) -> None:
        """Load these weights into a paused engine. A version that was never pushed here counts as stored."""
        loop = asyncio.get_running_loop()
        began, version = loop.time(), weights.version
        self._stored.setdefault(version, self.buckets)
        self.subscribe(engine)
        pull = self._pulls[engine].setdefault(version, _Pull(version))
        pull.wanted = True
        self._fetch(engine, version)
        await pull.complete.wait()
        await asyncio.sleep(self._load_s)
        if engine in self._depths:
            self._depths[engine].applied_s.append(self._load_s / self.buckets)
        for old in [v for v in self._pulls.get(engine, ()) if v < version]:
            del self._pulls[engine][old]
        report = self.moved.setdefault(version, VersionTransfer(version))
        report.exposed_s[engine] = loop.time() - began

    def _fetch(self, engine: str, version: int) -> None:
        """Start pulls of the next buckets that the engine lacks and the store has, up to the limit in flight."""
        pulls = self._pulls.get(engine)
        if pulls is None or (version not in pulls and any(v > version for v in pulls)):
            return
        if version not in pulls:
            newest = max(pulls, default=version)
            for old in [v for v, p in pulls.items() if v < newest and (not p.wanted or p.complete.is_set())]:
                del pulls[old]
        pull = pulls.setdefault(version, _Pull(version))
        depth, now = self._depths[engine], asyncio.get_running_loop().time()
        while (
            pull.moving < depth.depth(pull.arrived, self._bucket_gb * 1e9)
            and pull.arrived + pull.moving < self._stored[version]
            and (self._prefetch or pull.wanted)
        ):
            pull.moving += 1
            self._pull(engine).send(self._bucket_gb, lambda: self._arrived(engine, pull, now), self._streams)

    def _arrived(self, engine: str, pull: _Pull, began: float) -> None:
        pull.moving -= 1
        pull.arrived += 1
        took = asyncio.get_running_loop().time() - began
        if pull.arrived == 1 and engine in self._depths:
            self._depths[engine].alone_s.append(took)
        moved = self.moved.setdefault(pull.version, VersionTransfer(pull.version))
        moved.pulled_gb += self._bucket_gb
        moved.pull_s[engine] = moved.pull_s.get(engine, 0.0) + took
        if pull.arrived == self.buckets:
            pull.complete.set()
        elif self._pulls.get(engine, {}).get(pull.version) is pull:
            self._fetch(engine, pull.version)
