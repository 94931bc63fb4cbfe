"""KV hand-off: the steps before and after the driver runs a request that imports or exports KV.

Before: fetch the part of the prompt's KV that the local session lacks, by shared memory if the other engine is on this
host, else from its HTTP port. After: keep the KV for the next engine (the prompt's KV if that one decodes, the whole
sequence's if it prefills the next turn). Only KV that the next engine is not known to hold is copied.

The protocol is vLLM's pull protocol (NIXL): an engine keeps the KV of a request under its id and answers with
`kv_transfer_params`, which the router passes on verbatim to the engine that needs the KV. In addition to vLLM's keys,
the params hold `weight_version`, the `remote_token` required to pull, `remote_start` (KV of earlier tokens stays with
the session and is handed out on request), and the path of the file for engines on the same host.

An export waits in a file if memory is shared, else in this process. It is handed out once, until its lease ends. It is
dropped early when the weights are replaced, when its session ends, when a later export of the session replaces it, and,
oldest first, when all exports together exceed their limit.
"""

from __future__ import annotations

import asyncio
import json
import math
import mmap
import secrets
import struct
import zlib
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import aiohttp
import torch
from torch import Tensor

from rollart.engine.cache import KvBlock
from rollart.engine.driver import Driver
from rollart.engine.jobs import EngineJob, FinishedJob, refuse_invalid
from rollart.engine.shm import SharedKvFiles, boot_id
from rollart.errors import EngineError, HandoffFailed
from rollart.generation import parse_error
from rollart.model import Completion, FinishReason

