"""Tool calls in a model's text, in the two formats that open models are trained on: read while they are written.

The same parser reads streamed and complete responses, so both give the same result however the text was split. Text
that is no valid call stays content, so no text is lost.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pydantic_core import from_json

from rollart.adapters.proxy.messages import (
    ArgumentsDelta,
    OutputEvent,
    OutputPart,
    TextDelta,
    ToolCall,
    ToolCallStart,
    read_json,
)

SPELLINGS = ("hermes", "json", "none")
"""The formats of tool calls; `ToolCallParser` describes them."""

OPEN_TAG, CLOSE_TAG = "<tool_call>", "</tool_call>"

_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\\x00-\x1f]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
_TAIL = re.compile(r"\s*\}\s*(?:</tool_call>)?")

MAX_DEPTH = 100
"""Maximum nesting of objects and lists; clients' parsers accept 200."""

MAX_NUMBER_LENGTH = 1000
"""Maximum characters of a number: far below the length that Python refuses to parse."""

_SPACE = re.compile(r"[ \t\n\r]*")
_ATOM = re.compile(r"[^,\]} \t\n\r]*")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?\Z")
_HIGH, _LOW = r"\\u[dD][89abAB][0-9a-fA-F]{2}", r"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_STRING = re.compile(
    rf'(?:[^"\\\x00-\x1f\ud800-\udfff]+|\\["\\/bfnrt]|\\u(?![dD][89a-fA-F])[0-9a-fA-F]{{4}}|{_HIGH}{_LOW})*'
)
"""Characters of a string, in complete escapes and surrogate pairs."""
_PARTIAL_ESCAPE = re.compile(rf"(?:{_HIGH})?(?:\\(?:u[0-9a-fA-F]{{0,3}})?)?\Z")
_CLOSING = {"{": "}", "[": "]"}


def parser_name_for(template: str) -> str:
    """The name of the format in which a chat template renders earlier calls."""
    if "<tool_call>" in template:
        return "hermes"
    return "json" if '"parameters"' in template else "none"


def parse_answer(spelling: str, text: str) -> tuple[str, tuple[ToolCall, ...]]:
    """The content and the complete calls of a whole response."""
    parser = ToolCallParser(spelling)
    parser.feed(text)
    parser.end()
    return parser.content, tuple(call for *_, call in parser.spans)


def merge_events(events: Sequence[OutputEvent]) -> tuple[OutputPart, ...]:
    """Merge output events into texts and complete calls, in order."""
    parts: list[OutputPart] = []
    for one in events:
        if isinstance(one, TextDelta) and parts and isinstance(parts[-1], str):
            parts[-1] += one.text
        elif isinstance(one, TextDelta):
            parts.append(one.text)
        elif isinstance(one, ToolCall):
            parts.append(one)
    return tuple(parts)


