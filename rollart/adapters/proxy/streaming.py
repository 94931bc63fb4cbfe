"""Sends one streamed response of the proxy to its client."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

from aiohttp import web

from rollart.adapters.proxy.messages import BadRequest, CompletionRequest, PolicyResponse, ResponseHeader
from rollart.adapters.proxy.sessions import DeltaCallback
from rollart.adapters.proxy.sse import KEEPALIVE_COMMENT
from rollart.adapters.proxy.unfolding import OutputDelta
from rollart.errors import RollartError

__all__ = ["SESSION_HEADER", "StreamedResponse", "response_headers"]

SESSION_HEADER = "X-Rollart-Session"
"""Names the session of a request whose path names none."""

KEEPALIVE_INTERVAL_S = 10.0
"""Longest silence of a stream, seconds. A failure within the first such interval still gets its own HTTP status."""


class StreamedResponse:
    """The HTTP status is sent with the first byte: with the first text, at the end of the generation, or after
    `KEEPALIVE_INTERVAL_S`.

    Text queues here for a client that reads slower than the policy generates; the queue holds at most one response."""

    def __init__(
        self, request: web.Request, api: ModuleType, ask: CompletionRequest, headers: Mapping[str, str]
    ) -> None:
        self._request, self._api, self._ask = request, api, ask
        self._answer = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache", **headers}
        )
        self._deltas: asyncio.Queue[tuple[ResponseHeader, OutputDelta] | None] = asyncio.Queue()
        self._writer: Any = None

    async def send(self, generate: Callable[[DeltaCallback], Awaitable[PolicyResponse]]) -> web.StreamResponse:
        """Stream a generation. BadRequest or RollartError for a failure before the first byte; a later failure is sent
        as an event. A disconnected client cancels the generation."""
        failed: BadRequest | RollartError | None = None
        answer: PolicyResponse | None = None
        gone = False
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._forward(), name="stream")
                try:
                    answer = await generate(lambda head, delta: self._deltas.put_nowait((head, delta)))
                except (BadRequest, RollartError) as error:
                    failed = error
                self._deltas.put_nowait(None)
        except* ConnectionError:
            gone = True
        if failed is not None and not self._answer.prepared:
            raise failed
        if answer is not None and not self._answer.prepared:
            self._answer.headers.update(response_headers(answer))
        with contextlib.suppress(ConnectionError):
            for chunk in () if gone else self._ending(answer, failed):
                await self._write(chunk)
            await self._answer.write_eof()
        return self._answer

    async def _forward(self) -> None:
        while True:
            try:
                async with asyncio.timeout(KEEPALIVE_INTERVAL_S):
                    item = await self._deltas.get()
            except TimeoutError:
                await self._write(KEEPALIVE_COMMENT)
                continue
            if item is None:
                return
            head, delta = item
            for chunk in self._begin_events(head):
                await self._write(chunk)
            for chunk in self._writer.add(delta):
                await self._write(chunk)

    def _ending(self, answer: PolicyResponse | None, failed: Exception | None) -> Iterator[bytes]:
        if answer is None:
            yield self._api.error_event(str(failed), 503)
        else:
            yield from self._begin_events(answer)
            yield from self._writer.end(answer)

    def _begin_events(self, head: ResponseHeader) -> Iterator[bytes]:
        if self._writer is None:
            self._writer = self._api.EventWriter(self._ask, head)
            yield from self._writer.begin()

    async def _write(self, chunk: bytes) -> None:
        if not self._answer.prepared:
            await self._answer.prepare(self._request)
        await self._answer.write(chunk)


def response_headers(answer: PolicyResponse) -> dict[str, str]:
    return {SESSION_HEADER: answer.session, "X-Rollart-Turn": str(answer.turn)}
