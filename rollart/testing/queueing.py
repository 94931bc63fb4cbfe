"""Simulated engines with a queue: prefills run one after the other and delay the generations, which run together.

They model enough to compare routing rules on the product's own gateway: the duration of a turn depends on the engine's
load. Times are on the loop; nothing is random.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from rollart.fleet import EngineKind
from rollart.model import (
    Completion,
    EngineId,
    EngineStats,
    FinishReason,
    GenerateRequest,
    PauseMode,
    VersionSpan,
    WeightsRef,
)

DECODE_STRIDE = 16
"""Tokens that all generations advance by between two chunks of prefill."""

PREFILL_CHUNK = 512
"""Tokens of prefill that come between two strides (chunked prefill)."""


@dataclass(frozen=True, slots=True)
class QueueEngineSpeed:
    """Seconds per token of prefill, per step of generation, and per step for each sequence and each of its context
    tokens."""

    prefill_s: float
    step_s: float = 0.010
    sequence_s: float = 0.0001
    context_s: float = 2e-8

    def step(self, sequences: float, context: float) -> float:
        """One token for each of so many sequences of mean context."""
        return self.step_s + sequences * (self.sequence_s + context * self.context_s)


@dataclass(slots=True)
class _Job:
    prefill: float
    output: int
    context: float
    done: asyncio.Future[None]


@dataclass(slots=True)
class QueueEngine:
    """A simulated engine, which serves requests while `run` is running as a task. A request generates exactly
    `max_tokens` tokens; a session's KV is kept, and a hand-off transfers it in `handoff_s` plus `token_s` per token."""

    id: EngineId
    speed: QueueEngineSpeed
    handoff_s: float = 0.0
    token_s: float = 0.0
    busy_s: float = 0.0
    kv: dict[str, int] = field(default_factory=dict)
    _prefills: deque[_Job] = field(default_factory=deque)
    _active: list[_Job] = field(default_factory=list)
    _work: asyncio.Event = field(default_factory=asyncio.Event)

    async def generate(self, request: GenerateRequest) -> Completion:
        params = dict(request.kv_transfer or {})
        prefills = bool(params.get("do_remote_decode"))
        tokens = len(request.token_ids)
        cached = self.kv.get(request.session, 0)
        if "tokens" in params:
            held = int(str(params["tokens"]))
            await asyncio.sleep(self.handoff_s + self.token_s * max(held - cached, 0))
            cached = max(cached, held)
        output = 0 if prefills else request.sampling.max_tokens
        job = _Job(max(tokens - cached, 0), output, tokens, asyncio.get_running_loop().create_future())
        # Without a prefill it joins the running batch: prefills of others are chunked and do not block it.
        (self._prefills if job.prefill > 0 or prefills else self._active).append(job)
        self._work.set()
        try:
            await job.done
        finally:
            if not job.done.done() or job.done.cancelled():
                job.prefill = job.output = 0
        self.kv[request.session] = tokens + output
        n = max(output, 1)
        kv = {"do_remote_prefill": not prefills, "do_remote_decode": False, "tokens": tokens + output}
        if prefills:
            kv |= {"do_remote_prefill": True, "weight_version": 0}
        return Completion((97,) * n, (-1.0,) * n, (VersionSpan(0, 0, n),), FinishReason.LENGTH, tokens, cached, kv)

    async def run(self) -> None:
        """Alternate forever between a chunk of the oldest prefill and a stride of every generation."""
        while True:
            self._admit()
            if not self._prefills and not self._active:
                self._work.clear()
                await self._work.wait()
                continue
            seconds = 0.0
            if self._prefills:
                chunk = min(self._prefills[0].prefill, PREFILL_CHUNK)
                self._prefills[0].prefill -= chunk
                seconds += chunk * self.speed.prefill_s
            active = self._active
            if active:
                context = sum(j.context for j in active) / len(active)
                seconds += DECODE_STRIDE * self.speed.step(len(active), context)
            await asyncio.sleep(seconds)
            self.busy_s += seconds
            for job in active:
                job.output -= DECODE_STRIDE
                job.context += DECODE_STRIDE
                if job.output <= 0 and not job.done.done():
                    job.done.set_result(None)
            self._active = [j for j in active if j.output > 0]

    def _admit(self) -> None:
        """Finished prefills become generations, or complete."""
        while self._prefills and self._prefills[0].prefill <= 0:
            job = self._prefills.popleft()
            if job.output > 0:
                self._active.append(job)
            elif not job.done.done():
                job.done.set_result(None)

    async def abort(self, request_ids: Sequence[str]) -> None:
        return None

    async def release(self, session: str) -> None:
        self.kv.pop(session, None)

    async def pause(self, mode: PauseMode) -> None:
        return None

    async def resume(self) -> None:
        return None

    async def update_weights(self, weights: WeightsRef) -> None:
        raise NotImplementedError("these engines compare routes; their weights do not change")

    async def stats(self) -> EngineStats:
        return EngineStats(len(self._active), len(self._prefills), 0, 0, 0, 0.0, self.busy_s)

    async def healthy(self) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class QueueTurnModel:
    """`TurnModel` of such engines, by pool, at a planned number of sequences per engine and their mean context."""

    speeds: dict[str, QueueEngineSpeed]
    sequences: dict[str, float]
    context: float
    latency_s: float
    token_s: float

    def prefill_s(self, kind: EngineKind, new: float, cached: float) -> float:
        return new * self.speeds[kind.pool].prefill_s

    def decode_s(self, kind: EngineKind, context: float, output: float) -> float:
        n = self.batch(kind)
        return output * self.speeds[kind.pool].step(n, self.context) / n

    def batch(self, kind: EngineKind) -> float:
        return max(self.sequences.get(kind.pool, 1.0), 1.0)

    def handoff_s(self, source: EngineKind, target: EngineKind, tokens: float) -> float:
        return self.latency_s + self.token_s * tokens

    def kv_gb(self, tokens: float) -> float:
        return tokens * 2.6e-4
