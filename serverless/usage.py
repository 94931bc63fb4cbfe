"""Tokens of language models that a function's own requests consume: from the call to the bill.

A function that asks a model reports each answered request with `record_tokens`, whatever it makes of the answer. The
handler adds the sums to the item's answer (`usage`), and the caller bills them. Packed with every function.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import asdict
from typing import Any

from serverless.types import TokenUsage

recorded: ContextVar[list[TokenUsage] | None] = ContextVar("recorded", default=None)
"""The tokens of the item that is being scored; None between calls."""

unattributed: list[TokenUsage] = []
"""Recorded outside the context of an item, and not billed yet: by threads, and by handlers that take the whole list.
They are on the bill of the first item of the next call that ends."""


def record_tokens(usage: TokenUsage) -> None:
    """Add a request's tokens to the bill of the item that is being scored."""
    item = recorded.get()
    (unattributed if item is None else item).append(usage)


def recording() -> list[TokenUsage]:
    """A list that receives the tokens recorded from here on in this context, and in tasks started from it."""
    used: list[TokenUsage] = []
    recorded.set(used)
    return used


def total(usages: list[TokenUsage]) -> list[TokenUsage]:
    """One entry per endpoint and model, in order of first use."""
    sums: dict[tuple[str, str], TokenUsage] = {}
    for usage in usages:
        known = sums.get((usage.endpoint, usage.model))
        sums[usage.endpoint, usage.model] = usage if known is None else known + usage
    return list(sums.values())


def encoded(usages: list[TokenUsage]) -> list[dict[str, Any]]:
    """The wire form of the sums."""
    return [asdict(usage) for usage in total(usages)]
