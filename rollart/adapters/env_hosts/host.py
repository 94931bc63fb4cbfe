"""An environment host: a program that runs hundreds of episodes and serves their calls over a socket.

`python -m rollart.adapters.env_hosts.host --domains FILE [--path DIR] [--host ADDRESS] [--port N]` prints `ready
tcp://ADDRESS:PORT`. The file defines the domains (`{name: {"environment": "package.module:Class", "arguments":
{...}}}`); a request names one of them and can make nothing else. A client must greet the host with the token in the
variable ROLLART_HOST_TOKEN.

Environments run on the loop of the main thread, one call of each at a time. An environment whose class sets `blocking =
True` has a thread and a loop of its own and blocks no other. The socket and the health check use a third thread: a host
whose environments block the main loop reports the call that blocks it. A host may make environments in advance, and
reset them for another episode (`WarmPool`).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import faulthandler
import importlib
import json
import os
import sys
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any

from rollart.adapters.env_hosts.wire import (
    CallStatus,
    HostOperation,
    HostRequest,
    HostResponse,
    encode_frame,
    packed_observation,
    packed_step,
    read_frame,
)
from rollart.adapters.envs.images import ImageCache, ImageHook, PullFailed
from rollart.adapters.envs.lookup import attribute_at
from rollart.errors import one_line
from rollart.hosted import EnvironmentOrigin
from rollart.orphans import kill_at_end
from rollart.ports import Environment
from rollart.resident import machine_bytes, resident_bytes
from rollart.user_code import UserCodeGuard, checked_observation, checked_step, end_in_forks, require_awaitable
from serverless.deploy.handler import children_end_here
from serverless.hosts import GREETING_BYTES, Serving, greeting, run_host, token_matches

ENVIRONMENT_HOST_TOKEN = "ROLLART_HOST_TOKEN"

CLOSE_S = 3.0
"""Seconds that a running call may take to end once its episode is closed: less than a trajectory waits for it."""


@dataclass(slots=True)
class HostedEpisode:
    """One episode. `running` is its current call; `over` is True once a step returned done."""

    name: str
    hosted: PooledEnvironment
    pool: WarmPool
    made: EnvironmentOrigin
    """How the episode got its environment."""
    counted: bool = False
    """True if the pool has counted its environment as in use."""
    healthy: bool = True
    """True while no call of the episode has failed or been cancelled."""
    running: asyncio.Future[Any] | None = None
    over: bool = False
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
            hello = HostRequest.from_json(await greeting(read_frame(reader, largest=GREETING_BYTES)))
            authenticated = hello.op is HostOperation.HELLO and token_matches(hello.value, self.token)
            if authenticated and not self.connected:
                self.connected = True
                problems = {name: one.problem for name, one in self.factories.items() if one.problem}
                images = [name for name, one in self.factories.items() if one.images and self.hook is not None]
                about = [os.getpid(), problems, images]
                writer.write(encode_frame(hello.answer(CallStatus.OK, about).to_json()))
                await self._converse(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError, TimeoutError, ValueError):
            pass
        finally:
            writer.close()

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                self.pinned.clear()
                self.pools = {
                    name: WarmPool(name, factory, self.main, self.size, self.reuse, tasks)
                    for name, factory in self.factories.items()
                    if factory.make is not None
                }
                for pool in self.pools.values():
                    pool.fill()
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

    async def _answer(self, request: HostRequest, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        try:
            response = await self.handle(request)
        except asyncio.CancelledError:
            if task.cancelling() and request.id not in self.cancelled:
                raise  # the connection ends
            response = request.answer(CallStatus.REFUSED, "it was given up")
        finally:
            self.cancelled.discard(request.id)
        if response is None:
            return
        try:
            frame = encode_frame(response.to_json())
        except (TypeError, ValueError, RecursionError) as error:
            reason = f"returned a value that cannot be sent: {error}"
            frame = encode_frame(request.answer(CallStatus.LIED, reason).to_json())
        writer.write(frame)
        with contextlib.suppress(ConnectionError):
            await writer.drain()

    async def handle(self, request: HostRequest) -> HostResponse | None:
        """The response to a request; None if it gets none."""
        match request.op:
            case HostOperation.HEALTH:
                return request.answer(CallStatus.OK, self._health())
            case HostOperation.CANCEL:
                if (call := self.calls.get(request.value)) is not None and call.cancel():
                    self.cancelled.add(request.value)
                return None
            case HostOperation.CLOSE:
                episode = self.episodes.get(request.episode)
                reason = "" if episode is None else await self._close(episode)
                if (pinned := self.pinned.pop(request.episode, None)) is not None and self.images is not None:
                    await self.images.release(pinned)
                return request.answer(CallStatus.RAISED if reason else CallStatus.OK, reason or None)
            case HostOperation.IMAGES | HostOperation.PULL:
                return await self._images(request)
            case HostOperation.RESET:
                return await self._reset(request)
            case HostOperation.STEP:
                return await self._step(request)
        return request.answer(CallStatus.REFUSED, f"a second {request.op}")

    async def _reset(self, request: HostRequest) -> HostResponse:
        domain, seed = request.value
        episode = self.episodes.get(request.episode)
        if episode is None:
            factory = self.factories.get(domain)
            if factory is None or factory.make is None:
                reason = f"no domain '{domain}' here" if factory is None else factory.problem
                return request.answer(CallStatus.REFUSED, reason)
            name, pool = request.episode, self.pools[domain]
            if (idle := pool.take()) is None:
                episode = HostedEpisode(name, pool.new_loop(name), pool, EnvironmentOrigin("cold", 0.0))
            else:
                made = EnvironmentOrigin("reused" if idle.played else "ahead", 0.0 if idle.played else idle.make_s)
                episode = HostedEpisode(name, idle, pool, made, counted=True)
            self.episodes[name] = episode
        elif episode.hosted.environment is not None:
            episode.made = EnvironmentOrigin("again", 0.0)
        hosted = episode.hosted

        async def reset() -> Any:
            if hosted.environment is None:
                began = asyncio.get_running_loop().time()
                hosted.environment = await episode.pool.make()
                episode.made = EnvironmentOrigin("cold", asyncio.get_running_loop().time() - began)
            observation = await require_awaitable(hosted.environment.reset(seed), "reset")
            return [encode_result(lambda: packed_observation(checked_observation(observation))), *astuple(episode.made)]

        episode.over = False
        try:
            return await self._call(request, episode, reset)
        finally:
            if hosted.environment is not None and not episode.counted:
                episode.counted = True
                episode.pool.mark_in_use(hosted)

    async def _images(self, request: HostRequest) -> HostResponse:
        """List the images that an episode needs and the images on this host; a PULL request also pulls the missing
        ones. They stay pinned until the episode is closed."""
        domain, seed = request.value
        factory = self.factories.get(domain)
        if factory is None or factory.images is None or self.images is None:
            return request.answer(CallStatus.REFUSED, f"no images of domain '{domain}' here")
        began, pulled = asyncio.get_running_loop().time(), 0
        task = asyncio.current_task()
        assert task is not None
        # A CANCEL request cancels this task, so that nothing stays pinned without an episode.
        self.calls[request.id] = task
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
            return request.answer(CallStatus.REFUSED, str(error))
        except Exception as error:
            return request.answer(CallStatus.RAISED, f"{type(error).__name__}: {error}"[:500])
        finally:
            self.calls.pop(request.id, None)
        seconds = asyncio.get_running_loop().time() - began
        return request.answer(CallStatus.OK, [wanted, list(self.images.present), pulled], seconds)

    async def _step(self, request: HostRequest) -> HostResponse:
        episode = self.episodes.get(request.episode)
        if episode is None or (environment := episode.hosted.environment) is None:
            return request.answer(CallStatus.REFUSED, "a step of an episode that was not reset here")
        if episode.over:
            return request.answer(CallStatus.REFUSED, "a step after the end of its episode")

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
            return request.answer(CallStatus.REFUSED, "two calls of one episode at a time")
        call = run_on_loop(
            episode.hosted.loop, run_timed(f"{request.op} of {request.episode}", episode.call_lock, work)
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
        return request.answer(status, value, env_s)

    async def _close(self, episode: HostedEpisode) -> str:
        """Cancel the episode's call, close its environment and release its thread. Returns the error as text, '' if
        there is none."""
        self.episodes.pop(episode.name, None)
        hosted = episode.hosted
        if episode.counted:
            hosted.played += 1
            if episode.pool.give_back(hosted, healthy=episode.healthy and episode.running is None):
                return ""
        if episode.running is not None:
            episode.running.cancel()

        async def close() -> None:
            if hosted.environment is not None:
                await hosted.environment.close()

        closing = run_on_loop(hosted.loop, run_timed(f"close of {episode.name}", episode.call_lock, close))
        try:
            async with asyncio.timeout(CLOSE_S):
                status, value, _ = await closing
            return "" if status is CallStatus.OK else str(value)
        except TimeoutError:
            return f"did not end within {CLOSE_S:g} s"
        finally:
            hosted.stop()
            if hosted.thread is not None:
                self.abandoned_threads.append((episode.name, hosted.thread))

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


@dataclass(frozen=True, slots=True)
class DomainFactory:
    """Makes a domain's environments; `problem` is the reason if it cannot."""

    make: Callable[[], Environment] | None
    blocking: bool = False
    problem: str = ""
    images: Callable[[int], Sequence[str]] | None = None
    """The images that the episode of a seed needs, if the environment declares them."""


