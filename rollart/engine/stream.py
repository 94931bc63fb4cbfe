"""The low-latency transport: many requests over one TCP connection, answered as they end.

An agent's turn on a tiny model computes for less than 0.1 ms; an HTTP exchange costs several times that. Here all
requests of one loop iteration travel together, and so do all answers of one step (`rollart.framing`). A message is a
list that starts with its kind:

    g  number, request_id, session, token_ids, max_tokens, temperature, top_p, seed, stop ids, allowed ids, cache_salt,
       kv_transfer_params
    G  the same, streamed: answered with p messages before the c
    a  request_ids to abort: they are answered with their tokens so far
    x  number of a cancelled request: it is not answered
    r  session to release
    p  number, token_ids, logprobs, version, stamp: the tokens drawn since the last p
    c  number, token_ids, logprobs, [[version, start, end, stamp]], finish, prompt_tokens, cached_tokens,
       kv_transfer_params
    e  number, error message, retryable, kind ("handoff" for unavailable KV)

`GET /rollart/stream` names the port. Messages of one connection are handled in order; losing it aborts its requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from rollart.engine.driver import Driver
from rollart.engine.handoff import KvHandoffs
from rollart.engine.jobs import EngineJob, FinishedJob
from rollart.engine.protocol import error_body, parse_job, strip_prefix
from rollart.errors import EngineError
from rollart.framing import MessageConnection
from rollart.model import CompletionChunk

MAX_FRAME = 64 * 2**20
"""Longest frame of requests, bytes."""

GENERATE = ("max_tokens", "temperature", "top_p", "seed", "stop_token_ids", "allowed_token_ids")


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
            self._generate(message[1:], streamed=kind == "G")
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

    def _generate(self, fields: Sequence[Any], *, streamed: bool) -> None:
        number, name, session, token_ids, *sampling, salt, transfer = fields
        body = {
            "request_id": name,
            "token_ids": token_ids,
            "cache_salt": salt,
            "kv_transfer_params": transfer,
            "sampling_params": dict(zip(GENERATE, sampling, strict=True)),
        }
        try:
            job = parse_job(body, session=str(session), fallback_id=self._next_id())
            if streamed:
                job.on_chunk = lambda piece: self._send_piece(number, piece)
            if transfer:  # the request waits for other engines, before or after its steps
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
            self.send(("p", number, piece.token_ids, piece.logprobs, piece.version, piece.stamp))

    def _deliver(self, number: int, result: FinishedJob | EngineError) -> None:
        self._requests.pop(number, None)
        if isinstance(result, EngineError):
            kind = error_body(result, 0)["error"]["kind"]
            self.send(("e", number, str(result), result.retryable, kind))
            return
        c = result.completion
        spans = [(s.version, s.start, s.end, s.stamp) for s in c.spans]
        counts = c.prompt_tokens, c.cached_tokens
        self.send(("c", number, c.token_ids, c.logprobs, spans, c.finish.value, *counts, c.kv_transfer))
