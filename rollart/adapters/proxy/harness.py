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
from rollart.adapters.proxy.sessions import ProxySession
from rollart.errors import EngineError
from rollart.model import Completion, CompletionChunk, Observation, Sampling, Segment, Step
from rollart.ports import HarnessRequest
from rollart.user_code import GRACE_S, UserCodeGuard, abandon_task, guard

Agent = Callable[..., Awaitable[float | Step | None]]
"""`async def agent(base_url, session, seed, **arguments)`. `base_url` ends in `/v1`, as OpenAI's clients expect; it
also serves Anthropic's clients, which append a second `/v1`. The agent returns the episode's reward, or a `Step` with
success and metadata. With None, the reward is the one posted to `/sessions/SESSION/end`, or 0."""


class HarnessRunner:
    """Owns the agent coroutines of all episodes; use with `async with`. An exception in one affects only its episode.

    Leaving the context cancels all of them and waits at most `GRACE_S`. A program that swallows its cancellation is
    abandoned: neither its trajectory nor the end of the process waits for it.
    """

    def __init__(self, proxy: Proxy, url: str, *, context: int) -> None:
        """`context`: maximum tokens of a conversation."""
        self._proxy, self._url, self._context = proxy, url, context
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> HarnessRunner:
        return self

    async def __aexit__(self, *error: Any) -> None:
        async with asyncio.TaskGroup() as ending:
            for task in tuple(self._tasks):
                ending.create_task(_cancel_program(task, self._tasks))

    def factory(self, agent: Agent, arguments: Mapping[str, Any]) -> Callable[[str, int], ProxyEpisode]:
        """A `HarnessFactory`."""
        return lambda session, seed: self._begin(agent, arguments, session, seed)

    def _begin(self, agent: Agent, arguments: Mapping[str, Any], name: str, seed: int) -> ProxyEpisode:
        policy = _EpisodePolicy(self._context)
        session = self._proxy.open(name, policy)
        url = f"{self._url}/s/{name}/v1"
        program = partial(agent, base_url=url, session=name, seed=seed, **arguments)
        # Not in a TaskGroup, which would wait for a hanging task for ever.
        task = asyncio.get_running_loop().create_task(_run_program(program, policy), name=f"harness {name}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return ProxyEpisode(self._proxy, session, policy, task, partial(_cancel_program, tasks=self._tasks))


class ProxyEpisode:
    """Implements `HarnessEpisode`."""

    def __init__(
        self,
        proxy: Proxy,
        session: ProxySession,
        policy: _EpisodePolicy,
        task: asyncio.Task[None],
        end: Callable[[asyncio.Task[None]], Awaitable[None]],
    ) -> None:
        self._proxy, self._session, self._policy, self._task, self._end = proxy, session, policy, task, end

    async def wanted(self) -> HarnessRequest | None:
        wanted = await self._policy.next()
        if wanted is None and self._policy.error is not None and not self._was_exhausted():
            raise self._policy.error
        return wanted

    def answer(self, completion: Completion) -> None:
        self._policy.answer(completion)

    def exhaust(self) -> None:
        self._policy.exhausted = True

    def segments(self) -> tuple[Segment, ...]:
        branch = self._training_branch()
        return () if branch is None else branch.segments

    def ending(self) -> Step:
        branches = self._session.capture.branches()
        branch = self._training_branch()
        result, ending = self._policy.result, self._session.ending
        if isinstance(result, Step):
            step = result
        else:
            reward = result if result is not None else ending.reward or 0.0
            success = False if ending.success is None and self._policy.error is not None else ending.success
            step = Step(Observation(""), reward, done=True, success=success)
        everywhere = sum(t.sampled for t in self._session.capture.turns)
        more = {"branches": len(branches), "sampled_elsewhere": everywhere - (branch.sampled if branch else 0)}
        return Step(step.observation, step.reward, True, step.success, {**step.metadata, **more})

    async def close(self) -> None:
        self._policy.close()
        await self._proxy.close(self._session.name)
        await self._end(self._task)

    def _was_exhausted(self) -> bool:
        """True if a request was refused because turns or context ran out: an exception then is no infrastructure
        fault."""
        return self._policy.exhausted or self._session.full

    def _training_branch(self) -> Branch | None:
        """The branch with the most sampled tokens, the latest among equals: summaries and sub-agents are shorter."""
        branches = self._session.capture.branches()
        return max(branches, key=lambda b: (b.sampled, b.last), default=None)


@dataclass(slots=True)
class _PendingRequest:
    wanted: HarnessRequest
    answer: asyncio.Future[Completion]


class _EpisodePolicy:
    """The policy of one episode's session: a queue of requests that the trajectory answers one at a time.

    The proxy's requests call `generate`; only the trajectory calls `next` and `answer`. The queue is bounded by the
    number of requests that one program has in flight.
    """

    def __init__(self, context: int) -> None:
        self.context = context
        self.exhausted = False
        self.result: float | Step | None = None
        self._queue: asyncio.Queue[_PendingRequest | None] = asyncio.Queue()
        self._current: _PendingRequest | None = None
        self.error: Exception | None = None
        self._closed = False

    async def generate(
        self, token_ids: tuple[int, ...], sampling: Sampling, on_chunk: Callable[[CompletionChunk], None] | None = None
    ) -> Completion:
        if self.exhausted:
            raise BadRequest("the episode has had its turns (max_turns)", code="max_turns")
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

    async def next(self) -> HarnessRequest | None:
        while (request := await self._queue.get()) is not None:
            if self.exhausted:
                _reject(request, BadRequest("the episode has had its turns (max_turns)", code="max_turns"))
            elif not request.answer.done():  # otherwise its client has disconnected
                self._current = request
                return request.wanted
        return None

    def answer(self, completion: Completion) -> None:
        request, self._current = self._current, None
        if request is not None and not request.answer.done():
            request.answer.set_result(completion)

    def finish(self, result: float | Step | None, error: Exception | None) -> None:
        """The program has ended."""
        self.result, self.error = result, error
        self._queue.put_nowait(None)

    def close(self) -> None:
        """Fail all queued and future requests."""
        self._closed = True
        waiting = [self._current] if self._current is not None else []
        while not self._queue.empty():
            if (request := self._queue.get_nowait()) is not None:
                waiting.append(request)
        for request in waiting:
            _reject(request, EngineError("the episode is over", retryable=False))

    async def release(self) -> None:
        """Nothing to do: the trajectory releases its own prefix."""


@guard
async def _run_program(program: Callable[[], Awaitable[float | Step | None]], policy: _EpisodePolicy) -> None:
    try:
        with UserCodeGuard():
            result = await program()
        policy.finish(result, None)
    except Exception as error:
        policy.finish(None, error)


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