def load_factories(domains: Mapping[str, Any]) -> dict[str, DomainFactory]:
    """Import each domain's environment and make one instance."""
    return {name: _load_factory(one["environment"], one.get("arguments", {})) for name, one in domains.items()}


def _load_factory(path: str, arguments: dict[str, Any]) -> DomainFactory:
    module, _, name = path.partition(":")
    try:
        with UserCodeGuard():
            make = getattr(importlib.import_module(module), name)
    except Exception as error:  # the import of a user's module may raise anything
        return DomainFactory(None, problem=f"'{path}' cannot be imported: {one_line(error, 500)}")
    try:
        with UserCodeGuard():
            made = make(**arguments)
    except Exception as error:
        return DomainFactory(None, problem=f"'{path}' cannot be made with {arguments}: {one_line(error, 500)}")
    return DomainFactory(
        lambda: make(**arguments), blocking=bool(getattr(made, "blocking", False)), images=getattr(made, "images", None)
    )


def run_loop(loop: asyncio.AbstractEventLoop) -> None:
    end_in_forks(loop)
    try:
        loop.run_forever()
    finally:
        loop.close()


class InvalidResult(Exception):
    """The environment returned an invalid result."""


def encode_result(packed: Callable[[], Any]) -> Any:
    try:
        return packed()
    except (TypeError, ValueError) as error:
        raise InvalidResult(str(error)) from None


