"""The operations of the decoder between its matrix products.

Functions of one tensor serve both passes. `TorchOperations` has those of a decode step, one row per sequence, all
shapes fixed; `kernels.TritonOperations` has them as a few fused kernels, on GPUs with Triton.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from rollart.architecture import Architecture
from rollart.engine.rotary import Tables, rotate


def rms_norm(a: Architecture, x: Tensor, weight: Tensor) -> Tensor:
    """Root mean square norm of the last dimension, computed in the type of `weight`."""
    if x.dtype is weight.dtype:  # the usual case, without two calls
        return F.rms_norm(x, (x.shape[-1],), weight, a.norm_eps)
    return F.rms_norm(x.to(weight.dtype), (x.shape[-1],), weight, a.norm_eps).to(x.dtype)


def norm_heads(a: Architecture, x: Tensor, weight: Tensor | None, queries: int) -> Tensor:
    """The norm, if any, of `queries` heads of queries and the rest of keys, `x` `[n, heads, head_dim]`. `weight`
    `[heads, head_dim]`."""
    if weight is None:
        return x
    if a.qk_norm == "head":
        normed = F.rms_norm(x if x.dtype is weight.dtype else x.to(weight.dtype), (a.head_dim,), None, a.norm_eps)
        return (normed * weight).to(x.dtype)
    parts = [part for part in (slice(0, queries), slice(queries, None)) if x[:, part].shape[1]]
    return torch.cat([rms_norm(a, x[:, p].flatten(1), weight[p].flatten()).view_as(x[:, p]) for p in parts], 1)


def gate(a: Architecture, gate_up: Tensor) -> Tensor:
    """`[n, 2 * width]` to `[n, width]`: the activation of the first half times the second."""
    first, second = gate_up.chunk(2, -1)
    return (F.silu(first) if a.activation == "silu" else F.gelu(first, approximate="tanh")).mul_(second)


def scaled_attention(a: Architecture, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """Attention of `[..., queries, head_dim]` with an additive mask, and the soft cap of the scores, if any."""
    if a.attention_cap is None:
        return F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=a.attention_scale)
    scores = queries @ keys.transpose(-1, -2) * (a.attention_scale / a.attention_cap)
    scores = scores.tanh().mul_(a.attention_cap).add_(mask)
    return scores.softmax(-1, dtype=torch.float32).to(values.dtype) @ values


def separate_gates(a: Architecture, projected: Tensor) -> tuple[Tensor, Tensor | None]:
    """Take the gates out of `projected` `[n, ...]`, which starts with the queries, each head's beside its gate if the
    decoder is `gated`: what is left, and the gates `[n, heads * head_dim]`, if any."""
    if not a.gated:
        return projected, None
    wide = 2 * a.heads * a.head_dim
    queries, gates = projected[:, :wide].view(-1, a.heads, 2, a.head_dim).unbind(2)
    return torch.cat((queries.flatten(1), projected[:, wide:]), 1), gates.flatten(1)


def causal_mask(keys: Tensor, queries: Tensor, window: int | None, dtype: torch.dtype) -> Tensor:
    """Additive mask: a query sees keys up to its own position, the last `window` of them. Positions are broadcast."""
    hidden = keys > queries
    if window is not None:
        hidden = hidden | (keys <= queries - window)
    return torch.zeros(hidden.shape, device=keys.device, dtype=dtype).masked_fill_(hidden, float("-inf"))


class TorchOperations:
    """Implementation in PyTorch. `tables` are the rotary tables, of which a layer uses one or none.

    `keys` and `values` are one layer's cache, `[slots, kv_heads, context, head_dim]`. `slots` and `positions` `[R]` are
    the location of each row's token, which attends up to its position. `length` bounds the positions."""

    ragged = False
    """True if `attend` reads each row up to its own position; otherwise it reads all rows up to `length`."""

    def __init__(self, architecture: Architecture, tables: Sequence[Tables]) -> None:
        self.architecture, self.tables = architecture, tables

    def add_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor | None) -> tuple[Tensor, Tensor]:
        """`x + delta` `[R, hidden]` (`x` without `delta`), and its norm (itself without `weight`)."""
        x = x if delta is None else x + delta
        return x, x if weight is None else rms_norm(self.architecture, x, weight)

    def gate(self, gate_up: Tensor) -> Tensor:
        """`[R, 2 * width]` to `[R, width]`."""
        return gate(self.architecture, gate_up)

    def place(
        self,
        qkv: Tensor,
        scale: Tensor | None,
        slots: Tensor,
        positions: Tensor,
        keys: Tensor,
        values: Tensor,
        table: int | None = 0,
    ) -> Tensor:
        """Norm and rotate (by a table) queries and keys of `qkv` `[R, (heads + 2 kv_heads) * head_dim]`; keys and
        values go into the cache. The queries `[R, heads, head_dim]`."""
        a = self.architecture
        qkv = qkv.view(qkv.shape[0], a.heads + 2 * a.kv_heads, a.head_dim)
        qk = norm_heads(a, qkv[:, : a.heads + a.kv_heads], scale, a.heads)
        if table is not None:
            cos, sin = self.tables[table]
            qk = rotate(qk, (cos.index_select(0, positions), sin.index_select(0, positions)))
        context = keys.shape[2]
        heads = torch.arange(a.kv_heads, device=qkv.device)
        index = ((slots[:, None] * a.kv_heads + heads) * context + positions[:, None]).view(-1)
        for cache, new in ((keys, qk[:, a.heads :]), (values, qkv[:, a.heads + a.kv_heads :])):
            cache.view(-1, a.head_dim).index_copy_(0, index, new.reshape(-1, a.head_dim))
        return qk[:, : a.heads]

    def attend(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        slots: Tensor,
        positions: Tensor,
        length: int,
        window: int | None = None,
    ) -> Tensor:
        """Attention of one query per row to its slot's positions up to its own, the last `window` of them:
        `[R, heads * head_dim]`."""
        a, rows = self.architecture, queries.shape[0]
        mask = causal_mask(torch.arange(length, device=queries.device), positions[:, None], window, queries.dtype)
        k, v = (cache[:, :, :length].index_select(0, slots) for cache in (keys, values))
        folded = queries.reshape(rows, a.kv_heads, a.group, a.head_dim)
        return scaled_attention(a, folded, k, v, mask.view(rows, 1, 1, length)).reshape(rows, -1)
