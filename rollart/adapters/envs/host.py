"""An environment host: a program that holds hundreds of episodes and serves their calls by a socket of its own.

`python -m rollart.adapters.envs.host --domains FILE [--path DIR] [--host ADDRESS] [--port N]`; it says `ready
tcp://ADDRESS:PORT`. The file names the domains (`{name: {"environment": "package.module:Class", "arguments": {...}}}`);
a request names one of them and can make nothing else. ROLLART_HOST_TOKEN is what a client must greet it with.

Environments run on the loop of the main thread, one call of each at a time; those whose class says `blocking = True`
have a thread and a loop of their own each, and hold up nobody. The socket and the health check have a third thread: a
host whose environments block its loop says so, and by which call.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hmac
import importlib
import json
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollart.adapters.envs.wire import (
    Answer,
    Ask,
    Op,
    Told,
    packed_observation,
    packed_step,
    read_frame,
    write_frame,
)
from rollart.border import checked_observation, checked_step
from rollart.ports import Environment

__all__ = ["TOKEN", "Front", "Maker", "makers"]

TOKEN = "ROLLART_HOST_TOKEN"

CLOSE_S = 3.0
"""Seconds that a call under way may take to end once its episode is closed: less than a trajectory waits for it."""


@dataclass(frozen=True, slots=True)
class Maker:
    """What makes a domain's environments, or why nothing does."""

    make: Callable[[], Environment] | None
    blocking: bool = False
    problem: str = ""


def makers(domains: Mapping[str, Any]) -> dict[str, Maker]:
    """Import each domain's environment and make one of it."""
    return {name: _maker(str(one["environment"]), dict(one.get("arguments", {}))) for name, one in domains.items()}


def _maker(path: str, arguments: dict[str, Any]) -> Maker:
    module, _, name = path.partition(":")
    try:
        make = getattr(importlib.import_module(module), name)
    except Exception as error:  # a user's module may do anything when it is imported
        return Maker(None, problem=f"'{path}' cannot be imported: {_words(error)}")
    try:
        made = make(**arguments)
    except Exception as error:
        return Maker(None, problem=f"'{path}' cannot be made with {arguments}: {_words(error)}")
    return Maker(lambda: make(**arguments), blocking=bool(getattr(made, "blocking", False)))


@dataclass(slots=True)
class Seat:
    """The loop that an episode's calls run on; `thread` if it has one of its own."""

    loop: asyncio.AbstractEventLoop
    thread: threading.Thread | None = None

    @classmethod
    def alone(cls, name: str) -> Seat:
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=_forever, args=(loop,), name=name, daemon=True)
        thread.start()
        return cls(loop, thread)

    def leave(self) -> None:
        """Its thread ends, once it is in no call any more."""
        if self.thread is not None:
            self.loop.call_soon_threadsafe(self.loop.stop)