async def run_timed(name: str, lock: asyncio.Lock, work: Callable[[], Awaitable[Any]]) -> tuple[CallStatus, Any, float]:
    """Run a call on the environment's loop. Returns how it ended, its result or the error as text, and its seconds."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    task.set_name(name)
    began = loop.time()
    try:
        async with lock:
            with children_end_here():  # a process that an environment forks must not continue as the host
                value = await work()
    except InvalidResult as error:
        return CallStatus.LIED, str(error), loop.time() - began
    except asyncio.CancelledError:
        if task.cancelling():
            raise
        return CallStatus.RAISED, "CancelledError of its own", loop.time() - began
    except BaseException as error:  # SystemExit too: it ends the episode, not the host
        return CallStatus.RAISED, one_line(error, 500), loop.time() - began
    return CallStatus.OK, value, loop.time() - began


def run_on_loop(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Any]) -> asyncio.Future[Any]:
    """Run a coroutine on another thread's loop; cancelling the returned future cancels it there."""
    future: Future[Any] = asyncio.run_coroutine_threadsafe(work, loop)
    return asyncio.wrap_future(future)


@dataclass(slots=True)
class PooledEnvironment:
    """An environment, None until it is made, and the loop that its calls run on; `thread` if that loop has one of its
    own. It took `make_s` seconds to make and has played `played` episodes."""

    loop: asyncio.AbstractEventLoop
    thread: threading.Thread | None = None
    environment: Environment | None = None
    make_s: float = 0.0
    played: int = 0

    def stop(self) -> None:
        """End the loop's own thread once it is in no call."""
        if self.thread is not None:
            self.loop.call_soon_threadsafe(self.loop.stop)


