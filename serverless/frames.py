"""Frames between a client and a worker host: a 4-byte big-endian length and msgpack."""

from __future__ import annotations

import asyncio
import struct
from typing import Any

import msgpack

MAX_FRAME_BYTES = 2**31 - 1
"""Maximum bytes of a frame, which may be a package with its artefacts. A greater length is invalid."""

_HEADER = struct.Struct(">I")


def encode_frame(message: Any) -> bytes:
    """Encode a frame. Raises `TypeError`, `ValueError` or `OverflowError` for a message that has no wire form or is too
    large."""
    body: bytes = msgpack.packb(message)
    if len(body) > MAX_FRAME_BYTES:
        raise ValueError(f"{len(body)} bytes (rule: at most {MAX_FRAME_BYTES})")
    return _HEADER.pack(len(body)) + body


async def read_frame(reader: asyncio.StreamReader, *, largest: int = MAX_FRAME_BYTES) -> Any:
    """The next frame. Raises `IncompleteReadError` at the end, `ValueError` for an invalid frame."""
    (length,) = _HEADER.unpack(await reader.readexactly(_HEADER.size))
    return _decode_frame(await reader.readexactly(_checked_length(length, largest)))


class FrameDecoder:
    """Collects the received bytes of a protocol into frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Any]:
        """The frames that are now complete. Raises `ValueError` for an invalid frame."""
        self._buffer += data
        found = []
        while len(self._buffer) >= _HEADER.size:
            (length,) = _HEADER.unpack_from(self._buffer)
            end = _HEADER.size + _checked_length(length)
            if len(self._buffer) < end:
                break
            found.append(_decode_frame(bytes(self._buffer[_HEADER.size : end])))
            del self._buffer[:end]
        return found

    def answer(self, data: bytes, asked: str, reply: asyncio.Future[list[Any]] | None) -> bool:
        """Resolve `reply`, if it is pending, with the frame of request `asked`, without its id. False for any other
        frame, which violates the protocol."""
        try:
            messages = self.feed(data)
        except ValueError:
            return False
        for message in messages:
            if reply is None or reply.done() or not isinstance(message, list) or message[:1] != [asked]:
                return False
            reply.set_result(message[1:])
        return True


def _checked_length(length: int, largest: int = MAX_FRAME_BYTES) -> int:
    if length > largest:
        raise ValueError(f"a frame of {length} bytes (rule: at most {largest})")
    return length


def _decode_frame(body: bytes) -> Any:
    try:
        return msgpack.unpackb(body, strict_map_key=False)
    except (ValueError, msgpack.exceptions.UnpackException) as error:
        raise ValueError(f"a frame that is none: {error}") from None
