"""The nearest known name to a wrong one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["did_you_mean", "some_of"]

MAX_SUGGESTED = 12
"""Most names in one message."""


def did_you_mean(wrong: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?`, else `; known: a, b` for a short list, else ''."""
    known = list(known)
    close = difflib.get_close_matches(wrong, known, n=1, cutoff=0.6)
    if close:
        return f"; did you mean '{close[0]}'?"
    if 0 < len(known) <= MAX_SUGGESTED:
        return f"; known: {', '.join(known)}"
    return ""


def some_of(names: Iterable[str]) -> str:
    """`a, b, c`; of a long list the first ones and the number of the others."""
    names = list(names)
    more = len(names) - MAX_SUGGESTED
    return ", ".join(names[:MAX_SUGGESTED]) + (f" and {more:,} more" if more > 0 else "")
