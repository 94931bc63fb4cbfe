"""Incremental parsing of a response's text into content and tool calls.

The same parser reads streamed and complete responses, so both give the same result however the text was split.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rollart.adapters.proxy.messages import (
    ArgumentsDelta,
    OutputEvent,
    OutputPart,
    TextDelta,
    ToolCall,
    ToolCallEnd,
    ToolCallStart,
    read_json,
)
from rollart.adapters.proxy.scanning import PartialJsonScanner

__all__ = ["ToolCallParser", "partial_match_length", "merge_events"]

MARK, CLOSE = "<tool_call>", "</tool_call>"

_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\\x00-\x1f]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
_TAIL = re.compile(r"\s*\}\s*(?:</tool_call>)?")


def merge_events(said: Sequence[OutputEvent]) -> tuple[OutputPart, ...]:
    """Merge output events into texts and complete calls, in order."""
    parts: list[OutputPart] = []
    for one in said:
        if isinstance(one, TextDelta) and parts and isinstance(parts[-1], str):
            parts[-1] += one.text
        elif isinstance(one, TextDelta):
            parts.append(one.text)
        elif isinstance(one, ToolCallEnd):
            parts.append(one.call)
    return tuple(parts)


class ToolCallParser:
    """Parses one response: `feed` its text in any pieces, then `end` it.

    `spelling`: "hermes" (`<tool_call>{"name": …, "arguments": {…}}</tool_call>`, any number of them), "json" (the whole
    response is `{"name": …, "parameters": {…}}`) or "none". A call starts with the first character of its arguments,
    which are emitted as they are written. If they are truncated, or are not followed by a valid end of a call, the
    call is not `whole`: the emitted text remains its arguments, and the rest is content. No text is lost."""

    def __init__(self, spelling: str) -> None:
        self._spelling = spelling
        self._text = ""
        self._at = 0
        """Number of characters parsed."""
        self._state = {"hermes": self._outside, "json": self._inside, "none": self._outside}[spelling]
        self._mark = 0
        """Start of the current call, its opening tag included."""
        self._over = False
        self._blank = ""
        """Held-back white space: before a call it is not content."""
        self._words = self._calls = 0
        """Emitted texts, and started calls."""
        self._bare = False
        """True if only white space precedes the first call. Leading white space of the first content is then
        stripped."""
        self._name, self._scan, self._given = "", PartialJsonScanner(), 0
        self.spans: list[tuple[int, int, ToolCall]] = []
        """Complete calls with their (start, end) in the text."""

    @property
    def settled(self) -> int:
        """Number of leading characters that were emitted or never will be; later ones are held back."""
        if self._state == self._arguments:
            return self._at - len(self._scan.written) + self._given
        if self._state == self._inside:
            return self._mark - len(self._blank)
        if self._state == self._tail:
            return self._at
        return self._at - len(self._blank)

    def feed(self, text: str) -> list[OutputEvent]:
        self._text += text
        return list(self._run())

    def end(self) -> list[OutputEvent]:
        self._over = True
        said = list(self._run())
        if self._blank and not self._calls:
            said.append(TextDelta(self._blank))
        return said

    def _run(self) -> Iterator[OutputEvent]:
        while True:
            before = self._at, self._state
            yield from self._state()
            if (self._at, self._state) == before:
                return

    def _outside(self) -> Iterator[OutputEvent]:
        found = self._text.find(MARK, self._at) if self._spelling == "hermes" else -1
        stop = found if found >= 0 else len(self._text)
        if found < 0 and self._spelling == "hermes" and not self._over:
            stop -= partial_match_length(self._text[self._at :], MARK)
        yield from self._content(self._text[self._at : stop])
        self._at = stop
        if found >= 0:
            self._mark, self._at, self._state = found, found + len(MARK), self._inside

    def _inside(self) -> Iterator[OutputEvent]:
        """State after a call's opening tag, or at the start of a possible call."""
        head = _HEAD.match(self._text, self._at)
        if head is not None and (name := _name(head.group(1))) is not None:
            self._name, self._scan, self._given = name, PartialJsonScanner(), 0
            self._bare = self._bare or (not self._words and not self._calls)
            self._calls += 1
            self._at, self._state = head.end(), self._arguments
            yield ToolCallStart(self._calls - 1, name)
            return
        body = self._body()
        if body is None and self._text[self._at :].lstrip()[:1] in ("", "{") and not self._over:
            return
        call = None if body is None else _call(body[0])
        if call is None or body is None:  # no call: the text after the tag is parsed again, as content
            yield from self._content(self._text[self._mark : self._at])
            self._state = self._outside
            if self._spelling == "json":
                self._spelling = "none"
            return
        self._bare = self._bare or (not self._words and not self._calls)
        self._calls += 1
        yield ToolCallStart(self._calls - 1, call.name)
        yield ArgumentsDelta(self._calls - 1, call.written)
        yield from self._whole(body[1], call)

    def _arguments(self) -> Iterator[OutputEvent]:
        scan = self._scan
        self._at += scan.push(self._text[self._at :])
        if scan.sure > self._given:
            more = scan.written[self._given : scan.sure]
            self._given = scan.sure
            yield ArgumentsDelta(self._calls - 1, more)
        if scan.done:
            self._state = self._tail
        elif scan.broken or self._over:
            self._at -= len(scan.written) - scan.sure
            yield self._parted()

    def _tail(self) -> Iterator[OutputEvent]:
        """State after a call's arguments."""
        call = ToolCall(self._name, self._scan.value(), written=self._scan.written)
        tail = _TAIL.match(self._text, self._at)
        if tail is not None:
            closed = tail.group().endswith(CLOSE)
            last = self._over and tail.end() == len(self._text)
            if (closed or last) if self._spelling == "hermes" else (last and not closed):
                yield from self._whole(tail.end(), call)
                return
        body = self._body()
        if body is not None and _call(body[0]) == call:  # a call with more fields than name and arguments
            yield from self._whole(body[1], call)
        elif body is not None:
            yield self._parted()

    def _body(self) -> tuple[str, int] | None:
        """The text between the tags and the position after it; None until it is complete."""
        begin = self._mark + len(MARK) if self._spelling == "hermes" else 0
        found = self._text.find(CLOSE, self._at) if self._spelling == "hermes" else -1
        if found >= 0:
            return self._text[begin:found], found + len(CLOSE)
        return (self._text[begin:], len(self._text)) if self._over else None

    def _whole(self, end: int, call: ToolCall) -> Iterator[OutputEvent]:
        self.spans.append((self._mark, end, call))
        self._at, self._state = end, self._outside
        if self._spelling == "json":
            self._spelling = "none"
        yield ToolCallEnd(self._calls - 1, call)

    def _parted(self) -> OutputEvent:
        """End the current call as truncated."""
        self._state = self._outside
        if self._spelling == "json":
            self._spelling = "none"
        written = self._scan.written[: self._scan.sure]
        return ToolCallEnd(self._calls - 1, ToolCall(self._name, self._scan.value(), written=written, whole=False))

    def _content(self, text: str) -> Iterator[OutputEvent]:
        text = self._blank + text
        kept = text if self._spelling == "none" and not self._calls else text.rstrip()
        self._blank = text[len(kept) :]
        if kept:
            self._words += 1
            yield TextDelta(kept.lstrip() if self._bare and self._words == 1 else kept)


def partial_match_length(text: str, word: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `word`."""
    return next((n for n in range(min(len(word) - 1, len(text)), 0, -1) if text.endswith(word[:n])), 0)


def _name(written: str) -> str | None:
    try:
        found = read_json(written)
    except ValueError:
        return None
    return found if isinstance(found, str) else None


def _call(text: str) -> ToolCall | None:
    try:
        value = read_json(text)
    except ValueError:
        return None
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments: Any = value.get("arguments", value.get("parameters"))
    if not isinstance(arguments, Mapping):
        return None
    return ToolCall(value["name"], arguments, written=json.dumps(arguments, ensure_ascii=False))
