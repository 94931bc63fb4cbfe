"""Text of figures on pages: three digits, or as many as their interval justifies."""

from __future__ import annotations

import math

__all__ = ["DOLLARS", "PERCENT", "PLAIN", "estimate", "figure"]

PLAIN, PERCENT, DOLLARS = "", "%", "$"
"""Units of a figure; `%` is for shares of 1."""

NEGLIGIBLE = 1e-6
"""An interval below this share of its mean is rounding error."""


def figure(value: float, unit: str = PLAIN) -> str:
    """`0.583`, `1,284`, `12.5%`, `$3.20`."""
    if unit == PERCENT:
        return f"{_digits(100.0 * value)}%"
    if unit == DOLLARS:
        return f"${value:,.2f}" if 1 <= abs(value) < 100 else f"${_digits(value)}"
    return _digits(value)


def estimate(value: float, half: float | None, unit: str = PLAIN) -> str:
    """A mean and half of its interval with the same decimals: two digits of the interval, at least three of the mean.
    The mean alone without an interval, or if both are 0."""
    if half is None or value == half == 0:
        return figure(value, unit)
    if half <= NEGLIGIBLE * abs(value):
        return f"{figure(value, unit)} ± 0"
    scale = 100.0 if unit == PERCENT else 1.0
    decimals = max(_decimals(half * scale, 2), _decimals(value * scale, 3))
    before, after = ("$" if unit == DOLLARS else ""), ("%" if unit == PERCENT else "")
    return " ± ".join(f"{before}{given * scale:,.{decimals}f}{after}" for given in (value, half))


def _digits(value: float) -> str:
    if abs(value) < 1e-9:
        return "0"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _decimals(value: float, digits: int) -> int:
    if not abs(value) > 1e-9:
        return 0
    return min(9, max(0, digits - 1 - math.floor(math.log10(abs(value)))))
