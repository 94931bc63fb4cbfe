"""An actor in a process of its own: pickled frames over a socket pair. Parent and child are the same user's code.

The child's side runs as `python -m rollart.adapters.clusters.process FD PARENT_PID`.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import pickle
import signal
import socket
import struct
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from rollart.adapters.clusters.runtime import InlineActor
from rollart.errors import PartDied
from rollart.lifeline import die_with_parent, terminate

_HEADER = struct.Struct("!Q")

STOP_S = 2.0
"""Seconds between SIGTERM and SIGKILL: an actor has no state that needs longer."""


class ProcessActor:
    """The parent's side. Owns the child process, the task that reads the socket, and the queues of pending calls.

    `call` waits for the response's frame; the end of the child fails every pending call with `PartDied` and calls
    `on_exit`.
    """

    def __init__(self, factory: str, args: Any, kwargs: Any, *, on_exit: Callable[[], Awaitable[None]]) -> None:
        self._factory = factory
        self._init = (args, kwargs)
        self._on_exit = on_exit
        self._ids = itertools.count()
        self._queues: dict[int, asyncio.Queue[tuple[str, Any]]] = {}
        self._reader_task: asyncio.Task[None] | None = None
        self._killed = False

    async def start(self) -> None:
        ours, theirs = socket.socketpair()
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "rollart.adapters.clusters.process",
            str(theirs.fileno()),
            str(os.getpid()),
            pass_fds=(theirs.fileno(),),
        )
        theirs.close()
        ours.setblocking(False)
        self._reader, self._writer = await asyncio.open_connection(sock=ours)
        loop = asyncio.get_running_loop()
        # The task outlives the call that started the actor; `kill` ends the actor and awaits the task.
        self._reader_task = loop.create_task(self._read(), name=f"reader of {self._factory}")
        await self.call("__init__", (self._factory, *self._init), {})

    async def call(self, method: str, args: Any, kwargs: Any) -> Any:
        async for item in self._exchange("call", method, args, kwargs):
            return item
        raise AssertionError("unreachable: a call has one answer")

    async def stream(self, method: str, args: Any, kwargs: Any) -> AsyncIterator[Any]:
        async for item in self._exchange("stream", method, args, kwargs):
            yield item

    async def kill(self) -> None:
        """SIGTERM, then SIGKILL after `STOP_S`; returns when the process is reaped."""
        self._killed = True
        await terminate(self._process, STOP_S)
        self._writer.close()
        if self._reader_task is not None and self._reader_task is not asyncio.current_task():
            await self._reader_task

    @property
    def pid(self) -> int:
        return self._process.pid

    async def _exchange(self, kind: str, method: str, args: Any, kwargs: Any) -> AsyncIterator[Any]:
        number = next(self._ids)
        queue: asyncio.Queue[tuple[str, Any]] = asyncio.Queue(maxsize=1024)
        self._queues[number] = queue
        try:
            if self._process.returncode is not None:
                raise PartDied(self._factory, "its process has ended")
            write_frame(self._writer, (number, kind, method, args, kwargs))
            await self._writer.drain()
            while True:
                tag, value = await queue.get()
                if tag == "item":
                    yield value
                elif tag == "error":
                    raise value
                else:
                    return
        except (ConnectionError, BrokenPipeError):
            raise PartDied(self._factory, "its process has ended") from None
        finally:
            self._queues.pop(number, None)

    async def _read(self) -> None:
        try:
            while True:
                number, tag, value = await read_frame(self._reader)
                queue = self._queues.get(number)
                if queue is not None:
                    await queue.put((tag, value))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        await self._process.wait()
        died = PartDied(self._factory, f"its process ended with status {self._process.returncode}")
        for queue in list(self._queues.values()):
            await queue.put(("error", died))
        if not self._killed:
            await self._on_exit()


async def serve(fd: int) -> None:
    """Answer frames until the parent closes the socket. Calls run concurrently."""
    reader, writer = await asyncio.open_connection(sock=socket.socket(fileno=fd))
    actor: Any = None

    async def answer(number: int, kind: str, method: str, args: Any, kwargs: Any) -> None:
        nonlocal actor
        try:
            if method == "__init__":
                factory, init_args, init_kwargs = args
                actor = InlineActor(factory, init_args, init_kwargs)
                write_frame(writer, (number, "item", None))
            elif kind == "stream":
                async for item in actor.stream(method, args, kwargs):
                    write_frame(writer, (number, "item", item))
                    await writer.drain()
            else:
                write_frame(writer, (number, "item", await actor.call(method, args, kwargs)))
            write_frame(writer, (number, "end", None))
        except Exception as error:
            write_frame(writer, (number, "error", error))
        await writer.drain()

    try:
        async with asyncio.TaskGroup() as tasks:
            while True:
                frame = await read_frame(reader)
                tasks.create_task(answer(*frame))
    except* (asyncio.IncompleteReadError, ConnectionError):
        pass


async def read_frame(reader: asyncio.StreamReader) -> Any:
    header = await reader.readexactly(_HEADER.size)
    return pickle.loads(await reader.readexactly(_HEADER.unpack(header)[0]))


def write_frame(writer: asyncio.StreamWriter, value: Any) -> None:
    data = pickle.dumps(value)
    writer.write(_HEADER.pack(len(data)) + data)


if __name__ == "__main__":
    die_with_parent(int(sys.argv[2]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    asyncio.run(serve(int(sys.argv[1])))
