"""The cause of a call, and the meaning of its fault for retries, isolation and fallback. Pure."""

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
"""The stage that caused a call. (A hedge is a second attempt of an existing call.)"""

_NOT_THE_ITEMS = frozenset({FaultKind.THROTTLED, FaultKind.UNAVAILABLE, FaultKind.DEADLINE})
"""Call faults that no item can have caused, so that isolation is pointless."""


def cause_of(entries: Sequence[PendingItem]) -> Cause:
    """The common cause of the items; CALL if any item is called for the first time, since that call is no overhead."""
    first = entries[0].cause
    return first if all(entry.cause is first for entry in entries) else Cause.CALL


def is_divisible(fault: InfraFault, bill: Invocation | None) -> bool:
    """True if one item of a shared call may have caused its fault, so that its halves may succeed.

    False if a worker may still run the call: every half would be executed a second time. An event that could not be
    sent or read (too large, invalid JSON) is attributed to an item although no worker received it. Any other fault that
    reached no worker is attributed to the provider.
    """
    if fault.kind is FaultKind.ENVIRONMENT:
        return True
    return (
        fault.kind not in _NOT_THE_ITEMS
        and not is_outcome_unknown(fault, bill)
        and not retryable_elsewhere(fault, bill)
    )


def retryable_elsewhere(fault: InfraFault, bill: Invocation | None) -> bool:
    """True if another provider may succeed: this one is down, it refuses, or the function did not start on it. False
    for a lost call, unless its fault is marked as retryable."""
    if is_outcome_unknown(fault, bill):
        return fault.kind is FaultKind.UNAVAILABLE and fault.retryable
    if fault.kind in (FaultKind.UNAVAILABLE, FaultKind.THROTTLED):
        return True
    return fault.kind is not FaultKind.DEADLINE and (bill is None or bill.items == 0)


def limited(item: wire.WireItem, limit: float) -> wire.WireItem:
    return {**item, "metadata": {**item["metadata"], "timeout_s": limit}}
