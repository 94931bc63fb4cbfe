"""Modelled engines that hand KV over: a prefill here, its KV through a link, the decode there.

vLLM's pull protocol as `rollart.runtime.handoff` speaks it: the prefill engine keeps the KV under the request's id and
answers with where it is; the engine that decodes pulls it, which takes the link's time, and computes the last token of
the prompt anew. An engine may give KV back the same way for the next turn's prefill.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from rollart.errors import EngineError, HandoffFailed
from rollart.model import Completion, FinishReason, GenerateRequest, WeightsRef
from rollart.sim.batching import KvReservation
from rollart.sim.engines import EngineLimits, ModelledEngine
from rollart.sim.jobs import SimulatedJob
from rollart.sim.links import SharedLink
from rollart.sim.steps import StepModel

__all__ = ["DisaggregatedEngine", "KvFabric"]


@dataclass(slots=True)
class KvFabric:
    """The engines that hand KV over to each other, and the links between them. KV that is not pulled is dropped after
    `lease_s`; a dead engine is detected after `dead_s`. `moved_tokens` of KV crossed the links."""

    link: Callable[[str, str], SharedLink]
    lease_s: float = 60.0
    dead_s: float = 5.0
    engines: dict[str, DisaggregatedEngine] = field(default_factory=dict)
    handoffs: int = 0
    moved_tokens: int = 0


@dataclass(slots=True)
class _Export:
    session: str
    salt: str | None
    version: int
    tokens: int
    expiry: asyncio.TimerHandle | None
    """None: not kept for sure; it is part of the session's prefix and goes when that does."""
    ends: bool = False
    """No turn follows: the exported KV is not kept as a prefix."""


