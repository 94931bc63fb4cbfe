"""Encoding of server-sent events, and splitting of long output events."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from rollart.adapters.proxy.messages import ArgumentsDelta, OutputEvent, TextDelta

CHUNK_CHARACTERS = 48
"""Maximum characters of one event. The response is captured whole before these events are sent, so splitting serves
clients that expect several events, not latency."""

KEEPALIVE_COMMENT = b": the policy is still generating\n\n"
"""An SSE comment: clients ignore it, and it keeps the connection open."""


def encode_event(data: Mapping[str, object] | str, name: str = "") -> bytes:
    text = data if isinstance(data, str) else json.dumps(data)
    return (f"event: {name}\n" if name else "").encode() + f"data: {text}\n\n".encode()


def split_events(events: Iterable[OutputEvent]) -> Iterator[OutputEvent]:
    """The same events, with texts and arguments split into pieces."""
    for one in events:
        if isinstance(one, TextDelta | ArgumentsDelta):
            for start in range(0, len(one.text), CHUNK_CHARACTERS):
                yield replace(one, text=one.text[start : start + CHUNK_CHARACTERS])
        else:
            yield one
