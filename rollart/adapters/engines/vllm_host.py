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
        self._early: OrderedDict[str, tuple[set[str], bool, bool]] = OrderedDict()
        """Arrivals in the store of versions not requested yet, by stamp: digests, whether the push is over, and whether
        it is complete."""
        self._order = asyncio.Lock()
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
                return await self._progress()
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
        self, place: WeightStoreLocation, version: int, stamp: str, keep: Sequence[int], manifest_bytes: bytes | None
    ) -> tuple[str, PullResult]:
        manifest, arrivals = manifest_bytes, (set[str](), False, False)
        if manifest is None:
            manifest = await self._store().get(version_key(version))
            found = Manifest.decode(manifest)
            if found.stamp != stamp:
                raise StorageFailed(f"v{version} in the store is not what was published under that number")
            arrivals = (found.digests, True, True)
        self._stamp = stamp
        try:
            async with self._order:
                arrivals = self._early.pop(stamp, arrivals)
                self._pulling.add(stamp)
                reports = await self._call_workers("pull", await self._pull_arguments(manifest, stamp, arrivals, keep))
            after = LOOK_S
            while not all(report["path"] for report in reports):
                self._raise_failure(version, reports)
                await asyncio.sleep(after)
                after = min(2 * after, LOOKS_S)
                reports = await self._call_workers("look", {"stamp": stamp})
        except BaseException:  # workers that continue to pull would hold their host's lock
            with contextlib.suppress(TimeoutError, StorageFailed):
                async with asyncio.timeout(STOP_S):
                    await self._call_workers("stop", {"stamp": stamp})
            raise
        finally:
            self._pulling.discard(stamp)
        received = sum(int(report["received"]) for report in reports)
        return str(reports[0]["path"]), PullResult(
            version,
            sum(int(report["bytes"]) for report in reports if report["received"]),
            received,
            sum(float(report["accumulated_s"]) for report in reports),
            max(float(report["seconds"]) for report in reports),
        )

    async def _arrived(
        self, place: WeightStoreLocation, manifest: bytes, digests: Sequence[str], over: bool, whole: bool
    ) -> None:
        stamp = Manifest.decode(manifest).stamp
        async with self._order:
            if stamp in self._pulling:
                await self._call_workers(
                    "tell", await self._pull_arguments(manifest, stamp, (set(digests), over, whole), ())
                )
                return
            before = self._early.setdefault(stamp, (set(), False, False))
            self._early[stamp] = (before[0] | set(digests), before[1] or over, before[2] or whole)
            while len(self._early) > MAX_EARLY_VERSIONS:
                self._early.popitem(last=False)

    async def _progress(self) -> PullProgress | None:
        if not self._stamp:
            return None
        reports = await self._call_workers("look", {"stamp": self._stamp})
        if any("buckets" not in report for report in reports):
            return None
        return PullProgress(
            sum(int(report["buckets"]) for report in reports),
            max(float(report["longest_s"]) for report in reports),
            sum(int(report["open"]) for report in reports),
        )

    def _raise_failure(self, version: int, reports: Iterable[dict[str, Any]]) -> None:
        for report in reports:
            if report.get("unknown"):
                raise StorageFailed(f"{self._url} was restarted while it pulled v{version}")
            if report["error"]:
                raise StorageFailed(f"{self._url}: {report['error']}")

    async def _pull_arguments(
        self, manifest: bytes, stamp: str, arrivals: tuple[set[str], bool, bool], keep: Sequence[int]
    ) -> dict[str, Any]:
        objects, in_flight = self._store(), self._place.in_flight
        digests, over, whole = arrivals
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

    async def _call_workers(self, call: str, arguments: dict[str, Any]) -> list[dict[str, Any]]:
        if self._client is None:
            self._client = VllmEngine(self._name, self._url)
        try:
            return await self._client.workers(WORKER_METHOD, call, json.dumps(arguments))
        except EngineError as error:
            raise StorageFailed(error.message, remedy=error.remedy) from error

    def _store(self) -> LinkableObjectStore:
        if self._objects is None:
            self._objects = self._place.objects()
        return self._objects
