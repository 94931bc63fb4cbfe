"""The store of weight buckets in this process."""

from __future__ import annotations

from collections.abc import Iterable

from rollart.errors import StorageFailed


class MemoryObjectStore:
    """Implements `ObjectStore`."""

    def __init__(self) -> None:
        self.blobs: dict[str, bytes] = {}

    async def put(self, key: str, data: bytes) -> None:
        self.blobs[key] = bytes(data)

    async def get(self, key: str) -> bytes:
        try:
            return self.blobs[key]
        except KeyError:
            raise StorageFailed(f"the weight store has no {key}") from None

    async def link(self, key: str) -> str:
        return f"memory:{key}"

    async def keys(self, prefix: str) -> set[str]:
        return {key for key in self.blobs if key.startswith(prefix)}

    async def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            self.blobs.pop(key, None)

    async def aclose(self) -> None:
        return None
