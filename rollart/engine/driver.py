"""Runs the steps: the bridge between an asyncio server and the synchronous runner.

A short step (a few ms, small model) runs on the loop itself: handing it to a thread would cost more than it
saves, since the two would fight over the GIL at every operator. A long step runs in a worker thread, so that
health checks and aborts are answered meanwhile.
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

__all__ = ["Driver"]

T = TypeVar("T")

Deliver = Callable[[FinishedJob | EngineError], None]

INLINE_S = 0.02
"""Longest previous step that still runs on the loop, seconds: what a health check may have to wait."""

TICKS = 3
"""Loop iterations between inline steps: a request needs about three (read, parse, handle) to reach the queue, and
requests that arrived together should be prefilled together."""


class Driver:
    """Owns the runner's turn. All methods are called on the loop's thread.

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
        self._deliver: dict[str, tuple[EngineJob, Deliver]] = {}
        self._told: dict[str, EngineJob] = {}
        """Requests whose tokens somebody wants as they are drawn."""
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
        """Requests that wait for `resume` because a pause is draining the others."""
        return len(self._held)

    async def run(self) -> None:
        """Step until cancelled. However it ends, every request is told with a retryable error."""
        cause = "is shutting down"
        try:
            with ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(self._threads,)) as pool:
                while True:
                    await self._turn(pool)
        except Exception as error:
            cause = f"failed in a step: {error!r}"
            raise
        finally:
            deliveries, self._deliver = self._deliver, {}
            for _, deliver in deliveries.values():
                deliver(EngineError(f"the engine {cause}", retryable=True))

    def submit(self, job: EngineJob, deliver: Deliver) -> None:
        """Queue a request; `deliver` is called once, with its end or with why it was refused. EngineError if the id
        is in use."""
        name = job.request.request_id
        if name in self._deliver:
            raise EngineError(f"request id {name!r} is in use", retryable=False, remedy="give every request its own id")
        if job.told is not None:
            self._told[name] = job
        if self._mode is PauseMode.WAIT and not self._frozen:
            refuse_invalid(job, vocab=self.runner.network.architecture.vocab, context=self.runner.context)
            self._held[name] = job
            self._deliver[name] = job, deliver
            return
        self._deliver[name] = job, deliver
        self._soon(lambda: self._add(job))

    def discard(self, name: str) -> None:
        """Nobody waits for this request any more: abort it, deliver nothing."""
        self._deliver.pop(name, None)
        self.abort_soon([name])

    def abort_soon(self, request_ids: Sequence[str] | None) -> None:
        """End these requests (None: all) before the next step; what they have is delivered."""
        for name in list(self._held) if request_ids is None else request_ids:
            job = self._held.pop(name, None)
            if job is not None:
                self._settle([FinishedJob(job, Completion((), (), (), FinishReason.ABORT, len(job.prompt)))])
        self._soon(lambda: self._settle(self.runner.abort(request_ids)))

    def release_soon(self, session: str) -> None:
        """Free a session's prefix before the next step."""
        self._soon(lambda: self.runner.release(session))

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

        self.submit(job, deliver)
        try:
            return await waiter
        except asyncio.CancelledError:
            self.discard(job.request.request_id)
            raise

    async def abort(self, request_ids: Sequence[str] | None) -> None:
        """End these requests (None: all); their `generate` returns what they have."""
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
            self._soon(lambda job=job: self._add(job))  # type: ignore[misc]
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

    def _soon(self, action: Callable[[], object]) -> None:
        """Run `action` now, or right after the step that a worker thread is in."""
        if self._stepping:
            self._deferred.append(action)
        else:
            action()

    def _add(self, job: EngineJob) -> None:
        name = job.request.request_id
        entry = self._deliver.get(name)
        if entry is None or entry[0] is not job:  # cancelled while it was deferred, and perhaps sent again
            return
        try:
            self.runner.add(job)
        except EngineError as error:
            del self._deliver[name]
            entry[1](error)
        self._wake.set()

    async def _turn(self, pool: ThreadPoolExecutor) -> None:
        """One step, or a wait for something to do."""
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
            self._tell()
        else:
            self._stepping = True
            try:
                finished = await loop.run_in_executor(pool, self.runner.step)
            finally:
                self._stepping = False
            self._settle(finished)
            self._tell()
            while self._deferred:
                self._deferred.popleft()()
        self._last_step_s = loop.time() - began
        for _ in range(TICKS):
            await asyncio.sleep(0)

    def _tell(self) -> None:
        """Before weights change: what was drawn in the step is of the version that it ran with."""
        for name, job in list(self._told.items()):
            entry = self._deliver.get(name)
            if entry is None or entry[0] is not job or job.told is None:
                del self._told[name]
            elif (piece := self.runner.piece(job)) is not None:
                job.told(piece)

    def _settle(self, over: Sequence[FinishedJob]) -> None:
        for finished in over:
            name = finished.job.request.request_id
            entry = self._deliver.get(name)
            if entry is not None and entry[0] is finished.job:
                del self._deliver[name]
                entry[1](finished)