class DisaggregatedEngine(ModelledEngine):
    """A `ModelledEngine` that prefills for other engines, decodes turns that others prefilled, or does both.

    Exported KV is pinned: it counts as used memory. A request that pulls KV first waits for memory, in order, and holds
    it until it runs, as vLLM allocates the blocks before the transfer. KV given back after a decode (`returns`) is not
    pinned, as it is the session's prefix here. `versioned` hand-off values name the weights, as the embedded engine's
    do; KV of other weights than either engine's current ones is refused in any case.
    """

    def __init__(
        self,
        name: str,
        steps: StepModel,
        fabric: KvFabric,
        *,
        version: int = 0,
        limits: EngineLimits | None = None,
        load: Callable[[WeightsRef], Awaitable[None]] | None = None,
        returns: bool = True,
        versioned: bool = True,
    ) -> None:
        self._exports: dict[str, _Export] = {}
        self._memory_waiters: deque[tuple[GenerateRequest, asyncio.Future[None]]] = deque()
        super().__init__(name, steps, version=version, limits=limits, load=load)
        self._fabric = fabric
        self._returns, self._versioned = returns, versioned
        fabric.engines[name] = self

    async def generate(self, request: GenerateRequest) -> Completion:
        params = request.kv_transfer
        if not params:
            return await super().generate(request)
        self._check()
        pulls = "remote_request_id" in params
        if pulls:
            await self._pull(request, params)
        try:
            completion = await super().generate(request)
        finally:
            self._release_reservation(request, self._version)
        prefills = bool(params.get("do_remote_decode"))
        gives_back = pulls and self._returns and params.get("return_kv", True)
        if completion.finish is FinishReason.ABORT or not (prefills or gives_back):
            return completion
        if not prefills:
            self._note(request, self.retained.held(request.session, request.cache_salt), None)
        return dataclasses.replace(completion, kv_transfer=self._value(request.request_id))

    async def abort(self, request_ids: Sequence[str]) -> None:
        await super().abort(request_ids)
        for request_id in request_ids:
            self._drop_export(request_id)

    async def release(self, session: str) -> None:
        await super().release(session)
        for name in [n for n, e in self._exports.items() if e.session == session]:
            self._drop_export(name)

    def _empty(self) -> None:
        super()._empty()
        for export in self._exports.values():
            if export.expiry is not None:
                export.expiry.cancel()
        self._exports.clear()
        for _, room in self._memory_waiters:
            if not room.done():
                room.set_exception(EngineError(f"{self._id} died", retryable=True))
        self._memory_waiters.clear()

    def _go_on(self) -> None:
        waiters = self._memory_waiters
        while waiters and (waiters[0][1].done() or self._fits_memory(waiters[0][0])):
            request, room = waiters.popleft()
            if not room.done():
                self._reserve(request)
                room.set_result(None)
        super()._go_on()

    def _retain(self, job: SimulatedJob, tokens: int) -> None:
        params = job.request.kv_transfer
        if not params or not params.get("do_remote_decode"):
            super()._retain(job, tokens)
            return
        name = job.request.request_id
        expiry = asyncio.get_running_loop().call_later(self._fabric.lease_s, self._drop_export, name)
        self._pinned += tokens
        self._note(job.request, tokens, expiry)

    def _note(self, request: GenerateRequest, tokens: int, expiry: asyncio.TimerHandle | None) -> None:
        self._exports[request.request_id] = _Export(
            request.session,
            request.cache_salt,
            self._version,
            tokens,
            expiry,
            ends=bool((request.kv_transfer or {}).get("session_ends")),
        )

    def _value(self, name: str) -> Mapping[str, object]:
        value: dict[str, object] = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": str(self.id),
            "remote_request_id": name,
        }
        if self._versioned:
            value["weight_version"] = self._version
        return value

    def _drop_export(self, name: str) -> None:
        """Drop an export that will not be pulled."""
        export = self._exports.pop(name, None)
        if export is not None:
            self._unpin(export)

    def _unpin(self, export: _Export) -> None:
        if export.expiry is not None:
            export.expiry.cancel()
            self._catch_up()
            self._pinned -= export.tokens
            if self._work is None:
                self._go_on()
                self._arm()

    def _fits_memory(self, request: GenerateRequest) -> bool:
        spare = self._spare if self._running or self._round else 0
        return sum(request.token_ids) + 1 + spare <= self.kv_tokens - self._pinned - self._context - self._held

    def _reserve(self, request: GenerateRequest) -> None:
        """Reserve KV for the whole prompt; the local part of its prefix is included."""
        need, kept = sum(request.token_ids) + 1, self.retained.claim(request.session, request.cache_salt)
        self._reserved[request.request_id] = KvReservation(need, kept)
        self._pinned += need
        self._evict()

    def _release_reservation(self, request: GenerateRequest, version: int) -> None:
        """Release the reservation of a request that will not run. The local part of its prefix is kept if it has the
        current weights."""
        room = self._reserved.pop(request.request_id, None)
        if room is None:
            return
        self._catch_up()
        self._pinned -= room.need
        if version == self._version:
            self.retained.keep(request.session, room.kept, request.cache_salt)
        if self._work is None:
            self._go_on()
            self._arm()

    async def _wait_for_memory(self, request: GenerateRequest) -> None:
        """Returns when the request has its room."""
        self._catch_up()
        if not self._memory_waiters and self._fits_memory(request):
            self._reserve(request)
            return
        room = asyncio.get_running_loop().create_future()
        self._memory_waiters.append((request, room))
        await room

    async def _pull(self, request: GenerateRequest, params: Mapping[str, object]) -> None:
        """The KV comes over and lies in the room that the request has."""
        if sum(request.token_ids) + request.sampling.max_tokens > self.kv_tokens:
            return  # it is refused in a moment
        version = self._version
        try:
            await self._wait_for_memory(request)
            await self._fetch(request, params)
        except BaseException:
            self._release_reservation(request, version)
            raise

    async def _fetch(self, request: GenerateRequest, params: Mapping[str, object]) -> None:
        fabric, name = self._fabric, str(params["remote_request_id"])
        source, version = fabric.engines[str(params["remote_engine_id"])], self._version
        if source.fail:
            await asyncio.sleep(fabric.dead_s)
            raise HandoffFailed(f"{self.id}: {source.id} does not answer")
        export = source._exports.pop(name, None)
        if export is None:
            raise HandoffFailed(f"{self.id}: {source.id} has no KV of {name}")
        tokens = export.tokens
        if export.expiry is None:
            tokens = min(tokens, source.retained.held(export.session, export.salt))
        kept = self._reserved[request.request_id].kept
        missing = tokens - kept
        try:
            if missing > 0 and export.version == version == source._version:
                gb = missing * self._steps.kv_bytes_per_token / 1e9
                await fabric.link(source.id, self.id).transfer(gb)
                fabric.handoffs += 1
                fabric.moved_tokens += missing
        finally:
            if not source.fail and source._version == export.version:
                source._complete_handoff(export)
            elif not source.fail:
                source._unpin(export)
        self._check()
        if not export.version == version == self._version == source._version or source.fail or tokens < 1:
            what = f"{tokens} tokens of v{export.version}, v{self._version} here"
            raise HandoffFailed(f"{self.id}: KV of {name} from {source.id}: {what}")
        room = self._reserved.get(request.request_id)
        if room is None:
            raise EngineError(f"{self._id} died and came back", retryable=True)
        self._reserved[request.request_id] = room._replace(kept=max(tokens, kept))

    def _complete_handoff(self, export: _Export) -> None:
        """The pinned KV becomes the session's prefix, as long as memory is free."""
        if export.expiry is not None:
            if not export.ends:
                self.retained.keep(export.session, export.tokens, export.salt)
            self._unpin(export)
            self._evict()
