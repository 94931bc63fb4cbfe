"""Simulated engines that hand KV over: vLLM's pull protocol with its failure modes, on virtual time.

They keep a session's KV by token count and version, check every rule that a real engine would break silently, and
record violations: `HandoffFabric.broken` must stay empty.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rollart.errors import EngineError, HandoffFailed
from rollart.model import Completion, FinishReason, GenerateRequest, VersionSpan, WeightsRef
from rollart.testing.parts import SimulatedEngine


@dataclass(frozen=True, slots=True)
class HandoffTimings:
    """Seconds per token prefilled, per token generated, per token of KV pulled, and until a pull from a dead engine
    fails. KV that is not pulled is dropped after `lease_s`."""

    prefill_s: float = 0.001
    decode_s: float = 0.01
    pull_s: float = 0.0001
    dead_s: float = 5.0
    lease_s: float = 30.0


@dataclass(slots=True)
class _Export:
    session: str
    version: int
    tokens: int
    expires: float


@dataclass(slots=True)
class HandoffFabric:
    """The connected engines and the observations that tests check."""

    engines: dict[str, HandoffEngine] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)
    answered: Counter[tuple[str, int]] = field(default_factory=Counter)
    """Turns that an engine generated to the end, by session and length of the context."""
    remote: int = 0
    """Decodes on pulled KV."""
    returned: int = 0
    """Prefills that fetched KV back from a decode engine."""
    computed: int = 0
    """Tokens prefilled, anywhere."""


class HandoffEngine(SimulatedEngine):
    """One engine of a `HandoffFabric`. `versioned`: its hand-off values name the weights, and it refuses KV of others,
    as the embedded engine does; otherwise it trusts the sender of the request, as vLLM does, and the fabric records a
    breach.

    `fail` makes it dead (calls and pulls from it fail), `slow` adds seconds to every request; with `returns` it exports
    KV back after a decode.
    """

    def __init__(
        self,
        name: str,
        fabric: HandoffFabric,
        *,
        version: int = 0,
        seed: int = 0,
        tokens: int = 2,
        pace: HandoffTimings | None = None,
        versioned: bool = False,
        returns: bool = True,
    ) -> None:
        super().__init__(name, version=version, seed=seed, tokens=tokens)
        self.rng = random.Random(f"{seed}:{name}:handoff")
        self._fabric = fabric
        self.pace = pace or HandoffTimings()
        self._versioned = versioned
        self.returns = returns
        self.kv: dict[str, tuple[int, int]] = {}
        self.exports: dict[str, _Export] = {}
        self.slow = 0.0
        fabric.engines[name] = self

    async def generate(self, request: GenerateRequest) -> Completion:
        self._check()
        self.running += 1
        try:
            return await self._serve(request, dict(request.kv_transfer or {}))
        finally:
            self.running -= 1

    async def _serve(self, request: GenerateRequest, params: Mapping[str, object]) -> Completion:
        prefills = bool(params.get("do_remote_decode"))
        tokens, sampled = len(request.token_ids), 1 if prefills else self._tokens
        await self._resumed.wait()
        pulled = 0
        if "remote_request_id" in params:
            pulled = await self.pull(params)
            if not prefills:
                self._fabric.remote += 1
            else:
                self._fabric.returned += 1
        version, kept = self.kv.get(request.session, (-1, 0))
        cached = min(max(kept if version == self._version else 0, pulled), tokens)
        first = self._version
        await self.work(
            self.slow + self.pace.prefill_s * (tokens - cached) + self.pace.decode_s * (0 if prefills else sampled)
        )
        self._fabric.computed += tokens - cached
        last = self._version
        half = sampled // 2 if first != last else 0
        spans = [VersionSpan(last, half, sampled)]
        if half:
            spans.insert(0, VersionSpan(first, 0, half))
        self.kv[request.session] = (last, tokens + (0 if prefills else sampled - 1))
        if not prefills:
            self.served += 1
            self._fabric.answered[(request.session, tokens)] += 1
        kv = None
        if prefills or (self.returns and pulled):
            kv = self.export(request)
        return Completion((97,) * sampled, (-1.0,) * sampled, tuple(spans), FinishReason.LENGTH, tokens, cached, kv)

    async def work(self, seconds: float) -> None:
        await asyncio.sleep(seconds * self.rng.uniform(0.5, 1.5))
        await self._resumed.wait()
        self._check()

    async def pull(self, params: Mapping[str, object]) -> int:
        """Tokens whose KV came over. The weights must be the same at both ends, from the first byte to the last."""
        source = self._fabric.engines[str(params["remote_engine_id"])]
        name = str(params["remote_request_id"])
        before = self._version
        if source.fail:
            await asyncio.sleep(self.pace.dead_s)
            raise HandoffFailed(f"{self.id}: {source.id} does not answer")
        export = source.exports.pop(name, None)
        if export is None or export.expires <= asyncio.get_running_loop().time():
            raise HandoffFailed(f"{self.id}: {source.id} has no KV of {name}")
        await asyncio.sleep(self.pace.pull_s * export.tokens)
        self._check()
        if not export.version == before == self._version:
            what = f"{name}: KV of v{export.version} pulled from v{before} to v{self._version} on {self.id}"
            if self._versioned:
                raise HandoffFailed(what)
            self._fabric.broken.append(what)
        return export.tokens

    def export(self, request: GenerateRequest) -> Mapping[str, object]:
        version, tokens = self.kv[request.session]
        expires = asyncio.get_running_loop().time() + self.pace.lease_s
        self.exports[request.request_id] = _Export(request.session, version, tokens, expires)
        params: dict[str, object] = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": str(self.id),
            "remote_request_id": request.request_id,
        }
        if self._versioned:
            params["weight_version"] = version
        return params

    async def abort(self, request_ids: Sequence[str]) -> None:
        self._check()
        for request_id in request_ids:
            self.exports.pop(request_id, None)

    async def release(self, session: str) -> None:
        self._check()
        self.kv.pop(session, None)
        for name in [n for n, e in self.exports.items() if e.session == session]:
            del self.exports[name]

    async def update_weights(self, weights: WeightsRef) -> None:
        await super().update_weights(weights)
        self.kv.clear()  # salted by version; exports that wait to be pulled stay, as in vLLM

    def holds(self) -> int:
        """The number of sessions with KV on this engine, plus waiting exports."""
        return len(self.kv) + len(self.exports)

    def restart(self, version: int) -> None:
        """Restart the process with these weights and an empty memory."""
        self.fail = False
        self._version = version
        self.kv.clear()
        self.exports.clear()
        self._resumed.set()

    def _check(self) -> None:
        if self.fail:
            raise EngineError(f"{self.id} is down", retryable=True)
