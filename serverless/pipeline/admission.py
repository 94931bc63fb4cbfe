"""Whether a provider admits another call of a function. Pure.

`ConcurrencyWindow` learns the concurrency that the provider sustains, by AIMD on refusals and on growing latency.
`CircuitBreaker` stops the calls to a failing provider for a while. Switched off, either admits every call.
"""

from __future__ import annotations

import enum
import math
import random
from collections import deque

from serverless.pipeline.stages import AdmissionSpec, BreakerSpec
from serverless.types import FaultKind, InfraFault, Throttle

_FAST = 0.9
"""Up to this share of the window left by the last refusal, each answer adds one call. Beyond it, a whole window of
answers adds one (TCP CUBIC)."""

_USUAL, _RECENT = 0.02, 0.2
"""Weights of a new answer in the usual and the recent latency: about the last 50 and the last 5 answers."""

_CLIP = 1.5
"""Clipping of one answer, as a multiple of the factor (in logarithms) over the usual latency: five slow answers in a
row are needed before the recent latency exceeds the factor."""

_SURE = 20
"""Answers of a size after which its usual latency is known."""

_LEAST_SHARE = 0.25
"""Latency alone never removes more than three quarters of the concurrency: longer responses are no overload."""

_PROBE_S = 30.0
"""Seconds after which a limit of the function's own, which a person sets, is probed again in case it was raised."""


