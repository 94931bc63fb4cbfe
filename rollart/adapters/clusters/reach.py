"""Checks at once that the address of a program on another machine can be reached."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit

from rollart.errors import PartDied, ProviderError
from rollart.ports import Handle

CONNECT_S = 10.0
"""Seconds that a connection may take: a network that drops packets sends no error."""

ADDRESS_METHODS = ("start", "ready")
"""Methods of a `Program` that return the address it serves at."""


class ReachabilityCheckedHandle:
    """Implements `Handle` for a program on another machine. A new address that does not answer is a `ProviderError` the
    first time, since no restart would help. Later, or if the connection is refused, it is the death of the part, since
    the program may have ended meanwhile."""

    def __init__(self, handle: Handle) -> None:
        self._handle = handle
        self._reached = False

    @property
    def name(self) -> str:
        return self._handle.name

    @property
    def node(self) -> str:
        return self._handle.node

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        answer = await self._handle.call(method, *args, **kwargs)
        if method in ADDRESS_METHODS:
            await self._check_reachable(str(answer))
        return answer

    def stream(self, method: str, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        return self._handle.stream(method, *args, **kwargs)

    async def kill(self, *, restart: bool = False) -> None:
        await self._handle.kill(restart=restart)

    async def _check_reachable(self, address: str) -> None:
        url = urlsplit(address)
        if url.hostname is None or url.port is None:
            return
        try:
            async with asyncio.timeout(CONNECT_S):
                _, writer = await asyncio.open_connection(url.hostname, url.port)
        except ConnectionRefusedError:
            raise PartDied(
                self.name,
                f"{address} on node {self.node} refuses connections: it has ended, or its port is closed",
                remedy="open the nodes' ports to the controller's machine",
            ) from None
        except OSError as error:  # includes timeouts
            cause = error.strerror or f"no answer within {CONNECT_S:g} s"
            if self._reached:
                raise PartDied(self.name, f"nothing answers at {address} on node {self.node}: {cause}") from None
            raise ProviderError(
                f"{self.name} serves at {address} on node {self.node}, which this machine does not reach: {cause}",
                remedy="open the nodes' ports to this machine, or launch where their network can be reached",
            ) from None
        self._reached = True
        writer.close()
