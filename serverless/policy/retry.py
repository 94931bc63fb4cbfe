"""The retry policy of failed items. Pure: the jitter comes from an injected Random."""

from __future__ import annotations

import random

from serverless.settings import RetrySpec
from serverless.types import FaultKind, InfraFault, Invocation

__all__ = ["RetryBudget", "is_outcome_unknown", "retry_delay"]


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


class RetryBudget:
    """A token bucket: every submitted item deposits `budget`, every retry takes 1, never more than `reserve` saved.

    Bound: retries <= reserve + budget * items, so that under an outage load grows by at most a tenth.
    """

    __slots__ = ("_budget", "_reserve", "_tokens")

    def __init__(self, settings: RetrySpec) -> None:
        self._budget = settings.budget
        self._reserve = settings.reserve
        self._tokens = settings.reserve

    def earn(self) -> None:
        self._tokens = min(self._reserve, self._tokens + self._budget)

    def take(self) -> bool:
        if self._tokens < 1.0:
            return False
        self._tokens -= 1.0
        return True
