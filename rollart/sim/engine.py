"""A serving engine on virtual time, at the granularity of turns: continuous batching as exact processor sharing.

Requests wait, are prefilled in rounds that share steps with the decodes and slow them down, decode together, and are
preempted where the KV memory is full. The model also covers prefix KV kept between turns, slots, and weight updates
after which the KV of all requests in flight is computed again (I5). Step times come from `placement`'s roofline
(`steps`, which also computes the time of the next event): the state between two events is five numbers, with one timer
per engine.

A `DisaggregatedEngine` also hands KV over: a prefill here, its KV through a link, the decode there. It speaks vLLM's
pull protocol as `rollart.serving.handoff` does: the prefill engine keeps the KV under the request's id and answers with
where it is; the engine that decodes pulls it, which takes the link's time, and computes the last token of the prompt
anew. An engine may give KV back the same way for the next turn's prefill.
"""

from __future__ import annotations

import asyncio
import dataclasses
import enum
import math
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import NamedTuple

from rollart.errors import EngineError, HandoffFailed
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
from rollart.sim.links import SharedLink
from rollart.sim.loop import posting
from rollart.sim.steps import PrefillWork, StepModel, seconds_for, tokens_in

_NEVER = math.inf
_EPSILON = 1e-9
"""In units of service: events closer than this happen together."""

_ROOM = 1e-6
"""Tokens of KV: within this distance of its capacity the memory counts as full. Rounding errors of sums of contexts are
smaller."""


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """`slots` sequences at a time (vLLM's max_num_seqs); a step carries at most `step_tokens` (max_num_batched_tokens);
    `kv_tokens` replaces the roofline's capacity. A request is admitted while running ones leave the share `watermark`
    of the KV free after it (vLLM's rule), so that the next step does not preempt it at once."""

    slots: int = 256
    step_tokens: int = 8192
    kv_tokens: int | None = None
    watermark: float = 0.01


