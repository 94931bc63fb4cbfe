"""Incremental scanning of one JSON object: its certain prefix, its end, and where it becomes invalid."""

from __future__ import annotations

import json
import math
import re
from typing import Any

__all__ = ["PartialJsonScanner"]

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