def _forever(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
    finally:
        loop.close()


@dataclass(slots=True)
class Episode:
    """One episode. `running` is its call under way; `over` once a step said so."""

    name: str
    maker: Maker
    seat: Seat
    environment: Environment | None = None
    running: asyncio.Future[Any] | None = None
    over: bool = False
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Taken on its seat's loop: what was cancelled ends before the next begins."""


@dataclass(slots=True)
class Front:
    """Everything that is not an environment's: lives on the loop of its own thread, which nothing of theirs runs on.

    One connection at a time is the controller's; its episodes are closed when it ends. Calls of one episode come one
    after the other; a second beside it is refused.
    """

    makers: Mapping[str, Maker]
    main: asyncio.AbstractEventLoop
    token: str = ""
    episodes: dict[str, Episode] = field(default_factory=dict)
    calls: dict[int, asyncio.Future[Any]] = field(default_factory=dict)
    left: list[tuple[str, threading.Thread]] = field(default_factory=list)
    """Threads of closed episodes that are still in a call."""
    taken: bool = False
    beat_since: float | None = None
    """When the main loop was asked for a sign of life that it has not given yet."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """A connection, to its end."""
        try:
            hello = Ask.from_json(await read_frame(reader))
            known = hello.op is Op.HELLO and hmac.compare_digest(str(hello.value), self.token)
            if known and not self.taken:
                self.taken = True
                problems = {name: one.problem for name, one in self.makers.items() if one.problem}
                write_frame(writer, Answer(hello.id, "", Told.OK, [os.getpid(), problems]).to_json())
                await self._converse(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError, ValueError):
            pass
        finally:
            writer.close()

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                while True:
                    ask = Ask.from_json(await read_frame(reader))
                    tasks.create_task(self._answer(ask, writer))
        except* (asyncio.IncompleteReadError, ConnectionError, ValueError):
            pass
        finally:
            await self.close()
            self.taken = False

    async def close(self) -> None:
        """Close every episode, in bounded time."""
        await asyncio.gather(*(self._close(one) for one in list(self.episodes.values())))

    async def _answer(self, ask: Ask, writer: asyncio.StreamWriter) -> None:
        try:
            answer = await self._do(ask)
        except asyncio.CancelledError:
            return  # nobody waits for it any more
        if answer is None:
            return
        try:
            write_frame(writer, answer.to_json())
        except (TypeError, ValueError, RecursionError) as error:
            write_frame(
                writer, Answer(ask.id, ask.episode, Told.LIED, f"answered what cannot be sent: {error}").to_json()
            )
        with contextlib.suppress(ConnectionError):
            await writer.drain()

    async def _do(self, ask: Ask) -> Answer | None:
        match ask.op:
            case Op.HEALTH:
                return Answer(ask.id, "", Told.OK, self._health())
            case Op.CANCEL:
                if (call := self.calls.get(ask.value)) is not None:
                    call.cancel()
                return None
            case Op.CLOSE:
                episode = self.episodes.get(ask.episode)
                why = "" if episode is None else await self._close(episode)
                return Answer(ask.id, ask.episode, Told.RAISED if why else Told.OK, why or None)
            case Op.RESET:
                return await self._reset(ask)
            case Op.STEP:
                return await self._step(ask)
        return Answer(ask.id, ask.episode, Told.REFUSED, f"a second {ask.op}")

    async def _reset(self, ask: Ask) -> Answer:
        domain, seed = ask.value
        episode = self.episodes.get(ask.episode)
        if episode is None:
            maker = self.makers.get(domain)
            if maker is None or maker.make is None:
                why = f"no domain '{domain}' here" if maker is None else maker.problem
                return Answer(ask.id, ask.episode, Told.REFUSED, why)
            seat = Seat.alone(ask.episode) if maker.blocking else Seat(self.main)
            episode = self.episodes[ask.episode] = Episode(ask.episode, maker, seat)

        async def reset() -> Any:
            assert episode.maker.make is not None
            if episode.environment is None:
                episode.environment = episode.maker.make()
            shown = await episode.environment.reset(seed)
            return _sound(lambda: packed_observation(checked_observation(shown)))

        episode.over = False
        return await self._call(ask, episode, reset)

    async def _step(self, ask: Ask) -> Answer:
        episode = self.episodes.get(ask.episode)
        if episode is None or episode.environment is None:
            return Answer(ask.id, ask.episode, Told.REFUSED, "a step of an episode that was not reset here")
        if episode.over:
            return Answer(ask.id, ask.episode, Told.REFUSED, "a step after the end of its episode")
        environment = episode.environment

        async def step() -> Any:
            answered = await environment.step(ask.value)
            packed = _sound(lambda: packed_step(checked_step(answered)))
            episode.over = bool(packed[2])
            return packed

        return await self._call(ask, episode, step)

    async def _call(self, ask: Ask, episode: Episode, work: Callable[[], Awaitable[Any]]) -> Answer:
        """The environment's answer, from the loop that it lives on."""
        if episode.running is not None:
            return Answer(ask.id, ask.episode, Told.REFUSED, "two calls of one episode at a time")
        call = _on(episode.seat.loop, _timed(f"{ask.op} of {ask.episode}", episode.turn, work))
        self.calls[ask.id] = episode.running = call
        try:
            told, value, env_s = await call
        finally:
            self.calls.pop(ask.id, None)
            if call.done():
                episode.running = None
        return Answer(ask.id, ask.episode, told, value, env_s)

    async def _close(self, episode: Episode) -> str:
        """End its call, close its environment and give its thread up; what went wrong, in words."""
        self.episodes.pop(episode.name, None)
        if episode.running is not None:
            episode.running.cancel()

        async def close() -> None:
            if episode.environment is not None:
                await episode.environment.close()

        closing = _on(episode.seat.loop, _timed(f"close of {episode.name}", episode.turn, close))
        try:
            async with asyncio.timeout(CLOSE_S):
                told, value, _ = await closing
            return "" if told is Told.OK else str(value)
        except TimeoutError:
            return f"did not end within {CLOSE_S:g} s"
        finally:
            episode.seat.leave()
            if episode.seat.thread is not None:
                self.left.append((episode.name, episode.seat.thread))

    def _health(self) -> dict[str, Any]:
        """How long the main loop has given no sign of life, and in which call it is; threads that nobody needs and that
        do not end."""
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
        }

    def _beaten(self) -> None:
        self.beat_since = None


