"""A version on its way into the store, as those who pull it see it."""

from __future__ import annotations

import asyncio

from rollart.adapters.weights.manifests import Manifest
from rollart.errors import StorageFailed

__all__ = ["BucketArrivals"]


class BucketArrivals:
    """Which buckets of a version that is being pushed are in the store: a puller waits for each, so that pulling begins
    with the first. Unblocked by the pusher, by its end in any case."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self.there: set[str] = set()
        self.over = self.whole = False
        """The push has ended; with all of the version in the store."""
        self._changed = asyncio.Condition()

    async def wait(self, digest: str) -> None:
        """`StorageFailed` if the push ended without it."""
        async with self._changed:
            await self._changed.wait_for(lambda: digest in self.there or self.over)
        if digest not in self.there:
            raise self._torn()

    async def ended(self) -> None:
        """Returns once the version is in the store. `StorageFailed` if the push ended before."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.over)
        if not self.whole:
            raise self._torn()

    async def more(self, than: int) -> None:
        """Returns once more buckets than so many are there, or the push has ended."""
        async with self._changed:
            await self._changed.wait_for(lambda: len(self.there) > than or self.over)

    async def came(self, digests: set[str]) -> None:
        async with self._changed:
            self.there |= digests
            self._changed.notify_all()

    async def end(self, *, whole: bool = False) -> None:
        async with self._changed:
            self.over, self.whole = True, self.whole or whole
            self._changed.notify_all()

    def _torn(self) -> StorageFailed:
        return StorageFailed(f"version {self.manifest.version} was not pushed whole")
