"""Continuous batching as exact processor sharing, one timer per engine: the computing part of a simulated engine.

Requests wait, are prefilled in rounds that share steps with the decodes, decode together, and are preempted where the
KV memory is full. The state between two events is five numbers; `sharing` computes the time of the next event.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NamedTuple

from rollart.errors import EngineError
from rollart.model import EngineId, FinishReason, GenerateRequest
from rollart.sim.jobs import DECODE, OVER, PREFILL, WAITING, SimulatedJob, completion_of
from rollart.sim.loop import posting
from rollart.sim.retained import RetainedKv
from rollart.sim.sharing import seconds_for, tokens_in
from rollart.sim.steps import PrefillWork, StepModel

__all__ = ["ContinuousBatch", "EngineLimits", "KvReservation"]

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


class KvReservation(NamedTuple):
    """KV capacity that a request holds before it queues: `need` tokens, of which the KV of `kept` came from another
    engine."""

    need: int
    kept: int


class ContinuousBatch:
    """The state of an engine: requests, their progress, and the KV memory.

    `_at` is the time up to which everything is accounted for, `_service` the tokens that each sequence has received
    until then, and `_context` the tokens of all decoding sequences. `_when` is the time of the next event, at service
    `_target`. `_held` tokens of KV belong to the round of prefills, and `_pinned` tokens to others (`_reserved`
    included). Every public call first catches up with the loop's clock.
    """

    def __init__(self, name: str, steps: StepModel, *, version: int, limits: EngineLimits) -> None:
        self._id = EngineId(name)
        self._steps = steps
        self._version = version
        self._slots, self._budget = limits.slots, limits.step_tokens
        self.kv_tokens = steps.kv_tokens if limits.kv_tokens is None else limits.kv_tokens
        """Tokens of KV that it holds."""
        if self.kv_tokens < 2 or limits.slots < 1 or limits.step_tokens < 1:
            raise ValueError(f"engine {name}: {self.kv_tokens} tokens of KV, {limits} (rule: room for a request)")
        self._spare = int(limits.watermark * self.kv_tokens)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._post: Callable[..., object] = _unbound
        self._timer_at = _NEVER
        self._at = self._when = 0.0
        self.prefill_s = self.decode_s = 0.0
        self.prompt_tokens = self.generated_tokens = self.cached_tokens = 0
        self.preemptions = self.recomputed_tokens = 0
        self._empty()

    def _empty(self) -> None:
        """Nothing is in flight and no KV is held."""
        self._jobs: dict[str, SimulatedJob] = {}
        self._waiting: deque[SimulatedJob] = deque()
        self._ready: deque[SimulatedJob] = deque()
        self._late: list[SimulatedJob] = []
        self._running: dict[str, SimulatedJob] = {}
        self._ends: list[tuple[float, int, SimulatedJob]] = []
        self._round: list[SimulatedJob] = []
        self._work: PrefillWork | None = None
        self._held = self._pinned = 0
        self._reserved: dict[str, KvReservation] = {}
        self.retained = RetainedKv()
        self._service = self._context = self._round_end = 0.0
        self._target = 0.0
        self._when = _NEVER
        self._arrivals = 0
        self._paused = self._closed = False
        self._quiet: asyncio.Future[None] | None = None

    def _submit(self, request: GenerateRequest, tokens: int, output: int) -> SimulatedJob:
        if tokens < 1 or tokens + output > self.kv_tokens or request.request_id in self._jobs:
            raise EngineError(
                f"{self._id} refuses {request.request_id}: {tokens} tokens and {output} more, {self.kv_tokens} fit "
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
        reserved = self._reserved
        (self._ready if reserved and job.request.request_id in reserved else self._waiting).append(job)

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
            self._end_round()
        while running and self._context + self._held >= self.kv_tokens - self._pinned + _ROOM:
            self._preempt()
        self._go_on()

    def _end_round(self) -> None:
        """Finish the round: its prompts are computed, and each request has its next token."""
        jobs, self._round, self._work, self._held = self._round, [], None, 0
        for job in jobs:
            job.done += 1
            if job.done >= job.output:
                self._finish(job)
                continue
            job.phase, job.base = DECODE, self._service
            job.end = self._service + job.output - job.done
            self._running[job.request.request_id] = job
            self._context += job.tokens + job.done
            heappush(self._ends, (job.end, job.arrival, job))

    def _stop(self) -> None:
        self._paused = True
        self._when = _NEVER

    def _go_on(self) -> None:
        """Start a round if there is one to start, and plan the next event."""
        if self._paused:
            self._when = _NEVER
            return
        if self._work is None and (self._waiting or self._ready):
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
            room = self.kv_tokens - self._pinned - self._held - self._context + 2 * _ROOM
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
        ready, running = self._ready, len(self._running)
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
            reservation = self._reserved.pop(job.request.request_id, None) if self._reserved else None
            if reservation is None:
                room = self.kv_tokens - self._pinned - self._context - self._held
                if need + (self._spare if running or jobs else 0) > room:
                    break
                kept = retained.claim(job.request.session, job.request.cache_salt)
            else:
                self._pinned -= reservation.need
                kept = reservation.kept
            waiting.popleft()
            if kept > need - 2:
                kept = need - 2
            self._held += need
            self._evict()
            new = need - 1 - kept
            job.phase, job.new = PREFILL, new
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

    def _start_over(self) -> None:
        """Drop all KV; requests in flight wait to be prefilled again, with their tokens so far."""
        again = sorted((j for j in (*self._running.values(), *self._round)), key=lambda j: j.arrival)
        for job in again:
            job.done = job.generated(self._service)
            job.phase = WAITING
        for job in self._jobs.values():
            job.mark(self._version, job.done)
        self._running.clear()
        self._ends.clear()
        self._round, self._work = [], None
        self._held, self._context = 0, 0.0
        self._waiting.extendleft(reversed(again))
        self._reserved = {name: KvReservation(r.need, 0) for name, r in self._reserved.items()}
        self.retained.clear()

    def _evict(self) -> None:
        """Idle sessions leave the memory that running requests need."""
        room = self.kv_tokens - self._pinned - self._context - self._held + _ROOM
        if self.retained.total > room:
            self.retained.shrink(room)

    def _preempt(self) -> None:
        """Preempt the latest request: it releases its KV, and is computed again when memory is free."""
        job = max(self._running.values(), key=lambda j: j.arrival)
        self._leave(job)
        job.phase = WAITING
        self._waiting.appendleft(job)
        self.preemptions += 1

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
        self.generated_tokens += job.done if finish is FinishReason.ABORT else job.output
        if not job.future.done():
            tokens = job.done if finish is FinishReason.ABORT else job.output
            job.future.set_result(completion_of(job, finish, self._version, tokens))
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
            self._held -= job.tokens + job.done + 1
            if not self._round:
                self._work = None
        self._close(job, FinishReason.ABORT)
        self._go_on()
        self._arm()

    def _drop(self, job: SimulatedJob) -> None:
        if job.phase is not OVER:
            self._end_early(job)


def _unbound(*args: object) -> None:
    raise AssertionError("an engine sets no timer before it has taken a request")