class ModelledEngine:
    """Implements `ports.Engine`. A token id is a mass (`workload`); a request is answered with exactly `max_tokens`
    tokens.

    The engine owns its requests and one timer, which is set to the next of these events: a sequence is finished, a
    round of prefills ends, the KV memory is full. `generate` waits for its completion, unblocked by that timer, by
    `abort`, or with `EngineError` when the engine dies (`fail`). Invariant: KV of running requests, running prefills
    and idle sessions never exceeds `kv_tokens`. Idle sessions are evicted first, least recently used first; then the
    latest request is preempted, and computed again when memory is free.

    `_at` is the time up to which everything is accounted for, `_service` the tokens that each sequence has received
    until then, and `_context` the tokens of all decoding sequences. `_when` is the time of the next event, at service
    `_target`. `_held` tokens of KV belong to the round of prefills, and `_pinned` tokens to others (`_reserved`
    included). Every public call first catches up with the loop's clock.

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
        limits = limits or EngineLimits()
        self.id = EngineId(name)
        self.version = version
        self._steps = steps
        self._load = load
        self._slots, self._budget = limits.slots, limits.step_tokens
        self.kv_tokens = steps.kv_tokens if limits.kv_tokens is None else limits.kv_tokens
        """Tokens of KV that it holds."""
        if self.kv_tokens < 2 or limits.slots < 1 or limits.step_tokens < 1:
            raise ValueError(f"engine {name}: {self.kv_tokens} tokens of KV, {limits} (rule: room for a request)")
        self._spare = int(limits.watermark * self.kv_tokens)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._post: Callable[..., object]
        self._quiet: asyncio.Future[None] | None
        self._timer_at = _NEVER
        self._at = self._when = 0.0
        self._dead = False
        self.prefill_s = self.decode_s = 0.0
        self.prompt_tokens = self.generated_tokens = self.cached_tokens = 0
        self.preemptions = self.recomputed_tokens = 0
        self.lost_tokens = self.lost_kv_tokens = 0
        """Generated tokens of requests in flight, and KV tokens of running requests and idle sessions, lost when the
        engine died."""
        self._empty()

    def _empty(self) -> None:
        """Nothing is in flight and no KV is held."""
        self._jobs: dict[str, SimulatedJob] = {}
        self._waiting: deque[SimulatedJob] = deque()
        self.ready: deque[SimulatedJob] = deque()
        self._late: list[SimulatedJob] = []
        self._running: dict[str, SimulatedJob] = {}
        self._ends: list[tuple[float, int, SimulatedJob]] = []
        self._round: list[SimulatedJob] = []
        self._work: PrefillWork | None = None
        self.held_tokens = self.pinned = 0
        self.reserved: dict[str, KvReservation] = {}
        self.retained = RetainedKv()
        self._service = self._context = self._round_end = 0.0
        self._target = 0.0
        self._when = _NEVER
        self._arrivals = 0
        self._paused = self._closed = False
        self._quiet = None

    @property
    def kv_used(self) -> float:
        """Tokens of KV held now, for any purpose."""
        self._catch_up()
        self._evict()
        return self._context + self.held_tokens + self.pinned + self.retained.total

    async def generate(self, request: GenerateRequest) -> Completion:
        self._check()
        job = self._submit(request, sum(request.token_ids), request.sampling.max_tokens)
        try:
            return await job.future
        except asyncio.CancelledError:
            if job.phase is not OVER:
                self._end_early(job)
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
        self._paused = True
        self._when = _NEVER

    async def resume(self) -> None:
        self._check()
        self._catch_up()
        self._paused = self._closed = False
        for job in self._late:
            if job.phase is WAITING:
                self._enqueue(job)
        self._late.clear()
        self._go_on()
        self._arm()

    async def update_weights(self, weights: WeightsRef) -> None:
        """Load the weights and drop all KV; requests in flight are prefilled again after `resume`, with their tokens so
        far."""
        self._check()
        if self._load is not None:
            await self._load(weights)
            self._check()
        self._catch_up()
        again = sorted((j for j in (*self._running.values(), *self._round)), key=lambda j: j.arrival)
        for job in again:
            job.done = job.generated(self._service)
            job.phase = WAITING
        for job in self._jobs.values():
            if job.done > (job.marks[-1][1] if job.marks else 0):
                job.marks = (*job.marks, (self.version, job.done))
        self._running.clear()
        self._ends.clear()
        self._round, self._work = [], None
        self.held_tokens, self._context = 0, 0.0
        self._waiting.extendleft(reversed(again))
        self.reserved = {name: KvReservation(r.need, 0) for name, r in self.reserved.items()}
        self.retained = RetainedKv()
        self.version = weights.version
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
            kv_used=(self._context + self.held_tokens + self.pinned) / self.kv_tokens,
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
                job.phase = OVER
                if not job.future.done():
                    job.future.set_exception(EngineError(f"{self.id} died", retryable=True))
            if quiet is not None and not quiet.done():
                quiet.set_exception(EngineError(f"{self.id} died", retryable=True))
        self._dead = dead

    def restart(self, version: int) -> None:
        """Restart the process with these weights and an empty memory."""
        self.fail = True
        self._dead = False
        self.version = version

    def _check(self) -> None:
        if self._dead:
            raise EngineError(f"{self.id} is down", retryable=True)

    def _submit(self, request: GenerateRequest, tokens: int, output: int) -> SimulatedJob:
        if tokens < 1 or tokens + output > self.kv_tokens or request.request_id in self._jobs:
            raise EngineError(
                f"{self.id} refuses {request.request_id}: {tokens} tokens and {output} more, {self.kv_tokens} fit "
                "(rule: at least one token of prompt, all fit, an id is used once)",
                retryable=False,
            )
        loop = self._loop
        if loop is None:
            loop = self._loop = asyncio.get_running_loop()
            self._post = posting(loop)
            self._at = loop.time()
        self._arrivals += 1
        job = SimulatedJob(request, tokens, output, self._arrivals, loop.create_future())
        self._jobs[request.request_id] = job
        if self._closed:
            self._late.append(job)
            return job
        self._enqueue(job)
        # A running round of prefills admits no request, so that an arrival matters only without one.
        if self._work is None and not self._paused:
            self._catch_up()
            self._go_on()
            self._arm()
        return job

    def _enqueue(self, job: SimulatedJob) -> None:
        """Queue the request; requests with reserved KV go first."""
        reserved = self.reserved
        (self.ready if reserved and job.request.request_id in reserved else self._waiting).append(job)

    def _tick(self, when: float) -> None:
        if when == self._timer_at:
            self._timer_at = _NEVER
            self._catch_up()
            self._arm()

    def _arm(self) -> None:
        """Set the one valid timer, never later than the next event; a timer that fires early is set again."""
        when = self._when
        if when < self._timer_at and self._loop is not None:
            self._timer_at = when
            self._post(when, self._tick, when)

    def _catch_up(self) -> None:
        if self._loop is None:
            return
        now = self._loop.time()
        while self._when <= now:
            self._pass(self._when, self._target)
            self._arrive()
        if now > self._at:
            if self._when < _NEVER:
                n = len(self._running)
                service = self._service + tokens_in(now - self._at, self._lines, n, self._context)
                target = self._target
                self._pass(now, service if service < target else target)
            else:
                self._at = now

    def _pass(self, at: float, service: float) -> None:
        self._context += len(self._running) * (service - self._service)
        if self._work is None:
            self.decode_s += at - self._at
        else:
            self.prefill_s += at - self._at
        self._at, self._service = at, service

    def _arrive(self) -> None:
        """Handle the events at this service: finished sequences, the end of the round, a full memory."""
        service = self._service + _EPSILON
        ends, running = self._ends, self._running
        while ends and ends[0][0] <= service:
            end, _, job = heappop(ends)
            if job.phase is DECODE and job.end == end:
                del running[job.request.request_id]
                self._context -= job.tokens + job.output
                self._finish(job)
        if self._work is not None and self._round_end <= service:
            # The round's prompts are computed, and each request has its next token.
            jobs, self._round, self._work, self.held_tokens = self._round, [], None, 0
            for job in jobs:
                job.done += 1
                if job.done >= job.output:
                    self._finish(job)
                    continue
                job.phase, job.base = DECODE, self._service
                job.end = self._service + job.output - job.done
                running[job.request.request_id] = job
                self._context += job.tokens + job.done
                heappush(ends, (job.end, job.arrival, job))
        while running and self._context + self.held_tokens >= self.kv_tokens - self.pinned + _ROOM:
            # The latest request releases its KV, and is computed again when memory is free.
            job = max(running.values(), key=lambda j: j.arrival)
            self._leave(job)
            job.phase = WAITING
            self._waiting.appendleft(job)
            self.preemptions += 1
        self._go_on()

    def _go_on(self) -> None:
        """Start a round if there is one to start, and plan the next event."""
        if self._paused:
            self._when = _NEVER
            return
        if self._work is None and (self._waiting or self.ready):
            self._refill()
        n = len(self._running)
        if self._work is not None:
            self._lines = self._steps.mixed(n, self._work)
            target = self._round_end
        elif n:
            self._lines = self._steps.decoding(n)
            target = _NEVER
        else:
            self._ends.clear()
            self._service = self._context = 0.0
            self._when = _NEVER
            return
        service = self._service
        if n:
            ends = self._ends
            end, _, job = ends[0]
            while job.phase is not DECODE or job.end != end:
                heappop(ends)
                end, _, job = ends[0]
            room = self.kv_tokens - self.pinned - self.held_tokens - self._context + 2 * _ROOM
            full = service + (room if room > 2 * _ROOM else 2 * _ROOM) / n
            if end < target:
                target = end
            if full < target:
                target = full
        self._target = target
        self._when = self._at + seconds_for(target - service, self._lines, n, self._context)

    def _refill(self) -> None:
        """Start a round of the oldest waiting prefills: as many as a step carries, each whole, at least one. A prefill
        that does not fit into the memory blocks the requests after it, except requests with reserved KV."""
        ready, running = self.ready, len(self._running)
        chunk = max(self._budget - running, self._budget // 4, 1)
        tokens, jobs, parts = 0, self._round, []
        retained = self.retained
        self._evict()
        while tokens < chunk and running + len(jobs) < self._slots:
            waiting = ready or self._waiting
            if not waiting:
                break
            job = waiting[0]
            if job.phase is OVER:
                waiting.popleft()
                continue
            need = job.tokens + job.done + 1
            reservation = self.reserved.pop(job.request.request_id, None) if self.reserved else None
            if reservation is None:
                room = self.kv_tokens - self.pinned - self._context - self.held_tokens
                if need + (self._spare if running or jobs else 0) > room:
                    break
                kept = retained.claim(job.request.session, job.request.cache_salt)
            else:
                self.pinned -= reservation.need
                kept = reservation.kept
            waiting.popleft()
            if kept > need - 2:
                kept = need - 2
            self.held_tokens += need
            self._evict()
            new = need - 1 - kept
            job.phase = PREFILL
            if job.admitted:
                self.recomputed_tokens += new
            else:
                job.admitted, job.cached = True, kept
                self.prompt_tokens += job.tokens
                self.cached_tokens += kept
            tokens += new
            jobs.append(job)
            parts.append((new, kept))
        if jobs:
            self._work = self._steps.work(parts, chunk)
            self._round_end = self._service + self._work.steps

    def _evict(self) -> None:
        """Idle sessions leave the memory that running requests need."""
        room = self.kv_tokens - self.pinned - self._context - self.held_tokens + _ROOM
        if self.retained.total > room:
            self.retained.shrink(room)

    def _leave(self, job: SimulatedJob) -> None:
        """Take the job out of the decoding batch and set `done` to its progress."""
        del self._running[job.request.request_id]
        self._context -= job.tokens + job.done + (self._service - job.base)
        job.done = job.generated(self._service)

    def _finish(self, job: SimulatedJob) -> None:
        self._retain(job, job.tokens + job.output - 1)  # the KV of the last token is not there yet
        self._close(job, FinishReason.LENGTH)

    def _retain(self, job: SimulatedJob, tokens: int) -> None:
        self.retained.keep(job.request.session, tokens, job.request.cache_salt)

    def _close(self, job: SimulatedJob, finish: FinishReason) -> None:
        job.phase = OVER
        del self._jobs[job.request.request_id]
        tokens = job.done if finish is FinishReason.ABORT else job.output
        self.generated_tokens += tokens
        if not job.future.done():
            job.future.set_result(completion_of(job, finish, self.version, tokens))
        if self._quiet is not None and not self._jobs.keys() - {j.request.request_id for j in self._late}:
            if not self._quiet.done():
                self._quiet.set_result(None)
            self._quiet = None

    def _end_early(self, job: SimulatedJob) -> None:
        """End the request in any phase; its `generate`, if it still waits, returns the tokens so far."""
        self._catch_up()
        if job.phase is OVER:
            return
        if job.phase is DECODE:
            self._leave(job)
        elif job.phase is PREFILL:
            self._round.remove(job)
            self.held_tokens -= job.tokens + job.done + 1
            if not self._round:
                self._work = None
        self._close(job, FinishReason.ABORT)
        self._go_on()
        self._arm()


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


class DisaggregatedEngine(ModelledEngine):
    """A `ModelledEngine` that prefills for other engines, decodes turns that others prefilled, or does both.

    Exported KV is pinned: it counts as used memory. A request that pulls KV first waits for memory, in order, and holds
    it until it runs, as vLLM allocates the blocks before the transfer. KV given back after a decode (`returns`) is not
    pinned, as it is the session's prefix here. Hand-off values name the weights, as the embedded engine's
    do; KV of other weights than either engine's current ones is refused in any case.
    """

    def __init__(
        self,
        name: str,
        steps: StepModel,
        fabric: KvFabric,
        *,
        limits: EngineLimits | None = None,
        load: Callable[[WeightsRef], Awaitable[None]] | None = None,
        returns: bool = True,
    ) -> None:
        self._exports: dict[str, _Export] = {}
        self._memory_waiters: deque[tuple[GenerateRequest, asyncio.Future[None]]] = deque()
        super().__init__(name, steps, limits=limits, load=load)
        self.fabric = fabric
        self._returns = returns
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
            self._release_reservation(request, self.version)
        prefills = bool(params.get("do_remote_decode"))
        gives_back = pulls and self._returns and params.get("return_kv", True)
        if completion.finish is FinishReason.ABORT or not (prefills or gives_back):
            return completion
        if not prefills:
            tokens = self.retained.held(request.session, request.cache_salt)
            self._exports[request.request_id] = _Export(request, self.version, tokens, None)
        value = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": str(self.id),
            "remote_request_id": request.request_id,
            "weight_version": self.version,
        }
        return dataclasses.replace(completion, kv_transfer=value)

    async def abort(self, request_ids: Sequence[str]) -> None:
        await super().abort(request_ids)
        for request_id in request_ids:
            self._drop_export(request_id)

    async def release(self, session: str) -> None:
        await super().release(session)
        for name in [n for n, e in self._exports.items() if e.request.session == session]:
            self._drop_export(name)

    def _empty(self) -> None:
        super()._empty()
        for export in self._exports.values():
            if export.expiry is not None:
                export.expiry.cancel()
        self._exports.clear()
        for _, room in self._memory_waiters:
            if not room.done():
                room.set_exception(EngineError(f"{self.id} died", retryable=True))
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
        expiry = asyncio.get_running_loop().call_later(self.fabric.lease_s, self._drop_export, name)
        self.pinned += tokens
        self._exports[name] = _Export(job.request, self.version, tokens, expiry)

    def _drop_export(self, name: str) -> None:
        """Drop an export that will not be pulled."""
        export = self._exports.pop(name, None)
        if export is not None and export.expiry is not None:
            export.expiry.cancel()
            self._unpin(export.tokens)

    def _unpin(self, tokens: int) -> None:
        """Others hold so many tokens of KV no more."""
        self._catch_up()
        self.pinned -= tokens
        if self._work is None:
            self._go_on()
            self._arm()

    def _fits_memory(self, request: GenerateRequest) -> bool:
        spare = self._spare if self._running or self._round else 0
        return sum(request.token_ids) + 1 + spare <= self.kv_tokens - self.pinned - self._context - self.held_tokens

    def _reserve(self, request: GenerateRequest) -> None:
        """Reserve KV for the whole prompt; the local part of its prefix is included."""
        need, kept = sum(request.token_ids) + 1, self.retained.claim(request.session, request.cache_salt)
        self.reserved[request.request_id] = KvReservation(need, kept)
        self.pinned += need
        self._evict()

    def _release_reservation(self, request: GenerateRequest, version: int) -> None:
        """Release the reservation of a request that will not run. The local part of its prefix is kept if it has the
        current weights."""
        room = self.reserved.pop(request.request_id, None)
        if room is None:
            return
        self._catch_up()
        if version == self.version:
            self.retained.keep(request.session, room.kept, request.cache_salt)
        self._unpin(room.need)

    async def _pull(self, request: GenerateRequest, params: Mapping[str, object]) -> None:
        """The KV comes over and lies in the room that the request has."""
        if sum(request.token_ids) + request.sampling.max_tokens > self.kv_tokens:
            return  # it is refused in a moment
        version = self.version
        try:
            self._catch_up()
            if not self._memory_waiters and self._fits_memory(request):
                self._reserve(request)
            else:
                room = asyncio.get_running_loop().create_future()
                self._memory_waiters.append((request, room))
                await room
            await self._fetch(request, params)
        except BaseException:
            self._release_reservation(request, version)
            raise

    async def _fetch(self, request: GenerateRequest, params: Mapping[str, object]) -> None:
        fabric, name = self.fabric, str(params["remote_request_id"])
        source, version = fabric.engines[str(params["remote_engine_id"])], self.version
        if source.fail:
            await asyncio.sleep(fabric.dead_s)
            raise HandoffFailed(f"{self.id}: {source.id} does not answer")
        export = source._exports.pop(name, None)
        if export is None:
            raise HandoffFailed(f"{self.id}: {source.id} has no KV of {name}")
        tokens, session, salt = export.tokens, export.request.session, export.request.cache_salt
        if export.expiry is None:
            tokens = min(tokens, source.retained.held(session, salt))
        kept = self.reserved[request.request_id].kept
        missing = tokens - kept
        try:
            if missing > 0 and export.version == version == source.version:
                gb = missing * self._steps.kv_bytes_per_token / 1e9
                await fabric.link(source.id, self.id).transfer(gb)
                fabric.handoffs += 1
                fabric.moved_tokens += missing
        finally:
            if not source.fail and export.expiry is not None:
                export.expiry.cancel()
                current = source.version == export.version
                if current and not (export.request.kv_transfer or {}).get("session_ends"):
                    # A turn follows: the pinned KV becomes the session's prefix, as long as memory is free.
                    source.retained.keep(session, export.tokens, salt)
                source._unpin(export.tokens)
                if current:
                    source._evict()
        self._check()
        if not export.version == version == self.version == source.version or source.fail or tokens < 1:
            what = f"{tokens} tokens of v{export.version}, v{self.version} here"
            raise HandoffFailed(f"{self.id}: KV of {name} from {source.id}: {what}")
        room = self.reserved.get(request.request_id)
        if room is None:
            raise EngineError(f"{self.id} died and came back", retryable=True)
        self.reserved[request.request_id] = room._replace(kept=max(tokens, kept))


@dataclass(slots=True)
class _Export:
    request: GenerateRequest
    version: int
    tokens: int
    expiry: asyncio.TimerHandle | None
    """None: not kept for sure; it is part of the session's prefix and goes when that does."""


