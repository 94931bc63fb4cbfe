"""The operations of a decode step between its matrix products: one row per sequence, all shapes fixed.

`TorchOperations` uses PyTorch, on any device; `kernels.TritonOperations` uses a few fused kernels, on GPUs with Triton.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from rollart.architecture import Architecture


class TorchOperations:
    """Implementation in PyTorch. `cos` and `sin` `[context, 1, head_dim]` are the rotary tables; `sin` has the sign.

    `keys` and `values` are one layer's cache, `[slots, kv_heads, context, head_dim]`. `slots` and `positions` `[R]` are
    the location of each row's token, which attends up to its position. `length` bounds the positions."""

    ragged = False
    """True if `attend` reads each row up to its own position; otherwise it reads all rows up to `length`."""

    def __init__(self, architecture: Architecture, cos: Tensor, sin: Tensor) -> None:
        self.architecture, self.cos, self.sin = architecture, cos, sin

    def add_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor) -> tuple[Tensor, Tensor]:
        x = x if delta is None else x + delta
        return x, F.rms_norm(x, (x.shape[-1],), weight, self.architecture.norm_eps)

    def gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate).mul_(up)

    def place(
        self, qkv: Tensor, scale: Tensor | None, slots: Tensor, positions: Tensor, keys: Tensor, values: Tensor
    ) -> Tensor:
        a = self.architecture
        qkv = qkv.view(qkv.shape[0], a.heads + 2 * a.kv_heads, a.head_dim)
        qk = qkv[:, : a.heads + a.kv_heads]
        if scale is not None:
            qk = F.rms_norm(qk, (a.head_dim,), None, a.norm_eps) * scale
        cos, sin = self.cos.index_select(0, positions), self.sin.index_select(0, positions)
        qk = torch.addcmul(qk * cos, qk.roll(a.head_dim // 2, -1), sin)
        context = keys.shape[2]
        heads = torch.arange(a.kv_heads, device=qkv.device)
        index = ((slots[:, None] * a.kv_heads + heads) * context + positions[:, None]).view(-1)
        for cache, new in ((keys, qk[:, a.heads :]), (values, qkv[:, a.heads + a.kv_heads :])):
            cache.view(-1, a.head_dim).index_copy_(0, index, new.reshape(-1, a.head_dim))
        return qk[:, : a.heads]

    def attend(
        self, queries: Tensor, keys: Tensor, values: Tensor, slots: Tensor, positions: Tensor, length: int
    ) -> Tensor:
        a, rows = self.architecture, queries.shape[0]
        hidden = torch.arange(length, device=queries.device) > positions[:, None]
        mask = torch.zeros(hidden.shape, device=queries.device, dtype=queries.dtype)
        mask = mask.masked_fill_(hidden, float("-inf")).view(rows, 1, 1, length)
        k, v = (cache[:, :, :length].index_select(0, slots) for cache in (keys, values))
        folded = queries.reshape(rows, a.kv_heads, a.group, a.head_dim)
        return F.scaled_dot_product_attention(folded, k, v, attn_mask=mask).reshape(rows, -1)
