"""The gated delta rule (Yang et al., "Gated Delta Networks: Improving Mamba2 with Delta Rule", arXiv:2412.06464), and
the causal convolution before it.

Each value head has a memory S `[key_dim, value_dim]`. A token first lets the memory decay, then writes the part of its
value that the memory does not yet answer to its key, and reads with its query:

    S ← exp(decay) S,    S ← S + k ⊗ strength (v − Sᵀk),    o = Sᵀq

with keys and queries of length 1. In the functions below `[b, t]` are rows and their tokens, and `heads` the value
heads, of which consecutive ones share a key. All in fp32.
"""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK = 64
"""Tokens that are computed together; the tokens of a chunk cost a triangular system of this size per head."""

NORM_EPS = 1e-6
"""Added to squared lengths of keys and queries, as the published models were trained."""


def convolve(x: Tensor, before: Tensor, taps: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor]:
    """Causal convolution of each channel over the tokens `x` `[b, t, channels]`, after the inputs `before`
    `[b, kernel - 1, channels]`, with `taps` `[channels, 1, kernel]`, the current token's last. Returns the result, and
    the last inputs of each row in the form of `before`. `lengths` `[b]`: tokens of a row; None: all have `t`."""
    width, past = x.shape[1], before.shape[1]
    whole = torch.cat((before.to(x.dtype), x), 1)
    out = whole[:, :width] * taps[:, 0, 0]
    for tap in range(1, past + 1):
        out = torch.addcmul(out, whole[:, tap : tap + width], taps[:, 0, tap])
    if lengths is None:
        return out, whole[:, width:]
    at = lengths[:, None] + torch.arange(past, device=x.device)
    return out, whole.gather(1, at[:, :, None].expand(-1, -1, whole.shape[2]))


def delta_step(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, strength: Tensor, memory: Tensor
) -> tuple[Tensor, Tensor]:
    """One token per row: `q`, `k` `[b, 1, key heads, key_dim]`, `v` `[b, 1, heads, value_dim]`, `decay` (at most 0) and
    `strength` (0 to 1) `[b, 1, heads]`, `memory` `[b, heads, key_dim, value_dim]`. Returns the results in the form of
    `v`, and the memory after the token."""
    q, k = (part[:, 0, :, None] for part in _unit(q, k, v.shape[2]))
    memory = memory * decay[:, 0, :, None, None].exp()
    written = (v[:, 0, :, None] - k @ memory) * strength[:, 0, :, None, None]
    memory = memory + k.transpose(-1, -2) * written
    return (q @ memory).transpose(1, 2), memory


def delta_chunks(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, strength: Tensor, memory: Tensor
) -> tuple[Tensor, Tensor]:
    """`delta_step` of `t` tokens per row, `[b, t, ...]`, as matrix products over chunks.

    Within a chunk, with c the decays summed up to a token and S the memory before the chunk, token i writes
    w_i = strength_i (v_i − exp(c_i) Sᵀk_i − Σ_{j<i} exp(c_i − c_j) (k_i · k_j) w_j): a unit triangular system (section
    3.3 of the paper, where it is the extended WY representation). Exponents are at most 0."""
    q, k = _unit(q, k, v.shape[2])
    q, k, v, decay, strength = (part.transpose(1, 2) for part in (q, k, v, decay, strength))
    outputs = []
    for qs, ks, vs, decays, strengths in zip(
        *(torch.split(part, CHUNK, 2) for part in (q, k, v, decay, strength)), strict=True
    ):
        summed = decays.double().cumsum(2)  # differences of large sums are small
        between = (summed[..., :, None] - summed[..., None, :]).tril().float().exp().tril()
        grown, strengths = summed.float().exp()[..., None], strengths[..., None]
        system = strengths * between * (ks @ ks.transpose(-1, -2))
        written = strengths * (vs - grown * (ks @ memory))
        written = torch.linalg.solve_triangular(system, written, upper=False, unitriangular=True)
        outputs.append(grown * (qs @ memory) + (between * (qs @ ks.transpose(-1, -2))) @ written)
        left = between[..., -1, :, None]
        memory = grown[..., -1:, :] * memory + (left * ks).transpose(-1, -2) @ written
    return torch.cat(outputs, 2).transpose(1, 2), memory


def _unit(q: Tensor, k: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Queries and keys of length 1, repeated for the value heads that share them; queries also by the root of their
    size, as in other attention."""
    scale = q.shape[-1] ** -0.5
    q, k = (part * (part.square().sum(-1, keepdim=True) + NORM_EPS).rsqrt() for part in (q, k))
    return (q * scale).repeat_interleave(heads // q.shape[2], 2), k.repeat_interleave(heads // k.shape[2], 2)
