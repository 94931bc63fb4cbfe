"""Exact processor sharing of an engine's decode steps: the tokens that each sequence receives in some time, and the
inverse.

All sequences of a batch advance by one token per step, so that one number is the progress of all: the service S, in
tokens per sequence. A step's time is the larger of two lines in the total context, which grows by n tokens per step;
the time of a stretch is then quadratic in the stretch, piecewise, and its inverse a square root. No token is an event.

A stretch of whole steps takes exactly the sum of its steps if one line dominates all of them: each step counts with the
context at its middle, n/2 below the integral's.
"""

from __future__ import annotations

from math import sqrt

from rollart.sim.steps import StepTimeLines

__all__ = ["seconds_for", "tokens_in"]


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