@dataclass(slots=True)
class WarmPool:
    """The idle environments of one domain. Used on the loop of the host's server, from `open` to `close`; `take` and
    `give_back` do not wait.

    Bounds: at most `size` environments are idle or being made; an environment plays at most `reuse` episodes. Reusable
    environments that are in use count towards `size`, since they come back. An environment of which a call failed is
    never kept. The first failure stops making in advance until an episode has made its own environment: an episode
    reports the error in its own name.
    """

    name: str
    factory: DomainFactory
    main: asyncio.AbstractEventLoop
    """The loop of environments that do not block."""
    size: int
    reuse: int
    tasks: asyncio.TaskGroup | None
    """The tasks of the connection, which make environments; None once the pool is closed."""
    idle: deque[PooledEnvironment] = field(default_factory=deque)
    making: int = 0
    in_use: int = 0
    """Episodes whose environment may come back."""
    failing: bool = False

    def new_loop(self, name: str) -> PooledEnvironment:
        """The loop of an environment that is not made yet; a thread for it has this name."""
        if not self.factory.blocking:
            return PooledEnvironment(self.main)
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=run_loop, args=(loop,), name=name, daemon=True)
        thread.start()
        return PooledEnvironment(loop, thread)

    async def make(self) -> Environment:
        """Make an environment and run its own `async start()`, if it has one (a container, a browser): all work that
        needs no seed. An environment whose start fails is closed."""
        assert self.factory.make is not None
        environment = self.factory.make()
        start: Callable[[], Any] | None = getattr(environment, "start", None)
        if start is not None:
            try:
                await start()
            except BaseException:
                with contextlib.suppress(Exception):
                    await environment.close()
                raise
        return environment

    def fill(self) -> None:
        """Make environments until the pool is full."""
        while self.tasks is not None and not self.failing and len(self.idle) + self.making + self.in_use < self.size:
            self.making += 1
            self.tasks.create_task(self._make_ahead())

    def take(self) -> PooledEnvironment | None:
        """The environment that has been idle longest; None if there is none."""
        if not self.idle:
            return None
        idle = self.idle.popleft()
        self.mark_in_use(idle)
        return idle

    def mark_in_use(self, hosted: PooledEnvironment) -> None:
        """An episode uses this environment, from the pool or not."""
        self.failing = False
        if self._is_reusable(hosted):
            self.in_use += 1
        self.fill()

    def give_back(self, idle: PooledEnvironment, *, healthy: bool) -> bool:
        """The episode of this environment is over. True if the pool keeps it; else the caller closes it."""
        if not self._is_reusable(idle):
            return False
        self.in_use -= 1
        keep = healthy and self.tasks is not None and idle.played < self.reuse
        if keep and len(self.idle) + self.making < self.size:
            self.idle.append(idle)
            return True
        self.fill()
        return False

    async def close(self) -> None:
        """Stop making environments and close the idle ones."""
        self.tasks = None
        while self.idle:
            idle = self.idle.popleft()
            assert idle.environment is not None
            with contextlib.suppress(Exception):
                await run_on_loop(idle.loop, run_timed(f"close of {self.name}", asyncio.Lock(), idle.environment.close))
            idle.stop()

    def _is_reusable(self, hosted: PooledEnvironment) -> bool:
        """True if the environment declares that a reset removes all state of the episode before."""
        return self.reuse > 1 and self.size > 0 and getattr(hosted.environment, "reusable", False) is True

    async def _make_ahead(self) -> None:
        idle = self.new_loop(f"{self.name} ahead")
        try:
            work = run_timed(f"make of {self.name}", asyncio.Lock(), self.make)
            status, idle.environment, idle.make_s = await run_on_loop(idle.loop, work)
        except BaseException:
            idle.stop()
            raise
        finally:
            self.making -= 1
        if status is not CallStatus.OK:
            self.failing = True
            idle.stop()
            return
        self.idle.append(idle)


async def _serve(options: argparse.Namespace, serving: Serving) -> None:
    """Run the environments' loop. The server runs on the loop of its own thread."""
    domains = json.loads(Path(options.domains).read_text())
    images = {} if options.images is None else json.loads(options.images)
    hook = attribute_at(images["hook"], "environments.images")(**images.get("arguments", {})) if images else None
    front = EnvironmentHostServer(
        load_factories(domains),
        asyncio.get_running_loop(),
        os.environ.pop(ENVIRONMENT_HOST_TOKEN, ""),
        options.warm,
        options.reuse,
        hook=hook,
        max_image_bytes=images.get("bytes"),
    )
    loop = asyncio.new_event_loop()
    threading.Thread(target=run_loop, args=(loop,), name="front", daemon=True).start()

    async def listen() -> asyncio.Server:
        return await asyncio.start_server(front.serve, options.host, options.port)

    await serving(options.host, await run_on_loop(loop, listen()))
    await run_on_loop(loop, front.close())


def main() -> None:
    parser = argparse.ArgumentParser(prog="rollart.adapters.env_hosts.host")
    parser.add_argument("--domains", required=True)
    parser.add_argument("--path", action="append", default=[], help="a further directory to import environments from")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--warm", type=int, default=0, help="environments of each domain that are made ahead")
    parser.add_argument("--reuse", type=int, default=1, help="episodes that an environment plays, if it is reusable")
    parser.add_argument("--images", help="the image hook as JSON: hook, arguments, bytes")
    options = parser.parse_args()
    faulthandler.enable()  # a crash in C names the environment's line in the log
    kill_at_end()  # subprocesses of environments, however the host ends
    sys.path[:0] = options.path
    run_host(lambda serving: _serve(options, serving))
    os._exit(0)  # without waiting for threads that hang


if __name__ == "__main__":
    main()
