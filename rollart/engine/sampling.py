"""Sampling of the next token of all rows at once.

The reported log-probability is the token's under softmax(logits / temperature) restricted to the legal tokens: after
temperature and mask, *before* top-p. This is the policy in a loss's importance ratio, and it stays finite if the
trainer's top-p set differs by a rounding. A greedy row (temperature 0) reports temperature 1.

Randomness is counter-based: the uniform of a request's i-th token is a hash of (seed, i). It depends on neither the
batch, the slot nor the engine, so a request is reproducible in any batch, and after a hand-off to another engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 128
"""Tokens per block: about 1,200 blocks for a vocabulary of 150,000."""

BELOW_ONE = 1.0 - 2.0**-23
"""Factor that keeps a uniform times the total below the total despite rounding, so that the index exists."""


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """Sampling parameters of each row of the logits; arrays `[R]`. `allowed[i]` holds the legal ids, None for all."""

    temperature: npt.NDArray[np.float32]
    top_p: npt.NDArray[np.float32]
    seed: npt.NDArray[np.uint64]
    index: npt.NDArray[np.int64]
    allowed: list[npt.NDArray[np.int64] | None] | None


def sample(logits: Tensor, rows: SamplingRows) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """Sampled ids and their log-probabilities, `[R]` each. `logits` `[R, vocab]` fp32 is overwritten."""
    device = logits.device
    if rows.allowed is not None:
        logits = _restrict(logits, rows.allowed)
    greedy = rows.temperature == 0.0
    if not (rows.temperature[~greedy] == 1.0).all():
        scale = np.where(greedy, np.float32(1.0), rows.temperature)
        logits = logits / to_device(scale, device)[:, None]
    logp = torch.log_softmax(logits, -1)
    if greedy.all():
        ids = logp.argmax(-1)
    else:
        u = to_device(uniforms(rows.seed, rows.index), device)[:, None]
        ids = _draw(logp.exp(), rows.top_p, u)
        if greedy.any():
            ids = torch.where(to_device(greedy, device), logp.argmax(-1), ids)
    chosen = logp.gather(1, ids[:, None])[:, 0]
    if device.type == "cpu":
        return ids.numpy(), chosen.numpy()
    both = torch.stack((ids.double(), chosen.double())).cpu().numpy()  # one device wait; both are exact in fp64
    return both[0].astype(np.int64), both[1].astype(np.float32)


def sample_in_fixed_order(logits: Tensor, rows: SamplingRows) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """`sample`, the same bits at every call. On a GPU the cumulative sum of one long row, as of `top_p`, is otherwise
    added up in an order that depends on timing (PyTorch 2.11 on an H200: from 40,000 tokens on)."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        return sample(logits, rows)
    finally:
        torch.use_deterministic_algorithms(before)


def to_device(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """Copy an array to the device without waiting for the device's current work."""
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def uniforms(seed: npt.NDArray[np.uint64], index: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """Uniform numbers in [0, 1) from (seed, index): splitmix64 twice, the top 24 bits."""
    with np.errstate(over="ignore"):
        mixed = _mix(_mix(seed) + index.astype(np.uint64))
    return ((mixed >> np.uint64(40)).astype(np.float32)) * np.float32(2.0**-24)


def _mix(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    z = z + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _restrict(logits: Tensor, allowed: list[npt.NDArray[np.int64] | None]) -> Tensor:
    """Set all but the legal ids to minus infinity, in the rows that are restricted."""
    vocab = logits.shape[1]
    limited = [i for i, ids in enumerate(allowed) if ids is not None]
    if not limited:
        return logits
    legal = np.concatenate([ids + i * vocab for i, ids in enumerate(allowed) if ids is not None])
    index = to_device(legal, logits.device)
    kept = logits.view(-1).index_select(0, index)
    if len(limited) == len(allowed):
        logits = torch.full_like(logits, float("-inf"))
    else:
        logits.index_fill_(0, to_device(np.array(limited, np.int64), logits.device), float("-inf"))
    logits.view(-1).index_copy_(0, index, kept)
    return logits


def _draw(probs: Tensor, top_p: npt.NDArray[np.float32], u: Tensor) -> Tensor:
    """Inverse of the cumulative distribution at `u` `[R, 1]`; rows with top_p < 1 draw from their nucleus."""
    if (top_p >= 1.0).all():
        return invert(probs.cumsum(-1), u) if probs.device.type == "cpu" else invert_blocks(probs, u)
    ordered, ids = probs.sort(stable=True, dim=-1, descending=True)
    cumulative = ordered.cumsum(-1)
    limit = to_device(top_p, probs.device)[:, None]
    # The nucleus is the shortest prefix that reaches top_p: a token stays if the mass before it is below top_p.
    nucleus = ordered.masked_fill(cumulative - ordered >= limit, 0.0).cumsum(-1)
    drawn = ids.gather(1, invert(nucleus, u)[:, None])[:, 0]
    # Rows without top-p draw in vocabulary order in every batch, so that they are reproducible.
    whole = invert(probs.cumsum(-1), u) if probs.device.type == "cpu" else invert_blocks(probs, u)
    return torch.where(limit[:, 0] >= 1.0, whole, drawn)


def invert_blocks(probs: Tensor, u: Tensor) -> Tensor:
    """`invert` in two levels: first the block of `BLOCK` tokens, then the token in it. On a GPU, sums are parallel but
    cumulative sums over a long vocabulary are not."""
    rows, vocab = probs.shape
    blocks = F.pad(probs, (0, -vocab % BLOCK)).view(rows, -1, BLOCK)
    running = blocks.sum(-1).cumsum(-1)
    block = invert(running, u)[:, None]
    before = torch.where(block > 0, running.gather(1, (block - 1).clamp(min=0)), 0.0)
    inside = blocks.gather(1, block[:, :, None].expand(-1, -1, BLOCK))[:, 0].cumsum(-1)
    target = u * running[:, -1:] * BELOW_ONE - before
    # A block's cumulative sum may differ from its sum in the last bit: clamp to the last token with mass.
    target = torch.minimum(target, inside[:, -1:] * BELOW_ONE)
    token = torch.searchsorted(inside, target.clamp(min=0.0), right=True)
    return (block * BLOCK + token)[:, 0]


def invert(cumulative: Tensor, u: Tensor) -> Tensor:
    """The first index whose cumulative mass exceeds u times the total: never one of zero probability."""
    target = u * cumulative[:, -1:] * BELOW_ONE
    return torch.searchsorted(cumulative, target, right=True)[:, 0]