MAX_REMEMBERED_REASONS = 256
"""Maximum exports for which the reason of their removal is remembered, for the error of a late pull."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

BLOCK_PREFIX = struct.Struct("<QQ")

BLOCK_ALIGN = 64
"""The payload starts at a multiple of this, so that tensors can be read in place."""

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

    def __init__(self, driver: Driver, settings: HandoffSettings) -> None:
        self._driver, self.runner, self._settings = driver, driver.runner, settings
        self.advertise = ("", 0)
        """Host and port at which other engines reach this one; set once the server listens."""
        self._boot = boot_id()
        self.files = SharedKvFiles(settings.shm if self._boot else "")
        loop = asyncio.get_running_loop()
        self.exports = KvExports(loop.time, limit_bytes=settings.pending_bytes, files=self.files)
        self.pulled = {"shm": TransportCounters(), "socket": TransportCounters()}
        self.failed = 0
        self.pull_timeouts: dict[str, asyncio.Timeout] = {}
        """Time limits of the pulls in flight, by request id."""
        self._aborted: set[str] = set()
        self._http: aiohttp.ClientSession | None = None
        self._tasks: asyncio.TaskGroup | None = None

    async def run(self) -> None:
        """Sweep, and hold the tasks of `start`, until cancelled."""
        try:
            async with asyncio.TaskGroup() as self._tasks:
                while True:
                    await asyncio.sleep(SWEEP_S)
                    self.exports.sweep()
                    self.files.sweep()
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
        self.files.close()
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
        params = await self.keep(job, finished.kv)
        return replace(finished, completion=replace(finished.completion, kv_transfer=params), kv=None)

    def abort(self, request_ids: Sequence[str] | None) -> None:
        """End these pulls (None: all), and drop the exports of these requests."""
        for name in list(self.pull_timeouts) if request_ids is None else request_ids:
            if name in self.pull_timeouts:
                self._aborted.add(name)
                self.pull_timeouts[name].reschedule(asyncio.get_running_loop().time())
        self.exports.drop(request_ids or ())

    async def hand_out(self, request_id: str, token: str, start: int) -> list[memoryview]:
        """Hand out the bytes of an export from token `start` on, once. HandoffFailed, with the reason, if the export is
        unavailable."""
        export, before = self.exports.find(request_id, token), None
        if start < export.start:
            before = await self._driver.apply(
                lambda: self.runner.session_kv(export.session, export.token_ids, export.version, start)
            )
            if before is None:
                raise HandoffFailed(
                    f"KV of request {request_id!r} was copied from token {export.start} on, {start} was asked for, "
                    "and the session holds the rest no more"
                )
            self.exports.find(request_id, token)  # it may have been dropped during the await
        data = self.exports.take(export)
        if data is None:
            raise HandoffFailed(f"the KV of request {request_id!r} was taken")
        if start == export.start:  # the usual case: the peer still holds the tokens that it was known to hold
            return [memoryview(data)]

        def cut() -> list[memoryview]:
            block = decode_block(data, export.token)
            if before is not None:
                return encode_block(replace(before, logits=block.logits, states=block.states), export.token)
            return encode_block(block.cut(min(start, len(block.token_ids))), export.token)

        return await _off_loop(export.size, cut)

    async def _fetch(self, job: EngineJob, source: KvSource) -> bool:
        """Pull the KV that the session lacks into `job.imported`. False if the request was aborted during the pull."""
        name, runner = job.request.request_id, self.runner
        refuse_invalid(job, vocab=runner.network.architecture.vocab, context=runner.context)
        if name in self.pull_timeouts:
            raise EngineError(f"request id {name!r} is in use", retryable=False, remedy="give every request its own id")
        loop = asyncio.get_running_loop()
        began = loop.time()
        scope = self.pull_timeouts[name] = asyncio.timeout(source.timeout_s)
        try:
            async with scope:
                if source.version is not None:
                    runner.fence(source.version)
                held = await self._driver.apply(lambda: runner.held(job))
                n = len(job.prompt)
                job.peer_holds = min(source.tokens, n)
                whole = source.tokens == n and not job.export
                if held >= (n if whole else min(source.tokens, n - 1)):  # the session lacks nothing
                    self.files.remove(source.file)
                    return True
                job.imported, transport = await self.pull(source, held)
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
            del self.pull_timeouts[name]
            aborted = name in self._aborted
            self._aborted.discard(name)
        if aborted:  # just as the KV arrived
            return False
        counters = self.pulled[transport]
        counters.pulls += 1
        counters.bytes += job.imported.size
        counters.seconds += loop.time() - began
        return True

    async def pull(self, source: KvSource, held: int) -> tuple[KvBlock, str]:
        """The block and the transport that it came by."""
        if source.boot_id == self._boot and held >= source.start:
            data = self.files.take(source.file)
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
            refusal = parse_error(source.url, "", answer.status, body).message
            remedy = "prefill again: KV can be pulled once, within its lease"
            raise HandoffFailed(f"KV pull refused: {refusal}", remedy=remedy)
        return await _off_loop(len(body), lambda: decode_block(body, source.token)), "socket"

    async def keep(self, job: EngineJob, block: KvBlock) -> Mapping[str, object] | None:
        """Keep KV for another engine; returns the `kv_transfer_params` to pull it, or None if there is no room."""
        request, files, loop = job.request, self.files, asyncio.get_running_loop()
        token = secrets.token_hex(16)
        lease = self._settings.return_lease_s if job.returns else self._settings.lease_s

        def store() -> tuple[str, bytes]:
            parts = encode_block(block, token)
            try:
                return files.write(parts), b""
            except OSError:  # no shared memory here, or it is full
                return "", b"".join(parts)

        file, data = "", b""
        if block.size <= self._settings.pending_bytes:  # otherwise `put` refuses and counts it
            file, data = await _off_loop(block.size, store, undo=lambda kept: files.remove(kept[0]))
        if block.version != self.runner.version:  # the weights were replaced during the copy
            files.remove(file)
            return None
        host, port = self.advertise
        export = KvExport(
            host=host,
            port=port,
            request_id=request.request_id,
            token=token,
            tokens=len(block.token_ids),
            start=block.start,
            version=block.version,
            boot_id=self._boot if file else "",
            file=file,
            session=request.session,
            token_ids=block.token_ids,
            size=block.size,
            deadline=loop.time() + lease,
            data=data,
        )
        return export.params() if self.exports.put(export) else None


@dataclass(frozen=True, slots=True)
class KvSource:
    """The location of exported KV according to `kv_transfer_params`: `tokens` is the length of the sequence, `start`
    the first copied token, `version` that of the weights (None: not given). `file` is a path in the shared memory of
    the host `boot_id`, '' if there is none.
    """

    host: str
    port: int
    request_id: str
    token: str
    tokens: int
    start: int
    version: int | None
    boot_id: str = ""
    file: str = ""
    timeout_s: float = math.inf
    """Longest pull."""

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}/rollart/kv"

    def params(self) -> dict[str, object]:
        """The `kv_transfer_params` for this location."""
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": f"{self.host}:{self.port}",
            "remote_request_id": self.request_id,
            "remote_block_ids": [],
            "remote_host": self.host,
            "remote_port": self.port,
            "remote_num_tokens": self.tokens,
            "transfer_mode": "pull",
            "weight_version": self.version,
            "remote_start": self.start,
            "remote_token": self.token,
            "remote_boot_id": self.boot_id,
            "remote_file": self.file,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class KvExport(KvSource):
    """One export. Its bytes are the output of `encode_block`: in `file`, or in `data` if there is no file."""

    version: int
    session: str
    token_ids: tuple[int, ...]
    size: int
    deadline: float
    data: bytes = b""


class KvExports:
    """The exports of one engine by request id. Owned by the server's loop; `now` is the loop's clock.

    Invariants: the sizes sum up to at most `limit_bytes`; every file belongs to an entry. The file of an entry may be
    missing after another engine took it, until the next `sweep`.
    """

    def __init__(self, now: Callable[[], float], *, limit_bytes: int, files: SharedKvFiles | None = None) -> None:
        self.now, self._limit, self._files = now, limit_bytes, files or SharedKvFiles("")
        self.entries: OrderedDict[str, KvExport] = OrderedDict()
        """By request id, oldest first."""
        self.sessions: dict[str, str] = {}
        """The request id of each session's export."""
        self._removal_reasons: OrderedDict[str, str] = OrderedDict()
        self.bytes = 0
        self.expired = self.dropped = self.taken = self.exported_bytes = 0

    def __len__(self) -> int:
        return len(self.entries)

    def put(self, export: KvExport) -> bool:
        """Keep an export until its deadline. False, with nothing kept, if it alone exceeds the limit. Replaces an
        export of the same request or the same session."""
        for name in {export.request_id, self.sessions.get(export.session, export.request_id)}:
            if name in self.entries:
                self._drop(name, "a later one took its place")
        if export.size > self._limit:
            self.dropped += 1
            self._forget(export, "it exceeded the limit of waiting KV (--kv-pending-mb)")
            return False
        if self.bytes + export.size > self._limit:
            self.sweep()
        while self.bytes + export.size > self._limit:
            self._drop(next(iter(self.entries)), "it was the oldest when room ran out")
        self._removal_reasons.pop(export.request_id, None)
        self.entries[export.request_id] = export
        if export.session:
            self.sessions[export.session] = export.request_id
        self.bytes += export.size
        self.exported_bytes += export.size
        return True

    def find(self, request_id: str, token: str) -> KvExport:
        """The export. HandoffFailed, with the reason, if it is unavailable."""
        export = self.entries.get(request_id)
        if export is not None and export.deadline <= self.now():
            self._expire(request_id)
            export = None
        if export is not None and export.token == token:
            return export
        why = self._removal_reasons.get(request_id, "it was never here")
        why = why if export is None else "the token is not that of the export"
        raise HandoffFailed(f"no KV of request {request_id!r} is to be had here: {why}")

    def take(self, export: KvExport) -> bytes | mmap.mmap | None:
        """Remove an export and return its bytes; None if another engine has taken its file."""
        data = self._files.take(export.file) if export.file else export.data
        self._mark_taken(export.request_id)
        return data or None

    def drop(self, request_ids: Iterable[str]) -> None:
        """Drop the exports of aborted requests. Unknown ids are ignored."""
        for name in request_ids:
            if name in self.entries:
                self._drop(name, "it was aborted")

    def drop_session(self, session: str) -> None:
        if session in self.sessions:
            self._drop(self.sessions[session], "its session ended")

    def clear(self, reason: str) -> None:
        """Drop all exports, because the weights were replaced or the cache is reset."""
        for name in list(self.entries):
            self._drop(name, reason)

    def sweep(self) -> None:
        """Remove exports whose lease ended, and those whose file another engine took."""
        now = self.now()
        for name, export in list(self.entries.items()):
            if export.file and not self._files.holds(export.file):
                self._mark_taken(name)
            elif export.deadline <= now:
                self._expire(name)

    def _mark_taken(self, name: str) -> None:
        self.taken += 1
        self._remove(name, "it was taken")

    def _expire(self, name: str) -> None:
        self.expired += 1
        self._remove(name, "its lease ended")

    def _drop(self, name: str, reason: str) -> None:
        self.dropped += 1
        self._remove(name, reason)

    def _remove(self, name: str, reason: str) -> None:
        """Removes the export's file as well, unless it was taken."""
        export = self.entries.pop(name)
        self.bytes -= export.size
        if self.sessions.get(export.session) == name:
            del self.sessions[export.session]
        self._forget(export, reason)

    def _forget(self, export: KvExport, reason: str) -> None:
        self._files.remove(export.file)
        self._removal_reasons[export.request_id] = reason
        self._removal_reasons.move_to_end(export.request_id)
        if len(self._removal_reasons) > MAX_REMEMBERED_REASONS:
            self._removal_reasons.popitem(last=False)


