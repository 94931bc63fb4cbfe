"""Named blobs in a store near their readers, the storage of weight buckets (`buckets.py`): files, or S3 and any store
with its protocol.

A blob is visible whole or not at all, and never changes: a listed blob can be read completely. Keys are words joined by
`/`. Errors: `StorageFailed`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
from collections.abc import AsyncIterator, Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

from rollart.errors import StorageFailed, UsageError

LINK_S = 6 * 3600
"""Seconds that a signed URL is valid; it expires earlier if the credentials that signed it do."""

DELETED_AT_ONCE = 1000
"""Keys of one DeleteObjects call: S3's limit."""


class ObjectStore(Protocol):
    """Any number of concurrent callers."""

    async def put(self, key: str, data: bytes) -> None: ...

    async def get(self, key: str) -> bytes:
        """`StorageFailed` if there is no such blob."""

    async def link(self, key: str) -> str:
        """Reads the blob without access to the store: a path, or a URL that is valid for hours. The blob need not exist
        yet."""

    async def keys(self, prefix: str) -> set[str]:
        """Every key that starts with `prefix`."""

    async def delete(self, keys: Iterable[str]) -> None:
        """Missing keys are ignored."""

    async def aclose(self) -> None: ...


@contextlib.contextmanager
def storage_failures(action: str) -> Iterator[None]:
    """Convert the `OSError`s of the body into `StorageFailed`; `action` describes it in them."""
    try:
        yield
    except OSError as error:
        raise StorageFailed(f"cannot {action}: {error.strerror}") from error


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
        with storage_failures(f"read {self._root / key}"):
            try:
                return await asyncio.to_thread((self._root / key).read_bytes)
            except FileNotFoundError:
                raise StorageFailed(f"the weight store has no {key}") from None

    async def link(self, key: str) -> str:
        return str(self._root / key)

    async def keys(self, prefix: str) -> set[str]:
        return {key for key in await asyncio.to_thread(self._list) if key.startswith(prefix)}

    async def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            with storage_failures(f"remove {self._root / key}"):
                await asyncio.to_thread((self._root / key).unlink, missing_ok=True)

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


class S3ObjectStore:
    """One bucket, keys below `prefix`. Credentials, region and endpoint come from the process's environment. One event
    loop; the first call opens the connection and `aclose` closes it."""

    def __init__(self, bucket: str, *, prefix: str = "") -> None:
        self._bucket = bucket
        self._prefix = f"{prefix.strip('/')}/" if prefix.strip("/") else ""
        self._stack = contextlib.AsyncExitStack()
        self._client: Any = None
        self._opening = asyncio.Lock()

    async def put(self, key: str, data: bytes) -> None:
        async with self._call(f"write {key}") as client:
            await client.put_object(Bucket=self._bucket, Key=self._prefix + key, Body=data)

    async def get(self, key: str) -> bytes:
        async with self._call(f"read {key}") as client:
            answer = await client.get_object(Bucket=self._bucket, Key=self._prefix + key)
            async with answer["Body"] as body:
                data: bytes = await body.read()
        return data

    async def link(self, key: str) -> str:
        """Signed locally: no request is sent."""
        async with self._call(f"sign {key}") as client:
            params = {"Bucket": self._bucket, "Key": self._prefix + key}
            url: str = await client.generate_presigned_url("get_object", Params=params, ExpiresIn=LINK_S)
        return url

    async def keys(self, prefix: str) -> set[str]:
        found: set[str] = set()
        async with self._call(f"list {prefix}") as client:
            pages = client.get_paginator("list_objects_v2").paginate(Bucket=self._bucket, Prefix=self._prefix + prefix)
            async for page in pages:
                found |= {one["Key"].removeprefix(self._prefix) for one in page.get("Contents", ())}
        return found

    async def delete(self, keys: Iterable[str]) -> None:
        all_keys = sorted(keys)
        for start in range(0, len(all_keys), DELETED_AT_ONCE):
            batch = [{"Key": self._prefix + key} for key in all_keys[start : start + DELETED_AT_ONCE]]
            async with self._call(f"remove {len(batch)} blobs") as client:
                answer = await client.delete_objects(Bucket=self._bucket, Delete={"Objects": batch, "Quiet": True})
                for error in answer.get("Errors", ()):
                    raise StorageFailed(f"the weight store cannot remove {error['Key']}: {error['Message']}")

    async def aclose(self) -> None:
        self._client = None
        await self._stack.aclose()

    @contextlib.asynccontextmanager
    async def _call(self, action: str) -> AsyncIterator[Any]:
        """The client. Its errors become `StorageFailed`; `action` describes the call in them."""
        try:
            from aiobotocore.session import get_session
            from botocore.exceptions import BotoCoreError, ClientError
        except ImportError as error:
            raise UsageError("weights in S3 need aiobotocore", remedy="pip install 'rollart[aws]'") from error
        try:
            async with self._opening:  # the first calls may be concurrent
                if self._client is None:
                    self._client = await self._stack.enter_async_context(get_session().create_client("s3"))
            yield self._client
        except (BotoCoreError, ClientError) as error:
            response = error.response if isinstance(error, ClientError) else {}
            if response.get("Error", {}).get("Code") in ("NoSuchKey", "404"):
                raise StorageFailed(f"the weight store has no {action.removeprefix('read ')}") from error
            raise StorageFailed(f"the weight store s3://{self._bucket} cannot {action}: {error}") from error
