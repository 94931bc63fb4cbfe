"""Dollars as text for people: one formatter for reports, progress lines, warnings and errors."""

from __future__ import annotations

import math

CENT = 0.01
"""Dollars below this are shown in cents."""

LEAST_SHOWN = 1e-6
"""Dollars below this are shown as less than it: prices of single calls are quoted per thousand or per million."""


def dollars(usd: float) -> str:
    """`$1,240.50`, `$0.123`, `0.411 ¢`, `< 0.0001 ¢`: two decimals or three digits, never an exponent."""
    sign, size = ("-" if usd < 0 else ""), abs(usd)
    if size == 0:
        return "$0"
    if size < LEAST_SHOWN:
        return f"{'> -' if sign else '< '}0.0001 ¢"
    if size < CENT:
        return f"{sign}{_trimmed(size / CENT)} ¢"
    return f"{sign}${_digits(size, 3)}"


def dollars_between(usd: float, half: float) -> str:
    """A mean and half of its interval in one unit: `$1,240 ± 180`, `$0.42 ± 0.03`, `0.41 ¢ ± 0.02`. Two digits of the
    interval, at least three of the mean."""
    small = 0 < max(abs(usd), half) < CENT
    scale = 1 / CENT if small else 1.0
    places = max(decimals(half * scale, 2), decimals(usd * scale, 3))
    mean, spread = (f"{value * scale:,.{places}f}" for value in (usd, half))
    return f"{mean} ¢ ± {spread}" if small else f"${mean} ± {spread}"


def unit_price(usd: float) -> str:
    """A price of one unit with up to six digits; where that is below a cent, of a thousand units, or of a million:
    `$1.85`, `$0.164 / 1k`, `$16.6667 / 1M`."""
    units, per = 1, ""
    if 0 < abs(usd) < CENT:
        units, per = (1000, " / 1k") if abs(usd) * 1000 >= 10 * CENT else (1_000_000, " / 1M")
    return f"${_digits(usd * units, 6)}{per}"


def decimals(value: float, digits: int) -> int:
    """Decimals that show `digits` digits of a value."""
    if not abs(value) > 1e-9:
        return 0
    return min(9, max(0, digits - 1 - math.floor(math.log10(abs(value)))))


def _digits(value: float, digits: int) -> str:
    """At least two decimals, and as many more as the digits need."""
    text = f"{value:,.{max(2, decimals(value, digits))}f}"
    while text.endswith("0") and text[-3] != ".":
        text = text[:-1]
    return text


def _trimmed(value: float) -> str:
    """Three digits without an exponent and without trailing zeros."""
    text = f"{value:.{decimals(value, 3)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
