"""A run's weight store as seen from the hosts of its engines: where it is, and the copy that a host has of it."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rollart.adapters.weights.arrivals import BucketArrivals
from rollart.adapters.weights.buckets import BucketWeightStore, PullProgress, PullResult
from rollart.adapters.weights.manifests import Manifest
from rollart.adapters.weights.objects import FileObjectStore, LinkableObjectStore
from rollart.adapters.weights.s3 import S3ObjectStore
from rollart.errors import StorageFailed
from rollart.policy.pipeline import InFlight

__all__ = ["HostWeightCopy", "WeightStoreLocation"]

PUSH_TIMEOUT_S = 3600.0
"""Seconds that a version may be on its way: nobody may be left to say that it will not come."""

MAX_PENDING_PUSHES = 4
"""Versions on their way that a host knows of; one is pushed at a time."""

LOCK_RETRY_INTERVAL_S = 0.05
"""Seconds between two tries to get the lock of a directory: another process's end of a pull is no event here."""


@dataclass(frozen=True, slots=True)
class WeightStoreLocation:
    """A value that goes to every host. `url` is the store's, the run's name in it; `root` a directory of each host."""

    kind: str
    url: str
    root: str
    in_flight: InFlight = "auto"

    def objects(self) -> LinkableObjectStore:
        """Not connected yet. Credentials, region and endpoint of S3 are those of the host's environment."""
        if self.kind == "files":
            return FileObjectStore(self.url)
        bucket, _, prefix = self.url.removeprefix("s3://").partition("/")
        return S3ObjectStore(bucket, prefix=prefix)


class HostWeightCopy:
    """Called by one engine's actor at a time. Others on the same host, in this process or not, have the same directory:
    who pulls holds its lock, and the next one finds the version there."""

    def __init__(self, place: WeightStoreLocation) -> None:
        self.place = place
        self._objects = place.objects()
        self._store = BucketWeightStore(self._objects, place.root, in_flight=place.in_flight)
        self._coming: OrderedDict[bytes, BucketArrivals] = OrderedDict()
        self._came: bytes | None = None
        """The last that is here: what is told of it from now on concerns nobody."""

    @property
    def progress(self) -> PullProgress:
        """Of the pull that is under way here."""
        return self._store.progress

    async def arrived(self, manifest: bytes, digests: Sequence[str], *, over: bool, whole: bool) -> None:
        """These buckets of a version that is being pushed are in the store; its push has ended, well or not."""
        if manifest == self._came:
            return
        arrivals = self._arriving(manifest)
        await arrivals.came(set(digests))
        if over:
            await arrivals.end(whole=whole)

    async def pull(
        self, version: int, stamp: str, keep: Sequence[int], coming: bytes | None = None
    ) -> tuple[str, PullResult]:
        """Where the version lies whole, and what came from the store for it. What lies there under its number with
        another stamp was never committed (the run, or its trainer, died on the way), and goes. Versions that are older
        than those of `keep` go too; of those that are newer nobody here can say who reads them. `StorageFailed`: it is
        not here. `coming` is the list of a version whose push goes on: its buckets are pulled as they `arrived`, and it
        is here once they all did and the push ended well."""
        if self._store.stamp(version) == stamp:
            return self._store.path(version), PullResult(version, 0, 0, 0.0, 0.0)
        async with _locked(Path(self.place.root)):
            if self._store.stamp(version) not in (stamp, None):
                await self._prune([v for v in self._store.versions() if v != version])
            try:
                async with asyncio.timeout(None if coming is None else PUSH_TIMEOUT_S):
                    pulled = await self._store.pull(version, None if coming is None else self._arriving(coming))
            except TimeoutError:
                raise StorageFailed(f"v{version} was not pushed within {PUSH_TIMEOUT_S:g} s") from None
            if coming is not None:  # else it may be tried again, and is told no second time of what came
                self._coming.pop(coming, None)
                self._came = coming
            if self._store.stamp(version) != stamp:
                raise StorageFailed(f"v{version} in the store is not what was published under that number")
            newest = max(keep, default=0)
            await self._prune([v for v in self._store.versions() if v >= newest or v == version or v in keep])
        return self._store.path(version), pulled

    async def aclose(self) -> None:
        await self._objects.aclose()

    def _arriving(self, manifest: bytes) -> BucketArrivals:
        """What is told of a push may come before the pull that it is for, or after it."""
        found = self._coming.setdefault(manifest, BucketArrivals(Manifest.decode(manifest)))
        while len(self._coming) > MAX_PENDING_PUSHES:
            self._coming.popitem(last=False)
        return found

    async def _prune(self, keep: Sequence[int]) -> None:
        await asyncio.to_thread(self._store.prune, keep)


@contextlib.asynccontextmanager
async def _locked(root: Path) -> AsyncIterator[None]:
    """The kernel lets go of it when the process dies."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(root / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise StorageFailed(f"cannot write {root}: {error.strerror}") from error
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                await asyncio.sleep(LOCK_RETRY_INTERVAL_S)
            except OSError as error:
                raise StorageFailed(f"cannot lock {root}: {error.strerror}") from error
        yield
    finally:
        os.close(descriptor)
