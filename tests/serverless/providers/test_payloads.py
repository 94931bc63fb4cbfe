"""Payloads in a bucket that their callers have left."""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import AsyncIterator
from typing import Any

from serverless.providers.payloads import PREFIX, PayloadStore


class Client:
    """The listing and removal of an S3 client, over objects by age in hours."""

    def __init__(self, hours: dict[str, float]) -> None:
        self.hours = hours

    def get_paginator(self, operation: str) -> Client:
        assert operation == "list_objects_v2"
        return self

    async def paginate(self, *, Bucket: str, Prefix: str) -> AsyncIterator[dict[str, Any]]:
        now = datetime.datetime.now(datetime.UTC)
        for key, hours in list(self.hours.items()):
            if key.startswith(Prefix):
                yield {"Contents": [{"Key": key, "LastModified": now - datetime.timedelta(hours=hours)}]}
        yield {}

    async def delete_objects(self, *, Bucket: str, Delete: dict[str, Any]) -> None:
        for one in Delete["Objects"]:
            del self.hours[one["Key"]]


def test_only_payloads_of_calls_that_ended_long_ago_are_removed() -> None:
    client = Client({f"{PREFIX}new": 1.0, f"{PREFIX}old": 25.0, "rollart/name/code.zip": 1000.0})
    asyncio.run(PayloadStore(client, "ours").sweep())
    assert set(client.hours) == {f"{PREFIX}new", "rollart/name/code.zip"}
