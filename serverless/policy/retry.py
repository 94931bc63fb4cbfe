"""The retry policy of failed items. Pure: the jitter comes from an injected Random."""

from __future__ import annotations

import random
from dataclasses import dataclass

from serverless.types import FaultKind, InfraFault, Invocation

__all__ = ["RetryBudget", "RetryPolicy", "is_outcome_unknown"]


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


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Exponential back-off with full jitter, uniform in [0, min(cap, base * 2^(attempt-1))] (AWS's recommendation).

    Bound: one item is called at most `max_attempts` times (not counting isolation and throttled calls), and a run makes
    at most `reserve + budget * items` retries.
    """

    max_attempts: int = 3
    base_s: float = 0.05
    cap_s: float = 2.0
    budget: float = 0.1
    """Retries earned per submitted item: under an outage, load grows by at most a tenth."""
    reserve: float = 20.0
    """Retries available before any has been earned."""

    def delay(self, fault: InfraFault, attempt: int, remaining_s: float, rng: random.Random) -> float | None:
        """Seconds to wait after the failure of attempt number `attempt` (from 1), or None for no retry.

        None for a fault that is not retryable, after the last attempt, and if the deadline would pass first. The wait
        that the provider requested (`retry_after_s`) is the minimum.
        """
        if not fault.retryable or attempt >= self.max_attempts:
            return None
        ceiling: float = min(self.cap_s, self.base_s * 2.0 ** (attempt - 1))
        wait = max(rng.uniform(0.0, ceiling), fault.retry_after_s or 0.0)
        return wait if wait < remaining_s else None


class RetryBudget:
    """A token bucket: every submitted item deposits `budget`, every retry takes 1, never more than `reserve` saved.

    Bound: retries <= reserve + budget * items.
    """

    __slots__ = ("_budget", "_reserve", "_tokens")

    def __init__(self, policy: RetryPolicy) -> None:
        self._budget = policy.budget
        self._reserve = policy.reserve
        self._tokens = policy.reserve

    def earn(self) -> None:
        self._tokens = min(self._reserve, self._tokens + self._budget)

    def take(self) -> bool:
        if self._tokens < 1.0:
            return False
        self._tokens -= 1.0
        return True