class KvReservation(NamedTuple):
    """KV capacity that a request holds before it queues: `need` tokens, of which the KV of `kept` came from another
    engine."""

    need: int
    kept: int


class Phase(enum.IntEnum):
    """The phase of a request. A preempted or recomputed request waits again."""

    WAITING = 0
    PREFILL = 1
    DECODE = 2
    OVER = 3


WAITING, PREFILL, DECODE, OVER = Phase


@dataclass(slots=True, eq=False)
class SimulatedJob:
    """Mutable, owned by one engine. Token counts are real tokens.

    `done` tokens are generated, counted at its last change of phase; while it decodes, `base` is the engine's service
    when it joined (with `done` tokens) and `end` the one at which it is finished. `marks` are (version, tokens) at each
    change of weights: the tokens up to there are of that version.
    """

    request: GenerateRequest
    tokens: int
    output: int
    arrival: int
    future: asyncio.Future[Completion]
    phase: Phase = WAITING
    done: int = 0
    base: float = 0.0
    end: float = 0.0
    cached: int = 0
    admitted: bool = False
    """True if the request was admitted before, so that its prefill is a recomputation."""
    marks: tuple[tuple[int, int], ...] = ()

    def generated(self, service: float) -> int:
        """Whole tokens so far. A token is there when its step is over."""
        if self.phase is not DECODE:
            return self.done
        return min(self.output, self.done + int(service - self.base + 1e-6))