def parse_kv_source(params: Mapping[str, object] | None, *, timeout_s: float) -> KvSource | None:
    """The location to pull from; None if the request imports no KV. EngineError, not retryable, for invalid values.
    `timeout_s` bounds the pull unless the params set a bound."""
    if not params or not (params.get("do_remote_prefill") or params.get("remote_request_id")):
        return None
    try:
        version = params.get("weight_version")
        source = KvSource(
            host=str(params["remote_host"]),
            port=int(str(params["remote_port"])),
            request_id=str(params["remote_request_id"]),
            token=str(params.get("remote_token", "")),
            tokens=int(str(params["remote_num_tokens"])),
            start=int(str(params.get("remote_start", 0))),
            version=None if version is None else int(str(version)),
            boot_id=str(params.get("remote_boot_id", "")),
            file=str(params.get("remote_file", "")),
            timeout_s=float(str(params.get("timeout_s") or timeout_s)),
        )
    except (KeyError, ValueError) as error:
        raise EngineError(f"kv_transfer_params lack a valid {error}", retryable=False) from None
    if not (math.isfinite(source.timeout_s) and source.timeout_s > 0.0):
        raise EngineError(f"kv_transfer_params.timeout_s is {source.timeout_s}, it must be above 0", retryable=False)
    return source


