"""A linear layer with a second copy of its matrix in oneDNN's blocked layout, used where that multiplies faster.

Measured on Zen 4 with one thread: at 2 to 64 rows the blocked layout takes 0.6 to 0.75 of MKL's time for matrices of at
least 256 × 512, but each call costs 10 µs more, which is a loss for small products.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

LARGE = 65_536
"""Elements from which the blocked layout wins at any number of rows above one."""

WORK = 4_000_000
"""Multiply-adds from which the blocked layout wins for a small matrix as well."""

HINT_ROWS = 64
"""Number of rows that oneDNN optimizes the blocking for; measured to make no difference."""


class BlockedLinear:
    """`weight` `[out, in]` and an optional `bias` `[out]`, both filled by the owner; call `pack` after each change."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight, self.bias = weight, bias
        self._packed: Tensor | None = None
        self._large = weight.numel() >= LARGE

    def pack(self) -> None:
        """Copy the weight into the blocked layout (only for fp32 on a CPU with oneDNN; otherwise does nothing)."""
        w = self.weight
        # Inductor's operators are not public API: a torch without them uses the plain layout.
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
