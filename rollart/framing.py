"""Messages over one connection: msgpack frames, one for all messages of a loop iteration.

A frame is its length (4 bytes, little endian) and a msgpack list of messages, each a list. An engine and its clients
exchange requests and answers so: an HTTP exchange costs several times what a turn on a tiny model computes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import msgpack

FRAME_MESSAGES = 64
"""Maximum messages of one frame: 64 requests with contexts of 100,000 tokens stay below 64 MiB."""


class MessageConnection(asyncio.Protocol):
    """One end of a connection, on one loop. Received messages are handled in order by `on_message`. The transport
    buffers writes; their number is bounded by the requests in flight."""

    def __init__(self, *, max_frame: int) -> None:
        """`max_frame`: longest frame to accept, bytes. A larger length is not this protocol."""
        self._max_frame = max_frame
        self._transport: asyncio.Transport | None = None
        self._incoming = bytearray()
        self._outgoing: list[Sequence[object]] = []

    @property
    def open(self) -> bool:
        return self._transport is not None

    def send(self, message: Sequence[object]) -> None:
        """Queue a message; it is dropped if the connection is lost before the end of this loop iteration."""
        if not self._outgoing:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outgoing.append(message)

    def close(self) -> None:
        """Close the connection after everything was sent."""
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Close the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    def on_message(self, message: Sequence[Any]) -> None:
        """Handle a message. LookupError, TypeError and ValueError mean that it is invalid."""
        raise NotImplementedError

    def on_invalid(self, problem: str) -> None:
        """A frame was invalid, so no later byte can be interpreted: end the connection."""
        raise NotImplementedError

    def on_lost(self, error: Exception | None) -> None:
        """The connection is lost."""
        raise NotImplementedError

    def on_unsendable(self, message: Sequence[object], error: Exception) -> None:
        """A message cannot be encoded (an integer above 64 bits); the others of its frame are sent."""
        raise error

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self.on_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._incoming += data
        while len(self._incoming) >= 4:
            size = int.from_bytes(self._incoming[:4], "little")
            if size > self._max_frame:
                return self._fail(f"a frame of {size} bytes")
            if len(self._incoming) < 4 + size:
                return None
            frame = bytes(self._incoming[4 : 4 + size])
            del self._incoming[: 4 + size]
            try:
                for message in msgpack.unpackb(frame, use_list=False):
                    self.on_message(message)
            except (msgpack.UnpackException, LookupError, TypeError, ValueError) as error:
                return self._fail(repr(error))
        return None

    def _fail(self, problem: str) -> None:
        self._incoming.clear()
        self.on_invalid(problem)

    def _flush(self) -> None:
        messages, self._outgoing = self._outgoing, []
        for start in range(0, len(messages), FRAME_MESSAGES):
            if self._transport is not None:
                frame = self._packed(messages[start : start + FRAME_MESSAGES])
                self._transport.write(len(frame).to_bytes(4, "little") + frame)

    def _packed(self, messages: Sequence[Sequence[object]]) -> bytes:
        try:
            return cast(bytes, msgpack.packb(messages))
        except (OverflowError, TypeError, ValueError):
            encoded = list[bytes]()
            for message in messages:
                try:
                    encoded.append(msgpack.packb(message))
                except (OverflowError, TypeError, ValueError) as error:
                    self.on_unsendable(message, error)
            return b"".join((msgpack.Packer().pack_array_header(len(encoded)), *encoded))
