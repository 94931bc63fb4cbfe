"""Client of the embedded engine's stream: many requests over one connection, without HTTP.

`rollart.engine.stream` describes the format. The client must not import it, because engines are separate programs. The
contract suite runs over this client.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, cast

import msgpack

from rollart.errors import EngineError, HandoffFailed, WrongAnswer
from rollart.model import Completion, CompletionChunk, FinishReason, GenerateRequest, VersionSpan

SEED_MASK = 2**64 - 1
"""Seeds have 64 bits on the wire; the engine reduces seeds modulo 2^64 anyway."""


MAX_FRAME = 2**28
"""Maximum bytes of a frame of answers, far above real frames. A larger length is garbage, and the client would wait for
that many bytes."""

FRAME_MESSAGES = 64
"""Maximum requests in one frame: 64 contexts of 100,000 tokens stay below the server's limit (64 MiB)."""


class EngineStream(asyncio.Protocol):
    """One connection to an engine. Owns the requests that wait for an answer on it.

    Any task of the loop may call `generate`; it waits until the engine answers, and is unblocked by an EngineError
    (retryable) when the connection is lost. All messages of one loop iteration are sent as one frame.
    """

    def __init__(self, peer: str) -> None:
        self._peer = peer
        self._transport: asyncio.Transport | None = None
        self._incoming = bytearray()
        self._outgoing: list[Sequence[object]] = []
        self._pending: dict[int, asyncio.Future[Completion]] = {}
        self._on_chunk: dict[int, Callable[[CompletionChunk], None]] = {}
        self._sent = 0

    @property
    def open(self) -> bool:
        return self._transport is not None

    async def generate(self, request: GenerateRequest) -> Completion:
        """Send a request and wait for its end. Cancelling it aborts it on the engine."""
        # Answers carry the number, not the id: a cancelled id may be sent again before its first answer arrives.
        self._sent = number = self._sent + 1
        s = request.sampling
        seed = None if s.seed is None else s.seed & SEED_MASK
        self.send(
            (
                "g" if request.on_chunk is None else "G",
                number,
                request.request_id,
                request.session,
                request.token_ids,
                s.max_tokens,
                s.temperature,
                s.top_p,
                seed,
                s.stop_token_ids,
                s.allowed_token_ids,
                request.cache_salt,
                None if request.kv_transfer is None else dict(request.kv_transfer),
            )
        )
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
        if self._transport is None:
            raise self._lost(None)
        if not self._outgoing:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outgoing.append(message)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        for answer in self._pending.values():
            if not answer.done():
                answer.set_exception(self._lost(exc))

    def data_received(self, data: bytes) -> None:
        self._incoming += data
        while len(self._incoming) >= 4:
            size = int.from_bytes(self._incoming[:4], "little")
            if size > MAX_FRAME:
                self._fail_all(f"a frame of {size} bytes")
                return
            if len(self._incoming) < 4 + size:
                return
            frame = bytes(self._incoming[4 : 4 + size])
            del self._incoming[: 4 + size]
            try:
                for message in msgpack.unpackb(frame, use_list=False):
                    self._deliver(message)
            except (msgpack.UnpackException, LookupError, TypeError, ValueError) as error:
                self._fail_all(repr(error))

    def _fail_all(self, problem: str) -> None:
        """Fail all requests and drop the connection: after an invalid frame, no later byte can be interpreted."""
        self._incoming.clear()
        for answer in self._pending.values():
            if not answer.done():
                answer.set_exception(WrongAnswer(f"{self._peer}: answer not understood: {problem}"))
        if self._transport is not None:
            self._transport.abort()

    def _deliver(self, message: tuple[Any, ...]) -> None:
        answer = self._pending.get(message[1])
        if answer is None or answer.done():  # the request was cancelled
            return
        if message[0] == "p":
            try:
                self._on_chunk[message[1]](CompletionChunk(*message[2:]))
            except WrongAnswer as error:
                answer.set_exception(error)
            return
        if message[0] == "e":
            _, _, text, retryable, kind = message
            text = f"{self._peer}: {text}"
            answer.set_exception(HandoffFailed(text) if kind == "handoff" else EngineError(text, retryable=retryable))
            return
        _, _, token_ids, logprobs, spans, finish, prompt_tokens, cached_tokens, transfer = message
        answer.set_result(
            Completion(
                token_ids,
                logprobs,
                tuple(VersionSpan(*s) for s in spans),
                FinishReason(finish),
                prompt_tokens,
                cached_tokens,
                transfer,
            )
        )

    def _flush(self) -> None:
        messages, self._outgoing = self._outgoing, []
        for start in range(0, len(messages), FRAME_MESSAGES):
            if self._transport is not None:
                frame = self._packed(messages[start : start + FRAME_MESSAGES])
                self._transport.write(len(frame).to_bytes(4, "little") + frame)

    def _packed(self, messages: Sequence[Sequence[object]]) -> bytes:
        """A frame of messages. A message that cannot be encoded (an integer above 64 bits) fails alone."""
        try:
            return cast(bytes, msgpack.packb(messages))
        except (OverflowError, TypeError, ValueError):
            encoded = self._sendable(messages)
            return b"".join((msgpack.Packer().pack_array_header(len(encoded)), *encoded))

    def _sendable(self, messages: Sequence[Sequence[object]]) -> list[bytes]:
        encoded = list[bytes]()
        for message in messages:
            try:
                encoded.append(msgpack.packb(message))
            except (OverflowError, TypeError, ValueError) as error:
                answer = self._pending.get(cast(int, message[1])) if message[0] in ("g", "G") else None
                if answer is not None and not answer.done():
                    answer.set_exception(EngineError(f"{self._peer} cannot be sent this: {error}", retryable=False))
        return encoded

    def _lost(self, exc: Exception | None) -> EngineError:
        why = f": {exc}" if exc else ""
        return EngineError(f"{self._peer}: connection lost{why}", retryable=True, remedy="is the engine alive?")
