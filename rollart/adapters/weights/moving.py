"""Concurrent bucket transfers of one push or pull (`policy.pipeline` decides how many)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator

from rollart.policy.pipeline import BucketDepth


class BucketTransfer:
    """One bucket in transfer. Reports its times to `BucketDepth`, except for small buckets at the ends of files."""

    def __init__(self, depth: BucketDepth, *, alone: bool, whole: bool) -> None:
        self._depth, self._alone, self._whole = depth, alone, whole

    @contextlib.contextmanager
    def moving(self) -> Iterator[None]:
        """The transfer between this end and the store."""
        began = asyncio.get_running_loop().time()
        yield
        if self._alone and self._whole:
            self._depth.alone(asyncio.get_running_loop().time() - began)

    @contextlib.contextmanager
    def applying(self) -> Iterator[None]:
        """This end's own work on the bucket: reading and hashing it, or verifying and writing it."""
        began = asyncio.get_running_loop().time()
        yield
        if self._whole:
            self._depth.applied(asyncio.get_running_loop().time() - began)


class TransferWindow:
    """Limits concurrent transfers to the depth; the end of each admits others. Owned by one push or pull, which fails
    with the first bucket that fails."""

    def __init__(self, depth: BucketDepth, bucket_bytes: int) -> None:
        """`bucket_bytes`: of the largest bucket."""
        self._depth, self._bytes = depth, bucket_bytes
        self._inside = self._moved = 0
        self._changed = asyncio.Condition()

    @contextlib.asynccontextmanager
    async def bucket(self, count: int) -> AsyncIterator[BucketTransfer]:
        """Wait until a bucket of `count` bytes may be transferred."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._inside < self._depth.depth(self._moved, self._bytes))
            self._inside += 1
        yield BucketTransfer(self._depth, alone=self._moved == 0 and self._inside == 1, whole=count == self._bytes)
        async with self._changed:
            self._inside -= 1
            self._moved += 1
            self._changed.notify_all()
