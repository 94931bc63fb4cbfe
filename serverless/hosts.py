"""Host programs and their clients: what hosts of function workers and hosts of environments share.

A host is a program that prints `ready tcp://ADDRESS:PORT`, serves connections, and ends with SIGTERM. A client greets
it with a token. Requests and answers are frames (`serverless.frames`): requests have numbers, and answers come in any
order.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import itertools
import os
import signal
import urllib.parse
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeAlias, TypeVar

T = TypeVar("T")

GREETING_S = 10.0
"""Seconds until a client must have sent its greeting. A silent connection is then closed."""

GREETING_BYTES = 4096
"""Maximum bytes of a greeting, so that an unauthenticated client cannot send more."""

Serving: TypeAlias = Callable[[str, asyncio.Server], Awaitable[None]]
"""`await serving(address, server)` announces a server and returns when the program is to end."""


def run_host(main: Callable[[Serving], Coroutine[Any, Any, None]]) -> None:
    """Run a host. Its output goes to the log: after the ready line the pipe is not read."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ready_fd = os.dup(1)
    os.set_inheritable(ready_fd, False)
    os.dup2(2, 1)

    async def run() -> None:
        stop = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)

        async def serving(address: str, server: asyncio.Server) -> None:
            port = server.sockets[0].getsockname()[1]
            with os.fdopen(ready_fd, "w") as out:
                out.write(f"ready tcp://{address}:{port}\n")
            await stop.wait()

        await main(serving)

    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(run())


async def greeting(frame: Awaitable[T]) -> T:
    """The greeting that a client sends. `TimeoutError` if it does not."""
    async with asyncio.timeout(GREETING_S):
        return await frame


def token_matches(given: object, token: str) -> bool:
    """Compare a greeting's token in constant time."""
    return hmac.compare_digest(str(given).encode(), token.encode())


def host_and_port(address: str) -> tuple[str, int]:
    """The parts of `tcp://host:port`."""
    url = urllib.parse.urlsplit(address)
    return url.hostname or "", url.port or 0


class HostChannel(ABC):
    """A client's connection to a host. Owns the connection and the task that reads it.

    Any number of requests wait at a time, each for its answer; the end of the connection fails all of them. A malformed
    answer, or an answer without a request, ends the connection, with that as the cause. Invariant: an answer reaches
    the request of its number and its subject, or no request.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._cause: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._numbers = itertools.count(1)
        self._pending: dict[int, tuple[str, asyncio.Future[Any]]] = {}
        self._abandoned: set[int] = set()
        """Cancelled requests whose answers may still come."""
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None

    @property
    def alive(self) -> bool:
        return not self._cause.done()

    @property
    def cause(self) -> str:
        """The cause of the end; '' while connected."""
        return self._cause.result() if self._cause.done() else ""

    @property
    def outstanding(self) -> int:
        """Requests without an answer so far, with those whose caller no longer waits."""
        return len(self._pending) + len(self._abandoned)

    async def lost(self) -> str:
        """Returns when the host is no longer reachable, with the cause as text."""
        return await asyncio.shield(self._cause)

    async def aclose(self) -> None:
        self.end("its connection was closed")
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)

    def end(self, cause: str) -> None:
        """Treat the host as lost and ignore anything that it may still send. Idempotent."""
        if self._cause.done():
            return
        self._cause.set_result(cause)
        for _, pending in self._pending.values():
            if not pending.done():
                pending.set_exception(self.failure())
                pending.exception()  # a caller that is cancelled at the same moment never reads it
        if self._writer is not None:
            self._writer.close()

    def listen(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Read answers from now on, in a task that outlives this call and ends with the connection."""
        self._writer = writer
        self._reading = asyncio.get_running_loop().create_task(self._read(reader), name=f"answers of {self.name}")

    async def ask(self, encode: Callable[[int], bytes], *, subject: str = "") -> Any:
        """Send the request that `encode` makes of its number; its answer. Raises `failure` if the host ends first."""
        if self._cause.done() or self._writer is None:
            raise self.failure()
        number = next(self._numbers)
        pending: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        frame = encode(number)
        self._pending[number] = subject, pending
        try:
            self._writer.write(frame)
            return await pending
        except asyncio.CancelledError:
            if not pending.done() or pending.cancelled():
                self._abandoned.add(number)
                if self.alive:
                    self.abandon(number, subject)
            raise
        finally:
            del self._pending[number]

    def abandon(self, number: int, subject: str) -> None:
        """The caller of a request has left. Its answer is ignored."""

    @abstractmethod
    def failure(self) -> Exception:
        """The error of requests after the end."""

    @abstractmethod
    async def receive(self, reader: asyncio.StreamReader) -> tuple[int, str, Any]:
        """The next answer: its number, its subject and its content. `ValueError` for a malformed one."""

    async def _read(self, reader: asyncio.StreamReader) -> None:
        cause = "its connection broke"
        try:
            while True:
                self._deliver(*await self.receive(reader))
        except ValueError as error:
            cause = f"it sent {error}"
        except (asyncio.IncompleteReadError, OSError):
            pass
        finally:
            self.end(cause)

    def _deliver(self, number: int, subject: str, answer: Any) -> None:
        if number in self._abandoned:
            self._abandoned.discard(number)
            return
        asked_about, pending = self._pending.get(number, ("", None))
        if pending is None:
            raise ValueError(f"an answer to a request that was never made ({number})")
        if subject != asked_about:
            raise ValueError(f"an answer of episode '{subject}' to a request of '{asked_about}'")
        if not pending.done():
            pending.set_result(answer)
