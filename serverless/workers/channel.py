"""Connections of workers: messages in frames, and the caller's end with one request at a time."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from typing import Any, cast

import msgpack

from serverless import frames
from serverless.types import FaultKind, InfraFault
from serverless.workers.pool import WorkerFault, WorkerReply, WorkerRequest

MAX_MESSAGE_BYTES = 2**31 - 1
"""Maximum bytes of a message, which may be a package with its artefacts."""


def encode_message(message: Any) -> bytes:
    """Raises `TypeError`, `ValueError` or `OverflowError` for a message that has no wire form or is too large."""
    return frames.encode_frame(msgpack.packb(message), largest=MAX_MESSAGE_BYTES)


async def read_message(reader: asyncio.StreamReader, *, largest: int = MAX_MESSAGE_BYTES) -> Any:
    """The next message. Raises `IncompleteReadError` at the end, `ValueError` for an invalid one."""
    return _unpack(await frames.read_frame(reader, largest=largest))


def _unpack(body: bytes) -> Any:
    try:
        return msgpack.unpackb(body, strict_map_key=False)
    except (ValueError, msgpack.exceptions.UnpackException) as error:
        raise ValueError(f"a frame that is none: {error}") from None


_KINDS = frozenset(str(kind) for kind in FaultKind)


class WorkerChannel(asyncio.Protocol):
    """Implements `Worker` over a connection. A request waits for the frame with its id and is unblocked by it or by
    the connection's end. Any other frame violates the protocol and ends the worker."""

    violation = ""
    """The detail of the fault of a worker that violates the protocol."""

    def __init__(self) -> None:
        self.init_s = 0.0
        self._frames = frames.FrameDecoder(MAX_MESSAGE_BYTES)
        self._transport: asyncio.Transport | None = None
        self._asked = ""
        self._reply: asyncio.Future[list[Any]] | None = None

    @property
    def alive(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    async def call(self, request: WorkerRequest) -> WorkerReply:
        try:
            frame = encode_message([request.id, list(request.event), request.remaining_s * 1000.0])
        except (TypeError, ValueError, OverflowError) as error:
            detail = f"the event has no wire form: {error}"
            return WorkerReply(None, 0.0, InfraFault(FaultKind.ENVIRONMENT, retryable=False, detail=detail))
        match await self.ask(request.id, frame):
            case ["ok", int() | float() as run_s, body]:
                return WorkerReply(body, float(run_s))
            case ["ok", int() | float() as run_s, body, str(left)]:
                return WorkerReply(body, float(run_s), keep=False, left=left)
            case ["fault", int() | float() as run_s, str(kind), str(detail), bool(retryable), bool(keep), *left] if (
                kind in _KINDS
            ):
                fault = InfraFault(FaultKind(kind), retryable=retryable, detail=detail)
                return WorkerReply(None, float(run_s), fault, keep and not left, left=str(left[0]) if left else "")
            case ["died", str(kind), str(detail), bool(retryable)] if kind in _KINDS:
                raise WorkerFault(InfraFault(FaultKind(kind), retryable=retryable, detail=detail))
        raise self.broke_protocol()

    @abstractmethod
    def kill(self) -> None: ...

    @abstractmethod
    async def death(self) -> WorkerFault:
        """The fault of a request that lost its worker."""

    def expect(self, request: str) -> None:
        """The next frame must be that of this request."""
        self._asked = request
        self._reply = asyncio.get_running_loop().create_future()

    async def ask(self, request: str, frame: bytes) -> list[Any]:
        """Send a request and wait for its frame, without its id. Raises `WorkerFault` if the worker ends or sends
        another frame."""
        if self._transport is None or self._transport.is_closing():
            raise await self.death()
        self.expect(request)
        self._transport.write(frame)
        return await self.answer()

    def send(self, frame: bytes) -> None:
        """Send a frame that has no answer. No effect on a worker that has ended."""
        if self._transport is not None:
            self._transport.write(frame)

    async def answer(self) -> list[Any]:
        assert self._reply is not None
        try:
            return await self._reply
        except ConnectionResetError:
            raise await self.death() from None
        finally:
            self._reply = None

    def broke_protocol(self) -> WorkerFault:
        """End a worker that sent an unexpected frame, and fail the request that waits for one."""
        self.kill()
        fault = WorkerFault(InfraFault(FaultKind.BAD_ANSWER, retryable=True, detail=self.violation))
        self._fail(fault)
        return fault

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass of it

    def data_received(self, data: bytes) -> None:
        try:
            messages = [_unpack(body) for body in self._frames.feed(data)]
        except ValueError:
            self.broke_protocol()
            return
        for message in messages:
            expected = isinstance(message, list) and message[:1] == [self._asked]
            if not expected or self._reply is None or self._reply.done():
                self.broke_protocol()
                return
            self._reply.set_result(message[1:])

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._fail(ConnectionResetError())

    def _fail(self, error: Exception) -> None:
        if self._reply is not None and not self._reply.done():
            self._reply.set_exception(error)
            self._reply.exception()  # a start that is cancelled at the same moment never reads it
