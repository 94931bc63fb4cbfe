"""Divides samples among data-parallel ranks. Pure: every rank computes the same result from the same numbers, without
communication."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from rollart.train.batch import IntArray
from rollart.train.microbatch import plan_microbatches


def balanced_portions(sizes: Sequence[int] | IntArray, parts: int) -> list[IntArray]:
    """Indices of `sizes` in `parts` portions with nearly equal totals; each index is in exactly one, ascending.

    Largest first, each to the portion with the smallest total so far, the lower number on a tie (Graham 1969, "Bounds
    on multiprocessing timing anomalies": no total exceeds the mean by more than (1 − 1/parts) × the largest size, nor
    the optimum by more than a third).
    """
    order = sorted(range(len(sizes)), key=lambda i: (-int(sizes[i]), i))
    heap = [(0, part) for part in range(parts)]
    out: list[list[int]] = [[] for _ in range(parts)]
    for index in order:
        total, part = heap[0]
        out[part].append(index)
        heapq.heapreplace(heap, (total + int(sizes[index]), part))
    return [np.array(sorted(indices), np.int64) for indices in out]


def rank_microbatches(lengths: IntArray, max_tokens: int, *, rank: int, ranks: int) -> list[IntArray]:
    """The micro-batches of one rank (`microbatch.plan_microbatches`), as many as every other rank has: the last ones
    may be empty. Forward and backward passes are collective, so a rank with less work takes part with empty ones."""
    if ranks == 1:
        return plan_microbatches(lengths, max_tokens)
    alive = np.flatnonzero(lengths > 0)
    shares = [alive[share] for share in balanced_portions(lengths[alive], ranks)]
    plans = [[share[part] for part in plan_microbatches(lengths[share], max_tokens)] for share in shares]
    longest = max(len(one) for one in plans)
    return plans[rank] + [np.zeros(0, np.int64)] * (longest - len(plans[rank]))
