"""Agent programs inside a run: a coroutine is given a base URL and a session, and asks the proxy like any client."""

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
from rollart.episodes import HarnessRequest
from rollart.errors import EngineError
from rollart.foreign import GRACE_S, UserCodeGuard, abandon_task, guard
from rollart.model import Completion, CompletionChunk, Observation, Sampling, Segment, Step

__all__ = ["Agent", "HarnessRunner"]

Agent = Callable[..., Awaitable[float | Step | None]]
"""`async def agent(base_url, session, seed, **arguments)`. `base_url` ends in `/v1`, as OpenAI's clients take it,
and takes those of Anthropic's, too, which add their own. What it returns is the episode's own reward, or a `Step` with
success and metadata; None: what it said to `/sessions/SESSION/end`, or 0."""


class HarnessRunner:
    """Owns the coroutines of all episodes; `async with` it. What one of them raises is its own episode's matter.

    Leaving it ends every one, `GRACE_S` at most: a program that catches its cancellation and goes on is left behind,
    and neither its trajectory nor the end of the process waits for it.
    """

    def __init__(self, proxy: Proxy, url: str, *, context: int) -> None:
        """`context`: tokens of a conversation at most."""
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
        # No TaskGroup's: one waits for its tasks for ever.
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
        if wanted is None and self._policy.error is not None and not self._ran_out():
            raise self._policy.error
        return wanted

    def answer(self, completion: Completion) -> None:
        self._policy.answer(completion)

    def exhaust(self) -> None:
        self._policy.exhausted = True

    def segments(self) -> tuple[Segment, ...]:
        branch = self._trained()
        return () if branch is None else branch.segments

    def ending(self) -> Step:
        branches = self._session.capture.branches()
        trained = self._trained()
        said, ending = self._policy.result, self._session.ending
        if isinstance(said, Step):
            step = said
        else:
            reward = said if said is not None else ending.reward or 0.0
            success = False if ending.success is None and self._policy.error is not None else ending.success
            step = Step(Observation(""), reward, done=True, success=success)
        everywhere = sum(t.sampled for t in self._session.capture.turns)
        more = {"branches": len(branches), "sampled_elsewhere": everywhere - (trained.sampled if trained else 0)}
        return Step(step.observation, step.reward, True, step.success, {**step.metadata, **more})

    async def close(self) -> None:
        self._policy.close()
        await self._proxy.close(self._session.name)
        await self._end(self._task)

    def _ran_out(self) -> bool:
        """It was refused for want of turns or room: what it raised then is no fault of the infrastructure."""
        return self._policy.exhausted or self._session.full

    def _trained(self) -> Branch | None:
        """The branch with the most sampled tokens, the latest among equals: a summary or a sub-agent is shorter."""
        branches = self._session.capture.branches()
        return max(branches, key=lambda b: (b.sampled, b.last), default=None)


@dataclass(slots=True)
class _PendingRequest:
    wanted: HarnessRequest
    answer: asyncio.Future[Completion]


class _EpisodePolicy:
    """The policy of one episode's session: requests wait in line until the trajectory has answered them, one by one.

    `generate` is called by the proxy's requests; `next` and `answer` by the trajectory alone. Bounded by what one
    program asks at once.
    """

    def __init__(self, context: int) -> None:
        self.context = context
        self.exhausted = False
        self.result: float | Step | None = None
        self._line: asyncio.Queue[_PendingRequest | None] = asyncio.Queue()
        self._current: _PendingRequest | None = None
        self.error: Exception | None = None
        self._closed = False

    async def generate(
        self, token_ids: tuple[int, ...], sampling: Sampling, told: Callable[[CompletionChunk], None] | None = None
    ) -> Completion:
        if self.exhausted:
            raise BadRequest("the episode has had its turns (max_turns)", code="max_turns")
        if self._closed:
            raise EngineError("the episode is over", retryable=False)
        loop = asyncio.get_running_loop()
        gone: asyncio.Future[None] = loop.create_future()
        wanted = HarnessRequest(token_ids, sampling.max_tokens, sampling.stop_token_ids, told, gone)
        request = _PendingRequest(wanted, loop.create_future())
        self._line.put_nowait(request)
        try:
            return await request.answer
        except asyncio.CancelledError:  # the client went away: what is drawn for it is aborted
            if not gone.done():
                gone.set_result(None)
            raise

    async def next(self) -> HarnessRequest | None:
        while (request := await self._line.get()) is not None:
            if self.exhausted:
                _reject(request, BadRequest("the episode has had its turns (max_turns)", code="max_turns"))
            elif not request.answer.done():  # else whoever asked has gone
                self._current = request
                return request.wanted
        return None

    def answer(self, completion: Completion) -> None:
        request, self._current = self._current, None
        if request is not None and not request.answer.done():
            request.answer.set_result(completion)

    def over(self, result: float | Step | None, error: Exception | None) -> None:
        """The program has ended."""
        self.result, self.error = result, error
        self._line.put_nowait(None)

    def close(self) -> None:
        """Nothing more is answered."""
        self._closed = True
        waiting = [self._current] if self._current is not None else []
        while not self._line.empty():
            if (request := self._line.get_nowait()) is not None:
                waiting.append(request)
        for request in waiting:
            _reject(request, EngineError("the episode is over", retryable=False))

    async def release(self) -> None:
        """The trajectory frees its prefix by itself."""


@guard
async def _run_program(program: Callable[[], Awaitable[float | Step | None]], policy: _EpisodePolicy) -> None:
    try:
        with UserCodeGuard():
            result = await program()
        policy.over(result, None)
    except Exception as error:
        policy.over(None, error)


async def _cancel_program(task: asyncio.Task[None], tasks: set[asyncio.Task[None]]) -> None:
    """Cancel a program and wait for its end; past `GRACE_S` without one it is left behind, which is told in a line."""
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
