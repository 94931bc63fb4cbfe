"""A version that is being pushed into the store, as its pullers see it."""

from __future__ import annotations

import asyncio

from rollart.adapters.weights.manifests import Manifest
from rollart.errors import StorageFailed


class BucketArrivals:
    """The buckets of a version in the store while it is being pushed. A puller waits for each bucket, so pulling starts
    with the first. The pusher unblocks it, by the end of the push at the latest."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self.there: set[str] = set()
        self.over = self.whole = False
        """`over`: the push has ended. `whole`: it ended with the complete version in the store."""
        self._changed = asyncio.Condition()

    async def wait(self, digest: str) -> None:
        """`StorageFailed` if the push ended without the bucket."""
        async with self._changed:
            await self._changed.wait_for(lambda: digest in self.there or self.over)
        if digest not in self.there:
            raise self._incomplete()

    async def ended(self) -> None:
        """Returns once the version is in the store. `StorageFailed` if the push ended before."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.over)
        if not self.whole:
            raise self._incomplete()

    async def more(self, than: int) -> None:
        """Returns once more than this number of buckets have arrived, or the push has ended."""
        async with self._changed:
            await self._changed.wait_for(lambda: len(self.there) > than or self.over)

    async def add(self, digests: set[str]) -> None:
        async with self._changed:
            self.there |= digests
            self._changed.notify_all()

    async def end(self, *, whole: bool = False) -> None:
        async with self._changed:
            self.over, self.whole = True, self.whole or whole
            self._changed.notify_all()

    def _incomplete(self) -> StorageFailed:
        return StorageFailed(f"version {self.manifest.version} was not pushed whole")
