"""Small attention heads on CPUs: vLLM's CPU kernels need a head size of at least 32, and tiny test models have less.

Queries, keys and values are padded with zeros. Zeros add nothing to a score, and the padding of the output is cut off.
The scale remains that of the model's own head size, so the result is exact.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.nn.functional import pad

LEAST = 32
"""Smallest head size of vLLM's CPU kernels."""


def accept_small_heads() -> None:
    """Create attention layers with smaller heads as layers with heads of `LEAST` from now on. Idempotent."""
    from vllm.model_executor.layers.attention import Attention

    if getattr(Attention, "_rollart_pads", False):
        return
    Attention._rollart_pads = True
    make, attend = Attention.__init__, Attention.forward

    @functools.wraps(make)
    def init(self: Any, num_heads: int, head_size: int, *args: Any, **kwargs: Any) -> None:
        make(self, num_heads, max(head_size, LEAST), *args, **kwargs)
        self._own_head = head_size

    @functools.wraps(attend)
    def forward(
        self: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        own = self._own_head
        if own >= LEAST:
            return attend(self, query, key, value, *args, **kwargs)
        wide = [_widened(x, own) for x in (query, key, value)]
        out = attend(self, *wide, *args, **kwargs)
        return out.view(out.shape[0], -1, LEAST)[..., :own].reshape(out.shape[0], -1)

    Attention.__init__, Attention.forward = init, forward


def _widened(x: torch.Tensor, own: int) -> torch.Tensor:
    """`[tokens, heads * own]` to `[tokens, heads * LEAST]`."""
    return pad(x.reshape(x.shape[0], -1, own), (0, LEAST - own)).reshape(x.shape[0], -1)
