"""Distribution of work and tensors over ranks: completeness, uniqueness, and the bound of the greedy rule."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollart.shares import balanced_portions
from rollart.train.checkpoint import file_buckets, row_range
from rollart.train.microbatch import rank_microbatches

sizes = st.lists(st.integers(0, 5000), max_size=40)


@given(sizes, st.integers(1, 9))
def test_portions_are_a_partition_whose_totals_stay_near_the_mean(values: list[int], parts: int) -> None:
    shares = balanced_portions(values, parts)
    assert len(shares) == parts
    assert sorted(i for share in shares for i in share) == list(range(len(values)))
    totals = [sum(values[i] for i in share) for share in shares]
    assert max(totals) <= sum(values) / parts + (1 - 1 / parts) * max(values, default=0) + 1e-9


def test_on_a_tie_the_lower_rank_takes_it() -> None:
    assert balanced_portions([5, 5, 5], 2) == [[0, 2], [1]]


@given(st.lists(st.integers(0, 300), min_size=1, max_size=30), st.integers(1, 5), st.integers(1, 600))
def test_ranks_make_the_same_number_of_passes_and_each_sample_is_in_one(
    lengths: list[int], ranks: int, most: int
) -> None:
    used = np.array(lengths, np.int64)
    plans = [rank_microbatches(used, most, rank=rank, ranks=ranks) for rank in range(ranks)]
    assert len({len(one) for one in plans}) == 1
    taken = sorted(int(i) for one in plans for part in one for i in part)
    assert taken == [i for i, length in enumerate(lengths) if length]
    for part in (part for one in plans for part in one if len(part) > 1):
        assert used[part].max() * len(part) <= most


@given(st.integers(0, 50), st.integers(1, 9))
def test_rows_are_those_that_torch_chunk_gives(rows: int, ranks: int) -> None:
    chunks = torch.arange(rows).chunk(ranks)
    for rank in range(ranks):
        start, stop = row_range(rows, rank=rank, ranks=ranks)
        expected = chunks[rank].tolist() if rank < len(chunks) else []
        assert list(range(start, stop)) == expected


@given(st.lists(st.integers(1, 900), max_size=30), st.integers(1, 5), st.integers(1, 1500))
def test_buckets_hold_each_tensor_once_within_the_limit(listed: list[int], ranks: int, limit: int) -> None:
    named = {f"t{i}": size for i, size in enumerate(listed)}
    planned = file_buckets(named, ranks=ranks, limit=limit)
    assert sorted(name for bucket in planned for name in bucket.names) == sorted(named)
    assert [bucket.owner for bucket in planned] == sorted(bucket.owner for bucket in planned)
    for bucket in planned:
        assert len(bucket.names) == 1 or sum(named[name] for name in bucket.names) <= limit


def test_no_samples_are_no_passes() -> None:
    assert rank_microbatches(np.zeros(3, np.int64), 10, rank=1, ranks=2) == []


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_lone_long_sample_is_met_by_empty_passes(ranks: int) -> None:
    plans = [rank_microbatches(np.array([900]), 100, rank=rank, ranks=ranks) for rank in range(ranks)]
    assert [[list(part) for part in one] for one in plans] == [[[0]], [[]]][:ranks]
