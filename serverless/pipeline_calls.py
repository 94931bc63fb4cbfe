"""What a call is made for, and what its fault says about who can do better. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from serverless import wire
from serverless.pipeline_entry import PendingItem
from serverless.pipeline_stats import OffloadStage
from serverless.policy.retry import is_outcome_unknown
from serverless.types import Cause, FaultKind, InfraFault, Invocation

__all__ = ["CAUSED_BY", "cause_of", "is_divisible", "retryable_elsewhere", "limited"]

CAUSED_BY = {
    Cause.RETRY: OffloadStage.RETRY,
    Cause.ISOLATION: OffloadStage.ISOLATION,
    Cause.FALLBACK: OffloadStage.FALLBACK,
}
"""The stage whose doing a call is. (A hedge is a second try of a call.)"""

_NOT_THE_ITEMS = frozenset({FaultKind.THROTTLED, FaultKind.UNAVAILABLE, FaultKind.DEADLINE})
"""Faults of a call that no item of it can have caused: there is nothing to isolate."""


def cause_of(entries: Sequence[PendingItem]) -> Cause:
    """A call that carries any item for the first time would have been made anyway."""
    first = entries[0].cause
    return first if all(entry.cause is first for entry in entries) else Cause.CALL


def is_divisible(fault: InfraFault, bill: Invocation | None) -> bool:
    """Whether an item of a shared call can be what made it fail, so that its halves may fare better.

    Not if a worker may still be at it: every half would be executed a second time. An event that could not be sent or
    read (too many bytes, no JSON) is some item's doing though no worker saw it; any other fault that none saw is the
    provider's.
    """
    if fault.kind is FaultKind.ENVIRONMENT:
        return True
    return (
        fault.kind not in _NOT_THE_ITEMS
        and not is_outcome_unknown(fault, bill)
        and not retryable_elsewhere(fault, bill)
    )


def retryable_elsewhere(fault: InfraFault, bill: Invocation | None) -> bool:
    """Whether another provider would do: it is away, it refuses, or the function did not start on it. Not for a lost
    call, unless it is marked as one to repeat."""
    if is_outcome_unknown(fault, bill):
        return fault.kind is FaultKind.UNAVAILABLE and fault.retryable
    if fault.kind in (FaultKind.UNAVAILABLE, FaultKind.THROTTLED):
        return True
    return fault.kind is not FaultKind.DEADLINE and (bill is None or bill.items == 0)


def limited(item: wire.WireItem, limit: float) -> wire.WireItem:
    return {**item, "metadata": {**item["metadata"], "timeout_s": limit}}
