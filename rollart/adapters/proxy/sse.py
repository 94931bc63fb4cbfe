"""Server-sent events, and what is said in pieces."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from rollart.adapters.proxy.messages import More, Said, Text

__all__ = ["WAITING", "event", "pieces"]

PIECE = 48
"""Characters of one piece. An answer is captured whole before its first piece leaves, so pieces are for clients that
expect several, not for speed."""

WAITING = b": the policy is still generating\n\n"
"""A comment, which every client skips and which keeps the connection."""


def event(data: Mapping[str, object] | str, name: str = "") -> bytes:
    text = data if isinstance(data, str) else json.dumps(data)
    return (f"event: {name}\n" if name else "").encode() + f"data: {text}\n\n".encode()


def pieces(said: Iterable[Said]) -> Iterator[Said]:
    """The same with texts and arguments cut."""
    for one in said:
        if isinstance(one, Text | More):
            for start in range(0, len(one.text), PIECE):
                yield replace(one, text=one.text[start : start + PIECE])
        else:
            yield one
