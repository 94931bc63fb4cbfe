"""The host of an attached vLLM server, which pulls versions from the run's store itself.

The only part of rollart on that host is the plugin in vLLM's workers (`rollart_vllm.pulling`), called over the server's
own HTTP. The calls name a version's buckets and a URL for each. The host needs no access to the run's directory.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

from rollart.adapters.engines.vllm import WORKER_METHOD, VllmEngine
from rollart.adapters.weights.buckets import PullProgress, PullResult
from rollart.adapters.weights.hosts import WeightStoreLocation
from rollart.adapters.weights.manifests import Manifest, bucket_key, version_key
from rollart.adapters.weights.objects import LinkableObjectStore
from rollart.errors import EngineError, StorageFailed
from rollart.model import EngineId

__all__ = ["VllmHost"]

LOOK_S, LOOKS_S = 0.02, 0.5
"""First and longest interval between two polls of a pull, seconds. A poll waits for a step of the engine."""

MAX_EARLY_VERSIONS = 4
"""Maximum versions remembered that were pushed but not requested yet; one version is pushed at a time."""

STOP_S = 1.0
"""Timeout of the call that stops a pull, seconds. A host that does not receive it pulls to the end."""


class VllmHost:
    """The calls that `StoredWeights` makes to an engine's program, for an engine without one. Any number of concurrent
    calls, each for one version; `StorageFailed` names the server. All workers pull; those of one host share a copy."""

    def __init__(self, name: EngineId, url: str, place: WeightStoreLocation) -> None:
        self._name, self._url, self._place = name, url, place
        self._objects: LinkableObjectStore | None = None
        self._client: VllmEngine | None = None
        self._stamp = ""
        """Stamp of the version requested last."""
        self._pulling = set[str]()
        self._coming: OrderedDict[str, tuple[set[str], bool, bool]] = OrderedDict()
        """Arrivals in the store of versions not requested yet, by stamp: digests, whether the push is over, and whether
        it is complete."""
        self._turn = asyncio.Lock()
        """Keeps the calls to the plugin in order."""

    @property
    def name(self) -> str:
        return self._name

    async def call(self, method: str, *args: Any) -> Any:
        """`pull`, `arrived` and `pulling`, as on a `Program` actor. ValueError for any other method."""
        match method:
            case "pull":
                return await self._pull(*args)
            case "arrived":
                return await self._arrived(*args)
            case "pulling":
                return await self._look()
        raise ValueError(method)

    async def close(self) -> None:
        """Close the connections; later calls connect again."""
        client, self._client = self._client, None
        if client is not None:
            await client.close()
        objects, self._objects = self._objects, None
        if objects is not None:
            await objects.aclose()

    async def _pull(
        self, place: WeightStoreLocation, version: int, stamp: str, keep: Sequence[int], coming: bytes | None
    ) -> tuple[str, PullResult]:
        manifest, known = coming, (set[str](), False, False)
        if manifest is None:
            manifest = await self._store().get(version_key(version))
            found = Manifest.decode(manifest)
            if found.stamp != stamp:
                raise StorageFailed(f"v{version} in the store is not what was published under that number")
            known = (found.digests, True, True)
        self._stamp = stamp
        try:
            async with self._turn:
                known = self._coming.pop(stamp, known)
                self._pulling.add(stamp)
                seen = await self._ask("pull", await self._told(manifest, stamp, known, keep))
            after = LOOK_S
            while not all(one["path"] for one in seen):
                self._hold(version, seen)
                await asyncio.sleep(after)
                after = min(2 * after, LOOKS_S)
                seen = await self._ask("look", {"stamp": stamp})
        except BaseException:  # workers that continue to pull would hold their host's lock
            with contextlib.suppress(TimeoutError, StorageFailed):
                async with asyncio.timeout(STOP_S):
                    await self._ask("stop", {"stamp": stamp})
            raise
        finally:
            self._pulling.discard(stamp)
        received = sum(int(one["received"]) for one in seen)
        return str(seen[0]["path"]), PullResult(
            version,
            sum(int(one["bytes"]) for one in seen if one["received"]),
            received,
            sum(float(one["accumulated_s"]) for one in seen),
            max(float(one["seconds"]) for one in seen),
        )

    async def _arrived(
        self, place: WeightStoreLocation, manifest: bytes, digests: Sequence[str], over: bool, whole: bool
    ) -> None:
        stamp = Manifest.decode(manifest).stamp
        async with self._turn:
            if stamp in self._pulling:
                await self._ask("tell", await self._told(manifest, stamp, (set(digests), over, whole), ()))
                return
            before = self._coming.setdefault(stamp, (set(), False, False))
            self._coming[stamp] = (before[0] | set(digests), before[1] or over, before[2] or whole)
            while len(self._coming) > MAX_EARLY_VERSIONS:
                self._coming.popitem(last=False)

    async def _look(self) -> PullProgress | None:
        if not self._stamp:
            return None
        seen = await self._ask("look", {"stamp": self._stamp})
        if any("buckets" not in one for one in seen):
            return None
        return PullProgress(
            sum(int(one["buckets"]) for one in seen),
            max(float(one["longest_s"]) for one in seen),
            sum(int(one["open"]) for one in seen),
        )

    def _hold(self, version: int, seen: Iterable[dict[str, Any]]) -> None:
        for one in seen:
            if one.get("unknown"):
                raise StorageFailed(f"{self._url} was started anew while it pulled v{version}")
            if one["error"]:
                raise StorageFailed(f"{self._url}: {one['error']}")

    async def _told(
        self, manifest: bytes, stamp: str, known: tuple[set[str], bool, bool], keep: Sequence[int]
    ) -> dict[str, Any]:
        objects, in_flight = self._store(), self._place.in_flight
        digests, over, whole = known
        return {
            "root": self._place.root,
            "stamp": stamp,
            "manifest": manifest.decode(),
            "keep": list(keep),
            "in_flight": 0 if in_flight == "auto" else in_flight,
            "sources": {digest: await objects.link(bucket_key(digest)) for digest in sorted(digests)},
            "over": over,
            "whole": whole,
        }

    async def _ask(self, call: str, told: dict[str, Any]) -> list[dict[str, Any]]:
        if self._client is None:
            self._client = VllmEngine(self._name, self._url)
        try:
            return await self._client.workers(WORKER_METHOD, call, json.dumps(told))
        except EngineError as error:
            raise StorageFailed(error.message, remedy=error.remedy) from error

    def _store(self) -> LinkableObjectStore:
        if self._objects is None:
            self._objects = self._place.objects()
        return self._objects
