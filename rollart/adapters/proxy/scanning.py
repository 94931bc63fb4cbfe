"""One JSON object while it is being written: how much of it is certain, where it ends, where it breaks."""

from __future__ import annotations

import json
import math
import re
from typing import Any

__all__ = ["PartialJsonScanner"]

MAX_DEPTH = 100
"""Objects and lists within one another; clients' parsers take 200."""

MAX_NUMBER_LENGTH = 1000
"""Characters of a number: far below what Python refuses to read."""

WHITESPACE = " \t\n\r"
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?\Z")
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})\Z')
_PARTIAL_ESCAPE = re.compile(r"\\u[0-9a-fA-F]{0,3}\Z")
_PLAIN = re.compile(r'[^"\\\x00-\x1f\ud800-\udfff]+')
"""Within a string, of which nothing is to be looked at."""

_CLOSING = {"{": "}", "[": "]"}


class PartialJsonScanner:
    """`push` characters, the first one a `{`. Invariant: `written[: sure]` is how a JSON object begins that any reader
    takes; it stops within a string, or between values, never within a number, a word or an escape.

    What Python alone takes for JSON, halves of surrogate pairs and more nesting than `MAX_DEPTH` are broken."""

    def __init__(self) -> None:
        self.written = ""
        self.sure = 0
        self.done = self.broken = False
        self._read = 0
        """Characters."""
        self._stack: list[str] = []
        self._due = "value"
        """What may come: "value", "key", "colon", "comma", or what it is inside of: "string", "escape", "atom". With a
        "?" also the end of what is open."""
        self._key = self._high = False
        """The string is a key; the first half of a pair of escapes was read."""
        self._word = ""
        """Of an atom or an escape, so far."""
        self._whole = (0, "")
        """The longest beginning of which all values are whole, and what closes it."""

    def push(self, text: str) -> int:
        """How many of the characters are the object's; fewer than all only where it ends or breaks."""
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
        """What is whole of it; the last of two equal keys counts."""
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
        """Outside of strings, numbers and words."""
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
        """What was read before this character is a whole number or word."""
        word = self._word
        if word not in ("true", "false", "null") and not (_NUMBER.match(word) and math.isfinite(float(word))):
            return False
        self._read -= 1
        self._ended()
        self._read += 1
        return True

    def _ended(self) -> None:
        """A value is whole."""
        self._due = "comma"
        self._note()

    def _note(self) -> None:
        self.sure = self._read
        self._whole = self._read, "".join(_CLOSING[opened] for opened in reversed(self._stack))
