"""Images that environments need on their host: brought ahead of a reset, once for all who wait, the oldest removed.

What an image is, is the hook's business: `environments.images` names a class whose objects have
`async images() -> Sequence[str]`, those that are there; `async ensure(image) -> int`, which brings one and gives its
bytes (0: unknown); and, if they can be removed, `async remove(image)`. Docker, podman and Modal users plug theirs in;
`TarImages` is one over files.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tarfile
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from rollart.adapters.envs.lookup import attribute_at
from rollart.errors import one_line

__all__ = ["ImageCache", "ImageHook", "PullFailed", "TarImages", "load_image_hook"]


class PullFailed(Exception):
    """An image cannot be brought, in words with its name."""


class ImageHook(Protocol):
    """What a user plugs in."""

    async def images(self) -> Sequence[str]: ...

    async def ensure(self, image: str) -> int: ...


@dataclass(slots=True)
class ImageCache:
    """A host's images. `ensure` by any number of tasks of one loop, each waits for the pulls of what it names; a pull
    belongs to `tasks`, not to who asked first, so that nobody's end is another's.

    Bound: where bytes are known and the hook can remove, those that were used longest ago go until no more than `most`
    bytes are left; what somebody has asked for and not given back (`release`) stays, whatever the bound.
    """

    hook: ImageHook
    tasks: asyncio.TaskGroup
    most: int | None = None
    there: OrderedDict[str, int] = field(default_factory=OrderedDict)
    """Bytes by image, the one used longest ago first."""
    held: dict[str, int] = field(default_factory=dict)
    pulling: dict[str, asyncio.Task[str]] = field(default_factory=dict)
    removing: dict[str, asyncio.Event] = field(default_factory=dict)
    """Set once it is gone: it is not brought before."""

    async def known(self) -> None:
        """Ask what is there."""
        going = set(self.removing)
        for image in map(str, await self.hook.images()):
            if image not in going and image not in self.removing:
                self.there.setdefault(image, 0)

    async def ensure(self, images: Sequence[str]) -> int:
        """All of them are there, and held, once this returns: the number that had to be brought. `PullFailed`."""
        for image in images:
            self.held[image] = self.held.get(image, 0) + 1
        try:
            pulls = [self._pull(image) for image in dict.fromkeys(images) if image not in self.there]
            failed = [error for pull in pulls if (error := await asyncio.shield(pull))]
        except BaseException:
            await self.release(images)
            raise
        if failed:
            await self.release(images)
            raise PullFailed(failed[0])
        for image in images:
            self.there.move_to_end(image)
        return len(pulls)

    async def release(self, images: Sequence[str]) -> None:
        """Whoever asked for them needs them no more."""
        for image in images:
            self.held[image] -= 1
            if not self.held[image]:
                del self.held[image]
        await self._shrink()

    def _pull(self, image: str) -> asyncio.Task[str]:
        if image not in self.pulling:
            self.pulling[image] = self.tasks.create_task(self._brought(image), name=f"pull of {image}")
        return self.pulling[image]

    async def _brought(self, image: str) -> str:
        """What went wrong, in words; '' for nothing."""
        try:
            while (going := self.removing.get(image)) is not None:
                await going.wait()
            self.there[image] = int(await self.hook.ensure(image) or 0)
        except Exception as error:
            return f"image '{image}' could not be brought: {one_line(error, 300)}"
        finally:
            del self.pulling[image]
        return ""

    async def _shrink(self) -> None:
        remove: Callable[[str], Awaitable[object]] | None = getattr(self.hook, "remove", None)
        if self.most is None or remove is None:
            return
        for image in list(self.there):
            if sum(self.there.values()) <= self.most:
                return
            if image not in self.held and self.there.get(image):
                await self._remove(image, remove)

    async def _remove(self, image: str, remove: Callable[[str], Awaitable[object]]) -> None:
        """One that cannot be removed (others may use it too) stays, and is tried again when something else is."""
        size, self.removing[image] = self.there.pop(image), asyncio.Event()
        try:
            await remove(image)
        except Exception:
            self.there.setdefault(image, size)
        finally:
            self.removing.pop(image).set()


def load_image_hook(spec: Mapping[str, Any]) -> tuple[ImageHook, int | None]:
    """The hook that a spec names, and the bytes that it may fill."""
    hook: ImageHook = attribute_at(str(spec["hook"]), "environments.images")(**spec.get("arguments", {}))
    return hook, spec.get("bytes")


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
        """Whole or not at all: unpacked beside, then renamed."""
        target = self._cache / image
        if not target.is_dir():
            part = self._cache / f"{image}.{os.getpid()}.part"
            shutil.rmtree(part, ignore_errors=True)
            with tarfile.open(self._store / f"{image}.tar") as tar:
                tar.extractall(part, filter="data")
            try:
                part.rename(target)
            except OSError:  # another host of this machine was first
                shutil.rmtree(part, ignore_errors=True)
                if not target.is_dir():
                    raise
        return sum(path.stat().st_size for path in target.rglob("*") if path.is_file())
