"""Client of a vLLM server: its deviations from the protocol that it shares with the embedded engine.

The server runs with `VLLM_SERVER_DEV_MODE=1 --enable-scale-out --logprobs-mode processed_logprobs
--enable-prompt-tokens-details` and the weight transfer backend of integrations/vllm. vLLM is never imported: it has
its own environment and processes. Measured on vLLM 0.32.

The host of an attached server pulls versions from the run's store itself. The only part of rollart there is the plugin
in vLLM's workers (`rollart_vllm.pulling`), called over the server's own HTTP. The calls name a version's buckets and a
URL for each. The host needs no access to the run's directory.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import math
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rollart.adapters.engines.http import CONNECT_S, HttpEngine, as_object
from rollart.adapters.weights.buckets import Manifest, PullProgress, PullResult, bucket_key, version_key
from rollart.adapters.weights.hosts import WeightStoreLocation
from rollart.adapters.weights.objects import ObjectStore
from rollart.errors import EngineError, HandoffFailed, StorageFailed, WrongAnswer
from rollart.generation import VLLM_PREFIX
from rollart.model import Completion, EngineId, EngineStats, GenerateRequest, PauseMode, WeightsRef
from serverless.retries import VLLM_KV

WORKER_METHOD = "rollart_weights"
"""Method of vLLM's workers, defined in integrations/vllm."""

WORKER_ROUTES = ("/init_weight_transfer_engine", "/start_weight_update", "/update_weights", "/finish_weight_update")
"""Routes that call a method of the same name in every worker."""

ABORT_S, ABORTS = 0.25, 8
"""Seconds to wait for an aborted request to end before aborting it again, and the maximum number of attempts. vLLM
reports success for unknown ids, including that of a request which has not arrived yet."""

KV_VERSION_KEY = "rollart_version"
"""Key added to `kv_transfer_params`: the version of the KV. It is removed before vLLM sees the params."""

PROBE_FILE = "probe.json"
"""File of a version with token ids, and the trainer's log-probability of each token after the first."""

KEEPALIVE_S = 2.0
"""Seconds for which an idle connection is reused; vLLM closes it after 5."""

RESTART_CHECK_AFTER_S = 5.0
"""A server that answered within this many seconds cannot have been restarted since: starting vLLM takes longer."""

MISSING_VERSION_PATH = "/dev/null"
"""A path that can hold no version."""

UNKNOWN_VERSION = -1
"""Stands for a version name that is not a number: the server has loaded no weights since its start."""

MIN_PULL_POLL_S, MAX_PULL_POLL_S = 0.02, 0.5
"""First and longest interval between two polls of a pull, seconds. A poll waits for a step of the engine."""

MAX_EARLY_VERSIONS = 4
"""Maximum versions remembered that were pushed but not requested yet; one version is pushed at a time."""

PULL_STOP_S = 1.0
"""Timeout of the call that stops a pull, seconds. A host that does not receive it pulls to the end."""


