"""The server of an environment host. It reads requests from a socket and writes responses, on a loop that runs no
environment."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hmac
import os
import threading
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rollart.adapters.envs.images import ImageCache, ImageHook, PullFailed
from rollart.adapters.envs.seats import DomainFactory, EnvironmentLoop, encode_result, run_on_loop, run_timed
from rollart.adapters.envs.warm import IdleEnvironment, WarmPool, start_environment
from rollart.adapters.envs.wire import (
    CallStatus,
    HostOperation,
    HostRequest,
    HostResponse,
    packed_observation,
    packed_step,
    read_frame,
    write_frame,
)
from rollart.border import checked_observation, checked_step, require_awaitable
from rollart.hosted import EnvironmentOrigin
from rollart.ports import Environment
from rollart.resident import machine_bytes, resident_bytes

__all__ = ["EnvironmentHostServer"]

GREETING_S = 10.0
"""Seconds that a client has to authenticate. After that a silent connection is closed."""

GREETING = 4096
"""Maximum bytes of a greeting frame: no more is read from a client that has not authenticated."""

AGAIN = EnvironmentOrigin("again", 0.0)
MADE_FIRST = EnvironmentOrigin("cold", 0.0)

CLOSE_S = 3.0
"""Seconds that a running call may take to end once its episode is closed: less than a trajectory waits for it."""


@dataclass(slots=True)
class HostedEpisode:
    """One episode. `running` is its current call; `over` is True once a step returned done."""

    name: str
    maker: DomainFactory
    seat: EnvironmentLoop
    pool: WarmPool
    environment: Environment | None = None
    made: EnvironmentOrigin = MADE_FIRST
    """How the episode got its environment."""
    counted: bool = False
    """True if the pool has counted its environment as in use."""
    well: bool = True
    """True while no call of the episode has failed or been cancelled."""
    running: asyncio.Future[Any] | None = None
    over: bool = False
    played: int = 0
    """Episodes that its environment played before."""
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Acquired on the environment's loop: a cancelled call ends before the next one begins."""


