"""Whether a provider admits another call of a function. Pure.

`ConcurrencyWindow` learns the concurrency that the provider sustains, or this run's share of it, from refusals and from
growing latency.
`CircuitBreaker` stops the calls to a failing provider for a while. Switched off, either admits every call.
"""

from __future__ import annotations

import enum
import math
import random
from collections import deque
from collections.abc import Callable

from serverless.pipeline.stages import AdmissionSpec, BreakerSpec
from serverless.types import FaultKind, InfraFault, Throttle

_BURST, _RAMP_S = 32, 0.02
"""Calls that begin at once, and the time after which twice as many are in flight unless one was refused. A provider
refuses within a few milliseconds, so a storm of any size costs about `_BURST` refusals; 1,000 calls are in flight after
0.1 s."""

_PATIENCE = 16.0
"""Most windows of answers between two probes above the remembered cap. A lone run thus has one refusal in about 18
windows, and may miss a raised limit for as long."""

_REST = 1.0
"""Windows of answers without growth after a refusal: the time in which other runs of the account find the room."""

_YIELD = 0.85
"""Share of the accepted calls that remains after a refusal while other runs compete (CUBIC's is 0.7)."""

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

_DEFERRED = 4.0
"""Multiple of the patience after which a probe is made although too few items wait for it to pay."""


class ConcurrencyWindow:
    """The number of calls allowed in flight, in 1..most, where `most` is the function's concurrency. Functions are
    meant for bursts: it starts at 32 and doubles every 20 ms up to `most` unless a call is refused.

    A refusal's limit determines the reaction:

      CONCURRENCY, unknown  remember the calls in flight that were not refused as the cap, and yield a part of them
      RESERVED              the same, and do not probe above the cap for half a minute
      RATE, SCALING, QUEUE  begin no call for a while; the window stays (QUEUE is the bound of this side)

    Below the cap the window grows by the root of its size per window of answers; above it, by 1, 2, 4, ... calls. The
    first probe above the cap waits for up to 16 windows of answers: for one after a refusal below the former cap, where
    other runs compete for it, and for twice as long after each refusal at the same cap. The new cap is then halfway to
    the former one. The yield is 15 % while the wait is shorter than 16 windows, else one call. Additive growth and
    multiplicative yields converge to equal shares among runs.

    `retry_after_s` is the wait of the refused call itself. It delays other calls only if the limit applies to all calls
    (the third row). With no call in flight, they begin after a pause with full jitter over its upper half, which
    doubles up to `retry_after_s`. A lone run defers a probe while the waiting items would end sooner than a refused
    one.

    Bound: a constant capacity c of a lone run is met after one burst; then about one call in 18 c is refused, and at
    least 1 - 1/c of the capacity is used.
    """

    def __init__(self, most: int, settings: AdmissionSpec | None = None) -> None:
        self._most = most
        self._settings = settings or AdmissionSpec()
        self._size = float(min(most, _BURST) if self._settings.enabled else most)
        self._widens = -math.inf if self._size < most else math.inf
        """The time of the next doubling of the first burst; infinite once it has ended."""
        self._cap = math.inf
        self._returns_to = 0.0
        """The least cap after a refusal below the former one: halfway between both, in case that the dip is short."""
        self._patience = _PATIENCE
        self._step = 1.0
        self._rest = 0.0
        self._waited = 0.0
        """Windows of answers since the window reached the cap."""
        self._restart_to = 0.0
        """The size up to which each answer adds a call, after a restart."""
        self._retry_after_s = 0.0
        self._probes_at = -math.inf
        self._begun = 0
        self._full = 0
        self._cut_at = 0
        self._in_a_row = 0
        self.ready = -math.inf
        """The loop time before which no call may begin."""
        self.competed = 0
        """Refusals below a level that the provider had admitted before: something else used the rest."""
        self._usual: dict[int, tuple[int, float]] = {}
        self._recent = 0.0
        self._slow_cut = 0

    @property
    def size(self) -> int:
        return int(self._size)

    def exhausted(self, now: float) -> bool:
        """True while every call is refused: for more windows of calls in a row than an item may be refused."""
        return self._in_a_row > self._settings.max_throttles and now < self.ready

    def hold(self, until: float) -> None:
        """Begin no call before `until`."""
        self.ready = max(self.ready, until)

    def widen(self, now: float) -> float:
        """Double a full window of the first burst if it is time. Returns the time of the next doubling, infinite if
        there is none."""
        if now >= self._widens - 1e-9:
            if self._widens > -math.inf:
                self._size = min(self._most, 2.0 * self._size)
            self._widens = now + _RAMP_S if self._size < self._most else math.inf
        return self._widens

    def restart(self) -> None:
        """Restart slowly after an outage: two calls, then one more per answer (doubling per round trip, as TCP's slow
        start), so that the waiting items do not reach the provider at once."""
        if self._settings.enabled and self._size > 2.0:
            self._restart_to = max(self._restart_to, self._size)
            self._size, self._rest, self._widens = 2.0, 0.0, math.inf

    def begin(self, in_flight: int = 0) -> int:
        """Record the start of a call beside `in_flight` others. Returns its number."""
        self._begun += 1
        if in_flight + 1 >= int(self._size):
            self._full = self._begun
        return self._begun

    def answered(
        self, now: float, seconds: float, items: int, *, in_flight: int, number: int = 0, waiting: float = math.inf
    ) -> None:
        """Record the answer of call `number`, with `items`, after `seconds`; `in_flight` others remain and `waiting`
        items wait. The window grows only if it has been full since the call began."""
        self._in_a_row = 0
        if not self._settings.enabled or self._slower(seconds, items) or self._size >= self._most:
            return
        if in_flight + 1 < int(self._size) and not 0 < number <= self._full:
            return
        window = 1.0 / self._size
        if self._rest > 0.0:
            self._rest -= window
        elif self._size < self._restart_to:
            self._size = min(self._most, self._size + 1.0)
        elif self._size < self._cap:
            self._size = min(self._most, self._cap, self._size + math.sqrt(self._size) * window)
            self._waited = 0.0
        else:
            self._waited += window
            soon = waiting * seconds < self._retry_after_s * self._size * items
            self._probe(now, deferred=soon and self._patience == _PATIENCE)

    def throttled(self, fault: InfraFault, now: float, number: int, rng: random.Random, *, in_flight: int) -> None:
        """Record the refusal of call `number`; `in_flight` others remain."""
        if not self._settings.enabled:
            return
        fresh = number > self._cut_at  # another burst than that of the last refusal
        if fresh:
            self._cut_at = self._begun
            self._in_a_row += 1
        asked = fault.retry_after_s
        if fault.throttle in (Throttle.RATE, Throttle.SCALING, Throttle.QUEUE):
            if asked is not None:
                self.hold(now + asked)
                return
        else:
            self._shrink(now, in_flight, fresh=fresh, reserved=fault.throttle is Throttle.RESERVED)
            self._retry_after_s = asked or 0.0
            if in_flight:
                return
        if fresh or not in_flight:
            longest = min(self._settings.max_wait_s, self._settings.wait_s * 2.0 ** min(self._in_a_row - 1, 30))
            longest = min(longest, asked) if asked is not None else longest
            self.hold(now + rng.uniform(longest / 2.0, longest))

    def _shrink(self, now: float, in_flight: int, *, fresh: bool, reserved: bool) -> None:
        """Remember the accepted calls as the cap, and yield a part of them."""
        level = float(in_flight)
        if fresh:
            # Without a call in flight, nothing is known about the capacity.
            level = level or self._size / 2.0
            competing = level < self._cap < math.inf
            self.competed += competing
            self._patience = 1.0 if competing else min(_PATIENCE, 2.0 * self._patience)
            self._returns_to = (self._cap + level) / 2.0 if competing else 0.0
            self._rest, self._step, self._waited = _REST, 1.0, 0.0
            self._restart_to, self._widens = 0.0, math.inf
        level = max(1.0, level)
        self._cap = max(level, self._returns_to)
        least = level * _YIELD if self._patience < _PATIENCE else level - (level > 2.0)
        self._size = max(1.0, min(self._size, least))
        self._probes_at = now + _PROBE_S if reserved and self._patience == _PATIENCE else -math.inf

    def _probe(self, now: float, *, deferred: bool) -> None:
        """Grow above the cap, if a window of answers was given to a larger one or the patience is over."""
        if now < self._probes_at:
            return
        if self._size > self._cap and self._waited >= 1.0:  # the provider admits more than the cap
            self._cap, self._patience, self._step = self._size, 1.0, 2.0 * self._step
        elif self._size > self._cap or self._waited < self._patience * (_DEFERRED if deferred else 1.0):
            return
        self._waited = 0.0
        self._size = min(self._most, self._size + self._step)

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


