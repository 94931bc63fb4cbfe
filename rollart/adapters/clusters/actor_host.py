"""The child's side of a process actor: `python -m rollart.adapters.clusters.actor_host FD PARENT_PID`."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import signal
import socket
import sys
from typing import Any

from rollart.adapters.clusters.process import read_frame, write_frame
from rollart.lifeline import die_with_parent


async def serve(fd: int) -> None:
    """Answer frames until the parent closes the socket. Calls run concurrently."""
    reader, writer = await asyncio.open_connection(sock=socket.socket(fileno=fd))
    actor: Any = None

    async def answer(number: int, kind: str, method: str, args: Any, kwargs: Any) -> None:
        nonlocal actor
        try:
            if method == "__init__":
                factory, init_args, init_kwargs = args
                module, _, name = factory.partition(":")
                actor = getattr(importlib.import_module(module), name)(*init_args, **init_kwargs)
                write_frame(writer, (number, "item", None))
            elif kind == "stream":
                async for item in getattr(actor, method)(*args, **kwargs):
                    write_frame(writer, (number, "item", item))
                    await writer.drain()
            else:
                result = getattr(actor, method)(*args, **kwargs)
                write_frame(writer, (number, "item", await result if inspect.isawaitable(result) else result))
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


if __name__ == "__main__":
    die_with_parent(int(sys.argv[2]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    asyncio.run(serve(int(sys.argv[1])))