@dataclass(slots=True)
class EnvironmentHostServer:
    """Serves the requests of a host, on the loop of a thread that runs no environment code.

    One connection at a time belongs to the controller; its episodes are closed when it ends. The calls of an episode
    are sequential; a second concurrent one is refused. While the connection lasts, every request gets exactly one
    response, even if it was cancelled, so a client need not remember any request for ever.
    """

    makers: Mapping[str, DomainFactory]
    main: asyncio.AbstractEventLoop
    token: str = ""
    size: int = 0
    """Environments per domain that are made in advance."""
    reuse: int = 1
    """Episodes that one environment may play, if it is reusable."""
    pools: dict[str, WarmPool] = field(default_factory=dict)
    hook: ImageHook | None = None
    most: int | None = None
    """Maximum bytes of cached images; None for no limit."""
    images: ImageCache | None = None
    held: dict[str, list[str]] = field(default_factory=dict)
    """Images that are pinned, by episode."""
    episodes: dict[str, HostedEpisode] = field(default_factory=dict)
    calls: dict[int, asyncio.Future[Any]] = field(default_factory=dict)
    left: list[tuple[str, threading.Thread]] = field(default_factory=list)
    """Threads of closed episodes that are still in a call."""
    given_up: set[int] = field(default_factory=set)
    """Cancelled requests that have no response yet."""
    taken: bool = False
    beat_since: float | None = None
    """When the main loop was last pinged, while it has not replied; else None."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection until it ends."""
        try:
            async with asyncio.timeout(GREETING_S):
                hello = HostRequest.from_json(await read_frame(reader, largest=GREETING))
            known = hello.op is HostOperation.HELLO and hmac.compare_digest(
                str(hello.value).encode(), self.token.encode()
            )
            if known and not self.taken:
                self.taken = True
                problems = {name: one.problem for name, one in self.makers.items() if one.problem}
                said = [os.getpid(), problems, self._pictured()]
                write_frame(writer, HostResponse(hello.id, "", CallStatus.OK, said).to_json())
                await self._converse(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError, TimeoutError, ValueError):
            pass
        finally:
            writer.close()

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                self._warm(tasks)
                self.images = None if self.hook is None else ImageCache(self.hook, tasks, self.most)
                while True:
                    ask = HostRequest.from_json(await read_frame(reader))
                    tasks.create_task(self._answer(ask, writer))
        except* (asyncio.IncompleteReadError, ConnectionError, ValueError):
            pass
        finally:
            await self.close()
            self.taken = False

    async def close(self) -> None:
        """Close every episode and every idle environment, in bounded time."""
        pools = list(self.pools.values())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await asyncio.gather(*(pool.close() for pool in pools))
        await asyncio.gather(*(self._close(one) for one in list(self.episodes.values())))

    def _warm(self, tasks: asyncio.TaskGroup) -> None:
        """Start making environments in advance."""
        self.held.clear()
        self.pools = {
            name: WarmPool(name, maker, functools.partial(self._seat, maker), self.size, self.reuse)
            for name, maker in self.makers.items()
            if maker.make is not None
        }
        for pool in self.pools.values():
            pool.open(tasks)

    def _seat(self, maker: DomainFactory, name: str) -> EnvironmentLoop:
        return EnvironmentLoop.alone(name) if maker.blocking else EnvironmentLoop(self.main)

    async def _answer(self, ask: HostRequest, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        try:
            answer = await self._do(ask)
        except asyncio.CancelledError:
            if task.cancelling() and ask.id not in self.given_up:
                raise  # the connection ends
            answer = HostResponse(ask.id, ask.episode, CallStatus.REFUSED, "it was given up")
        finally:
            self.given_up.discard(ask.id)
        if answer is None:
            return
        try:
            write_frame(writer, answer.to_json())
        except (TypeError, ValueError, RecursionError) as error:
            write_frame(
                writer,
                HostResponse(ask.id, ask.episode, CallStatus.LIED, f"answered what cannot be sent: {error}").to_json(),
            )
        with contextlib.suppress(ConnectionError):
            await writer.drain()

    async def _do(self, ask: HostRequest) -> HostResponse | None:
        match ask.op:
            case HostOperation.HEALTH:
                return HostResponse(ask.id, "", CallStatus.OK, self._health())
            case HostOperation.CANCEL:
                if (call := self.calls.get(ask.value)) is not None and call.cancel():
                    self.given_up.add(ask.value)
                return None
            case HostOperation.CLOSE:
                episode = self.episodes.get(ask.episode)
                why = "" if episode is None else await self._close(episode)
                if (held := self.held.pop(ask.episode, None)) is not None and self.images is not None:
                    await self.images.release(held)
                return HostResponse(ask.id, ask.episode, CallStatus.RAISED if why else CallStatus.OK, why or None)
            case HostOperation.IMAGES | HostOperation.PULL:
                return await self._images(ask)
            case HostOperation.RESET:
                return await self._reset(ask)
            case HostOperation.STEP:
                return await self._step(ask)
        return HostResponse(ask.id, ask.episode, CallStatus.REFUSED, f"a second {ask.op}")

    async def _reset(self, ask: HostRequest) -> HostResponse:
        domain, seed = ask.value
        episode = self.episodes.get(ask.episode)
        if episode is None:
            maker = self.makers.get(domain)
            if maker is None or maker.make is None:
                why = f"no domain '{domain}' here" if maker is None else maker.problem
                return HostResponse(ask.id, ask.episode, CallStatus.REFUSED, why)
            episode = self.episodes[ask.episode] = self._begun(ask.episode, maker, self.pools[domain])
        elif episode.environment is not None:
            episode.made = AGAIN

        async def reset() -> Any:
            assert episode.maker.make is not None
            if episode.environment is None:
                began = asyncio.get_running_loop().time()
                episode.environment = await start_environment(episode.maker.make)
                episode.made = EnvironmentOrigin("cold", asyncio.get_running_loop().time() - began)
            shown = await require_awaitable(episode.environment.reset(seed), "reset")
            return [encode_result(lambda: packed_observation(checked_observation(shown))), *episode.made.values()]

        episode.over = False
        try:
            return await self._call(ask, episode, reset)
        finally:
            if episode.environment is not None and not episode.counted:
                episode.counted = True
                episode.pool.began(episode.environment)

    def _begun(self, name: str, maker: DomainFactory, pool: WarmPool) -> HostedEpisode:
        """An episode, with an idle environment of the pool if there is one."""
        kept = pool.take()
        if kept is None:
            return HostedEpisode(name, maker, self._seat(maker, name), pool)
        made = EnvironmentOrigin("reused" if kept.played else "ahead", 0.0 if kept.played else kept.make_s)
        return HostedEpisode(name, maker, kept.seat, pool, kept.environment, made, counted=True, played=kept.played)

    def _pictured(self) -> list[str]:
        """Domains whose environments name images that this host can pull."""
        return [name for name, maker in self.makers.items() if maker.images is not None and self.hook is not None]

    async def _images(self, ask: HostRequest) -> HostResponse:
        """List the images that an episode needs and the images on this host; a PULL request also pulls the missing
        ones. They stay pinned until the episode is closed."""
        domain, seed = ask.value
        maker = self.makers.get(domain)
        if maker is None or maker.images is None or self.images is None:
            return HostResponse(ask.id, ask.episode, CallStatus.REFUSED, f"no images of domain '{domain}' here")
        began, pulled = asyncio.get_running_loop().time(), 0
        task = asyncio.current_task()
        assert task is not None
        self.calls[ask.id] = task  # a CANCEL request cancels this task, so that nothing stays pinned without an episode
        try:
            named = maker.images

            async def names() -> list[str]:
                return [str(image) for image in named(seed)]

            wanted = await run_on_loop(self.main, names())
            await self.images.known()
            if ask.op is HostOperation.PULL:
                pulled = await self.images.ensure(wanted)
                self.held.setdefault(ask.episode, []).extend(wanted)
        except PullFailed as error:
            return HostResponse(ask.id, ask.episode, CallStatus.REFUSED, str(error))
        except Exception as error:
            return HostResponse(ask.id, ask.episode, CallStatus.RAISED, f"{type(error).__name__}: {error}"[:500])
        finally:
            self.calls.pop(ask.id, None)
        seconds = asyncio.get_running_loop().time() - began
        return HostResponse(ask.id, ask.episode, CallStatus.OK, [wanted, list(self.images.there), pulled], seconds)

    async def _step(self, ask: HostRequest) -> HostResponse:
        episode = self.episodes.get(ask.episode)
        if episode is None or episode.environment is None:
            return HostResponse(ask.id, ask.episode, CallStatus.REFUSED, "a step of an episode that was not reset here")
        if episode.over:
            return HostResponse(ask.id, ask.episode, CallStatus.REFUSED, "a step after the end of its episode")
        environment = episode.environment

        async def step() -> Any:
            answered = await require_awaitable(environment.step(ask.value), "step")
            packed = encode_result(lambda: packed_step(checked_step(answered)))
            episode.over = bool(packed[2])
            return packed

        return await self._call(ask, episode, step)

    async def _call(self, ask: HostRequest, episode: HostedEpisode, work: Callable[[], Awaitable[Any]]) -> HostResponse:
        """Run a call on the loop of its environment; its response."""
        if episode.running is not None:
            return HostResponse(ask.id, ask.episode, CallStatus.REFUSED, "two calls of one episode at a time")
        call = run_on_loop(episode.seat.loop, run_timed(f"{ask.op} of {ask.episode}", episode.turn, work))
        self.calls[ask.id] = episode.running = call
        told = CallStatus.REFUSED
        try:
            told, value, env_s = await call
        finally:
            episode.well = episode.well and told is CallStatus.OK
            self.calls.pop(ask.id, None)
            if call.done():
                episode.running = None
        return HostResponse(ask.id, ask.episode, told, value, env_s)

    async def _close(self, episode: HostedEpisode) -> str:
        """Cancel the episode's call, close its environment and release its thread. Returns the error as text, '' if
        there is none."""
        self.episodes.pop(episode.name, None)
        if episode.environment is not None and episode.counted:
            kept = IdleEnvironment(episode.seat, episode.environment, played=episode.played + 1)
            if episode.pool.give_back(kept, well=episode.well and episode.running is None):
                return ""
        if episode.running is not None:
            episode.running.cancel()

        async def close() -> None:
            if episode.environment is not None:
                await episode.environment.close()

        closing = run_on_loop(episode.seat.loop, run_timed(f"close of {episode.name}", episode.turn, close))
        try:
            async with asyncio.timeout(CLOSE_S):
                told, value, _ = await closing
            return "" if told is CallStatus.OK else str(value)
        except TimeoutError:
            return f"did not end within {CLOSE_S:g} s"
        finally:
            episode.seat.leave()
            if episode.seat.thread is not None:
                self.left.append((episode.name, episode.seat.thread))

    def _health(self) -> dict[str, Any]:
        """Seconds since the main loop stopped responding and the call that blocks it; threads of closed episodes that
        have not ended; memory."""
        now = asyncio.get_running_loop().time()
        stuck = 0.0
        if self.beat_since is None:
            self.beat_since = now
            front = asyncio.get_running_loop()
            self.main.call_soon_threadsafe(lambda: front.call_soon_threadsafe(self._beaten))
        else:
            stuck = now - self.beat_since
        task = asyncio.current_task(self.main) if stuck else None
        self.left = [(name, thread) for name, thread in self.left if thread.is_alive()]
        return {
            "live": len(self.episodes),
            "stuck_s": stuck,
            "stuck_in": "" if task is None else task.get_name(),
            "left": [name for name, _ in self.left],
            "memory": resident_bytes(),
            "machine": machine_bytes(),
        }

    def _beaten(self) -> None:
        self.beat_since = None