class VllmEngine(HttpEngine):
    """Implements the `Engine` port. As `HttpEngine`, but it also counts its requests in flight: a paused vLLM takes no
    step, so its gauges are outdated."""

    _once = True

    def __init__(
        self,
        id: EngineId,
        url: str,
        *,
        version: int = 0,
        tolerance: float = 0.0,
        local: Callable[[WeightsRef], Awaitable[str]] | None = None,
    ) -> None:
        """`tolerance`: maximum mean difference between a new version's log-probabilities and the trainer's; 0: not
        checked."""
        super().__init__(id, url, version=version, streaming=False, keepalive_s=KEEPALIVE_S, local=local)
        self._in_flight: dict[str, asyncio.Event] = {}
        self._paused = False
        self._loaded = version
        self._updates = 0
        """Number of weight updates begun."""
        self._update_succeeded = True
        """True if the latest update succeeded."""
        self._workers_are_several: bool | None = None
        """True if one engine core has several workers; None until asked."""
        self._tolerance = tolerance
        self.silent = asyncio.Event()
        """Set once a health check got no answer, or the answer of a restarted server; `why` has the reason."""
        self.why = ""
        self._last_answer_at = -math.inf
        """Loop time of the server's latest answer."""
        self._unverified: str | None = None
        """Path of the loaded version whose log-probabilities were not checked yet."""

    async def generate(self, request: GenerateRequest) -> Completion:
        """As the port. KV of another version is not pulled: vLLM would accept it without an error and label the tokens
        with its own version (measured on 0.32). The gateway has to detect the case that is invisible here: a prefill
        engine whose weights were replaced in between."""
        request = self._fenced(request)
        ended = self._in_flight[request.request_id] = asyncio.Event()
        try:
            await self._check_not_restarted()
            answer = await super().generate(request)
            self._last_answer_at = asyncio.get_running_loop().time()
            blocks = (request.kv_transfer or {}).get("remote_block_ids")
            if _pulls_kv(request.kv_transfer) and isinstance(blocks, list | tuple) and any(blocks):
                # The whole prompt was transferred, partial blocks included, and only the last token is recomputed.
                # vLLM's usage reports the prefill engine's prefix hits instead (measured on 0.32).
                answer = dataclasses.replace(answer, cached_tokens=max(answer.prompt_tokens - 1, 0))
            if any(span.version == UNKNOWN_VERSION for span in answer.spans):
                raise self._restarted("none of the run")
            if answer.kv_transfer and answer.spans:
                answer = dataclasses.replace(
                    answer, kv_transfer={**answer.kv_transfer, KV_VERSION_KEY: answer.spans[-1].version}
                )
            return answer
        except EngineError as error:
            wrong = isinstance(error, WrongAnswer)
            if error.retryable and not wrong and _pulls_kv(request.kv_transfer) and await self.healthy():
                raise HandoffFailed(str(error)) from None  # `kv_load_failure_policy: fail` answers 500
            raise
        finally:
            ended.set()
            if self._in_flight.get(request.request_id) is ended:
                del self._in_flight[request.request_id]

    async def started_with(self, weights: WeightsRef) -> None:
        if self._tolerance:
            await self._verify(Path(weights.path))

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Abort, and wait until those of the requests that this client sent have ended."""
        ids = list(request_ids)
        for _ in range(ABORTS):
            if not ids:  # an empty list would abort everything
                return
            await self.control("/abort_requests", {"request_ids": [VLLM_PREFIX + i for i in ids]})
            ids = [i for i in ids if i in self._in_flight]
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ABORT_S):
                    await asyncio.gather(*(self._in_flight[i].wait() for i in ids))

    async def release(self, session: str) -> None:
        """Nothing to do: vLLM has no such call and evicts the least recently used KV when it needs memory."""

    async def pause(self, mode: PauseMode) -> None:
        # `update_weights` drops the KV: dropping it here as well would recompute it twice.
        clear = str(mode is not PauseMode.KEEP).lower()
        await self.control(f"/pause?mode={mode.value}&clear_cache={clear}", {})
        self._paused = True

    async def resume(self) -> None:
        """`EngineError` if the version loaded since the pause computes other log-probabilities than the trainer."""
        await self.control("/resume", {})
        self._paused = False
        path, self._unverified = self._unverified, None
        if path is not None:
            await self._verify(Path(path))

    async def update_weights(self, weights: WeightsRef) -> None:
        self._updates += 1
        self._update_succeeded = False
        await super().update_weights(weights)
        self._update_succeeded, self._loaded, self._first = True, weights.version, UNKNOWN_VERSION
        self._unverified = weights.path if self._tolerance else None

    async def members(self) -> int:
        return int(as_object(await self.request("GET", "/get_world_size")).get("world_size", 1))

    async def healthy(self) -> bool:
        answers = await super().healthy()
        if answers:
            try:
                self._last_answer_at = -math.inf
                await self._check_not_restarted()
                return True
            except EngineError:
                if self.silent.is_set():
                    return False
        self.why = f"nothing answers at {self.url}"
        self.silent.set()
        return False

    async def stats(self) -> EngineStats:
        stats = await super().stats()
        if not self._paused:
            return stats
        running = min(stats.running, len(self._in_flight))
        return dataclasses.replace(stats, running=running, waiting=len(self._in_flight) - running)

    async def options(self) -> dict[str, Any]:
        """The server's start options. The first call may take 10 s, because vLLM then inspects its whole machine.
        `EngineError` for a server without development mode, whose weights cannot be updated."""
        answer = await self.request("GET", "/server_info?config_format=json", optional=True)
        if not answer:
            raise EngineError(
                f"{self.url} was started without VLLM_SERVER_DEV_MODE=1: weights cannot be updated", retryable=False
            )
        return as_object(answer)

    async def workers(self, method: str, *args: str) -> list[dict[str, Any]]:
        """Call a method in every worker; returns their answers. `EngineError` if the workers have no such method, or
        it failed."""
        body = {"method": method, "args": list(args)}
        try:
            answer = as_object(await self.request("POST", "/collective_rpc", body, once=True))
        except EngineError as error:
            # the three texts of: a single worker, several workers, a server without development mode
            if not any(s in error.message for s in ("not implemented", f"no attribute '{method}'", " answered 404")):
                raise
            raise EngineError(
                f"{self.url} has no {method}: its plugin is older than this rollart",
                retryable=False,
                remedy="install integrations/vllm of this rollart beside it, and start it with VLLM_SERVER_DEV_MODE=1",
            ) from None
        found = answer.get("results")
        if not isinstance(found, list) or not found or not all(isinstance(one, dict) for one in found):
            raise EngineError(f"{self.url}: {method} not understood", retryable=True)
        return found

    async def tried(self) -> None:
        """Generate one token as a trial. `EngineError` if the server lacks the route or the usage details that are
        needed."""
        body = {"request_id": f"tried-v{self._loaded}", "token_ids": [1], "sampling_params": {"max_tokens": 1}}
        try:
            answer = as_object(await self.request("POST", "/inference/v1/generate", body))
        except EngineError as error:
            if " answered 403" not in error.message:
                raise
            raise EngineError(f"{self.url} was started without --enable-scale-out", retryable=False) from None
        if (answer.get("usage") or {}).get("prompt_tokens_details") is None:
            raise EngineError(f"{self.url} was started without --enable-prompt-tokens-details", retryable=False)

    async def _check_not_restarted(self) -> None:
        """`EngineError` if the server was restarted under the same address: it then computes with its initial weights.
        Checked only if a restart is possible. The process of an attached server cannot be watched instead."""
        now, updates = asyncio.get_running_loop().time, self._updates
        if not (updates and self._update_succeeded) or now() - self._last_answer_at < RESTART_CHECK_AFTER_S:
            return
        answer = as_object(await self.request("GET", "/weight_info", limit_s=CONNECT_S, optional=True))
        found = str(answer.get("weight_version", self._loaded))
        if found != str(self._loaded) and self._update_succeeded and self._updates == updates:
            raise self._restarted(found)
        self._last_answer_at = now()

    def _restarted(self, found: str) -> EngineError:
        self.why = f"{self.url} was restarted: its weights are '{found}', not v{self._loaded}"
        self.silent.set()
        return EngineError(self.why, retryable=True)

    async def control(self, path: str, body: Mapping[str, object], *, optional: bool = False) -> dict[str, Any]:
        """If several workers refuse a call, vLLM takes their unread answers for answers to later calls. With several
        workers, the plugin's method therefore makes the call and returns refusals as values."""
        if path not in WORKER_ROUTES or not await self._has_several_workers():
            return await super().control(path, body, optional=optional)
        version = body.get("weight_version")
        arguments = json.dumps({key: value for key, value in body.items() if key != "weight_version"})
        for answer in await self.workers(WORKER_METHOD, path[1:], arguments):
            if answer.get("error"):
                raise EngineError(f"{self.url}{path}: {' '.join(str(answer['error']).split())}", retryable=True)
        return {} if version is None else await super().control("/update_weight_version", {"new_version": version})

    async def _has_several_workers(self) -> bool:
        """True if there are several workers and all of them answer `/collective_rpc` (with data-parallel cores, only
        one core does)."""
        if self._workers_are_several is None:
            answer = as_object(await self.request("GET", "/get_world_size?include_dp=false", optional=True))
            workers = int(answer.get("world_size", 1))
            self._workers_are_several = workers > 1 and workers == await self.members()
        return self._workers_are_several

    async def _begin_update(self) -> None:
        """Begin an update. An earlier update that was never finished (by a killed controller, or because its version
        failed at the end) would block it for ever. Updating to a version that cannot exist ends the earlier update and
        changes nothing."""
        try:
            await super()._begin_update()
        except EngineError as error:
            if "already active" not in error.message:
                raise
            with contextlib.suppress(EngineError):
                await self.control("/update_weights", {"update_info": {"path": MISSING_VERSION_PATH}})
            await super()._begin_update()

    def _version_source(self) -> Callable[[], int | None]:
        """The version loaded when the request was sent; None once an update begins. All weights of this server are
        loaded through this client."""
        version, updates = self._loaded if self._update_succeeded else None, self._updates
        return lambda: version if self._updates == updates else None

    async def _verify(self, version: Path) -> None:
        try:
            probe = json.loads((version / PROBE_FILE).read_text())
        except OSError:
            return  # the trainer writes no probe
        ids, expected = probe["token_ids"], probe["logprobs"]
        body = {
            "request_id": f"probe-v{self._loaded}",
            "token_ids": ids,
            "sampling_params": {"max_tokens": 1, "temperature": 0, "prompt_logprobs": 0},
        }
        answer = as_object(await self.request("POST", "/inference/v1/generate", body))
        try:
            rows = zip(ids[1:], answer["prompt_logprobs"][1:], strict=True)
            found = [row[str(token)]["logprob"] for token, row in rows]
        except (KeyError, TypeError, ValueError) as error:
            raise EngineError(f"{self.url}: probe not understood: {error!r}", retryable=True) from error
        off = sum(abs(a - b) for a, b in zip(found, expected, strict=True)) / len(expected)
        if not off <= self._tolerance:
            raise EngineError(
                f"{self.url}: v{self._loaded} is {off:.3g} off the trainer's log-probabilities on average "
                f"(rule: at most engines.vllm.probe, {self._tolerance:g})",
                retryable=True,
            )

    def _fenced(self, request: GenerateRequest) -> GenerateRequest:
        """The request without rollart's own keys. `HandoffFailed` if its KV has another version than this engine's
        weights."""
        if request.kv_transfer is None or KV_VERSION_KEY not in request.kv_transfer:
            return request
        kv = dict(request.kv_transfer)
        if (version := kv.pop(KV_VERSION_KEY)) != self._loaded and _pulls_kv(kv):
            raise HandoffFailed(f"{self.url}: the KV is of v{version}, the weights are of v{self._loaded}")
        return dataclasses.replace(request, kv_transfer=kv)

    async def _drop_kv(self) -> None:
        """Drop all KV. vLLM refuses while it holds KV that other engines were promised, so this retries until they have
        pulled it or vLLM's lease on it ends. The caller's lease bounds the wait."""

        async def refuse_if_unhealthy(error: BaseException, tries: int) -> None:
            if not await self.healthy():
                raise error

        await VLLM_KV.run(super()._drop_kv, EngineError, failed=refuse_if_unhealthy)


