"""The key of an item, equal for equal items. Pure."""

from __future__ import annotations

import hashlib
from dataclasses import replace

from serverless.keys import canonical
from serverless.types import InfraFault, Outcome, Scored
from serverless.wire import WireItem

__all__ = ["cacheable", "item_key", "copy_outcome"]


def item_key(version: str, item: WireItem) -> bytes | None:
    """SHA-256 over the function's version and the canonical JSON of the item without its id; 32 bytes.

    None if it has no canonical form (NaN, bytes): such an item never equals another.
    """
    try:
        text = canonical([version, item["messages"], item["reference_answer"], item["metadata"]])
    except (TypeError, ValueError):
        return None
    return hashlib.sha256(text).digest()


def cacheable(outcome: Outcome) -> bool:
    """True for outcomes of the function; faults of the platform are never cached."""
    return not isinstance(outcome, InfraFault)


def copy_outcome(outcome: Outcome) -> Outcome:
    """A copy of the outcome that shares no mutable state with it."""
    return replace(outcome, metrics=dict(outcome.metrics)) if isinstance(outcome, Scored) else outcome
