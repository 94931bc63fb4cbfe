"""An answer's text as what a harness is given: content and tool calls, piece by piece while the text is being drawn.

One reader reads streams and whole answers, so that both say the same however the text was cut.
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
    """What was said, put together: texts and calls in their order."""
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
    """`feed` an answer's text in any pieces, then `end` it.

    `spelling`: "hermes" (`<tool_call>{"name": …, "arguments": {…}}</tool_call>`, any number of them), "json" (the whole
    answer is `{"name": …, "parameters": {…}}`) or "none". A call is one from the beginning of its arguments on, which
    are given out as they are written. Where they break off, or what follows them is no end of a call, it is not
    `whole`: what was given out stays its arguments, and the rest is content. Nothing that was said is lost."""

    def __init__(self, spelling: str) -> None:
        self._spelling = spelling
        self._text = ""
        self._at = 0
        """What is before was read."""
        self._state = {"hermes": self._outside, "json": self._inside, "none": self._outside}[spelling]
        self._mark = 0
        """Where the call under way begins, mark included."""
        self._over = False
        self._blank = ""
        """White space that may stand before a call, where it is no content."""
        self._words = self._calls = 0
        """Texts that were given out, and calls that were begun."""
        self._bare = False
        """Nothing but white space was before the first call: there is none before the first content, then."""
        self._name, self._scan, self._given = "", PartialJsonScanner(), 0
        self.spans: list[tuple[int, int, ToolCall]] = []
        """Of whole calls: where they are in the text."""

    @property
    def settled(self) -> int:
        """So many characters were given out, or never will be; what follows is held back."""
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
        """After a call's mark, or at the beginning of what may be one."""
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
        if call is None or body is None:  # what follows the mark is looked at again
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
        """After a call's arguments."""
        call = ToolCall(self._name, self._scan.value(), written=self._scan.written)
        tail = _TAIL.match(self._text, self._at)
        if tail is not None:
            closed = tail.group().endswith(CLOSE)
            last = self._over and tail.end() == len(self._text)
            if (closed or last) if self._spelling == "hermes" else (last and not closed):
                yield from self._whole(tail.end(), call)
                return
        body = self._body()
        if body is not None and _call(body[0]) == call:  # with more than a name and arguments
            yield from self._whole(body[1], call)
        elif body is not None:
            yield self._parted()

    def _body(self) -> tuple[str, int] | None:
        """What is between the marks, and where it ends."""
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
        """It is no whole call after all."""
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
    """How many of the last characters are a beginning of `word`, and not all of it."""
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
