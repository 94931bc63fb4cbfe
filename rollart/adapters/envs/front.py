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
    factory: DomainFactory
    env_loop: EnvironmentLoop
    pool: WarmPool
    environment: Environment | None = None
    made: EnvironmentOrigin = MADE_FIRST
    """How the episode got its environment."""
    counted: bool = False
    """True if the pool has counted its environment as in use."""
    healthy: bool = True
    """True while no call of the episode has failed or been cancelled."""
    running: asyncio.Future[Any] | None = None
    over: bool = False
    played: int = 0
    """Episodes that its environment played before."""
    call_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Acquired on the environment's loop: a cancelled call ends before the next one begins."""


@dataclass(slots=True)
class EnvironmentHostServer:
    """Serves the requests of a host, on the loop of a thread that runs no environment code.

    One connection at a time belongs to the controller; its episodes are closed when it ends. The calls of an episode
    are sequential; a second concurrent one is refused. While the connection lasts, every request gets exactly one
    response, even if it was cancelled, so a client need not remember any request for ever.
    """

    factories: Mapping[str, DomainFactory]
    main: asyncio.AbstractEventLoop
    token: str = ""
    size: int = 0
    """Environments per domain that are made in advance."""
    reuse: int = 1
    """Episodes that one environment may play, if it is reusable."""
    pools: dict[str, WarmPool] = field(default_factory=dict)
    hook: ImageHook | None = None
    max_image_bytes: int | None = None
    """Maximum bytes of cached images; None for no limit."""
    images: ImageCache | None = None
    pinned: dict[str, list[str]] = field(default_factory=dict)
    """Images that are pinned for episodes, by episode."""
    episodes: dict[str, HostedEpisode] = field(default_factory=dict)
    calls: dict[int, asyncio.Future[Any]] = field(default_factory=dict)
    abandoned_threads: list[tuple[str, threading.Thread]] = field(default_factory=list)
    """Threads of closed episodes that are still in a call."""
    cancelled: set[int] = field(default_factory=set)
    """Cancelled requests that have no response yet."""
    connected: bool = False
    ping_sent_at: float | None = None
    """When the main loop was last pinged, while it has not replied; else None."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection until it ends."""
        try:
            async with asyncio.timeout(GREETING_S):
                hello = HostRequest.from_json(await read_frame(reader, largest=GREETING))
            authenticated = hello.op is HostOperation.HELLO and hmac.compare_digest(
                str(hello.value).encode(), self.token.encode()
            )
            if authenticated and not self.connected:
                self.connected = True
                problems = {name: one.problem for name, one in self.factories.items() if one.problem}
                greeting = [os.getpid(), problems, self._domains_with_images()]
                write_frame(writer, HostResponse(hello.id, "", CallStatus.OK, greeting).to_json())
                await self._converse(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError, TimeoutError, ValueError):
            pass
        finally:
            writer.close()

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                self._warm(tasks)
                self.images = None if self.hook is None else ImageCache(self.hook, tasks, self.max_image_bytes)
                while True:
                    request = HostRequest.from_json(await read_frame(reader))
                    tasks.create_task(self._answer(request, writer))
        except* (asyncio.IncompleteReadError, ConnectionError, ValueError):
            pass
        finally:
            await self.close()
            self.connected = False

    async def close(self) -> None:
        """Close every episode and every idle environment, in bounded time."""
        pools = list(self.pools.values())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await asyncio.gather(*(pool.close() for pool in pools))
        await asyncio.gather(*(self._close(one) for one in list(self.episodes.values())))

    def _warm(self, tasks: asyncio.TaskGroup) -> None:
        """Start making environments in advance."""
        self.pinned.clear()
        self.pools = {
            name: WarmPool(name, factory, functools.partial(self._new_loop, factory), self.size, self.reuse)
            for name, factory in self.factories.items()
            if factory.make is not None
        }
        for pool in self.pools.values():
            pool.open(tasks)

    def _new_loop(self, factory: DomainFactory, name: str) -> EnvironmentLoop:
        return EnvironmentLoop.on_thread(name) if factory.blocking else EnvironmentLoop(self.main)

    async def _answer(self, request: HostRequest, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        try:
            response = await self._handle(request)
        except asyncio.CancelledError:
            if task.cancelling() and request.id not in self.cancelled:
                raise  # the connection ends
            response = HostResponse(request.id, request.episode, CallStatus.REFUSED, "it was given up")
        finally:
            self.cancelled.discard(request.id)
        if response is None:
            return
        try:
            write_frame(writer, response.to_json())
        except (TypeError, ValueError, RecursionError) as error:
            write_frame(
                writer,
                HostResponse(
                    request.id, request.episode, CallStatus.LIED, f"returned a value that cannot be sent: {error}"
                ).to_json(),
            )
        with contextlib.suppress(ConnectionError):
            await writer.drain()

    async def _handle(self, request: HostRequest) -> HostResponse | None:
        match request.op:
            case HostOperation.HEALTH:
                return HostResponse(request.id, "", CallStatus.OK, self._health())
            case HostOperation.CANCEL:
                if (call := self.calls.get(request.value)) is not None and call.cancel():
                    self.cancelled.add(request.value)
                return None
            case HostOperation.CLOSE:
                episode = self.episodes.get(request.episode)
                reason = "" if episode is None else await self._close(episode)
                if (pinned := self.pinned.pop(request.episode, None)) is not None and self.images is not None:
                    await self.images.release(pinned)
                return HostResponse(
                    request.id, request.episode, CallStatus.RAISED if reason else CallStatus.OK, reason or None
                )
            case HostOperation.IMAGES | HostOperation.PULL:
                return await self._images(request)
            case HostOperation.RESET:
                return await self._reset(request)
            case HostOperation.STEP:
                return await self._step(request)
        return HostResponse(request.id, request.episode, CallStatus.REFUSED, f"a second {request.op}")

    async def _reset(self, request: HostRequest) -> HostResponse:
        domain, seed = request.value
        episode = self.episodes.get(request.episode)
        if episode is None:
            factory = self.factories.get(domain)
            if factory is None or factory.make is None:
                reason = f"no domain '{domain}' here" if factory is None else factory.problem
                return HostResponse(request.id, request.episode, CallStatus.REFUSED, reason)
            episode = self.episodes[request.episode] = self._open_episode(request.episode, factory, self.pools[domain])
        elif episode.environment is not None:
            episode.made = AGAIN

        async def reset() -> Any:
            assert episode.factory.make is not None
            if episode.environment is None:
                began = asyncio.get_running_loop().time()
                episode.environment = await start_environment(episode.factory.make)
                episode.made = EnvironmentOrigin("cold", asyncio.get_running_loop().time() - began)
            observation = await require_awaitable(episode.environment.reset(seed), "reset")
            return [encode_result(lambda: packed_observation(checked_observation(observation))), *episode.made.values()]

        episode.over = False
        try:
            return await self._call(request, episode, reset)
        finally:
            if episode.environment is not None and not episode.counted:
                episode.counted = True
                episode.pool.mark_in_use(episode.environment)

    def _open_episode(self, name: str, factory: DomainFactory, pool: WarmPool) -> HostedEpisode:
        """An episode, with an idle environment of the pool if there is one."""
        idle = pool.take()
        if idle is None:
            return HostedEpisode(name, factory, self._new_loop(factory, name), pool)
        made = EnvironmentOrigin("reused" if idle.played else "ahead", 0.0 if idle.played else idle.make_s)
        return HostedEpisode(
            name, factory, idle.env_loop, pool, idle.environment, made, counted=True, played=idle.played
        )

    def _domains_with_images(self) -> list[str]:
        """Domains whose environments name images that this host can pull."""
        return [
            name for name, factory in self.factories.items() if factory.images is not None and self.hook is not None
        ]

    async def _images(self, request: HostRequest) -> HostResponse:
        """List the images that an episode needs and the images on this host; a PULL request also pulls the missing
        ones. They stay pinned until the episode is closed."""
        domain, seed = request.value
        factory = self.factories.get(domain)
        if factory is None or factory.images is None or self.images is None:
            return HostResponse(request.id, request.episode, CallStatus.REFUSED, f"no images of domain '{domain}' here")
        began, pulled = asyncio.get_running_loop().time(), 0
        task = asyncio.current_task()
        assert task is not None
        self.calls[request.id] = (
            task  # a CANCEL request cancels this task, so that nothing stays pinned without an episode
        )
        try:
            named = factory.images

            async def names() -> list[str]:
                return [str(image) for image in named(seed)]

            wanted = await run_on_loop(self.main, names())
            await self.images.refresh()
            if request.op is HostOperation.PULL:
                pulled = await self.images.ensure(wanted)
                self.pinned.setdefault(request.episode, []).extend(wanted)
        except PullFailed as error:
            return HostResponse(request.id, request.episode, CallStatus.REFUSED, str(error))
        except Exception as error:
            return HostResponse(
                request.id, request.episode, CallStatus.RAISED, f"{type(error).__name__}: {error}"[:500]
            )
        finally:
            self.calls.pop(request.id, None)
        seconds = asyncio.get_running_loop().time() - began
        return HostResponse(
            request.id, request.episode, CallStatus.OK, [wanted, list(self.images.present), pulled], seconds
        )

    async def _step(self, request: HostRequest) -> HostResponse:
        episode = self.episodes.get(request.episode)
        if episode is None or episode.environment is None:
            return HostResponse(
                request.id, request.episode, CallStatus.REFUSED, "a step of an episode that was not reset here"
            )
        if episode.over:
            return HostResponse(request.id, request.episode, CallStatus.REFUSED, "a step after the end of its episode")
        environment = episode.environment

        async def step() -> Any:
            result = await require_awaitable(environment.step(request.value), "step")
            packed = encode_result(lambda: packed_step(checked_step(result)))
            episode.over = bool(packed[2])
            return packed

        return await self._call(request, episode, step)

    async def _call(
        self, request: HostRequest, episode: HostedEpisode, work: Callable[[], Awaitable[Any]]
    ) -> HostResponse:
        """Run a call on the loop of its environment; its response."""
        if episode.running is not None:
            return HostResponse(request.id, request.episode, CallStatus.REFUSED, "two calls of one episode at a time")
        call = run_on_loop(
            episode.env_loop.loop, run_timed(f"{request.op} of {request.episode}", episode.call_lock, work)
        )
        self.calls[request.id] = episode.running = call
        status = CallStatus.REFUSED
        try:
            status, value, env_s = await call
        finally:
            episode.healthy = episode.healthy and status is CallStatus.OK
            self.calls.pop(request.id, None)
            if call.done():
                episode.running = None
        return HostResponse(request.id, request.episode, status, value, env_s)

    async def _close(self, episode: HostedEpisode) -> str:
        """Cancel the episode's call, close its environment and release its thread. Returns the error as text, '' if
        there is none."""
        self.episodes.pop(episode.name, None)
        if episode.environment is not None and episode.counted:
            idle = IdleEnvironment(episode.env_loop, episode.environment, played=episode.played + 1)
            if episode.pool.give_back(idle, healthy=episode.healthy and episode.running is None):
                return ""
        if episode.running is not None:
            episode.running.cancel()

        async def close() -> None:
            if episode.environment is not None:
                await episode.environment.close()

        closing = run_on_loop(episode.env_loop.loop, run_timed(f"close of {episode.name}", episode.call_lock, close))
        try:
            async with asyncio.timeout(CLOSE_S):
                status, value, _ = await closing
            return "" if status is CallStatus.OK else str(value)
        except TimeoutError:
            return f"did not end within {CLOSE_S:g} s"
        finally:
            episode.env_loop.stop()
            if episode.env_loop.thread is not None:
                self.abandoned_threads.append((episode.name, episode.env_loop.thread))

    def _health(self) -> dict[str, Any]:
        """Seconds since the main loop stopped responding and the call that blocks it; threads of closed episodes that
        have not ended; memory."""
        now = asyncio.get_running_loop().time()
        stuck = 0.0
        if self.ping_sent_at is None:
            self.ping_sent_at = now
            front = asyncio.get_running_loop()
            self.main.call_soon_threadsafe(lambda: front.call_soon_threadsafe(self._on_pong))
        else:
            stuck = now - self.ping_sent_at
        task = asyncio.current_task(self.main) if stuck else None
        self.abandoned_threads = [(name, thread) for name, thread in self.abandoned_threads if thread.is_alive()]
        return {
            "live": len(self.episodes),
            "stuck_s": stuck,
            "stuck_in": "" if task is None else task.get_name(),
            "left": [name for name, _ in self.abandoned_threads],
            "memory": resident_bytes(),
            "machine": machine_bytes(),
        }

    def _on_pong(self) -> None:
        self.ping_sent_at = None