def encode_block(block: KvBlock, token: str = "") -> list[memoryview]:
    """Encode as: length of the header and CRC-32 of everything that follows (8 bytes each, little endian), JSON header,
    then the block's tensors, which are not copied. The header holds the token required to pull the block.
    """
    payload = [_bytes(t) for t in block.parts]
    header = json.dumps(
        {
            "token": token,
            "token_ids": block.token_ids,
            "start": block.start,
            "version": block.version,
            "shape": list(block.keys.shape),
            "dtype": str(block.keys.dtype).removeprefix("torch."),
            "vocab": 0 if block.logits is None else len(block.logits),
        }
        | ({} if block.experts is None else {"experts": list(block.experts.shape)})
        | ({} if block.states is None else {"states": list(block.states.shape)})
        | ({} if block.adapter is None else {"adapter": block.adapter})
    ).encode()
    header += b" " * (-(BLOCK_PREFIX.size + len(header)) % BLOCK_ALIGN)
    crc = zlib.crc32(header)
    for part in payload:
        crc = zlib.crc32(part, crc)
    return [memoryview(BLOCK_PREFIX.pack(len(header), crc) + header), *payload]


def decode_block(data: bytes | bytearray | mmap.mmap, token: str = "") -> KvBlock:
    """Inverse of `encode_block`; the tensors share the memory of `data` unless that is immutable. HandoffFailed if the
    bytes are no such block, were corrupted, or belong to another token."""
    buffer = bytearray(data) if isinstance(data, bytes) else data
    try:
        size, crc = BLOCK_PREFIX.unpack_from(buffer)
        with memoryview(buffer) as view, view[BLOCK_PREFIX.size :] as rest:
            if zlib.crc32(rest) != crc:
                raise ValueError("its checksum is wrong")
        begin = BLOCK_PREFIX.size + size
        header = json.loads(buffer[BLOCK_PREFIX.size : begin])
        if header["token"] != token:
            raise ValueError("it was exported for another request")
        shape, dtype, vocab = tuple(header["shape"]), DTYPES[header["dtype"]], int(header["vocab"])
        count = math.prod(shape)
        logits_at = begin + 2 * count * dtype.itemsize
        states, states_at = tuple(header.get("states", ())), logits_at + 4 * vocab
        experts, experts_at = tuple(header.get("experts", ())), states_at + (4 * math.prod(states) if states else 0)
        expected = experts_at + (math.prod(experts) if experts else 0)
        if len(buffer) != expected:
            raise ValueError(f"it has {len(buffer)} bytes, its header says {expected}")
        return KvBlock(
            token_ids=tuple(header["token_ids"]),
            version=int(header["version"]),
            keys=_tensor(buffer, dtype, shape, begin),
            values=_tensor(buffer, dtype, shape, begin + count * dtype.itemsize),
            start=int(header["start"]),
            logits=_tensor(buffer, torch.float32, (vocab,), logits_at) if vocab else None,
            experts=_tensor(buffer, torch.uint8, experts, experts_at) if experts else None,
            states=_tensor(buffer, torch.float32, states, states_at) if states else None,
            adapter=header.get("adapter"),
        )
    except (struct.error, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise HandoffFailed(f"the pull brought no valid KV: {error}", remedy="prefill again") from error


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


def _bytes(tensor: Tensor) -> memoryview:
    return memoryview(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)


def _tensor(buffer: bytearray | mmap.mmap, dtype: torch.dtype, shape: tuple[int, ...], offset: int) -> Tensor:
    count = math.prod(shape)
    if not count:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(buffer, dtype=dtype, count=count, offset=offset).view(shape)
