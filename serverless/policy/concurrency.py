"""How many calls of a function a provider bears at once. Pure: AIMD on refusals and on growing latency."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from serverless.types import InfraFault, Throttle

__all__ = ["ConcurrencyWindow", "ConcurrencyPolicy"]

_FAST = 0.9
"""Up to this share of the window that the last refusal left, one answer makes room for one call more; beyond it a whole
window of answers does (TCP CUBIC)."""

_USUAL, _RECENT = 0.02, 0.2
"""Weights of a new answer in the usual and the recent latency: about the last 50 and the last 5 answers."""

_CLIP = 1.5
"""One answer counts as at most this many times the factor (in logarithms) slower than usual: five in a row are needed
before the recent latency passes the factor."""

_SURE = 20
"""Answers of a size before it has a usual latency."""

_LEAST_SHARE = 0.25
"""Latency alone never takes more than three quarters of the concurrency: longer responses are no overload."""

_PROBE_S = 30.0
"""A limit of the function's own is set by a person: it is tried again this often, in case that person raised it."""


@dataclass(frozen=True, slots=True)
class ConcurrencyPolicy:
    """`most` is the function's concurrency. `wait_s` and `max_wait_s` bound the jittered waits after refusals in a row
    for which the provider asked no wait of its own. `latency_factor` None: latency is not looked at."""

    most: int
    wait_s: float = 0.05
    max_wait_s: float = 5.0
    latency_factor: float | None = 2.0


class ConcurrencyWindow:
    """Calls in flight that are allowed now: starts at `most` (a burst is what functions are for) and stays in 1..most.

    A refusal says what to do:
      CONCURRENCY, unknown  shrink to the calls in flight that were not refused, to no less than half per burst of calls
      RESERVED              shrink to those at once, and do not grow for half a minute
      RATE, SCALING, QUEUE  begin no call for a while; the window stays (QUEUE is the bound of our own side)
    `retry_after_s` is how long a refused call itself waits. It holds others back only where the limit is one of all
    calls (the third row) or nothing is in flight; otherwise the next call that ends makes room, and the window does not
    grow before that time has passed. Where a pause has no `retry_after_s`, it has full jitter over its upper half.
    Bound: a constant capacity c is met after at most log2(most / c) + 1 bursts; then a round of answers adds one call,
    so that about one call in c + 1 is refused, and no more than one or two per `retry_after_s`.
    """

    def __init__(self, policy: ConcurrencyPolicy) -> None:
        self._policy = policy
        self._size = float(policy.most)
        self._accepted = float(policy.most)
        self._least = 1.0
        """What refusals of the present burst may shrink the window to."""
        self._grows_at = -math.inf
        self._begun = 0
        self._full = 0
        self._cut_at = 0
        self._in_a_row = 0
        self._ready = -math.inf
        self._usual: dict[int, tuple[int, float]] = {}
        self._recent = 0.0
        self._slow_cut = 0

    @property
    def size(self) -> int:
        return int(self._size)

    def ready_at(self) -> float:
        """No call begins before this loop time."""
        return self._ready

    @property
    def refused_in_a_row(self) -> int:
        """Windows of calls that were refused since the last answer."""
        return self._in_a_row

    def restart(self) -> None:
        """The provider is back after an outage: two calls, then one more per answer (twice as many per round trip, as
        TCP's slow start), so that all that has waited does not fall upon it at once."""
        if self._size > 2.0:
            self._accepted = self._size
            self._size = 2.0

    def begin(self, in_flight: int = 0) -> int:
        """A call begins beside `in_flight` others; its number."""
        self._begun += 1
        if in_flight + 1 >= int(self._size):
            self._full = self._begun
        return self._begun

    def answered(self, now: float, seconds: float, items: int, *, in_flight: int, number: int = 0) -> None:
        """Call `number`, of `items`, was answered `seconds` after it began; `in_flight` others are still out. It makes
        room for more only if the window has been full since it began: else there was room."""
        self._in_a_row = 0
        if self._slower(seconds, items) or now < self._grows_at:
            return
        if in_flight + 1 >= int(self._size) or 0 < number <= self._full:
            step = 1.0 if self._size < _FAST * self._accepted else 1.0 / self._size
            self._size = min(self._policy.most, self._size + step)

    def throttled(self, fault: InfraFault, now: float, number: int, rng: random.Random, *, in_flight: int) -> None:
        """Call `number` was refused; `in_flight` others are still out."""
        fresh = number > self._cut_at  # of another burst than the last refusal
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
            self._ready = max(self._ready, now + fault.retry_after_s)
        elif fresh or not in_flight:
            longest = min(self._policy.max_wait_s, self._policy.wait_s * 2.0 ** min(self._in_a_row - 1, 30))
            self._ready = max(self._ready, now + rng.uniform(longest / 2.0, longest))

    def _slower(self, seconds: float, items: int) -> bool:
        """Note a latency; True if the window was cut for it: by a tenth, at most once per window of answers.

        Compared in logarithms with the usual latency of calls of a like number of items, since load makes batches
        larger; the usual one follows, so that a lasting change (longer responses) becomes usual.
        """
        factor = self._policy.latency_factor
        if factor is None:
            return False
        kind, log = items.bit_length(), math.log(max(seconds, 1e-6))
        seen, usual = self._usual.get(kind, (0, log))
        # Clipped, so that it takes several slow answers in a row: a single straggler is no load.
        above = min(log - usual, _CLIP * math.log(factor))
        self._usual[kind] = seen + 1, usual + max(_USUAL, 1.0 / (seen + 1)) * above
        self._slow_cut -= 1
        if seen < _SURE:
            return False
        self._recent += _RECENT * (above - self._recent)
        if self._recent <= math.log(factor) or self._slow_cut > 0:
            return False
        self._size = min(self._size, max(self._size * 0.9, self._policy.most * _LEAST_SHARE, 1.0))
        self._slow_cut = int(self._size)
        return True
