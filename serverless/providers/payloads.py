"""Events and answers that are larger than a provider's request, through S3.

The event is an object for the duration of its call. The function gets two presigned URLs in its place, one to read the
event and one to write an answer that is too large (`serverless.deploy.handler`), so it needs no permission of its own.
A URL is valid as long as the call may run. Objects of a killed caller are removed by the next one after a day.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from serverless.deploy.handler import REFERENCE
from serverless.types import FaultKind, InfraFault

PREFIX = "rollart/payloads/"
"""Prefix of the objects in the bucket."""

MAX_BYTES = 256 * 2**20
"""Largest event. It is in the memory of the caller and of the function, several times while it is parsed."""

_ABANDONED = datetime.timedelta(days=1)
"""Age of an object without a caller: a call ends after 15 minutes."""


class PayloadFailed(Exception):
    """An event or an answer could not be stored or read."""

    def __init__(self, doing: str, error: Exception) -> None:
        super().__init__(doing)
        detail = f"{doing}: {type(error).__name__}: {error}"[:500]
        self.fault = InfraFault(FaultKind.UNAVAILABLE, retryable=True, detail=detail)


@dataclass(frozen=True, slots=True)
class StoredEvent:
    """A stored event. `payload` is the request that refers to it; `answer` reads an answer that may be stored too."""

    payload: bytes
    _store: PayloadStore
    _key: str

    async def answer(self, body: bytes) -> bytes:
        """The answer of the call. Raises `PayloadFailed`."""
        if not body.startswith(b"{") or json.loads(body) != {REFERENCE: True}:
            return body
        return await self._store.read(self._key + ".answer")


class PayloadStore:
    """The objects of one caller in a bucket. `client` is an open S3 client of aiobotocore, whose owner closes it."""

    def __init__(self, client: Any, bucket: str) -> None:
        self._client = client
        self._bucket = bucket

    @contextlib.asynccontextmanager
    async def stored(self, event: bytes, *, seconds: float) -> AsyncIterator[StoredEvent]:
        """Store an event for a call of at most `seconds`. Raises `PayloadFailed`."""
        key = PREFIX + secrets.token_hex(16)
        chosen = {"Bucket": self._bucket, "Key": key}
        try:
            try:
                await self._client.put_object(**chosen, Body=event)
                urls = {
                    "get": await self._client.generate_presigned_url("get_object", chosen, int(seconds) + 1),
                    "put": await self._client.generate_presigned_url(
                        "put_object", chosen | {"Key": f"{key}.answer"}, int(seconds) + 1
                    ),
                }
            except Exception as error:
                raise PayloadFailed(f"storing an event in s3://{self._bucket}", error) from error
            yield StoredEvent(json.dumps({REFERENCE: urls}).encode(), self, key)
        finally:
            with contextlib.suppress(Exception):  # `sweep` removes them later
                await self._remove([key, f"{key}.answer"])

    async def read(self, key: str) -> bytes:
        """An object. Raises `PayloadFailed`."""
        try:
            found = await self._client.get_object(Bucket=self._bucket, Key=key)
            async with found["Body"] as stream:
                data: bytes = await stream.read()
                return data
        except Exception as error:
            raise PayloadFailed(f"reading an answer from s3://{self._bucket}", error) from error

    async def sweep(self) -> None:
        """Remove the objects of callers that were killed. A failure is left to the next caller."""
        oldest = datetime.datetime.now(datetime.UTC) - _ABANDONED
        with contextlib.suppress(Exception):
            async for page in self._client.get_paginator("list_objects_v2").paginate(
                Bucket=self._bucket, Prefix=PREFIX
            ):
                old = [one["Key"] for one in page.get("Contents", ()) if one["LastModified"] < oldest]
                if old:
                    await self._remove(old)

    async def _remove(self, keys: list[str]) -> None:
        objects = [{"Key": key} for key in keys]
        await self._client.delete_objects(Bucket=self._bucket, Delete={"Objects": objects, "Quiet": True})
