"""KV hand-off: the steps before and after the driver runs a request that imports or exports KV.

Before: fetch the part of the prompt's KV that the local session lacks, by shared memory if the other engine is on this
host, else from its HTTP port. After: keep the KV for the next engine (the prompt's KV if that one decodes, the whole
sequence's if it prefills the next turn). Only KV that the next engine is not known to hold is copied.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import aiohttp

from rollart.engine.cache import KvBlock
from rollart.engine.driver import Driver
from rollart.engine.exports import KvExport, KvExports
from rollart.engine.jobs import EngineJob, FinishedJob, refuse_invalid
from rollart.engine.shm import SharedKvFiles, boot_id
from rollart.engine.transfer import KvSource, decode_block, encode_block, parse_kv_source
from rollart.errors import EngineError, HandoffFailed
from rollart.model import Completion, FinishReason

T = TypeVar("T")

OFFLOAD_BYTES = 1 << 20
"""Bytes from which a copy runs in a worker thread; for smaller ones the thread costs more than the copy (0.5 ms)."""

SWEEP_S = 5.0
"""Seconds between checks of the leases. Memory is freed that much after its lease ends; pulls check leases exactly."""


@dataclass(frozen=True, slots=True)
class HandoffSettings:
    """Leases in seconds: `lease_s` of a prompt's KV (vLLM's `kv_lease_duration`), `return_lease_s` of KV that waits for
    the next turn (vLLM's `decoder_kv_blocks_ttl`). `timeout_s` bounds a pull unless the request sets a bound. `shm` is
    the directory of shared memory, '' for sockets only."""

    lease_s: float = 30.0
    return_lease_s: float = 480.0
    timeout_s: float = 10.0
    pending_bytes: int = 1 << 30
    shm: str = ""


@dataclass(slots=True)
class TransportCounters:
    """Counters of the pulls over one transport."""

    pulls: int = 0
    bytes: int = 0
    seconds: float = 0.0


class KvHandoffs:
    """Owns the exports of one engine and the pulls in flight. All methods are called on the loop's thread.

    `serve` waits for the pull, then for the driver; cancelling it frees everything. `run` ends leases and owns the
    tasks of `start`, until cancelled. A pull never delays a step, because it waits outside the driver.
    """

    def __init__(self, driver: Driver, settings: HandoffSettings, *, advertise: tuple[str, int]) -> None:
        self._driver, self._runner, self._settings = driver, driver.runner, settings
        self.advertise = advertise
        self._boot, self._files = boot_id(), None
        if settings.shm and self._boot:
            try:
                self._files = SharedKvFiles(settings.shm)
            except OSError:  # no shared memory here: all KV travels by socket
                self._files = None
        loop = asyncio.get_running_loop()
        self.exports = KvExports(loop.time, limit_bytes=settings.pending_bytes, files=self._files)
        self.pulled = {"shm": TransportCounters(), "socket": TransportCounters()}
        self.failed = 0
        self._pulling: dict[str, asyncio.Timeout] = {}
        self._aborted: set[str] = set()
        self._http: aiohttp.ClientSession | None = None
        self._tasks: asyncio.TaskGroup | None = None

    @property
    def pulling(self) -> int:
        """Number of requests that wait for their KV."""
        return len(self._pulling)

    async def run(self) -> None:
        """Sweep, and hold the tasks of `start`, until cancelled."""
        try:
            async with asyncio.TaskGroup() as self._tasks:
                while True:
                    await asyncio.sleep(SWEEP_S)
                    self.exports.sweep()
                    if self._files is not None:
                        self._files.sweep()
        finally:
            self._tasks = None

    def start(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """Run `work` as a task of its own; it must not raise. EngineError while the engine shuts down."""
        if self._tasks is None:
            work.close()
            raise EngineError("the engine is shutting down", retryable=True)
        return self._tasks.create_task(work)

    async def close(self) -> None:
        """Free the exported KV and close the connections."""
        self.exports.clear("the engine ended")
        if self._files is not None:
            self._files.close()
        if self._http is not None:
            await self._http.close()

    async def serve(self, job: EngineJob) -> FinishedJob:
        """Run a request with its hand-offs before and after. EngineError if it is refused. HandoffFailed if its KV is
        unavailable: without `kv_transfer_params` the same request will run."""
        params = job.request.kv_transfer
        if not params:
            return await self._driver.generate(job)
        source = parse_kv_source(params, timeout_s=self._settings.timeout_s)
        if source is not None and not await self._fetch(job, source):
            return FinishedJob(job, Completion((), (), (), FinishReason.ABORT, len(job.prompt)))
        finished = await self._driver.generate(job)
        if finished.kv is None:
            return finished
        params = await self._keep(job, finished.kv)
        return replace(finished, completion=replace(finished.completion, kv_transfer=params), kv=None)

    def abort(self, request_ids: Sequence[str] | None) -> None:
        """End these pulls (None: all), and drop the exports of these requests."""
        for name in list(self._pulling) if request_ids is None else request_ids:
            if name in self._pulling:
                self._aborted.add(name)
                self._pulling[name].reschedule(asyncio.get_running_loop().time())
        self.exports.drop(request_ids or ())

    async def hand_out(self, request_id: str, token: str, start: int) -> list[memoryview]:
        """Hand out the bytes of an export from token `start` on, once. HandoffFailed, with the reason, if the export is
        unavailable."""
        export, before = self._find(request_id, token), None
        if start < export.start:
            before = await self._driver.apply(
                lambda: self._runner.session_kv(export.session, export.token_ids, export.version, start)
            )
            if before is None:
                raise HandoffFailed(
                    f"KV of request {request_id!r} was copied from token {export.start} on, {start} was asked for, "
                    "and the session holds the rest no more"
                )
            self._find(request_id, token)  # it may have been dropped during the await
        data = self.exports.take(export)
        if data is None:
            raise HandoffFailed(f"the KV of request {request_id!r} was taken")
        if start == export.start:  # the usual case: the peer still holds the tokens that it was known to hold
            return [memoryview(data)]

        def cut() -> list[memoryview]:
            block = decode_block(data, export.token)
            return encode_block(
                _block_from(block, start) if before is None else replace(before, logits=block.logits), export.token
            )

        return await _off_loop(export.size, cut)

    def _find(self, request_id: str, token: str) -> KvExport:
        found = self.exports.find(request_id, token)
        if isinstance(found, str):
            raise HandoffFailed(f"no KV of request {request_id!r} is to be had here: {found}")
        return found

    async def _fetch(self, job: EngineJob, source: KvSource) -> bool:
        """Pull the KV that the session lacks into `job.imported`. False if the request was aborted during the pull."""
        name, runner = job.request.request_id, self._runner
        refuse_invalid(job, vocab=runner.network.architecture.vocab, context=runner.context)
        if name in self._pulling:
            raise EngineError(f"request id {name!r} is in use", retryable=False, remedy="give every request its own id")
        loop = asyncio.get_running_loop()
        began = loop.time()
        scope = self._pulling[name] = asyncio.timeout(source.timeout_s)
        try:
            async with scope:
                if source.version is not None:
                    runner.fence(source.version)
                held = await self._driver.apply(lambda: runner.held(job))
                n = len(job.prompt)
                job.peer_holds = min(source.tokens, n)
                whole = source.tokens == n and not job.export
                if held >= (n if whole else min(source.tokens, n - 1)):  # the session lacks nothing
                    if self._files is not None:
                        self._files.remove(source.file)
                    return True
                job.imported, transport = await self._pull(source, held)
        except TimeoutError as error:
            if name in self._aborted:
                return False
            self.failed += 1
            remedy = "prefill again"
            raise HandoffFailed(f"no KV came from {source.url} in {source.timeout_s:g} s", remedy=remedy) from error
        except HandoffFailed:
            self.failed += 1
            raise
        finally:
            del self._pulling[name]
            aborted = name in self._aborted
            self._aborted.discard(name)
        if aborted:  # just as the KV arrived
            return False
        counters = self.pulled[transport]
        counters.pulls += 1
        counters.bytes += job.imported.size
        counters.seconds += loop.time() - began
        return True

    async def _pull(self, source: KvSource, held: int) -> tuple[KvBlock, str]:
        """The block and the transport that it came by."""
        if self._files is not None and source.file and source.boot_id == self._boot and held >= source.start:
            data = self._files.take(source.file)
            if data is not None:
                return await _off_loop(len(data), lambda: decode_block(data, source.token)), "shm"
        if self._http is None:
            self._http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None))
        query = {"request_id": source.request_id, "token": source.token, "from": str(held)}
        try:
            async with self._http.get(source.url, params=query) as answer:
                body = await answer.read()
        except (aiohttp.ClientError, OSError, ValueError) as error:  # ValueError: an invalid address
            raise HandoffFailed(f"the KV pull from {source.url} failed: {error!r}", remedy="prefill again") from error
        if answer.status != 200:
            raise HandoffFailed(
                f"KV pull refused: {source.url} answered {answer.status}: {_error_text(body)}",
                remedy="prefill again: KV can be pulled once, within its lease",
            )
        return await _off_loop(len(body), lambda: decode_block(body, source.token)), "socket"

    async def _keep(self, job: EngineJob, block: KvBlock) -> Mapping[str, object] | None:
        """Keep KV for another engine; returns the `kv_transfer_params` to pull it, or None if there is no room."""
        request, files, loop = job.request, self._files, asyncio.get_running_loop()
        token = secrets.token_hex(16)
        lease = self._settings.return_lease_s if job.returns else self._settings.lease_s

        def store() -> tuple[str, bytes]:
            parts = encode_block(block, token)
            if files is not None:
                try:
                    return files.write(parts), b""
                except OSError:  # shared memory is full
                    pass
            return "", b"".join(parts)

        file, data = "", b""
        if block.size <= self._settings.pending_bytes:  # otherwise `put` refuses and counts it
            file, data = await _off_loop(block.size, store, undo=lambda kept: _discard(files, kept[0]))
        if block.version != self._runner.version:  # the weights were replaced during the copy
            _discard(files, file)
            return None
        kept = self.exports.put(
            KvExport(
                request_id=request.request_id,
                session=request.session,
                token=token,
                token_ids=block.token_ids,
                start=block.start,
                version=block.version,
                size=block.size,
                deadline=loop.time() + lease,
                file=file,
                data=data,
            )
        )
        if not kept:
            return None
        host, port = self.advertise
        return KvSource(
            host=host,
            port=port,
            request_id=request.request_id,
            token=token,
            tokens=len(block.token_ids),
            start=block.start,
            version=block.version,
            boot_id=self._boot if file else "",
            file=file,
            timeout_s=0.0,
        ).params()


def _block_from(block: KvBlock, start: int) -> KvBlock:
    """The part of a block from token `start` on."""
    skip = max(0, min(start, len(block.token_ids)) - block.start)
    return replace(block, keys=block.keys[:, :, skip:], values=block.values[:, :, skip:], start=block.start + skip)


async def _off_loop(size: int, work: Callable[[], T], *, undo: Callable[[T], None] | None = None) -> T:
    """Run `work` here, or in a worker thread if it moves many bytes. If the caller is cancelled before the thread
    ends, `undo` is called with the result."""
    if size < OFFLOAD_BYTES:
        return work()
    running = asyncio.get_running_loop().run_in_executor(None, work)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        if undo is not None:
            running.add_done_callback(lambda done: undo(done.result()) if not done.exception() else None)
        raise


def _discard(files: SharedKvFiles | None, location: str) -> None:
    if files is not None and location:
        files.remove(location)


def _error_text(body: bytes) -> str:
    """The error message in an engine's response body."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body[:200].decode(errors="replace")
