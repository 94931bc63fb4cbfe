"""Incremental parsing of a response's text into content and tool calls.

The same parser reads streamed and complete responses, so both give the same result however the text was split.

Incremental scanning of one JSON object: its certain prefix, its end, and where it becomes invalid.

Parsers for tool calls in a model's text: the two formats that open models are trained on.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
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

MAX_DEPTH = 100
"""Maximum nesting of objects and lists; clients' parsers accept 200."""

MAX_NUMBER_LENGTH = 1000
"""Maximum characters of a number: far below the length that Python refuses to parse."""

WHITESPACE = " \t\n\r"
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?\Z")
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})\Z')
_PARTIAL_ESCAPE = re.compile(r"\\u[0-9a-fA-F]{0,3}\Z")
_PLAIN = re.compile(r'[^"\\\x00-\x1f\ud800-\udfff]+')
"""Characters of a string that need no inspection."""

_CLOSING = {"{": "}", "[": "]"}


class PartialJsonScanner:
    """`push` characters, the first one a `{`. Invariant: `written[: sure]` is a prefix of a JSON object that every
    parser accepts; it ends inside a string or between values, never inside a number, a literal or an escape.

    Python's extensions to JSON, lone surrogates and nesting deeper than `MAX_DEPTH` count as broken."""

    def __init__(self) -> None:
        self.written = ""
        self.sure = 0
        self.done = self.broken = False
        self._read = 0
        """Number of characters read."""
        self._stack: list[str] = []
        self._due = "value"
        """The parser state: the next expected item ("value", "key", "colon", "comma"), or the current one ("string",
        "escape", "atom"). A "?" suffix also permits the end of the innermost object or list."""
        self._key = self._high = False
        """True inside a key; true after the first escape of a surrogate pair."""
        self._word = ""
        """The characters so far of an atom (number or literal) or an escape."""
        self._whole = (0, "")
        """Length of the longest prefix whose values are all complete, and the brackets that close it."""

    def push(self, text: str) -> int:
        """Number of characters that belong to the object; less than all only where it ends or breaks."""
        at = 0
        while at < len(text) and not self.done:
            plain = _PLAIN.match(text, at) if self._due == "string" and not self._high else None
            if plain is not None:
                self._read += plain.end() - at
                self.sure, at = self._read, plain.end()
            elif self.broken or not self._next(text[at]):
                self.broken = True
                break
            else:
                at += 1
        self.written += text[:at]
        return at

    def value(self) -> dict[str, Any]:
        """The object's complete values; of two equal keys the last counts."""
        at, closing = self._whole
        found: dict[str, Any] = json.loads(self.written[:at] + closing)
        return found

    def _next(self, character: str) -> bool:
        self._read += 1
        if self._due == "string":
            return self._in_string(character)
        if self._due == "escape":
            return self._in_escape(character)
        if self._due != "atom":
            return self._between(character)
        if character in ",]}" or character in WHITESPACE:
            return self._atom() and self._between(character)
        self._word += character
        return len(self._word) <= MAX_NUMBER_LENGTH

    def _between(self, character: str) -> bool:
        """Read a character outside strings, numbers and literals."""
        due = self._due
        if character in WHITESPACE:
            self.sure = self._read
        elif character == '"' and due.startswith(("value", "key")):
            self.sure = self._read
            self._key, self._due = due.startswith("key"), "string"
        elif character == ":" and due == "colon":
            self.sure, self._due = self._read, "value"
        elif character == "," and due == "comma":
            self.sure, self._due = self._read, "key" if self._stack[-1] == "{" else "value"
        elif character in _CLOSING and due.startswith("value"):
            return self._open(character)
        elif character in "}]" and (due.endswith("?") or due == "comma"):
            return self._close(character)
        elif character in "-0123456789tfn" and due.startswith("value") and self._stack:
            self._word, self._due = character, "atom"
        else:
            return False
        return True

    def _open(self, character: str) -> bool:
        if len(self._stack) == MAX_DEPTH or (not self._stack and character != "{"):
            return False
        self._stack.append(character)
        self._note()
        self._due = "key?" if character == "{" else "value?"
        return True

    def _close(self, character: str) -> bool:
        if character != _CLOSING[self._stack.pop()]:
            return False
        self._ended()
        self.done = not self._stack
        return True

    def _in_string(self, character: str) -> bool:
        if character == "\\":
            self._word, self._due = character, "escape"
            return True
        if self._high or character < " " or "\ud800" <= character <= "\udfff":
            return False
        self.sure = self._read
        if character == '"' and self._key:
            self._due = "colon"
        elif character == '"':
            self._ended()
        return True

    def _in_escape(self, character: str) -> bool:
        self._word += character
        if not _ESCAPE.match(self._word):
            return _PARTIAL_ESCAPE.match(self._word) is not None
        self._due = "string"
        code = int(self._word[2:], 16) if self._word[1] == "u" else 0
        if self._high != (0xDC00 <= code <= 0xDFFF):
            return False
        self._high = 0xD800 <= code <= 0xDBFF
        if not self._high:
            self.sure = self._read
        return True

    def _atom(self) -> bool:
        """End the current atom before this character; False if it is no valid number or literal."""
        word = self._word
        if word not in ("true", "false", "null") and not (_NUMBER.match(word) and math.isfinite(float(word))):
            return False
        self._read -= 1
        self._ended()
        self._read += 1
        return True

    def _ended(self) -> None:
        """A value is complete."""
        self._due = "comma"
        self._note()

    def _note(self) -> None:
        self.sure = self._read
        self._whole = self._read, "".join(_CLOSING[opened] for opened in reversed(self._stack))


