"""The buckets of one push or pull that are under way at a time (`policy.pipeline` says how many)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator

from rollart.policy.pipeline import BucketDepth

__all__ = ["BucketTransfer", "TransferWindow"]


class BucketTransfer:
    """One bucket under way: tells the rule how long it took. Small ones, the ends of files, tell nothing."""

    def __init__(self, depth: BucketDepth, *, alone: bool, whole: bool) -> None:
        self._depth, self._alone, self._whole = depth, alone, whole

    @contextlib.contextmanager
    def moving(self) -> Iterator[None]:
        """On its way between this end and the store."""
        began = asyncio.get_running_loop().time()
        yield
        if self._alone and self._whole:
            self._depth.alone(asyncio.get_running_loop().time() - began)

    @contextlib.contextmanager
    def applying(self) -> Iterator[None]:
        """What this end does with it."""
        began = asyncio.get_running_loop().time()
        yield
        if self._whole:
            self._depth.applied(asyncio.get_running_loop().time() - began)


class TransferWindow:
    """Waiting for a place: as many as the depth says are inside, and each that leaves lets others in. One push or pull
    owns it and ends with it: a bucket that fails, fails that."""

    def __init__(self, depth: BucketDepth, bucket_bytes: int) -> None:
        """`bucket_bytes`: of the largest bucket."""
        self._depth, self._bytes = depth, bucket_bytes
        self._inside = self._moved = 0
        self._changed = asyncio.Condition()

    @contextlib.asynccontextmanager
    async def bucket(self, count: int) -> AsyncIterator[BucketTransfer]:
        """A bucket of `count` bytes may be under way."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._inside < self._depth.depth(self._moved, self._bytes))
            self._inside += 1
        yield BucketTransfer(self._depth, alone=self._moved == 0 and self._inside == 1, whole=count == self._bytes)
        async with self._changed:
            self._inside -= 1
            self._moved += 1
            self._changed.notify_all()
