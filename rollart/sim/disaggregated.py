"""Modelled engines that hand KV over: a prefill here, its KV through a link, the decode there.

vLLM's pull protocol as `rollart.runtime.handoff` speaks it: the prefill engine keeps the KV under the request's id and
answers with where it is; the engine that decodes pulls it, which takes the link's time, and computes the last token of
the prompt anew. An engine may give KV back the same way for the next turn's prefill.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from rollart.errors import HandoffFailed
from rollart.model import Completion, FinishReason, GenerateRequest, WeightsRef
from rollart.sim.engines import EngineLimits, ModelledEngine
from rollart.sim.jobs import Job
from rollart.sim.links import SharedLink
from rollart.sim.steps import StepModel

__all__ = ["HandoffEngine", "KvFabric"]


@dataclass(slots=True)
class KvFabric:
    """The engines that hand over to each other, and the link between two of them. KV that nobody pulls is dropped after
    `lease_s`; that an engine is dead is known after `dead_s`. `moved_tokens` of KV went through the links."""

    link: Callable[[str, str], SharedLink]
    lease_s: float = 60.0
    dead_s: float = 5.0
    engines: dict[str, HandoffEngine] = field(default_factory=dict)
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


class HandoffEngine(ModelledEngine):
    """A `ModelledEngine` that prefills for others, decodes what others prefilled, or does both.

    KV that waits to be pulled is pinned: it counts as used memory. KV given back after a decode (`returns`) is not, as
    it is the session's prefix here. `versioned` hand-off values name the weights, as the embedded engine's do; KV of
    other weights than those that either engine has by now is refused in any case.
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
        completion = await super().generate(request)
        prefills = bool(params.get("do_remote_decode"))
        if completion.finish is FinishReason.ABORT or not (prefills or (pulls and self._returns)):
            return completion
        if not prefills:
            self._note(request, self.retained.held(request.session, request.cache_salt), None)
        return dataclasses.replace(completion, kv_transfer=self._value(request.request_id))

    async def abort(self, request_ids: Sequence[str]) -> None:
        await super().abort(request_ids)
        for request_id in request_ids:
            self._forget(request_id)

    async def release(self, session: str) -> None:
        await super().release(session)
        for name in [n for n, e in self._exports.items() if e.session == session]:
            self._forget(name)

    def _empty(self) -> None:
        super()._empty()
        for export in self._exports.values():
            if export.expiry is not None:
                export.expiry.cancel()
        self._exports.clear()

    def _retain(self, job: Job, tokens: int) -> None:
        params = job.request.kv_transfer
        if not params or not params.get("do_remote_decode"):
            super()._retain(job, tokens)
            return
        name = job.request.request_id
        expiry = asyncio.get_running_loop().call_later(self._fabric.lease_s, self._forget, name)
        self._pinned += tokens
        self._note(job.request, tokens, expiry)

    def _note(self, request: GenerateRequest, tokens: int, expiry: asyncio.TimerHandle | None) -> None:
        self._exports[request.request_id] = _Export(
            request.session, request.cache_salt, self._version, tokens, expiry
        )  # fmt: skip

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

    def _forget(self, name: str) -> None:
        """Nobody will pull it."""
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

    async def _pull(self, request: GenerateRequest, params: Mapping[str, object]) -> None:
        """The KV comes over and is the session's prefix here."""
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
        missing = tokens - self.retained.held(request.session, request.cache_salt)
        try:
            if missing > 0 and export.version == version == source._version:
                gb = missing * self._steps.kv_bytes_per_token / 1e9
                await fabric.link(source.id, self.id).transfer(gb)
                fabric.handoffs += 1
                fabric.moved_tokens += missing
        finally:
            if not source.fail and source._version == export.version:
                source._handed_over(export)
            elif not source.fail:
                source._unpin(export)
        self._check()
        if not export.version == version == self._version == source._version or source.fail or tokens < 1:
            what = f"{tokens} tokens of v{export.version}, v{self._version} here"
            raise HandoffFailed(f"{self.id}: KV of {name} from {source.id}: {what}")
        self._catch_up()
        if missing > 0:
            self.retained.keep(request.session, tokens, request.cache_salt)
        self._evict()

    def _handed_over(self, export: _Export) -> None:
        """What was pinned is the session's prefix from now on, as long as there is room."""
        if export.expiry is not None:
            self.retained.keep(export.session, export.tokens, export.salt)
            self._unpin(export)
            self._evict()
