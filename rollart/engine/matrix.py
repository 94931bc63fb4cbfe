"""A linear layer's matrix, kept a second time in oneDNN's blocked order where that multiplies faster.

Measured on Zen 4 with one thread: at 2 to 64 rows the blocked order takes 0.6 to 0.75 of MKL's time for matrices
of 256 × 512 and more, but each call costs 10 µs more, which is a loss for small products.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["BlockedLinear"]

LARGE = 65_536
"""Elements from which the blocked order wins at any number of rows above one."""

WORK = 4_000_000
"""Multiply-adds from which it wins for a small matrix as well."""

HINT_ROWS = 64
"""Rows that oneDNN chooses the blocking for; measured to make no difference."""


class BlockedLinear:
    """`weight` `[out, in]` and an optional `bias` `[out]`, which the owner fills; call `pack` after each change."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight, self.bias = weight, bias
        self._packed: Tensor | None = None
        self._large = weight.numel() >= LARGE

    def pack(self) -> None:
        """Copy the weight into the blocked order (fp32 on a CPU with oneDNN only; otherwise nothing)."""
        w = self.weight
        # Inductor's operators, not public API: a torch without them multiplies the plain way.
        known = hasattr(torch.ops.mkldnn, "_reorder_linear_weight") and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        if known and w.device.type == "cpu" and w.dtype == torch.float32:
            self._packed = torch.ops.mkldnn._reorder_linear_weight(w.contiguous(), HINT_ROWS)

    def rows(self, start: int, stop: int) -> BlockedLinear:
        """The outputs [start, stop) as a matrix that shares this one's storage."""
        return BlockedLinear(self.weight[start:stop], None if self.bias is None else self.bias[start:stop])

    def __call__(self, x: Tensor) -> Tensor:
        """`x` `[n, in]` to `[n, out]`."""
        n = x.shape[0]
        if self._packed is None or n == 1 or not (self._large or n * self.weight.numel() >= WORK):
            return F.linear(x, self.weight, self.bias)
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        return product
