"""When a provider of a function is left alone. Pure."""

from __future__ import annotations

import enum
import math
from collections import deque
from dataclasses import dataclass

from serverless.types import FaultKind, InfraFault

__all__ = ["CircuitBreaker", "BreakerPolicy", "BreakerState", "is_provider_failure"]


class BreakerState(enum.StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@dataclass(frozen=True, slots=True)
class BreakerPolicy:
    """Opens after `consecutive` failures, or when `rate` of the last `window` calls failed. Stays open `open_s`, twice
    as long each time that the trial after it fails, at most `max_open_s`. After `trials` failed trials in a row what
    waits for it is given up, and so is whatever comes until a trial succeeds, at the next that fails.

    Bound, with no other provider: an outage is waited out for open_s * (2^trials - 1) seconds and `trials` trials;
    in a longer one an item waits for one trial, at most `max_open_s` and what the trial takes.
    """

    consecutive: int = 5
    rate: float = 0.5
    window: int = 20
    open_s: float = 1.0
    max_open_s: float = 30.0
    trials: int = 3


def is_provider_failure(fault: InfraFault, *, alone: bool = False) -> bool | None:
    """Whether a call's fault is a failure of the provider (True), shows that it works (False), or says nothing about it
    (None): a refusal is load, a deadline is the caller's, what cannot be sent or read is the item's.

    `alone`: there is no other provider. A function whose code fails would then only be made to wait, and whoever runs
    it would learn late that it is broken: what does not answer opens the breaker, what answers badly does not.
    """
    if fault.kind in (FaultKind.THROTTLED, FaultKind.DEADLINE, FaultKind.ENVIRONMENT):
        return None
    if alone and fault.kind is not FaultKind.UNAVAILABLE:
        return None if fault.kind is FaultKind.TIMEOUT else False
    return True


class CircuitBreaker:
    """One function on one provider.

    CLOSED calls go; OPEN none goes until `until`; HALF_OPEN one trial goes: its answer closes, its failure opens again.
    Only the trial's result counts while half open, and none while open: they are calls from before.
    """

    def __init__(self, policy: BreakerPolicy) -> None:
        self._policy = policy
        self._state = BreakerState.CLOSED
        self._until = -math.inf
        self._pause_s = 0.0
        self._in_a_row = 0
        self._last: deque[bool] = deque(maxlen=policy.window)
        self._trial = False
        self.opened = 0
        self.failed_trials = 0
        """Since it was closed last."""

    @property
    def state(self) -> BreakerState:
        return self._state

    @property
    def until(self) -> float:
        """While open: when a trial may go, loop seconds; while a trial is out nobody knows."""
        return math.inf if self._trial else self._until

    @property
    def hopeless(self) -> bool:
        """So many trials have failed that nothing should wait for more than the next."""
        return self.failed_trials >= self._policy.trials

    def unanswered(self, seconds: float) -> bool:
        """Whether a trial that its caller's deadline ended after so long is a failed one: it had the time."""
        return seconds >= self._policy.open_s

    def admits(self, now: float) -> bool:
        """Whether a call may begin."""
        if self._state is BreakerState.CLOSED:
            return True
        return not self._trial and now >= self._until - 1e-9

    def begin(self, now: float) -> bool:
        """A call begins, which `admits` allowed; True if it is the trial, for the call to say so when it ends."""
        if self._state is BreakerState.CLOSED:
            return False
        self._state = BreakerState.HALF_OPEN
        self._trial = True
        return True

    def ended(self, now: float, failed: bool | None, *, trial: bool) -> bool:
        """A call ended: answered (False), failed (True), or in a way that says nothing (None). True if the breaker
        opened by it. A trial that says nothing leaves the way free for another."""
        if trial:
            self._trial = False
            if failed is None:
                return False
            if failed:
                self.failed_trials += 1
                self._open(now)
                return True
            self._state, self._pause_s, self._in_a_row = BreakerState.CLOSED, 0.0, 0
            self.failed_trials = 0
            self._last.clear()
            return False
        if failed is None or self._state is not BreakerState.CLOSED:
            return False
        self._in_a_row = self._in_a_row + 1 if failed else 0
        self._last.append(failed)
        if failed and (self._in_a_row >= self._policy.consecutive or self._often()):
            self._open(now)
            return True
        return False

    def _often(self) -> bool:
        return len(self._last) == self._policy.window and sum(self._last) >= self._policy.rate * self._policy.window

    def _open(self, now: float) -> None:
        self._pause_s = min(self._policy.max_open_s, max(self._policy.open_s, 2.0 * self._pause_s))
        self._state, self._until = BreakerState.OPEN, now + self._pause_s
        self.opened += 1
