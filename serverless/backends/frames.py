"""Frames between a client and a machine that holds its workers: a 4-byte big-endian length and msgpack."""

from __future__ import annotations

import asyncio
import struct
from typing import Any

import msgpack

__all__ = ["MAX_FRAME_BYTES", "FrameDecoder", "encode_frame", "read_frame"]

MAX_FRAME_BYTES = 2**31 - 1
"""Bytes of a frame: a package with its artefacts is one. A length beyond it is no frame."""

_HEADER = struct.Struct(">I")


def encode_frame(message: Any) -> bytes:
    """One frame. TypeError, ValueError or OverflowError for what has no wire form, or is too large."""
    body: bytes = msgpack.packb(message)
    if len(body) > MAX_FRAME_BYTES:
        raise ValueError(f"{len(body)} bytes (rule: at most {MAX_FRAME_BYTES})")
    return _HEADER.pack(len(body)) + body


async def read_frame(reader: asyncio.StreamReader, *, largest: int = MAX_FRAME_BYTES) -> Any:
    """The next frame. `IncompleteReadError` at the end; ValueError for what is none."""
    (length,) = _HEADER.unpack(await reader.readexactly(_HEADER.size))
    return _decode_frame(await reader.readexactly(_checked_length(length, largest)))


class FrameDecoder:
    """What a protocol was sent, until it is a frame."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Any]:
        """The frames that are whole now. ValueError for what is none."""
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
        """Give `reply`, if one is awaited, the frame of request `asked`, without its id. False for any other frame: a
        worker that sends one has broken the protocol."""
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
