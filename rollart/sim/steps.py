"""The duration of a simulated engine's step: the roofline of `placement`, in a form that can be integrated.

A step with n sequences of C tokens of total context takes the larger of two lines in C, arithmetic and memory traffic.
Both include all terms that do not depend on C. A step that carries prefill has the same form with other intercepts.
Exact for architectures without sliding windows; with windows the bytes and FLOPs of a sequence are replaced by a line
through two points around `context`.

`tokens_in` and `seconds_for` are the exact processor sharing of decode steps: the tokens that each sequence receives in
some time, and the inverse. All sequences of a batch advance by one token per step, so that one number is the progress
of all: the service S, in tokens per sequence. The total context grows by n tokens per step; the time of a stretch is
then quadratic in the stretch, piecewise, and its inverse a square root. No token is an event. A stretch of whole steps
takes exactly the sum of its steps if one line dominates all of them: each step counts with the context at its middle,
n/2 below the integral's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from math import sqrt
from typing import NamedTuple

from placement.roofline import Roofline

TYPICAL_CONTEXT = 8192.0
"""Tokens of a sequence, which matter only for models with sliding windows."""


class StepTimeLines(NamedTuple):
    """Seconds of a step: max(flat_s + flat_slope × x, steep_s + steep_slope × x) at x tokens of context in all."""

    flat_s: float
    flat_slope: float
    steep_s: float
    steep_slope: float

    def at(self, context: float) -> float:
        return max(self.flat_s + self.flat_slope * context, self.steep_s + self.steep_slope * context)


class PrefillWork(NamedTuple):
    """The prefill work that each of the `steps` steps of a round carries beside its decodes."""

    steps: float
    tokens: float
    seconds: float
    """Of arithmetic."""
    reads: float
    """Cached tokens whose KV is read."""
    rows: float
    own_s: float
    """Cost of accepting the requests."""


_NO_PREFILL = PrefillWork(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


class StepModel:
    """Step times of one engine instance, from its roofline. Immutable but for its table by batch size; engines of one
    kind share one. `pace` multiplies every time: the measured slowdown of an engine against its roofline."""

    def __init__(self, roofline: Roofline, *, pace: float = 1.0) -> None:
        if not 0 < pace < math.inf:
            raise ValueError(f"a pace of {pace} (rule: finite, above 0)")
        self._pace = pace
        shape, tp, decode_per_s = roofline.shape, roofline.tp, roofline.decode_flops_per_s
        self._bytes_per_s, self._fixed_s, self._expert_s = roofline.bytes_per_s, roofline.fixed_s, roofline.expert_s
        self._row_s, self._request_s = roofline.constants.row_s, roofline.constants.request_s
        self._touched = shape.touched_weight_bytes
        self._weights_s = None if shape.expert_layers else self._touched(1.0) / self._bytes_per_s
        """Of reading the weights; None where it depends on the tokens (experts)."""
        windows = shape.window is not None
        context = TYPICAL_CONTEXT
        near, far = (context / 2, context * 1.5) if windows else (0.0, context)
        self._flops_s, self._flops_slope = _line(near, far, lambda x: shape.decode_flops(x) / decode_per_s)
        copies = shape.kv_copies(tp)
        self._kv_s, self._kv_slope = _line(near, far, lambda x: shape.kv_bytes(x) * copies / self._bytes_per_s)
        self._first_s, self._new_s, self._pair_s = _prefill(roofline, context if windows else 1000.0)
        at_one = max(shape.decode_flops(0.0) / decode_per_s, self._touched(1.0) / self._bytes_per_s)
        own_s = roofline.decode_step_s(1.0, 0.0) - self._fixed_s - self._row_s
        self._comm_s = 0.0 if tp == 1 else max(0.0, own_s - at_one)
        self._table: list[StepTimeLines] = []
        self.kv_bytes_per_token = shape.kv_bytes(context) / context
        """KV of a token of context, one copy."""
        self.kv_tokens = int(roofline.kv_capacity_bytes / self.kv_bytes_per_token)
        """Tokens of KV that an instance holds."""

    def decoding(self, n: int) -> StepTimeLines:
        """A step that only decodes, for n sequences."""
        table = self._table
        while len(table) <= n:
            table.append(self.mixed(len(table), _NO_PREFILL))
        return table[n]

    def work(self, parts: Iterable[tuple[int, int]], chunk: float) -> PrefillWork:
        """A round of prefills of (new, cached) tokens in steps of at most `chunk` new tokens."""
        tokens = cached = count = 0
        seconds = 0.0
        for new, before in parts:
            tokens += new
            cached += before
            count += 1
            seconds += self._first_s + new * (self._new_s + self._pair_s * (before + new / 2))
        steps = max(1.0, tokens / chunk)
        # A prompt in several chunks reads the KV of its earlier chunks, half of it on average.
        reads = cached + tokens * (steps - 1) / (2 * steps)
        return PrefillWork(steps, tokens / steps, seconds / steps, reads, count, count * self._request_s / steps)

    def mixed(self, n: int, work: PrefillWork) -> StepTimeLines:
        """A step that decodes for n sequences and carries its share of a round of prefills."""
        _, tokens, arithmetic, reads, rows, accept = work
        fixed = (
            self._fixed_s + accept + (n + rows) * self._row_s + (n + tokens) * self._comm_s + tokens * self._expert_s
        )
        weights = self._weights_s
        if weights is None:
            weights = self._touched(n + tokens) / self._bytes_per_s
        by_flops, by_bytes = fixed + arithmetic + n * self._flops_s, fixed + weights + n * self._kv_s
        by_bytes += reads * self._kv_slope
        flat, steep = (by_flops, self._flops_slope), (by_bytes, self._kv_slope)
        if self._flops_slope > self._kv_slope:
            flat, steep = steep, flat
        pace = self._pace
        return StepTimeLines(pace * flat[0], pace * flat[1], pace * steep[0], pace * steep[1])


def _line(near: float, far: float, of: Callable[[float], float]) -> tuple[float, float]:
    """Intercept and slope of the line through two points of a function."""
    low, high = of(near), of(far)
    slope = (high - low) / (far - near)
    return low - slope * near, slope


def _prefill(roofline: Roofline, context: float) -> tuple[float, float, float]:
    """Seconds of arithmetic of a prefill: per request, per new token, and per pair of a new token and one before it."""
    flops, per_s = roofline.shape.flops, roofline.flops_per_s
    first = flops(0.0, 0.0, 1.0)
    pair = (flops(1.0, context, 1.0) - flops(1.0, 0.0, 1.0)) / context
    new = flops(1.0, 0.0, 1.0) - first - pair / 2
    return first / per_s, new / per_s, pair / per_s


def seconds_for(tokens: float, lines: StepTimeLines, n: int, context: float) -> float:
    """Seconds until each of n sequences, `context` tokens together, has got `tokens` more. n = 0: steps without any."""
    a, c, b, d = lines
    x = context - n / 2
    if b + d * x >= a + c * x:
        return tokens * (b + d * (x + n * tokens / 2))
    turn = _tokens_until_steep(a, c, b, d, x, n)
    if turn >= tokens:
        return tokens * (a + c * (x + n * tokens / 2))
    rest = tokens - turn
    return turn * (a + c * (x + n * turn / 2)) + rest * (b + d * (x + n * (turn + rest / 2)))


def tokens_in(seconds: float, lines: StepTimeLines, n: int, context: float) -> float:
    """The inverse of `seconds_for`."""
    a, c, b, d = lines
    x = context - n / 2
    if b + d * x >= a + c * x:
        return _solve(b + d * x, d * n / 2, seconds)
    turn = _tokens_until_steep(a, c, b, d, x, n)
    flat = turn * (a + c * (x + n * turn / 2)) if turn < _NEVER else _NEVER
    if seconds > flat:
        return turn + _solve(b + d * (x + n * turn), d * n / 2, seconds - flat)
    return _solve(a + c * x, c * n / 2, seconds)


_NEVER = float("inf")


def _tokens_until_steep(a: float, c: float, b: float, d: float, x: float, n: int) -> float:
    """Steps from context x, where the flatter line is the higher one, until the steeper one is."""
    return _NEVER if n == 0 or d <= c else ((a - b) / (d - c) - x) / n


def _solve(linear: float, square: float, seconds: float) -> float:
    """The s >= 0 with square × s² + linear × s = seconds, without cancellation."""
    return 2.0 * seconds / (linear + sqrt(linear * linear + 4.0 * square * seconds))
