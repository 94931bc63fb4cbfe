"""Server-sent events, and text in pieces."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

__all__ = ["WAITING", "event", "pieces"]

PIECE = 48
"""Characters of one piece. An answer is captured whole before its first piece leaves, so pieces are for clients that
expect several, not for speed."""

WAITING = b": the policy is still generating\n\n"
"""A comment, which every client skips and which keeps the connection."""


def event(data: Mapping[str, object] | str, name: str = "") -> bytes:
    text = data if isinstance(data, str) else json.dumps(data)
    return (f"event: {name}\n" if name else "").encode() + f"data: {text}\n\n".encode()


def pieces(text: str) -> Iterator[str]:
    for start in range(0, len(text), PIECE):
        yield text[start : start + PIECE]
