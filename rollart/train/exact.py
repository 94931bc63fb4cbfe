"""A sum of tensors whose result does not depend on the order of its addends, to the last bit.

Floating-point addition is not associative, so gradients added in the order in which groups finish would give different
weights in every run. Here each addend x is split, without error, at two fixed positions (the idea of Demmel and Nguyen,
"Parallel Reproducible Summation", 2015, with bins that are known in advance):

    x = c + f + r,   c a multiple of 2⁻²⁴,   f a multiple of 2⁻⁶⁴,   |r| ≤ 2⁻⁶⁵

c and f are each summed as float64. All partial sums are multiples of the same power of two and short enough for 53
bits, so every addition is exact and their order has no effect. Only r is lost: 2.7e-20 per addend.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

COARSE = 1.5 * 2.0**28
"""Adding and subtracting it rounds to multiples of 2⁻²⁴, for |x| < 2²⁷."""

FINE = 1.5 * 2.0**-12
"""The same for 2⁻⁶⁴, for |x| < 2⁻¹³."""

MAX_MAGNITUDE = 2.0**27
"""Bound on Σ |x| of an entry: below it all partial sums are exact, and each x is split correctly."""

MAX_ADDENDS = 2**13
"""Maximum number of addends: 2¹³ remainders of at most 2⁻²⁵ stay below 2⁻¹¹, 53 bits above 2⁻⁶⁴."""


class ExactSum:
    """Σ of equally shaped lists of tensors, 24 bytes per entry. Any addend may lack a tensor (None)."""

    def __init__(self, size: int) -> None:
        self._parts: list[tuple[Tensor, Tensor, Tensor] | None] = [None] * size
        self._count = 0

    def add(self, values: Sequence[Tensor | None]) -> None:
        self._count += 1
        for i, value in enumerate(values):
            if value is None:
                continue
            x = value.detach().double()
            part = self._parts[i]
            if part is None:
                part = self._parts[i] = (torch.zeros_like(x), torch.zeros_like(x), torch.zeros_like(x))
            coarse = (x + COARSE) - COARSE
            rest = x - coarse
            part[0].add_(coarse)
            part[1].add_((rest + FINE) - FINE)
            part[2].add_(x.abs())

    def is_exact(self) -> bool:
        """True if the sum is exact: every addend was finite, and their number and size were within the bounds."""
        peaks = [part[2].max() for part in self._parts if part is not None]
        # A comparison with NaN is false.
        return self._count <= MAX_ADDENDS and (not peaks or bool((torch.stack(peaks) < MAX_MAGNITUDE).all()))

    def total(self, index: int) -> Tensor | None:
        """The sum in float64; None if no addend had this tensor."""
        part = self._parts[index]
        return None if part is None else part[0] + part[1]
