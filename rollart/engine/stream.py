"""The low-latency transport: many requests over one connection, answered as they end (`rollart.generation`)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from rollart.engine.driver import Driver
from rollart.engine.handoff import KvHandoffs
from rollart.engine.jobs import EngineJob, FinishedJob, parse_job
from rollart.errors import EngineError
from rollart.framing import MessageConnection
from rollart.generation import body_of_message, chunk_message, completion_message, error_message, strip_prefix
from rollart.model import CompletionChunk

MAX_FRAME = 64 * 2**20
"""Longest frame of requests, bytes."""


class StreamConnection(MessageConnection):
    """One connection, on the driver's loop."""

    def __init__(self, driver: Driver, handoffs: KvHandoffs, next_id: Callable[[], str]) -> None:
        super().__init__(max_frame=MAX_FRAME)
        self._driver, self._handoffs, self._next_id = driver, handoffs, next_id
        self._requests: dict[int, EngineJob | asyncio.Task[None]] = {}

    def on_lost(self, error: Exception | None) -> None:
        requests, self._requests = self._requests, {}
        for one in requests.values():
            self._discard(one)

    def on_invalid(self, problem: str) -> None:
        self.close()

    def on_message(self, message: Sequence[Any]) -> None:
        kind = message[0]
        if kind in ("g", "G"):
            self._generate(message)
        elif kind == "a":
            names = [strip_prefix(str(name)) for name in message[1]]
            self._handoffs.abort(names)
            self._driver.abort_soon(names)
        elif kind == "x":
            one = self._requests.pop(message[1], None)
            if one is not None:
                self._discard(one)
        elif kind == "r":
            self._handoffs.exports.drop_session(str(message[1]))
            self._driver.release_soon(str(message[1]))
        else:
            raise ValueError(f"unknown message kind {kind!r}")

    def _generate(self, message: Sequence[Any]) -> None:
        number, session, body = body_of_message(message)
        try:
            job = parse_job(body, session=session, fallback_id=self._next_id())
            if message[0] == "G":
                job.on_chunk = lambda piece: self._send_piece(number, piece)
            if job.request.kv_transfer:  # the request waits for other engines, before or after its steps
                self._requests[number] = self._handoffs.start(self._serve(number, job))
                return
            self._requests[number] = job
            self._driver.submit(job, lambda result: self._deliver(number, result))
        except EngineError as error:
            self._deliver(number, error)

    async def _serve(self, number: int, job: EngineJob) -> None:
        """Run a request with a hand-off."""
        try:
            result: FinishedJob | EngineError = await self._handoffs.serve(job)
        except EngineError as error:
            result = error
        if number in self._requests:
            self._deliver(number, result)

    def _discard(self, one: EngineJob | asyncio.Task[None]) -> None:
        """Abort a request whose client is gone."""
        if isinstance(one, EngineJob):
            self._driver.discard(one.request.request_id)
        else:
            one.cancel()

    def _send_piece(self, number: int, piece: CompletionChunk) -> None:
        if number in self._requests:
            self.send(chunk_message(number, piece))

    def _deliver(self, number: int, result: FinishedJob | EngineError) -> None:
        self._requests.pop(number, None)
        if isinstance(result, EngineError):
            self.send(error_message(number, result))
        else:
            self.send(completion_message(number, result.completion))