MARK, CLOSE = "<tool_call>", "</tool_call>"

_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\\x00-\x1f]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
_TAIL = re.compile(r"\s*\}\s*(?:</tool_call>)?")


def merge_events(events: Sequence[OutputEvent]) -> tuple[OutputPart, ...]:
    """Merge output events into texts and complete calls, in order."""
    parts: list[OutputPart] = []
    for one in events:
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
        found = self._text.find(MARK, self._position) if self._spelling == "hermes" else -1
        stop = found if found >= 0 else len(self._text)
        if found < 0 and self._spelling == "hermes" and not self._at_end:
            stop -= partial_match_length(self._text[self._position :], MARK)
        yield from self._content(self._text[self._position : stop])
        self._position = stop
        if found >= 0:
            self._call_start, self._position, self._state = found, found + len(MARK), self._inside

    def _inside(self) -> Iterator[OutputEvent]:
        """State after a call's opening tag, or at the start of a possible call."""
        head = _HEAD.match(self._text, self._position)
        if head is not None and (name := _name(head.group(1))) is not None:
            self._name, self._scan, self._emitted = name, PartialJsonScanner(), 0
            self._strip_leading = self._strip_leading or (not self._texts and not self._calls)
            self._calls += 1
            self._position, self._state = head.end(), self._arguments
            yield ToolCallStart(self._calls - 1, name)
            return
        body = self._body()
        if body is None and self._text[self._position :].lstrip()[:1] in ("", "{") and not self._at_end:
            return
        call = None if body is None else _call(body[0])
        if call is None or body is None:  # no call: the text after the tag is parsed again, as content
            yield from self._content(self._text[self._call_start : self._position])
            self._state = self._outside
            if self._spelling == "json":
                self._spelling = "none"
            return
        self._strip_leading = self._strip_leading or (not self._texts and not self._calls)
        self._calls += 1
        yield ToolCallStart(self._calls - 1, call.name)
        yield ArgumentsDelta(self._calls - 1, call.written)
        yield from self._end_call(body[1], call)

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
            self._position -= len(scan.written) - scan.sure
            yield self._truncated_end()

    def _tail(self) -> Iterator[OutputEvent]:
        """State after a call's arguments."""
        call = ToolCall(self._name, self._scan.value(), written=self._scan.written)
        tail = _TAIL.match(self._text, self._position)
        if tail is not None:
            closed = tail.group().endswith(CLOSE)
            last = self._at_end and tail.end() == len(self._text)
            if (closed or last) if self._spelling == "hermes" else (last and not closed):
                yield from self._end_call(tail.end(), call)
                return
        body = self._body()
        if body is not None and _call(body[0]) == call:  # a call with more fields than name and arguments
            yield from self._end_call(body[1], call)
        elif body is not None:
            yield self._truncated_end()

    def _body(self) -> tuple[str, int] | None:
        """The text between the tags and the position after it; None until it is complete."""
        begin = self._call_start + len(MARK) if self._spelling == "hermes" else 0
        found = self._text.find(CLOSE, self._position) if self._spelling == "hermes" else -1
        if found >= 0:
            return self._text[begin:found], found + len(CLOSE)
        return (self._text[begin:], len(self._text)) if self._at_end else None

    def _end_call(self, end: int, call: ToolCall) -> Iterator[OutputEvent]:
        self.spans.append((self._call_start, end, call))
        self._position, self._state = end, self._outside
        if self._spelling == "json":
            self._spelling = "none"
        yield ToolCallEnd(self._calls - 1, call)

    def _truncated_end(self) -> OutputEvent:
        """End the current call as truncated."""
        self._state = self._outside
        if self._spelling == "json":
            self._spelling = "none"
        written = self._scan.written[: self._scan.sure]
        return ToolCallEnd(self._calls - 1, ToolCall(self._name, self._scan.value(), written=written, whole=False))

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


AnswerParser = Callable[[str], tuple[str, tuple[ToolCall, ...]]]
"""Text in, content and calls out. Text that is no valid call stays content, so no text is lost."""


def parse_hermes(text: str) -> tuple[str, tuple[ToolCall, ...]]:
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`, any number of them (Hermes, Qwen)."""
    return _parse_calls("hermes", text)


def parse_bare_json(text: str) -> tuple[str, tuple[ToolCall, ...]]:
    """The whole response is `{"name": …, "parameters": {…}}` (Llama 3)."""
    return _parse_calls("json", text)


def parse_none(text: str) -> tuple[str, tuple[ToolCall, ...]]:
    """Everything is content."""
    return text, ()


PARSERS: Mapping[str, AnswerParser] = {"hermes": parse_hermes, "json": parse_bare_json, "none": parse_none}


def parser_name_for(template: str) -> str:
    """The name of the format in which a chat template renders earlier calls."""
    if "<tool_call>" in template:
        return "hermes"
    return "json" if '"parameters"' in template else "none"


def _parse_calls(spelling: str, text: str) -> tuple[str, tuple[ToolCall, ...]]:
    reader = ToolCallParser(spelling)
    reader.feed(text)
    reader.end()
    if not reader.spans:
        return text, ()
    rest, end = [], 0
    for start, stop, _ in reader.spans:
        rest.append(text[end:start])
        end = stop
    rest.append(text[end:])
    content = "".join(rest).rstrip()
    return (content if rest[0].strip() else content.lstrip()), tuple(call for *_, call in reader.spans)
