"""Server-sent events, and what is said in pieces."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from rollart.adapters.proxy.messages import ArgumentsDelta, OutputEvent, TextDelta

__all__ = ["KEEPALIVE_COMMENT", "encode_event", "split_events"]

CHUNK_CHARACTERS = 48
"""Characters of one piece. An answer is captured whole before its first piece leaves, so pieces are for clients that
expect several, not for speed."""

KEEPALIVE_COMMENT = b": the policy is still generating\n\n"
"""A comment, which every client skips and which keeps the connection."""


def encode_event(data: Mapping[str, object] | str, name: str = "") -> bytes:
    text = data if isinstance(data, str) else json.dumps(data)
    return (f"event: {name}\n" if name else "").encode() + f"data: {text}\n\n".encode()


def split_events(said: Iterable[OutputEvent]) -> Iterator[OutputEvent]:
    """The same with texts and arguments cut."""
    for one in said:
        if isinstance(one, TextDelta | ArgumentsDelta):
            for start in range(0, len(one.text), CHUNK_CHARACTERS):
                yield replace(one, text=one.text[start : start + CHUNK_CHARACTERS])
        else:
            yield one
