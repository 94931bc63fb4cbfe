"""Messages of workers and worker hosts: frames with msgpack."""

from __future__ import annotations

import asyncio
from typing import Any

import msgpack

from serverless import frames

MAX_MESSAGE_BYTES = 2**31 - 1
"""Maximum bytes of a message, which may be a package with its artefacts."""


def encode_message(message: Any) -> bytes:
    """Raises `TypeError`, `ValueError` or `OverflowError` for a message that has no wire form or is too large."""
    return frames.encode_frame(msgpack.packb(message), largest=MAX_MESSAGE_BYTES)


async def read_message(reader: asyncio.StreamReader, *, largest: int = MAX_MESSAGE_BYTES) -> Any:
    """The next message. Raises `IncompleteReadError` at the end, `ValueError` for an invalid one."""
    return _unpack(await frames.read_frame(reader, largest=largest))


class MessageDecoder:
    """Collects the received bytes of a protocol into messages."""

    def __init__(self) -> None:
        self._frames = frames.FrameDecoder(MAX_MESSAGE_BYTES)

    def feed(self, data: bytes) -> list[Any]:
        """The messages that are now complete. Raises `ValueError` for an invalid one."""
        return [_unpack(body) for body in self._frames.feed(data)]


def _unpack(body: bytes) -> Any:
    try:
        return msgpack.unpackb(body, strict_map_key=False)
    except (ValueError, msgpack.exceptions.UnpackException) as error:
        raise ValueError(f"a frame that is none: {error}") from None
