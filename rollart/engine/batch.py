"""One forward pass as arrays: the tokens, the cache rows of their keys, and the attention groups.

Tokens of all rows are packed without padding, so that the linear layers, which are most of the work, compute no
padding. Attention needs rectangles: rows are grouped by similar length (at most a factor of two apart), and only the
queries are padded. A decoding row is simply a row with one new token.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rollart.engine.sampling import to_device

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """Rows that attend together: packed tokens [t0, t1), rows [r0, r1) of the batch.

    `pad` `[rows * width]` picks each padded query from the group's tokens and `keep` `[t1 - t0]` picks the real
    ones back (None where no row is shorter than `width`). `mask` is additive, `[rows, 1, width * heads per
    kv head or 1, length]`; `tail_mask` `[rows, 1, 1, length]` is that of each row's last token alone.
    """

    r0: int
    r1: int
    t0: int
    t1: int
    width: int
    length: int
    slots: slice | Tensor
    pad: Tensor | None
    keep: Tensor | None
    mask: Tensor
    tail_mask: Tensor


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """Tokens `[T]`, their positions `[T]`, the flat cache rows of their keys `[T * kv_heads]`, and the groups.

    `order` `[R]` gives, for each row of the result, the row of the caller. `last` `[R]` is the packed index of each
    row's last token, or None when every token is one (pure decoding).
    """

    tokens: Tensor
    positions: Tensor
    write: Tensor
    last: Tensor | None
    groups: tuple[AttentionGroup, ...]
    order: Ints


def pack_batch(
    table: Ints,
    slots: Ints,
    start: Ints,
    end: Ints,
    *,
    context: int,
    kv_heads: int,
    per_kv_head: int,
    device: torch.device,
    dtype: torch.dtype,
    layers: int,
) -> PackedBatch:
    """Pack rows: row i computes tokens `table[slots[i], start[i]:end[i]]` (at least one each).

    `context` is the cache's number of positions per slot, `per_kv_head` the query heads per kv head. With one
    of `layers` only, just each row's last query is ever computed, so the masks of the others are omitted.
    """
    lengths = end - start
    bucket = np.ceil(np.log2(lengths)).astype(np.int64)
    order = np.lexsort((slots, bucket))
    slots, start, lengths, bucket = slots[order], start[order], lengths[order], bucket[order]
    rows, total = len(slots), int(lengths.sum())
    offsets = np.zeros(rows + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    slot_of = np.repeat(slots, lengths)
    position = np.arange(total) + np.repeat(start - offsets[:-1], lengths)
    heads = np.arange(kv_heads)
    write = ((slot_of[:, None] * kv_heads + heads) * context + position[:, None]).reshape(-1)
    edges = np.flatnonzero(np.diff(bucket)) + 1
    groups = tuple(
        _group(int(a), int(b), slots, start, lengths, offsets, per_kv_head, device, dtype, tail_only=layers == 1)
        for a, b in zip([0, *edges], [*edges, rows], strict=True)
    )
    return PackedBatch(
        tokens=to_device(table[slot_of, position], device),
        positions=to_device(position, device),
        write=to_device(write, device),
        last=None if total == rows else to_device(offsets[1:] - 1, device),
        groups=groups,
        order=order,
    )


def _group(
    a: int,
    b: int,
    slots: Ints,
    start: Ints,
    lengths: Ints,
    offsets: Ints,
    per_kv_head: int,
    device: torch.device,
    dtype: torch.dtype,
    *,
    tail_only: bool,
) -> AttentionGroup:
    slots, start, lengths = slots[a:b], start[a:b], lengths[a:b]
    rows, width = b - a, int(lengths.max())
    final = start + lengths - 1
    length = int(final.max()) + 1
    tail_mask = _causal(final[:, None], length, device, dtype).view(rows, 1, 1, length)
    pad = keep = None
    mask = tail_mask
    if width > 1 and not tail_only:
        step = np.minimum(np.arange(width), lengths[:, None] - 1)
        if int(lengths.min()) < width:
            local = offsets[a:b] - offsets[a]
            pad = to_device((local[:, None] + step).reshape(-1), device)
            real = np.arange(width) < lengths[:, None]
            keep = to_device(np.flatnonzero(real), device)
        mask = _causal(start[:, None] + step, length, device, dtype)
        mask = mask.view(rows, 1, width, 1, length).expand(-1, -1, -1, per_kv_head, -1)
        mask = mask.reshape(rows, 1, width * per_kv_head, length)
    run = int(slots[-1]) - int(slots[0]) + 1 == rows
    where = slice(int(slots[0]), int(slots[-1]) + 1) if run else to_device(slots, device)
    return AttentionGroup(a, b, int(offsets[a]), int(offsets[b]), width, length, where, pad, keep, mask, tail_mask)


def _causal(positions: Ints, length: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Additive mask `[rows, width, length]`: key j is hidden from a query at a position below j."""
    query = to_device(positions, device)
    hidden = torch.arange(length, device=device) > query[:, :, None]
    return torch.zeros(hidden.shape, device=device, dtype=dtype).masked_fill_(hidden, float("-inf"))
