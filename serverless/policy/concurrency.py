"""How many calls of a function a provider bears at once. Pure: AIMD on refusals and on growing latency."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from serverless.types import InfraFault, Throttle

__all__ = ["Window", "WindowPolicy"]

_FAST = 0.9
"""Up to this share of the window that was refused last, one answer makes room for one call more; beyond it a whole
window of answers does. Half the window is far from what the provider bears, nine tenths are close (TCP CUBIC)."""

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
class WindowPolicy:
    """`most` is the function's concurrency. `wait_s` and `max_wait_s` bound the jittered waits after refusals in a row
    for which the provider asked no wait of its own. `latency_factor` None: latency is not looked at."""

    most: int
    wait_s: float = 0.05
    max_wait_s: float = 5.0
    latency_factor: float | None = 2.0


class Window:
    """Calls in flight that are allowed now: starts at `most` (a burst is what functions are for) and stays in 1..most.

    A refusal says what to do:
      CONCURRENCY, unknown  halve, once per window (refusals of calls that began before the last cut are old news)
      RESERVED              clamp to what is in flight and was not refused; tried again every half minute
      RATE, SCALING, QUEUE  wait; the window stays (QUEUE is the bound of our own side of the provider)
    `retry_after_s` is always kept. Without it, those three wait, and so does any refusal of an only call; where
    others are in flight, the next of them to end is the signal. Waits have full jitter over the upper half.
    Bound: a constant capacity c is met after at most log2(most / c) cuts, and each later cut costs at most the time of
    one call, since recovery up to nine tenths of the last window is one call per answer.
    """

    def __init__(self, policy: WindowPolicy) -> None:
        self._policy = policy
        self._size = float(policy.most)
        self._ceiling = float(policy.most)
        self._refused_at = float(policy.most)
        self._begun = 0
        self._full = 0
        self._cut_at = 0
        self._clamped_at = -math.inf
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
            self._refused_at = self._size
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
        if self._ceiling < self._policy.most and now - self._clamped_at >= _PROBE_S:
            self._ceiling += 1.0
            self._clamped_at = now
        if self._slower(seconds, items):
            return
        if self._size < self._ceiling and (in_flight + 1 >= int(self._size) or 0 < number <= self._full):
            step = 1.0 if self._size < _FAST * self._refused_at else 1.0 / self._size
            self._size = min(self._ceiling, self._size + step)

    def throttled(self, fault: InfraFault, now: float, number: int, rng: random.Random, *, in_flight: int) -> None:
        """Call `number` was refused; `in_flight` others are still out."""
        waits = fault.throttle in (Throttle.RATE, Throttle.SCALING, Throttle.QUEUE)
        fresh = number > self._cut_at
        if fault.throttle is Throttle.RESERVED:
            self._ceiling = max(1.0, min(self._ceiling, float(in_flight)))
            self._size = min(self._size, self._ceiling)
            self._clamped_at = now
        elif not waits and fresh:
            self._refused_at = self._size
            self._size = max(1.0, self._size / 2.0)
        if fresh:
            self._cut_at = self._begun
            self._in_a_row += 1
        if fault.retry_after_s is not None:
            self._ready = max(self._ready, now + fault.retry_after_s)
        elif (waits and fresh) or in_flight == 0:
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