class ToolCallParser:
    """Parses one response: `feed` its text in any pieces, then `end` it.

    `spelling`: "hermes" (`<tool_call>{"name": …, "arguments": {…}}</tool_call>`, any number of them), "json" (the whole
    response is `{"name": …, "parameters": {…}}`) or "none". A call starts with the first character of its arguments,
    which are emitted as they are written. If they are truncated, or are not followed by a valid end of a call, the
    call is not `whole`: the emitted text remains its arguments, and the rest is content.

    `call_id` gives the id of the response's call by its number."""

    def __init__(self, spelling: str, call_id: Callable[[int], str] = lambda number: "") -> None:
        self._spelling, self._call_id = spelling, call_id
        self._text = ""
        self._position = 0
        """Number of characters parsed."""
        self._state = {"hermes": self._outside, "json": self._inside, "none": self._outside}[spelling]
        self._call_start = 0
        """Start of the current call, its opening tag included."""
        self._at_end = False
        self._pending_space = ""
        """Held-back white space: before a call it is not content."""
        self._texts = self._calls = 0
        """Emitted texts, and started calls."""
        self._strip_leading = False
        """True if only white space precedes the first call. Leading white space of the first content is then
        stripped."""
        self._name, self._scan, self._emitted = "", PartialJsonScanner(), 0
        self.spans: list[tuple[int, int, ToolCall]] = []
        """Complete calls with their (start, end) in the text."""

    @property
    def settled(self) -> int:
        """Number of leading characters that were emitted or never will be; later ones are held back."""
        if self._state == self._arguments:
            return self._position - len(self._scan.written) + self._emitted
        if self._state == self._inside:
            return self._call_start - len(self._pending_space)
        if self._state == self._tail:
            return self._position
        return self._position - len(self._pending_space)

    @property
    def content(self) -> str:
        """The text without its complete calls."""
        if not self.spans:
            return self._text
        starts, ends, _ = zip(*self.spans, strict=True)
        kept = [self._text[end:start] for end, start in zip((0, *ends), (*starts, None), strict=True)]
        content = "".join(kept).rstrip()
        return content if kept[0].strip() else content.lstrip()

    def feed(self, text: str) -> list[OutputEvent]:
        self._text += text
        return list(self._run())

    def end(self) -> list[OutputEvent]:
        self._at_end = True
        events = list(self._run())
        if self._pending_space and not self._calls:
            events.append(TextDelta(self._pending_space))
        return events

    def _run(self) -> Iterator[OutputEvent]:
        while True:
            before = self._position, self._state
            yield from self._state()
            if (self._position, self._state) == before:
                return

    def _outside(self) -> Iterator[OutputEvent]:
        found = self._text.find(OPEN_TAG, self._position) if self._spelling == "hermes" else -1
        stop = found if found >= 0 else len(self._text)
        if found < 0 and self._spelling == "hermes" and not self._at_end:
            stop -= partial_match_length(self._text[self._position :], OPEN_TAG)
        yield from self._content(self._text[self._position : stop])
        self._position = stop
        if found >= 0:
            self._call_start, self._position, self._state = found, found + len(OPEN_TAG), self._inside

    def _inside(self) -> Iterator[OutputEvent]:
        """State after a call's opening tag, or at the start of a possible call."""
        head = _HEAD.match(self._text, self._position)
        if head is not None and (name := read_json(head.group(1))) is not None:
            self._name, self._scan, self._emitted = name, PartialJsonScanner(), 0
            self._position, self._state = head.end(), self._arguments
            yield self._start_call(name)
            return
        body = self._body()
        if body is None and self._text[self._position :].lstrip()[:1] in ("", "{") and not self._at_end:
            return
        call = None if body is None else _call(body[0])
        if call is None or body is None:  # no call: the text after the tag is parsed again, as content
            yield from self._content(self._text[self._call_start : self._position])
            self._leave(self._position)
            return
        yield self._start_call(call.name)
        yield ArgumentsDelta(self._calls - 1, call.written)
        yield self._end_call(body[1], call)

    def _arguments(self) -> Iterator[OutputEvent]:
        scan = self._scan
        self._position += scan.push(self._text[self._position :])
        if scan.sure > self._emitted:
            more = scan.written[self._emitted : scan.sure]
            self._emitted = scan.sure
            yield ArgumentsDelta(self._calls - 1, more)
        if scan.done:
            self._state = self._tail
        elif scan.broken or self._at_end:
            self._leave(self._position - len(scan.written) + scan.sure)
            yield self._truncated_call()

    def _tail(self) -> Iterator[OutputEvent]:
        """State after a call's arguments."""
        call = ToolCall(self._name, self._scan.value(), written=self._scan.written)
        tail = _TAIL.match(self._text, self._position)
        if tail is not None:
            closed = tail.group().endswith(CLOSE_TAG)
            last = self._at_end and tail.end() == len(self._text)
            if (closed or last) if self._spelling == "hermes" else (last and not closed):
                yield self._end_call(tail.end(), call)
                return
        body = self._body()
        if body is not None and _call(body[0]) == call:  # a call with more fields than name and arguments
            yield self._end_call(body[1], call)
        elif body is not None:
            self._leave(self._position)
            yield self._truncated_call()

    def _body(self) -> tuple[str, int] | None:
        """The text between the tags and the position after it; None until it is complete."""
        begin = self._call_start + len(OPEN_TAG) if self._spelling == "hermes" else 0
        found = self._text.find(CLOSE_TAG, self._position) if self._spelling == "hermes" else -1
        if found >= 0:
            return self._text[begin:found], found + len(CLOSE_TAG)
        return (self._text[begin:], len(self._text)) if self._at_end else None

    def _start_call(self, name: str) -> ToolCallStart:
        self._strip_leading = self._strip_leading or (not self._texts and not self._calls)
        self._calls += 1
        return ToolCallStart(self._calls - 1, name)

    def _end_call(self, end: int, call: ToolCall) -> ToolCall:
        self.spans.append((self._call_start, end, call))
        self._leave(end)
        return replace(call, id=self._call_id(self._calls - 1))

    def _truncated_call(self) -> ToolCall:
        id, written = self._call_id(self._calls - 1), self._scan.written[: self._scan.sure]
        return ToolCall(self._name, self._scan.value(), id, written, whole=False)

    def _leave(self, position: int) -> None:
        """Go on with content after a call."""
        self._position, self._state = position, self._outside
        if self._spelling == "json":
            self._spelling = "none"

    def _content(self, text: str) -> Iterator[OutputEvent]:
        text = self._pending_space + text
        kept = text if self._spelling == "none" and not self._calls else text.rstrip()
        self._pending_space = text[len(kept) :]
        if kept:
            self._texts += 1
            yield TextDelta(kept.lstrip() if self._strip_leading and self._texts == 1 else kept)


