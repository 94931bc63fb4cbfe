"""One streamed answer of the proxy on its way to the client."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

from aiohttp import web

from rollart.adapters.proxy.messages import Answer, Ask, BadRequest, Head
from rollart.adapters.proxy.sessions import Streamed
from rollart.adapters.proxy.sse import WAITING
from rollart.adapters.proxy.unfolding import Delta
from rollart.errors import RollartError

__all__ = ["HEADER", "Stream", "where"]

HEADER = "X-Rollart-Session"
"""Names the session of a request whose path does not."""

QUIET_S = 10.0
"""A stream says something at least this often, seconds. Until then a failure still has a status of its own."""


class Stream:
    """Its status is sent with its first byte: with the first text, at the end of the generation, or after `QUIET_S`.

    Text waits here for a client that reads slower than the policy speaks: at most one answer of it."""

    def __init__(self, request: web.Request, api: ModuleType, ask: Ask, headers: Mapping[str, str]) -> None:
        self._request, self._api, self._ask = request, api, ask
        self._answer = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache", **headers}
        )
        self._told: asyncio.Queue[tuple[Head, Delta] | None] = asyncio.Queue()
        self._events: Any = None

    async def send(self, generate: Callable[[Streamed], Awaitable[Answer]]) -> web.StreamResponse:
        """BadRequest or RollartError for a failure before the first byte; a later one is an event. A client that has
        gone cancels the generation."""
        failed: BadRequest | RollartError | None = None
        answer: Answer | None = None
        gone = False
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._forward(), name="stream")
                try:
                    answer = await generate(lambda head, delta: self._told.put_nowait((head, delta)))
                except (BadRequest, RollartError) as error:
                    failed = error
                self._told.put_nowait(None)
        except* ConnectionError:
            gone = True
        if failed is not None and not self._answer.prepared:
            raise failed
        if answer is not None and not self._answer.prepared:
            self._answer.headers.update(where(answer))
        with contextlib.suppress(ConnectionError):
            for chunk in () if gone else self._ending(answer, failed):
                await self._write(chunk)
            await self._answer.write_eof()
        return self._answer

    async def _forward(self) -> None:
        while True:
            try:
                async with asyncio.timeout(QUIET_S):
                    told = await self._told.get()
            except TimeoutError:
                await self._write(WAITING)
                continue
            if told is None:
                return
            head, delta = told
            for chunk in self._begun(head):
                await self._write(chunk)
            for chunk in self._events.drawn(delta):
                await self._write(chunk)

    def _ending(self, answer: Answer | None, failed: Exception | None) -> Iterator[bytes]:
        if answer is None:
            yield self._api.failed(str(failed), 503)
        else:
            yield from self._begun(answer)
            yield from self._events.end(answer)

    def _begun(self, head: Head) -> Iterator[bytes]:
        if self._events is None:
            self._events = self._api.Events(self._ask, head)
            yield from self._events.begin()

    async def _write(self, chunk: bytes) -> None:
        if not self._answer.prepared:
            await self._answer.prepare(self._request)
        await self._answer.write(chunk)


def where(answer: Answer) -> dict[str, str]:
    return {HEADER: answer.session, "X-Rollart-Turn": str(answer.turn)}
