"""An engine on virtual time at the granularity of turns: continuous batching as exact processor sharing.

Step times come from `placement`'s roofline (`steps`). The model covers a serving engine's scheduling: chunked prefills
that share steps with the decodes and slow them down, prefix KV kept between turns, KV memory with preemption, slots,
and weight updates after which the KV of all requests in flight is computed again (I5).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from rollart.errors import EngineError
from rollart.model import Completion, EngineId, EngineStats, GenerateRequest, PauseMode, WeightsRef
from rollart.sim.batching import ContinuousBatch, EngineLimits
from rollart.sim.jobs import Phase
from rollart.sim.steps import StepModel

__all__ = ["EngineLimits", "ModelledEngine"]


class ModelledEngine(ContinuousBatch):
    """Implements `ports.Engine`. A token id is a mass (`mass`); a request is answered with exactly `max_tokens` tokens.

    The engine owns its requests and one timer, which is set to the next of these events: a sequence is finished, a
    round of prefills ends, the KV memory is full. `generate` waits for its completion, unblocked by that timer, by
    `abort`, or with `EngineError` when the engine dies (`fail`). Invariant: KV of running requests, running prefills
    and idle sessions never exceeds `kv_tokens`. Idle sessions are evicted first, least recently used first; then the
    latest request is preempted, and computed again when memory is free.

    `load` is awaited in `update_weights`: it transfers the weights to this engine.
    """

    def __init__(
        self,
        name: str,
        steps: StepModel,
        *,
        version: int = 0,
        limits: EngineLimits | None = None,
        load: Callable[[WeightsRef], Awaitable[None]] | None = None,
    ) -> None:
        super().__init__(name, steps, version=version, limits=limits or EngineLimits())
        self._load = load
        self._dead = False
        self.lost_tokens = self.lost_kv_tokens = 0
        """Generated tokens of requests in flight, and KV tokens of running requests and idle sessions, lost when the
        engine died."""

    @property
    def id(self) -> EngineId:
        return self._id

    @property
    def version(self) -> int:
        return self._version

    @property
    def busy_s(self) -> float:
        """Seconds of computation."""
        return self.prefill_s + self.decode_s

    @property
    def kv_used(self) -> float:
        """Tokens of KV held now, for any purpose."""
        self._catch_up()
        self._evict()
        return self._context + self._held + self._pinned + self.retained.total

    async def generate(self, request: GenerateRequest) -> Completion:
        self._check()
        job = self._submit(request, sum(request.token_ids), request.sampling.max_tokens)
        try:
            return await job.future
        except asyncio.CancelledError:
            self._drop(job)
            raise

    async def abort(self, request_ids: Sequence[str]) -> None:
        self._check()
        for request_id in request_ids:
            job = self._jobs.get(request_id)
            if job is not None:
                self._end_early(job)

    async def release(self, session: str) -> None:
        self._check()
        self.retained.take(session)

    async def pause(self, mode: PauseMode) -> None:
        self._check()
        self._catch_up()
        if mode is PauseMode.ABORT:
            for job in list(self._jobs.values()):
                self._end_early(job)
        elif mode is PauseMode.WAIT and self._jobs:
            self._closed = True
            self._quiet = asyncio.get_running_loop().create_future()
            await self._quiet
        self._catch_up()
        self._stop()

    async def resume(self) -> None:
        self._check()
        self._catch_up()
        self._paused = self._closed = False
        for job in self._late:
            if job.phase is Phase.WAITING:
                self._enqueue(job)
        self._late.clear()
        self._go_on()
        self._arm()

    async def update_weights(self, weights: WeightsRef) -> None:
        """Load the weights and drop all KV; requests in flight are prefilled again after `resume`."""
        self._check()
        if self._load is not None:
            await self._load(weights)
            self._check()
        self._catch_up()
        self._start_over()
        self._version = weights.version
        self._go_on()
        self._arm()

    async def stats(self) -> EngineStats:
        """Generated tokens include tokens of requests in flight and of aborted requests."""
        self._check()
        self._catch_up()
        running = len(self._running) + len(self._round)
        flying = sum(j.generated(self._service) for j in self._jobs.values())
        return EngineStats(
            running,
            len(self._jobs) - running,
            self.prompt_tokens,
            self.generated_tokens + flying,
            self.cached_tokens,
            self.prefill_s,
            self.decode_s,
            kv_used=(self._context + self._held + self._pinned) / self.kv_tokens,
            preemptions=self.preemptions,
            kv_tokens=self.kv_tokens,
        )

    async def healthy(self) -> bool:
        return not self._dead

    @property
    def fail(self) -> bool:
        """True if the engine is dead. Setting it ends all requests in flight with `EngineError`; `restart` revives the
        engine."""
        return self._dead

    @fail.setter
    def fail(self, dead: bool) -> None:
        if dead and not self._dead:
            self._catch_up()
            jobs, quiet = list(self._jobs.values()), self._quiet
            self.lost_tokens += sum(j.generated(self._service) for j in jobs)
            self.lost_kv_tokens += int(self._context + self.retained.total)
            self._empty()
            for job in jobs:
                job.phase = Phase.OVER
                if not job.future.done():
                    job.future.set_exception(EngineError(f"{self._id} died", retryable=True))
            if quiet is not None and not quiet.done():
                quiet.set_exception(EngineError(f"{self._id} died", retryable=True))
        self._dead = dead

    def restart(self, version: int) -> None:
        """Restart the process with these weights and an empty memory."""
        self.fail = True
        self._dead = False
        self._version = version

    def _check(self) -> None:
        if self._dead:
            raise EngineError(f"{self._id} is down", retryable=True)
