"""Frames on a stream: a 4-byte big-endian length and a body. The encoding of bodies is up to both ends."""

from __future__ import annotations

import asyncio
import struct

_HEADER = struct.Struct(">I")


def encode_frame(body: bytes, *, largest: int) -> bytes:
    """`ValueError` for a body that is too large."""
    return _HEADER.pack(_checked_length(len(body), largest)) + body


async def read_frame(reader: asyncio.StreamReader, *, largest: int) -> bytes:
    """The body of the next frame. Raises `IncompleteReadError` at the end, `ValueError` for a frame that is too
    large."""
    (length,) = _HEADER.unpack(await reader.readexactly(_HEADER.size))
    return await reader.readexactly(_checked_length(length, largest))


class FrameDecoder:
    """Collects the received bytes of a protocol into the bodies of frames."""

    def __init__(self, largest: int) -> None:
        self._buffer = bytearray()
        self._largest = largest

    def feed(self, data: bytes) -> list[bytes]:
        """The bodies that are now complete. `ValueError` for a frame that is too large."""
        self._buffer += data
        found = []
        while len(self._buffer) >= _HEADER.size:
            (length,) = _HEADER.unpack_from(self._buffer)
            end = _HEADER.size + _checked_length(length, self._largest)
            if len(self._buffer) < end:
                break
            found.append(bytes(self._buffer[_HEADER.size : end]))
            del self._buffer[:end]
        return found


def _checked_length(length: int, largest: int) -> int:
    if length > largest:
        raise ValueError(f"a frame of {length} bytes (rule: at most {largest})")
    return length