class _Lie(Exception):
    """What the environment answered is no answer."""


def _sound(packed: Callable[[], Any]) -> Any:
    try:
        return packed()
    except (TypeError, ValueError) as error:
        raise _Lie(str(error)) from None


async def _timed(name: str, turn: asyncio.Lock, work: Callable[[], Awaitable[Any]]) -> tuple[Told, Any, float]:
    """Runs where the environment lives: how it ended, its result or the error in words, and its seconds."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    task.set_name(name)
    began = loop.time()
    try:
        async with turn:
            value = await work()
    except _Lie as error:
        return Told.LIED, str(error), loop.time() - began
    except asyncio.CancelledError:
        if task.cancelling():
            raise
        return Told.RAISED, "CancelledError of its own", loop.time() - began
    except BaseException as error:  # SystemExit too: it is the episode's matter, not the host's
        return Told.RAISED, _words(error), loop.time() - began
    return Told.OK, value, loop.time() - began


def _on(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Any]) -> asyncio.Future[Any]:
    """The work on another thread's loop; cancelling what this gives cancels it there."""
    future: Future[Any] = asyncio.run_coroutine_threadsafe(work, loop)
    return asyncio.wrap_future(future)


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:500]


async def _main(options: argparse.Namespace, said: int) -> None:
    """The environments' loop: everything else is on the front's thread."""
    main = asyncio.get_running_loop()
    stop = asyncio.Event()
    main.add_signal_handler(signal.SIGTERM, stop.set)
    domains = json.loads(Path(options.domains).read_text())
    front = Front(makers(domains), main, os.environ.pop(TOKEN, ""))
    loop = asyncio.new_event_loop()
    threading.Thread(target=_forever, args=(loop,), name="front", daemon=True).start()

    async def listen() -> asyncio.Server:
        return await asyncio.start_server(front.serve, options.host, options.port)

    server = await _on(loop, listen())
    port = server.sockets[0].getsockname()[1]
    with os.fdopen(said, "w") as out:
        out.write(f"ready tcp://{options.host}:{port}\n")
    await stop.wait()
    await _on(loop, front.close())


def main() -> None:
    parser = argparse.ArgumentParser(prog="rollart.adapters.envs.host")
    parser.add_argument("--domains", required=True)
    parser.add_argument("--path", action="append", default=[], help="where environments are imported from, beside")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    options = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # What environments print goes to the log: nobody reads the pipe that says ready.
    said = os.dup(1)
    os.set_inheritable(said, False)
    os.dup2(2, 1)
    sys.path[:0] = options.path
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_main(options, said))
    os._exit(0)  # threads that hang keep nobody


if __name__ == "__main__":
    main()
