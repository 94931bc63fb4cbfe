"""Named blobs in a store near their readers: the storage of weight buckets (`buckets.py`).

A blob is visible whole or not at all, and never changes: a listed blob can be read completely. Keys are words joined by
`/`. Errors: `StorageFailed`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from rollart.errors import StorageFailed


class ObjectStore(Protocol):
    """Any number of concurrent callers."""

    async def put(self, key: str, data: bytes) -> None: ...

    async def get(self, key: str) -> bytes:
        """`StorageFailed` if there is no such blob."""

    async def keys(self, prefix: str) -> set[str]:
        """Every key that starts with `prefix`."""

    async def delete(self, keys: Iterable[str]) -> None:
        """Missing keys are ignored."""

    async def aclose(self) -> None: ...


class LinkableObjectStore(ObjectStore, Protocol):
    """A store whose blobs can be read by a link alone, without access to the store."""

    async def link(self, key: str) -> str:
        """A path, or a URL that is valid for hours. The blob need not exist yet."""


class MemoryObjectStore:
    """In this process: for one machine, and for tests."""

    def __init__(self) -> None:
        self._blobs: dict[str, bytes] = {}

    async def put(self, key: str, data: bytes) -> None:
        self._blobs[key] = bytes(data)

    async def get(self, key: str) -> bytes:
        try:
            return self._blobs[key]
        except KeyError:
            raise StorageFailed(f"the weight store has no {key}") from None

    async def keys(self, prefix: str) -> set[str]:
        return {key for key in self._blobs if key.startswith(prefix)}

    async def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._blobs.pop(key, None)

    async def aclose(self) -> None:
        return None


class FileObjectStore:
    """Files below a directory that producers and consumers share: a network file system, a disk, tmpfs."""

    def __init__(self, root: str | Path) -> None:
        self._root = Path(root)
        self._numbers = itertools.count()

    async def put(self, key: str, data: bytes) -> None:
        # A unique name until the blob is whole: another host's process may write the same blob.
        temporary = self._root / ".tmp" / f"{os.uname().nodename}-{os.getpid()}-{next(self._numbers)}"
        await asyncio.to_thread(self._put, temporary, self._root / key, data)

    async def get(self, key: str) -> bytes:
        try:
            return await asyncio.to_thread((self._root / key).read_bytes)
        except FileNotFoundError:
            raise StorageFailed(f"the weight store has no {key}") from None
        except OSError as error:
            raise StorageFailed(f"cannot read {self._root / key}: {error.strerror}") from error

    async def link(self, key: str) -> str:
        return str(self._root / key)

    async def keys(self, prefix: str) -> set[str]:
        return {key for key in await asyncio.to_thread(self._list) if key.startswith(prefix)}

    async def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            try:
                await asyncio.to_thread((self._root / key).unlink, missing_ok=True)
            except OSError as error:
                raise StorageFailed(f"cannot remove {self._root / key}: {error.strerror}") from error

    async def aclose(self) -> None:
        return None

    def _put(self, temporary: Path, final: Path, data: bytes) -> None:
        try:
            for path in (temporary, final):
                path.parent.mkdir(parents=True, exist_ok=True)
            with temporary.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.rename(final)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise StorageFailed(f"cannot write {final}: {error.strerror}") from error

    def _list(self) -> list[str]:
        found = []
        for directory, inner, names in os.walk(self._root):
            inner[:] = [name for name in inner if name != ".tmp"]
            found += [str((Path(directory) / name).relative_to(self._root)) for name in names]
        return found
