"""The nearest known name to a wrong one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["did_you_mean"]


def did_you_mean(wrong: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?`, else `; known: a, b` for a short list, else ''."""
    known = list(known)
    close = difflib.get_close_matches(wrong, known, n=1, cutoff=0.6)
    if close:
        return f"; did you mean '{close[0]}'?"
    if 0 < len(known) <= 12:
        return f"; known: {', '.join(known)}"
    return ""
