"""Client of the embedded engine's stream: many requests over one connection, without HTTP (`rollart.generation`).

The contract suite runs over this client.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, cast

from rollart.errors import EngineError, WrongAnswer
from rollart.framing import MessageConnection
from rollart.generation import parse_chunk_message, parse_completion_message, parse_error_message, request_message
from rollart.model import Completion, CompletionChunk, GenerateRequest

MAX_FRAME = 2**28
"""Longest frame of answers, bytes, far above real frames: the client would wait for that many bytes of garbage."""


class EngineStream(MessageConnection):
    """One connection to an engine. Owns the requests that wait for an answer on it.

    Any task of the loop may call `generate`; it waits until the engine answers, and is unblocked by an EngineError
    (retryable) when the connection is lost.
    """

    def __init__(self, peer: str) -> None:
        super().__init__(max_frame=MAX_FRAME)
        self._peer = peer
        self._pending: dict[int, asyncio.Future[Completion]] = {}
        self._on_chunk: dict[int, Callable[[CompletionChunk], None]] = {}
        self._sent = 0

    async def generate(self, request: GenerateRequest) -> Completion:
        """Send a request and wait for its end. Cancelling it aborts it on the engine."""
        self._sent = number = self._sent + 1
        self.send(request_message(number, request))
        answer: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._pending[number] = answer
        if request.on_chunk is not None:
            self._on_chunk[number] = request.on_chunk
        try:
            return await answer
        except (asyncio.CancelledError, WrongAnswer):
            if self.open:
                self.send(("x", number))
            raise
        finally:
            del self._pending[number]
            self._on_chunk.pop(number, None)

    def send(self, message: Sequence[object]) -> None:
        """Queue a message: ("a", request_ids) to abort, ("r", session) to release, or one of `generate`'s."""
        if not self.open:
            raise self._lost(None)
        super().send(message)

    def on_lost(self, error: Exception | None) -> None:
        self._fail_all(lambda: self._lost(error))

    def on_invalid(self, problem: str) -> None:
        self._fail_all(lambda: WrongAnswer(f"{self._peer}: answer not understood: {problem}"))
        self.abort()

    def on_unsendable(self, message: Sequence[object], error: Exception) -> None:
        answer = self._pending.get(cast(int, message[1])) if message[0] in ("g", "G") else None
        if answer is not None and not answer.done():
            answer.set_exception(EngineError(f"{self._peer} cannot be sent this: {error}", retryable=False))

    def on_message(self, message: Sequence[Any]) -> None:
        answer = self._pending.get(message[1])
        if answer is None or answer.done():  # the request was cancelled
            return
        if message[0] == "p":
            try:
                self._on_chunk[message[1]](parse_chunk_message(message))
            except WrongAnswer as error:
                answer.set_exception(error)
        elif message[0] == "e":
            answer.set_exception(parse_error_message(self._peer, message))
        else:
            answer.set_result(parse_completion_message(message))

    def _fail_all(self, error: Callable[[], Exception]) -> None:
        for answer in self._pending.values():
            if not answer.done():
                answer.set_exception(error())

    def _lost(self, exc: Exception | None) -> EngineError:
        why = f": {exc}" if exc else ""
        return EngineError(f"{self._peer}: connection lost{why}", retryable=True, remedy="is the engine alive?")
