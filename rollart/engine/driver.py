"""Runs the steps: the bridge between an asyncio server and the synchronous runner.

A short step (a few ms, small model) runs on the loop itself: in a thread it would contend with the loop for the GIL at
every operator, which costs more than it saves. A long step runs in a worker thread, so that the loop can answer health
checks and aborts.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from rollart.engine.jobs import EngineJob, FinishedJob, refuse_invalid
from rollart.engine.runner import Runner
from rollart.errors import EngineError
from rollart.model import Completion, FinishReason, PauseMode

T = TypeVar("T")

INLINE_S = 0.02
"""Seconds. A step runs on the loop only if the previous one was shorter; bounds the delay of a health check."""

TICKS = 3
"""Loop iterations between steps. A request needs about three (read, parse, handle) to reach the queue, and requests
that arrive together should be prefilled together."""


class Driver:
    """Steps the runner; no other code may. All methods are called on the loop's thread.

    `run` consumes queued requests and steps until cancelled; it waits for work or for `resume`. `generate` waits
    until its request ends; `submit` is the same with a callback. `apply` runs a function between
    steps, never during one.
    """

    def __init__(self, runner: Runner, *, threads: int = 1) -> None:
        self.runner = runner
        self._threads = threads
        self._wake = asyncio.Event()
        self._stepping = False
        self._deferred: deque[Callable[[], object]] = deque()
        self._open: dict[str, EngineJob] = {}
        self._held: dict[str, EngineJob] = {}
        self._mode: PauseMode | None = None
        self._frozen = False
        self._drained: asyncio.Event = asyncio.Event()
        self._last_step_s = 0.0

    @property
    def paused(self) -> bool:
        return self._mode is not None

    @property
    def held(self) -> int:
        """Number of requests that wait for `resume` because a pause is draining the others."""
        return len(self._held)

    async def run(self) -> None:
        """Step until cancelled. However this ends, every open request gets a retryable error."""
        cause = "is shutting down"
        try:
            with ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(self._threads,)) as pool:
                while True:
                    await self._step_or_wait(pool)
        except Exception as error:
            cause = f"failed in a step: {error!r}"
            raise
        finally:
            jobs, self._open = self._open, {}
            for job in jobs.values():
                job.deliver(EngineError(f"the engine {cause}", retryable=True))

    def submit(self, job: EngineJob) -> None:
        """Queue a request; its `deliver` is called once, with the finished request or the error that refused it.
        EngineError if the id is in use."""
        name = job.request.request_id
        if name in self._open:
            raise EngineError(f"request id {name!r} is in use", retryable=False, remedy="give every request its own id")
        if self._mode is PauseMode.WAIT and not self._frozen:
            refuse_invalid(job, vocab=self.runner.network.architecture.vocab, context=self.runner.context)
            self._held[name] = self._open[name] = job
            return
        self._open[name] = job
        self.apply_soon(lambda: self._add(job))

    def discard(self, name: str) -> None:
        """Abort a request whose caller is gone; nothing is delivered."""
        self._open.pop(name, None)
        self.abort_soon([name])

    def abort_soon(self, request_ids: Sequence[str] | None) -> None:
        """End these requests (None: all) before the next step; their tokens so far are delivered."""
        for name in list(self._held) if request_ids is None else request_ids:
            job = self._held.pop(name, None)
            if job is not None:
                self._settle([FinishedJob(job, Completion((), (), (), FinishReason.ABORT, len(job.prompt)))])
        self.apply_soon(lambda: self._settle(self.runner.abort(request_ids)))

    async def generate(self, job: EngineJob) -> FinishedJob:
        """Run a request to its end. Cancelling this call aborts it. EngineError if it is refused."""
        waiter: asyncio.Future[FinishedJob] = asyncio.get_running_loop().create_future()

        def deliver(result: FinishedJob | EngineError) -> None:
            if waiter.done():
                return
            if isinstance(result, EngineError):
                waiter.set_exception(result)
            else:
                waiter.set_result(result)

        job.deliver = deliver
        self.submit(job)
        try:
            return await waiter
        except asyncio.CancelledError:
            self.discard(job.request.request_id)
            raise

    async def abort(self, request_ids: Sequence[str] | None) -> None:
        """End these requests (None: all); their `generate` returns the tokens so far."""
        self.abort_soon(request_ids)
        await self.apply(lambda: None)

    async def pause(self, mode: PauseMode) -> None:
        """Stop stepping. KEEP freezes requests as they are, WAIT lets them finish first, ABORT ends them.

        Requests that arrive while paused wait for `resume`.
        """
        self._mode = mode
        if mode is PauseMode.WAIT:
            self._frozen = False
            self._drained.clear()
            self._wake.set()
            await self._drained.wait()
            return
        self._frozen = True
        self._drained.set()
        if mode is PauseMode.ABORT:
            await self.abort(None)
        await self.apply(lambda: None)

    async def resume(self) -> None:
        self._mode, self._frozen = None, False
        self._drained.set()
        held, self._held = self._held, {}
        for job in held.values():
            self.apply_soon(lambda job=job: self._add(job))  # type: ignore[misc]
        self._wake.set()

    async def apply(self, action: Callable[[], T]) -> T:
        """Run `action` between two steps and return its result; its exceptions are raised here."""
        if not self._stepping:
            return action()
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def deferred() -> None:
            if done.cancelled():
                return
            try:
                done.set_result(action())
            except Exception as error:
                done.set_exception(error)

        self._deferred.append(deferred)
        return await done

    def apply_soon(self, action: Callable[[], object]) -> None:
        """Run `action` now, or right after the current step if one runs in a worker thread."""
        if self._stepping:
            self._deferred.append(action)
        else:
            action()

    def _add(self, job: EngineJob) -> None:
        name = job.request.request_id
        if self._open.get(name) is not job:  # cancelled while deferred, and possibly submitted again
            return
        try:
            self.runner.add(job)
        except EngineError as error:
            del self._open[name]
            job.deliver(error)
        self._wake.set()

    async def _step_or_wait(self, pool: ThreadPoolExecutor) -> None:
        """Run one step, or wait for work."""
        if self._mode is PauseMode.WAIT and not self._frozen and not self.runner.busy:
            self._frozen = True
            self._drained.set()
        if self._frozen or not self.runner.busy:
            self._wake.clear()
            await self._wake.wait()
            return
        loop = asyncio.get_running_loop()
        began = loop.time()
        if self._last_step_s <= INLINE_S:
            self._settle(self.runner.step())
            self._emit_pieces()
        else:
            self._stepping = True
            try:
                finished = await loop.run_in_executor(pool, self.runner.step)
            finally:
                self._stepping = False
            self._settle(finished)
            self._emit_pieces()
            while self._deferred:
                self._deferred.popleft()()
        self._last_step_s = loop.time() - began
        for _ in range(TICKS):
            await asyncio.sleep(0)

    def _emit_pieces(self) -> None:
        """Emit the tokens of the last step. Called before weights can change, so the tokens get the version that drew
        them."""
        for job in list(self._open.values()):
            if job.on_chunk is not None and (piece := self.runner.piece(job)) is not None:
                job.on_chunk(piece)

    def _settle(self, finished_jobs: Sequence[FinishedJob]) -> None:
        for finished in finished_jobs:
            job, name = finished.job, finished.job.request.request_id
            if self._open.get(name) is job:
                del self._open[name]
                job.deliver(finished)
