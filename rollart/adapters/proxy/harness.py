"""Agent programs inside a run: a coroutine receives a base URL and a session, and calls the proxy like any client."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from rollart.adapters.proxy.capture import Branch
from rollart.adapters.proxy.messages import BadRequest
from rollart.adapters.proxy.server import Proxy
from rollart.errors import EngineError
from rollart.model import Completion, CompletionChunk, Observation, Sampling, Segment, Step
from rollart.ports import HarnessRequest
from rollart.user_code import GRACE_S, UserCodeGuard, abandon_task, guard

Agent = Callable[..., Awaitable[float | Step | None]]
"""`async def agent(base_url, session, seed, **arguments)`. `base_url` ends in `/v1`, as OpenAI's clients expect; it
also serves Anthropic's clients, which append a second `/v1`. The agent returns the episode's reward, or a `Step` with
success and metadata. With None, the reward is the one posted to `/sessions/SESSION/end`, or 0."""


class HarnessRunner(contextlib.AbstractAsyncContextManager["HarnessRunner"]):
    """Owns the agent coroutines of all episodes; use with `async with`. An exception in one affects only its episode.

    Leaving the context cancels all of them and waits at most `GRACE_S`. A program that swallows its cancellation is
    abandoned: neither its trajectory nor the end of the process waits for it.
    """

    def __init__(self, proxy: Proxy, url: str, *, context: int) -> None:
        """`context`: maximum tokens of a conversation."""
        self._proxy, self._url, self._context = proxy, url, context
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aexit__(self, *error: Any) -> None:
        async with asyncio.TaskGroup() as ending:
            for task in tuple(self._tasks):
                ending.create_task(_cancel_program(task, self._tasks))

    def factory(self, agent: Agent, arguments: Mapping[str, Any]) -> Callable[[str, int], ProxyEpisode]:
        """A `HarnessFactory`."""

        def begin(name: str, seed: int) -> ProxyEpisode:
            episode = ProxyEpisode(self._proxy, name, self._context)
            program = partial(agent, base_url=f"{self._url}/s/{name}/v1", session=name, seed=seed, **arguments)
            # Not in a TaskGroup, which would wait for a hanging task for ever.
            task = asyncio.get_running_loop().create_task(episode.run(program), name=f"harness {name}")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            episode.end_program = partial(_cancel_program, task, self._tasks)
            return episode

        return begin


class ProxyEpisode:
    """One episode of an agent program. Implements `HarnessEpisode` for its trajectory, and `SessionPolicy` for its
    session: a queue of requests that the trajectory answers one at a time.

    The proxy's requests call `generate`; only the trajectory calls `wanted` and `answer`. The queue is bounded by the
    number of requests that one program has in flight.
    """

    def __init__(self, proxy: Proxy, name: str, context: int) -> None:
        self.context = context
        self.end_program: Callable[[], Awaitable[None]]
        self._proxy = proxy
        self._session = proxy.open(name, self)
        self._queue: asyncio.Queue[_PendingRequest | None] = asyncio.Queue()
        self._current: _PendingRequest | None = None
        self._result: float | Step | None = None
        self._error: Exception | None = None
        self._exhausted = self._closed = False

    @guard
    async def run(self, program: Callable[[], Awaitable[float | Step | None]]) -> None:
        """Run the program. The next call of `wanted` that finds no request then returns None or raises its error."""
        try:
            with UserCodeGuard():
                self._result = await program()
        except Exception as error:
            self._error = error
        self._queue.put_nowait(None)

    async def generate(
        self, token_ids: tuple[int, ...], sampling: Sampling, on_chunk: Callable[[CompletionChunk], None] | None = None
    ) -> Completion:
        if self._exhausted:
            raise _turns_are_over()
        if self._closed:
            raise EngineError("the episode is over", retryable=False)
        loop = asyncio.get_running_loop()
        gone: asyncio.Future[None] = loop.create_future()
        wanted = HarnessRequest(token_ids, sampling.max_tokens, sampling.stop_token_ids, on_chunk, gone)
        request = _PendingRequest(wanted, loop.create_future())
        self._queue.put_nowait(request)
        try:
            return await request.answer
        except asyncio.CancelledError:  # the client disconnected: abort its generation
            if not gone.done():
                gone.set_result(None)
            raise

    async def release(self) -> None:
        """Nothing to do: the trajectory releases its own prefix."""

    async def wanted(self) -> HarnessRequest | None:
        while (request := await self._queue.get()) is not None:
            if self._exhausted:
                _reject(request, _turns_are_over())
            elif not request.answer.done():  # otherwise its client has disconnected
                self._current = request
                return request.wanted
        out_of_room = self._exhausted or self._session.full  # an exception is then no infrastructure fault
        if self._error is not None and not out_of_room:
            raise self._error
        return None

    def answer(self, completion: Completion) -> None:
        request, self._current = self._current, None
        if request is not None and not request.answer.done():
            request.answer.set_result(completion)

    def exhaust(self) -> None:
        self._exhausted = True

    def segments(self) -> tuple[Segment, ...]:
        branch = self._training_branch()
        return () if branch is None else branch.segments

    def ending(self) -> Step:
        capture, ending, branch = self._session.capture, self._session.ending, self._training_branch()
        step = self._result
        if not isinstance(step, Step):
            reward = step if step is not None else ending.reward or 0.0
            success = False if ending.success is None and self._error is not None else ending.success
            step = Step(Observation(""), reward, done=True, success=success)
        sampled_elsewhere = sum(t.sampled for t in capture.turns) - (branch.sampled if branch else 0)
        more = {"branches": len(capture.branches()), "sampled_elsewhere": sampled_elsewhere}
        return Step(step.observation, step.reward, True, step.success, {**step.metadata, **more})

    async def close(self) -> None:
        """Fail all queued and future requests, and end the program."""
        self._closed = True
        waiting = [self._current]
        while not self._queue.empty():
            waiting.append(self._queue.get_nowait())
        for request in filter(None, waiting):
            _reject(request, EngineError("the episode is over", retryable=False))
        await self._proxy.close(self._session.name)
        await self.end_program()

    def _training_branch(self) -> Branch | None:
        """The branch with the most sampled tokens, the latest among equals: summaries and sub-agents are shorter."""
        return max(self._session.capture.branches(), key=lambda b: (b.sampled, b.last), default=None)


@dataclass(slots=True)
class _PendingRequest:
    wanted: HarnessRequest
    answer: asyncio.Future[Completion]


def _turns_are_over() -> BadRequest:
    return BadRequest("the episode has had its turns (max_turns)", code="max_turns")


async def _cancel_program(task: asyncio.Task[None], tasks: set[asyncio.Task[None]]) -> None:
    """Cancel a program and wait for its end. After `GRACE_S` it is abandoned, with one log line."""
    for _ in range(2):
        task.cancel()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GRACE_S / 2):
                await asyncio.shield(asyncio.gather(task, return_exceptions=True))
        if task.done():
            return
    tasks.discard(task)
    abandon_task(task)


def _reject(request: _PendingRequest, error: Exception) -> None:
    if not request.answer.done():
        request.answer.set_exception(error)