def completion_of(job: SimulatedJob, finish: FinishReason, version: int, tokens: int) -> Completion:
    """One id per policy version, its mass the tokens sampled under it."""
    masses: list[int] = []
    spans: list[VersionSpan] = []
    last = 0
    for of, until in (*job.marks, (version, tokens)):
        if until > last:
            spans.append(VersionSpan(of, len(masses), len(masses) + 1))
            masses.append(until - last)
            last = until
    assert sum(masses) == tokens, f"{job.request.request_id}: {masses} for {tokens} tokens"
    logprobs = (-1.0,) * len(masses)  # simulated tokens are not trained on: any valid log-probability does
    return Completion(tuple(masses), logprobs, tuple(spans), finish, job.tokens, job.cached, None, tokens)


class RetainedKv:
    """Tokens of KV by session. `total` is their sum."""

    __slots__ = ("_kept", "total")

    def __init__(self) -> None:
        self._kept: OrderedDict[str, tuple[int, str | None]] = OrderedDict()
        self.total = 0

    def keep(self, session: str, tokens: int, salt: str | None) -> None:
        """Set the session's KV and mark it as most recently used."""
        self.take(session)
        if tokens > 0:
            self._kept[session] = tokens, salt
            self.total += tokens

    def held(self, session: str, salt: str | None) -> int:
        """Tokens of the session that a request with this salt may use."""
        found = self._kept.get(session)
        return found[0] if found is not None and found[1] == salt else 0

    def claim(self, session: str, salt: str | None) -> int:
        """Remove the session's KV; return the tokens of it that a request with this salt may use."""
        usable = self.held(session, salt)
        self.take(session)
        return usable

    def take(self, session: str) -> None:
        """Remove the session's KV."""
        found = self._kept.pop(session, None)
        if found is not None:
            self.total -= found[0]

    def shrink(self, room: float) -> None:
        """Evict until at most `room` tokens are left, from the end of the oldest session, as vLLM frees blocks."""
        room = max(int(room), 0)
        while self.total > room:
            session, (tokens, salt) = self._kept.popitem(last=False)
            gone = min(tokens, self.total - room)
            self.total -= gone
            if gone < tokens:
                self._kept[session] = tokens - gone, salt
                self._kept.move_to_end(session, last=False)
