"""Images that environments need on their host: pulled before a reset, once for all episodes that wait, evicted by least
recent use.

The meaning of an image is up to the hook: `environments.images` names a class whose objects have `async images() ->
Sequence[str]`, the images on the host; `async ensure(image) -> int`, which pulls one and returns its bytes (0:
unknown); and, if images can be removed, `async remove(image)`. Users of Docker, podman and Modal plug in their own;
`TarImages` is a hook over files.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tarfile
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from rollart.errors import one_line


class PullFailed(Exception):
    """An image cannot be pulled; the message names it."""


class ImageHook(Protocol):
    """The interface that a user's hook implements."""

    async def images(self) -> Sequence[str]: ...

    async def ensure(self, image: str) -> int: ...


@dataclass(slots=True)
class ImageCache:
    """A host's images. Any number of tasks of one loop may call `ensure`; each waits for the pulls of its own images. A
    pull belongs to `tasks`, not to its first caller, so the cancellation of one caller does not affect another.

    Bound: if sizes are known and the hook can remove images, the least recently used ones are removed until at most
    `most` bytes are left. Pinned images (between `ensure` and `release`) stay, whatever the bound.
    """

    hook: ImageHook
    tasks: asyncio.TaskGroup
    max_bytes: int | None = None
    present: OrderedDict[str, int] = field(default_factory=OrderedDict)
    """Bytes by image, the least recently used one first."""
    pinned: Counter[str] = field(default_factory=Counter)
    pulling: dict[str, asyncio.Task[str]] = field(default_factory=dict)
    removing: dict[str, asyncio.Event] = field(default_factory=dict)
    """Set once the removal has ended: the image is not pulled before."""

    async def refresh(self) -> None:
        """Ask the hook for the images on the host."""
        in_removal = set(self.removing)
        for image in map(str, await self.hook.images()):
            if image not in in_removal and image not in self.removing:
                self.present.setdefault(image, 0)

    async def ensure(self, images: Sequence[str]) -> int:
        """Pull and pin all images; the number of images that had to be pulled. `PullFailed`."""
        self.pinned.update(images)
        try:
            pulls = [self._pull(image) for image in dict.fromkeys(images) if image not in self.present]
            failed = [error for pull in pulls if (error := await asyncio.shield(pull))]
        except BaseException:
            await self.release(images)
            raise
        if failed:
            await self.release(images)
            raise PullFailed(failed[0])
        for image in images:
            self.present.move_to_end(image)
        return len(pulls)

    async def release(self, images: Sequence[str]) -> None:
        """Unpin images of one `ensure`."""
        self.pinned -= Counter(images)  # keeps positive counts only
        await self._evict()

    def _pull(self, image: str) -> asyncio.Task[str]:
        if image not in self.pulling:
            self.pulling[image] = self.tasks.create_task(self._run_pull(image), name=f"pull of {image}")
        return self.pulling[image]

    async def _run_pull(self, image: str) -> str:
        """The error as text; '' if the pull succeeded."""
        try:
            while (removal := self.removing.get(image)) is not None:
                await removal.wait()
            self.present[image] = int(await self.hook.ensure(image) or 0)
        except Exception as error:
            return f"image '{image}' could not be brought: {one_line(error, 300)}"
        finally:
            del self.pulling[image]
        return ""

    async def _evict(self) -> None:
        remove: Callable[[str], Awaitable[object]] | None = getattr(self.hook, "remove", None)
        if self.max_bytes is None or remove is None:
            return
        for image in list(self.present):
            if sum(self.present.values()) <= self.max_bytes:
                return
            if image not in self.pinned and self.present.get(image):
                await self._remove(image, remove)

    async def _remove(self, image: str, remove: Callable[[str], Awaitable[object]]) -> None:
        """An image that cannot be removed (others may use it too) stays, until the next removal tries again."""
        size, self.removing[image] = self.present.pop(image), asyncio.Event()
        try:
            await remove(image)
        except Exception:
            self.present.setdefault(image, size)
        finally:
            self.removing.pop(image).set()


class TarImages:
    """Images that are tarballs in a directory, unpacked into another: `NAME.tar` of `store` to `cache/NAME`."""

    def __init__(self, store: str, cache: str) -> None:
        self._store, self._cache = Path(store), Path(cache)

    async def images(self) -> Sequence[str]:
        if not self._cache.is_dir():
            return ()
        return sorted(path.name for path in self._cache.iterdir() if path.is_dir() and path.suffix != ".part")

    async def ensure(self, image: str) -> int:
        return await asyncio.to_thread(self._unpack, image)

    async def remove(self, image: str) -> None:
        await asyncio.to_thread(shutil.rmtree, self._cache / image, ignore_errors=True)

    def _unpack(self, image: str) -> int:
        """Atomic: unpacked beside, then renamed."""
        target = self._cache / image
        if not target.is_dir():
            part = self._cache / f"{image}.{os.getpid()}.part"
            shutil.rmtree(part, ignore_errors=True)
            with tarfile.open(self._store / f"{image}.tar") as tar:
                tar.extractall(part, filter="data")
            try:
                part.rename(target)
            except OSError:  # another host on this machine was first
                shutil.rmtree(part, ignore_errors=True)
                if not target.is_dir():
                    raise
        return sum(path.stat().st_size for path in target.rglob("*") if path.is_file())