def partial_match_length(text: str, word: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `word`."""
    return next((n for n in range(min(len(word) - 1, len(text)), 0, -1) if text.endswith(word[:n])), 0)


def _call(text: str) -> ToolCall | None:
    value = read_json(text)
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments: Any = value.get("arguments", value.get("parameters"))
    if not isinstance(arguments, Mapping):
        return None
    return ToolCall(value["name"], arguments, written=json.dumps(arguments, ensure_ascii=False))


class PartialJsonScanner:
    """`push` characters, the first one a `{`. Invariant: `written[: sure]` is a prefix of a JSON object that every
    parser accepts; it ends inside a string or between values, never inside a number, a literal or an escape.

    Python's extensions to JSON, lone surrogates and nesting deeper than `MAX_DEPTH` count as broken."""

    def __init__(self) -> None:
        self.written = ""
        self.sure = 0
        self.done = self.broken = False
        self._stack: list[str] = []
        self._due = "value"
        """The item that follows `sure`: "value", "key", "colon", "comma" or the rest of a "string". A "?" suffix also
        permits the end of the innermost object or list."""
        self._in_key = False

    def push(self, text: str) -> int:
        """Number of characters taken; less than all only where the object ends."""
        before = len(self.written)
        self.written += text
        while not (self.done or self.broken) and (self._string() if self._due == "string" else self._token()):
            pass
        if self.done:
            self.written = self.written[: self.sure]
        return len(self.written) - before

    def value(self) -> dict[str, Any]:
        """The object's complete values; of two equal keys the last counts."""
        return dict(from_json(self.written[: self.sure], allow_partial=True))

    def _token(self) -> bool:
        """Read one token outside strings; False if it is incomplete or broken."""
        due, at = self._due, self._end_of(_SPACE)
        self.sure = at
        if at == len(self.written):
            return False
        character = self.written[at]
        if character in "-0123456789tfn" and due.startswith("value") and self._stack:
            return self._atom()
        self.sure += 1
        if character == '"' and due.startswith(("value", "key")):
            self._in_key, self._due = due.startswith("key"), "string"
        elif character == ":" and due == "colon":
            self._due = "value"
        elif character == "," and due == "comma":
            self._due = "key" if self._stack[-1] == "{" else "value"
        elif character in _CLOSING and due.startswith("value") and len(self._stack) < MAX_DEPTH:
            self._stack.append(character)
            self._due = "key?" if character == "{" else "value?"
        elif character in "}]" and (due.endswith("?") or due == "comma") and character == _CLOSING[self._stack[-1]]:
            self._stack.pop()
            self._due = "comma"
            self.done = not self._stack
        else:
            self.sure, self.broken = at, True
        return not self.broken

    def _string(self) -> bool:
        self.sure = self._end_of(_STRING)
        if self.sure == len(self.written):
            return False
        if self.written[self.sure] != '"':
            self.broken = not _PARTIAL_ESCAPE.match(self.written, self.sure)
            return False
        self.sure += 1
        self._due = "colon" if self._in_key else "comma"
        return True

    def _atom(self) -> bool:
        """Read a number or a literal, which ends before the next character that belongs to neither."""
        end = self._end_of(_ATOM)
        word = self.written[self.sure : end]
        if len(word) > MAX_NUMBER_LENGTH:
            self.broken = True
        elif end < len(self.written):
            if word in ("true", "false", "null") or (_NUMBER.match(word) and math.isfinite(float(word))):
                self.sure, self._due = end, "comma"
            else:
                self.broken = True
        return end < len(self.written) and not self.broken

    def _end_of(self, pattern: re.Pattern[str]) -> int:
        match = pattern.match(self.written, self.sure)
        assert match is not None
        return match.end()