class ConcurrencyWindow:
    """The number of calls allowed in flight: starts at `most`, the function's concurrency (functions are meant for
    bursts), and stays in 1..most.

    A refusal's limit determines the reaction:

      CONCURRENCY, unknown  shrink to the calls in flight that were not refused, to no less than half per burst of calls
      RESERVED              shrink to those at once, and do not grow for half a minute
      RATE, SCALING, QUEUE  begin no call for a while; the window stays (QUEUE is the bound of this side)

    `retry_after_s` is the wait of the refused call itself. It delays other calls only if the limit applies to all calls
    (the third row) or none is in flight. Otherwise the next call that ends makes room, and the window does not grow
    before that time has passed. A pause without `retry_after_s` has full jitter over its upper half.

    Bound: a constant capacity c is met after at most log2(most / c) + 1 bursts. Then a round of answers adds one call,
    so that about one call in c + 1 is refused, and no more than one or two per `retry_after_s`.
    """

    def __init__(self, most: int, settings: AdmissionSpec | None = None) -> None:
        self._most = most
        self._settings = settings or AdmissionSpec()
        self._size = float(most)
        self._accepted = float(most)
        self._least = 1.0
        """The size to which refusals of the present burst may shrink the window."""
        self._grows_at = -math.inf
        self._begun = 0
        self._full = 0
        self._cut_at = 0
        self._in_a_row = 0
        self.ready = -math.inf
        """The loop time before which no call may begin."""
        self._usual: dict[int, tuple[int, float]] = {}
        self._recent = 0.0
        self._slow_cut = 0

    @property
    def size(self) -> int:
        return int(self._size)

    def exhausted(self, now: float) -> bool:
        """True while every call is refused: for more windows of calls in a row than an item may be refused."""
        return self._in_a_row > self._settings.max_throttles and now < self.ready

    def restart(self) -> None:
        """Restart slowly after an outage: two calls, then one more per answer (doubling per round trip, as TCP's slow
        start), so that the waiting items do not reach the provider at once."""
        if self._settings.enabled and self._size > 2.0:
            self._accepted = self._size
            self._size = 2.0

    def begin(self, in_flight: int = 0) -> int:
        """Record the start of a call beside `in_flight` others. Returns its number."""
        self._begun += 1
        if in_flight + 1 >= int(self._size):
            self._full = self._begun
        return self._begun

    def answered(self, now: float, seconds: float, items: int, *, in_flight: int, number: int = 0) -> None:
        """Record the answer of call `number`, with `items`, after `seconds`; `in_flight` others remain. The window
        grows only if it has been full since the call began."""
        self._in_a_row = 0
        if not self._settings.enabled or self._slower(seconds, items) or now < self._grows_at:
            return
        if in_flight + 1 >= int(self._size) or 0 < number <= self._full:
            step = 1.0 if self._size < _FAST * self._accepted else 1.0 / self._size
            self._size = min(self._most, self._size + step)

    def throttled(self, fault: InfraFault, now: float, number: int, rng: random.Random, *, in_flight: int) -> None:
        """Record the refusal of call `number`; `in_flight` others remain."""
        if not self._settings.enabled:
            return
        fresh = number > self._cut_at  # another burst than that of the last refusal
        if fresh:
            self._cut_at = self._begun
            self._in_a_row += 1
            self._least = max(1.0, self._size / 2.0)
        reserved = fault.throttle is Throttle.RESERVED
        all_wait = fault.throttle in (Throttle.RATE, Throttle.SCALING, Throttle.QUEUE)
        if not all_wait:
            self._size = self._accepted = min(self._size, max(1.0 if reserved else self._least, in_flight))
            self._grows_at = now + max(fault.retry_after_s or 0.0, _PROBE_S if reserved else 0.0)
        if not all_wait and in_flight:
            return
        if fault.retry_after_s is not None:
            self.ready = max(self.ready, now + fault.retry_after_s)
        elif fresh or not in_flight:
            longest = min(self._settings.max_wait_s, self._settings.wait_s * 2.0 ** min(self._in_a_row - 1, 30))
            self.ready = max(self.ready, now + rng.uniform(longest / 2.0, longest))

    def _slower(self, seconds: float, items: int) -> bool:
        """Record a latency. True if it shrank the window: by a tenth, at most once per window of answers.

        The latency is compared, in logarithms, with the usual one for calls with a similar number of items, since load
        makes batches larger. The usual latency follows, so that a lasting change (longer responses) becomes usual.
        """
        if not self._settings.latency:
            return False
        factor = self._settings.latency_factor
        kind, log = items.bit_length(), math.log(max(seconds, 1e-6))
        seen, usual = self._usual.get(kind, (0, log))
        # Clipped, so that several slow answers in a row are needed: a single straggler is no load.
        above = min(log - usual, _CLIP * math.log(factor))
        self._usual[kind] = seen + 1, usual + max(_USUAL, 1.0 / (seen + 1)) * above
        self._slow_cut -= 1
        if seen < _SURE:
            return False
        self._recent += _RECENT * (above - self._recent)
        if self._recent <= math.log(factor) or self._slow_cut > 0:
            return False
        self._size = min(self._size, max(self._size * 0.9, self._most * _LEAST_SHARE, 1.0))
        self._slow_cut = int(self._size)
        return True


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
        self.state = BreakerState.CLOSED
        self._until = -math.inf
        self._pause_s = 0.0
        self._in_a_row = 0
        self._last: deque[bool] = deque(maxlen=settings.window)
        self._trial = False
        self.failed_trials = 0
        """Failed trials since the breaker was last closed."""

    @property
    def until(self) -> float:
        """The time of the next trial while open, loop seconds; infinite while a trial is in flight."""
        return math.inf if self._trial else self._until

    @property
    def hopeless(self) -> bool:
        """True if so many trials have failed that no item should wait for more than the next one."""
        return self.failed_trials >= self._settings.trials

    def admits(self, now: float) -> bool:
        """True if a call may begin."""
        if self.state is BreakerState.CLOSED:
            return True
        return not self._trial and now >= self._until - 1e-9

    def begin(self) -> bool:
        """Record the start of an admitted call. True if it is the trial, which the caller passes to `ended`."""
        if self.state is BreakerState.CLOSED:
            return False
        self.state = BreakerState.HALF_OPEN
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
            self.state, self._pause_s, self._in_a_row = BreakerState.CLOSED, 0.0, 0
            self.failed_trials = 0
            self._last.clear()
            return False
        if failed is None or self.state is not BreakerState.CLOSED or not self._settings.enabled:
            return False
        self._in_a_row = self._in_a_row + 1 if failed else 0
        self._last.append(failed)
        settings, window = self._settings, self._settings.window
        often = len(self._last) == window and sum(self._last) >= settings.rate * window
        if failed and (self._in_a_row >= settings.consecutive or often):
            self._open(now)
            return True
        return False

    def _open(self, now: float) -> None:
        self._pause_s = min(self._settings.max_open_s, max(self._settings.open_s, 2.0 * self._pause_s))
        self.state, self._until = BreakerState.OPEN, now + self._pause_s