class VllmHost:
    """The calls that `StoredWeights` makes to an engine's program, for an engine without one. Any number of concurrent
    calls, each for one version; `StorageFailed` names the server. All workers pull; those of one host share a copy."""

    def __init__(self, name: EngineId, url: str, place: WeightStoreLocation) -> None:
        self.name, self._url, self._place = name, url, place
        self._objects: ObjectStore | None = None
        self._client: VllmEngine | None = None
        self._stamp = ""
        """Stamp of the version requested last."""
        self._pulling = set[str]()
        self._early: OrderedDict[str, tuple[set[str], bool, bool]] = OrderedDict()
        """Arrivals in the store of versions not requested yet, by stamp: digests, whether the push is over, and whether
        it is complete."""
        self._order = asyncio.Lock()
        """Keeps the calls to the plugin in order."""

    async def call(self, method: str, *args: Any) -> Any:
        """`pull`, `arrived` and `pulling`, as on a `Program` actor."""
        return await getattr(self, method)(*args)

    async def close(self) -> None:
        """Close the connections; later calls connect again."""
        client, self._client = self._client, None
        if client is not None:
            await client.close()
        objects, self._objects = self._objects, None
        if objects is not None:
            await objects.aclose()

    async def pull(
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
            after = MIN_PULL_POLL_S
            while not all(report["path"] for report in reports):
                for report in reports:
                    if report.get("unknown"):
                        raise StorageFailed(f"{self._url} was restarted while it pulled v{version}")
                    if report["error"]:
                        raise StorageFailed(f"{self._url}: {report['error']}")
                await asyncio.sleep(after)
                after = min(2 * after, MAX_PULL_POLL_S)
                reports = await self._call_workers("look", {"stamp": stamp})
        except BaseException:  # workers that continue to pull would hold their host's lock
            with contextlib.suppress(TimeoutError, StorageFailed):
                async with asyncio.timeout(PULL_STOP_S):
                    await self._call_workers("stop", {"stamp": stamp})
            raise
        finally:
            self._pulling.discard(stamp)
        received = sum(int(report["received"]) for report in reports)
        return str(reports[0]["path"]), PullResult(
            sum(int(report["bytes"]) for report in reports if report["received"]),
            received,
            sum(float(report["accumulated_s"]) for report in reports),
            max(float(report["seconds"]) for report in reports),
        )

    async def arrived(
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

    async def pulling(self) -> PullProgress | None:
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
            self._client = VllmEngine(self.name, self._url)
        try:
            return await self._client.workers(WORKER_METHOD, call, json.dumps(arguments))
        except EngineError as error:
            raise StorageFailed(error.message, remedy=error.remedy) from error

    def _store(self) -> ObjectStore:
        if self._objects is None:
            self._objects = self._place.objects()
        return self._objects


def _pulls_kv(kv_transfer: Mapping[str, object] | None) -> bool:
    return bool(kv_transfer and kv_transfer.get("do_remote_prefill"))
