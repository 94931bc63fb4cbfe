"""Circuit breaker of a function's provider. Pure."""

from __future__ import annotations

import enum
import math
from collections import deque

from serverless.settings import BreakerSpec
from serverless.types import FaultKind, InfraFault

__all__ = ["CircuitBreaker", "BreakerState", "is_provider_failure"]


class BreakerState(enum.StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


def is_provider_failure(fault: InfraFault, *, alone: bool = False) -> bool | None:
    """Classify a call's fault: a failure of the provider (True), evidence that the provider works (False), or neither
    (None). A refusal is load, a deadline is the caller's, and an event that cannot be sent or read is the item's.

    `alone`: there is no other provider. Opening the breaker for a function whose code fails would only delay the items,
    and the user would learn late that the function is broken. So a missing answer opens the breaker and a bad answer
    does not.
    """
    if fault.kind in (FaultKind.THROTTLED, FaultKind.DEADLINE, FaultKind.ENVIRONMENT):
        return None
    if alone and fault.kind is not FaultKind.UNAVAILABLE:
        return None if fault.kind is FaultKind.TIMEOUT else False
    return True


class CircuitBreaker:
    """Circuit breaker for one function on one provider.

    CLOSED admits calls. OPEN admits none until `until`. HALF_OPEN admits one trial: its answer closes the breaker, its
    failure opens it again. Only the trial's result counts while half open, and no result counts while open: those calls
    began earlier.

    The breaker opens after `consecutive` failures, or when a share of `rate` of the last `window` calls failed. It
    stays open for `open_s`, and after each failed trial twice as long, at most `max_open_s`. After `trials` failed
    trials in a row, waiting items are given up, and so are later ones at each further failed trial until a trial
    succeeds.

    Bound without another provider: an outage of up to open_s * (2^trials - 1) seconds and `trials` trials is waited
    out. In a longer one, an item waits for one trial: at most `max_open_s` and the duration of the trial.
    """

    def __init__(self, settings: BreakerSpec) -> None:
        self._settings = settings
        self._state = BreakerState.CLOSED
        self._until = -math.inf
        self._pause_s = 0.0
        self._in_a_row = 0
        self._last: deque[bool] = deque(maxlen=settings.window)
        self._trial = False
        self.opened = 0
        self.failed_trials = 0
        """Failed trials since the breaker was last closed."""

    @property
    def state(self) -> BreakerState:
        return self._state

    @property
    def until(self) -> float:
        """The time of the next trial while open, loop seconds; infinite while a trial is in flight."""
        return math.inf if self._trial else self._until

    @property
    def hopeless(self) -> bool:
        """True if so many trials have failed that no item should wait for more than the next one."""
        return self.failed_trials >= self._settings.trials

    def unanswered(self, seconds: float) -> bool:
        """True if a trial that its caller's deadline ended after `seconds` counts as failed: it had enough time."""
        return seconds >= self._settings.open_s

    def admits(self, now: float) -> bool:
        """True if a call may begin."""
        if self._state is BreakerState.CLOSED:
            return True
        return not self._trial and now >= self._until - 1e-9

    def begin(self, now: float) -> bool:
        """Record the start of an admitted call. True if it is the trial, which the caller passes to `ended`."""
        if self._state is BreakerState.CLOSED:
            return False
        self._state = BreakerState.HALF_OPEN
        self._trial = True
        return True

    def ended(self, now: float, failed: bool | None, *, trial: bool) -> bool:
        """Record the end of a call: answered (False), failed (True), or inconclusive (None). True if the breaker
        opened. After an inconclusive trial, another one may begin."""
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
        if failed and (self._in_a_row >= self._settings.consecutive or self._often()):
            self._open(now)
            return True
        return False

    def _often(self) -> bool:
        return (
            len(self._last) == self._settings.window and sum(self._last) >= self._settings.rate * self._settings.window
        )

    def _open(self, now: float) -> None:
        self._pause_s = min(self._settings.max_open_s, max(self._settings.open_s, 2.0 * self._pause_s))
        self._state, self._until = BreakerState.OPEN, now + self._pause_s
        self.opened += 1
