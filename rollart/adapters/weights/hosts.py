"""A run's weight store from the point of view of its engine hosts: its location, and a host's copy of it."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rollart.adapters.weights.buckets import BucketArrivals, BucketWeightStore, Manifest, PullResult
from rollart.adapters.weights.objects import FileObjectStore, ObjectStore, S3ObjectStore, storage_failures
from rollart.errors import StorageFailed
from rollart.policy.pipeline import InFlight
from serverless.retries import WEIGHT_DIRECTORY

PUSH_TIMEOUT_S = 3600.0
"""Seconds that a push may take: a pusher that died cannot report that it failed."""

MAX_PENDING_PUSHES = 4
"""Unfinished pushes that a host keeps track of; one version is pushed at a time."""


@dataclass(frozen=True, slots=True)
class WeightStoreLocation:
    """A value that is sent to every host. `url` is the store's, with the run's name in it; `root` a directory on each
    host."""

    kind: str
    url: str
    root: str
    in_flight: InFlight = "auto"

    def objects(self) -> ObjectStore:
        """Not connected yet. Credentials, region and endpoint of S3 are taken from the host's environment."""
        if self.kind == "files":
            return FileObjectStore(self.url)
        bucket, _, prefix = self.url.removeprefix("s3://").partition("/")
        return S3ObjectStore(bucket, prefix=prefix)


class HostWeightCopy(BucketWeightStore):
    """Called by one engine's actor at a time. Other actors on the same host, in this process or another, share the
    directory: a pull holds its lock, and the next caller finds the version there."""

    def __init__(self, location: WeightStoreLocation) -> None:
        super().__init__(location.objects(), location.root, in_flight=location.in_flight)
        self._pending: OrderedDict[bytes, BucketArrivals] = OrderedDict()
        self._last_pulled: bytes | None = None
        """The last version that was pulled while its push went on: later reports about it are ignored."""

    async def arrived(self, manifest: bytes, digests: Sequence[str], *, over: bool, whole: bool) -> None:
        """These buckets of a version that is being pushed are in the store, each with its chain behind blanks; `over`:
        its push has ended, `whole`: successfully."""
        if manifest == self._last_pulled:
            return
        arrivals = self._arrivals_of(manifest)
        await arrivals.add({digest: tuple(chain) for digest, *chain in map(str.split, digests)})
        if over:
            await arrivals.end(whole=whole)

    async def pull_stamped(
        self, version: int, stamp: str, keep: Sequence[int], coming: bytes | None = None
    ) -> tuple[str, PullResult]:
        """The path of the complete version, and the result of its pull. A version here with the same number and another
        stamp was never committed (the run or its trainer died first) and is removed. Versions below the newest of
        `keep` are removed too unless `keep` has them; newer ones stay, since they may have readers that are unknown
        here. `StorageFailed`: the version is not here. `coming` is the manifest of a version whose push goes on: its
        buckets are pulled as they `arrived`, and it is complete once all arrived and the push succeeded."""
        if self.stamp(version) == stamp:
            return self.path(version), PullResult(0, 0, 0.0, 0.0)
        async with _locked(self._root):
            if self.stamp(version) not in (stamp, None):
                await asyncio.to_thread(self.prune, [v for v in self.versions() if v != version])
            try:
                async with asyncio.timeout(None if coming is None else PUSH_TIMEOUT_S):
                    pulled = await self.pull(version, None if coming is None else self._arrivals_of(coming))
            except TimeoutError:
                raise StorageFailed(f"v{version} was not pushed within {PUSH_TIMEOUT_S:g} s") from None
            if coming is not None:  # after a failure the pull may be retried, and arrivals are not reported again
                self._pending.pop(coming, None)
                self._last_pulled = coming
            if self.stamp(version) != stamp:
                raise StorageFailed(f"v{version} in the store is not what was published under that number")
            newest = max(keep, default=0)
            kept = [v for v in self.versions() if v >= newest or v == version or v in keep]
            await asyncio.to_thread(self.prune, kept)
        return self.path(version), pulled

    async def aclose(self) -> None:
        await self._objects.aclose()

    def _arrivals_of(self, manifest: bytes) -> BucketArrivals:
        """Reports about a push may come before its pull starts, or after."""
        arrivals = self._pending.setdefault(manifest, BucketArrivals(Manifest.decode(manifest)))
        while len(self._pending) > MAX_PENDING_PUSHES:
            self._pending.popitem(last=False)
        return arrivals


@contextlib.asynccontextmanager
async def _locked(root: Path) -> AsyncIterator[None]:
    """The kernel releases the lock if the process dies."""
    with storage_failures(f"write {root}"):
        root.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(root / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        with storage_failures(f"lock {root}"):

            async def lock() -> None:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)

            # The end of another process's pull raises no event here.
            await WEIGHT_DIRECTORY.run(lock, BlockingIOError)
        yield
    finally:
        os.close(descriptor)
