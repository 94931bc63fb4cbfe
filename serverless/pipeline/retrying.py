"""Consequences of a failed call: a retry, isolation of the failing item, or another provider. Pure: the jitter comes
from an injected Random.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass

from serverless.pipeline.items import PendingItem
from serverless.pipeline.stages import OffloadStage, RetrySpec
from serverless.types import Cause, FaultKind, InfraFault, Invocation


def is_outcome_unknown(fault: InfraFault, bill: Invocation | None) -> bool:
    """True if a call was sent and its result is unknown: it may have been executed or still be running.

    A backend returns a bill for a call that may have reached a worker, and a provider that answered has a name for the
    call (`provider_id`). So UNAVAILABLE with a bill without a name means that the connection was lost after the call
    was sent; a call that was refused or never sent has no bill. A TIMEOUT that is not retryable is the caller's time
    limit, not the function's (a timeout by the provider is retryable).
    """
    if bill is None or not bill.items or bill.provider_id:
        return False
    return fault.kind is FaultKind.UNAVAILABLE or (fault.kind is FaultKind.TIMEOUT and not fault.retryable)


def retry_delay(
    settings: RetrySpec, fault: InfraFault, attempt: int, remaining_s: float, rng: random.Random
) -> float | None:
    """Seconds to wait after the failure of attempt number `attempt` (from 1), or None for no retry.

    Exponential back-off with full jitter, uniform in [0, min(cap, base * 2^(attempt-1))] (AWS's recommendation). None
    for a fault that is not retryable, after the last attempt, and if the deadline would pass first. The wait that the
    provider requested (`retry_after_s`) is the minimum.

    Bound: one item is called at most `max_attempts` times, not counting isolation and throttled calls.
    """
    if not fault.retryable or attempt >= settings.max_attempts:
        return None
    ceiling: float = min(settings.cap_s, settings.base_s * 2.0 ** (attempt - 1))
    wait = max(rng.uniform(0.0, ceiling), fault.retry_after_s or 0.0)
    return wait if wait < remaining_s else None


@dataclass(slots=True)
class TokenBucket:
    """Each unit of work deposits `earned` tokens, each extra call takes one; at most `most` are saved.

    Bound, at every moment: extra calls <= initial `tokens` + earned * work. So under an outage, retries add at most a
    tenth to the load; and since the bucket of hedges starts empty, hedges <= budget * calls.
    """

    earned: float
    _: KW_ONLY
    most: float
    tokens: float = 0.0

    def earn(self) -> None:
        self.tokens = min(self.most, self.tokens + self.earned)

    def take(self, *, spare: float = 0.0) -> bool:
        """Spend a token, if `spare` tokens remain afterwards."""
        if self.tokens < 1.0 + spare:
            return False
        self.tokens -= 1.0
        return True


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