class CallQuota:
    """The calls that a run may have in flight at one provider, over all of its functions.

    A queue that finds no call left waits for its turn: the end of a call gives the turn to the queue that has waited
    longest, and a queue that does not use it passes it on. Invariant: at most `limit` calls are in flight.
    """

    def __init__(self, limit: float = math.inf) -> None:
        self._limit = limit
        self._in_flight = 0
        self._waiting: dict[Callable[[], None], None] = {}
        self._next: Callable[[], None] | None = None
        """The queue that has the turn."""

    def admits(self, turn: Callable[[], None]) -> bool:
        """True if the queue of `turn` may begin a call."""
        if self._in_flight >= self._limit:
            return False
        return not self._waiting if self._next is None else self._next == turn

    def begin(self, turn: Callable[[], None]) -> None:
        self._in_flight += 1
        if self._next == turn:
            self._next = None

    def wait(self, turn: Callable[[], None]) -> bool:
        """Wait for a turn. False if the queue waits already."""
        if turn in self._waiting or turn == self._next:
            return False
        self._waiting[turn] = None
        return True

    def end(self) -> Callable[[], None] | None:
        """Record the end of a call. Returns the queue to call, which has the turn."""
        self._in_flight -= 1
        return self._pass_on()

    def taken(self, turn: Callable[[], None]) -> Callable[[], None] | None:
        """Record that a queue's turn is over. Returns the next queue to call."""
        if self._next == turn:
            self._next = None
        return self._pass_on()

    def _pass_on(self) -> Callable[[], None] | None:
        if self._next is not None or not self._waiting or self._in_flight >= self._limit:
            return None
        self._next = next(iter(self._waiting))
        del self._waiting[self._next]
        return self._next


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
