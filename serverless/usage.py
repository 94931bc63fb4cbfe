"""Tokens of language models that a function's own requests consume: from the call to the bill.

A function that asks a model reports each answered request with `record_tokens`, whatever it makes of the answer. The
handler adds the sums to the item's answer (`usage`), and the caller bills them. Packed with every function.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import asdict
from typing import Any

from serverless.types import TokenUsage

_recorded: ContextVar[list[TokenUsage] | None] = ContextVar("recorded", default=None)

_unattributed: list[TokenUsage] = []
"""Recorded outside the context of an item: by threads, and by handlers that take the whole list."""

_calls = 0
"""Calls under way in this process."""


def record_tokens(usage: TokenUsage) -> None:
    """Add a request's tokens to the bill of the item that is being scored; those recorded in threads are in the bill of
    the call's first item. No effect outside a function's call."""
    recorded = _recorded.get()
    if recorded is not None:
        recorded.append(usage)
    elif _calls:
        _unattributed.append(usage)


def begin_call() -> None:
    """Count a call under way."""
    global _calls
    if not _calls:
        _unattributed.clear()
    _calls += 1
    _recorded.set(None)  # a worker's calls share a context


def end_call() -> list[TokenUsage]:
    """The tokens that were recorded outside the context of an item since the last end of a call."""
    global _calls
    _calls -= 1
    taken = _unattributed.copy()
    del _unattributed[: len(taken)]
    return taken


def recording() -> list[TokenUsage]:
    """A list that receives the tokens recorded from here on in this context, and in tasks started from it."""
    recorded: list[TokenUsage] = []
    _recorded.set(recorded)
    return recorded


def total(recorded: list[TokenUsage]) -> list[TokenUsage]:
    """One entry per endpoint and model, in order of first use."""
    sums: dict[tuple[str, str], TokenUsage] = {}
    for usage in recorded:
        known = sums.get((usage.endpoint, usage.model))
        sums[usage.endpoint, usage.model] = usage if known is None else known + usage
    return list(sums.values())


def encoded(recorded: list[TokenUsage]) -> list[dict[str, Any]]:
    """The wire form of the sums."""
    return [asdict(usage) for usage in total(recorded)]
