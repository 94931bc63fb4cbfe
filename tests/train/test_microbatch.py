"""Micro-batches: everything exactly once, bounded, no dearer than simple plans; and the wire form."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.adapters.trainers.http import encode_samples
from rollart.train.batch import InvalidSamples, decode_batch
from rollart.train.microbatch import build_microbatch, plan_microbatches
from tests.train.trainkit import VOCAB, batch, sample

lengths = st.lists(st.integers(0, 60), min_size=0, max_size=40)


@settings(max_examples=60, deadline=None)
@given(lengths, st.integers(1, 300), st.integers(0, 200))
def test_a_plan_takes_every_sample_once_within_the_bound(sizes: list[int], limit: int, overhead: int) -> None:
    size = np.array(sizes, np.int64)
    parts = plan_microbatches(size, limit, overhead)
    assert sorted(i for p in parts for i in p.tolist()) == [i for i, n in enumerate(sizes) if n]
    for part in parts:
        assert len(part) == 1 or size[part].max() * len(part) <= limit


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=8), st.integers(20, 80), st.integers(0, 60))
def test_a_plan_is_the_cheapest_cut_of_the_sorted_samples(sizes: list[int], limit: int, overhead: int) -> None:
    def cost(parts: list[list[int]]) -> int:
        return sum(overhead + max(p) * len(p) for p in parts)

    ordered = sorted(sizes)
    options = []
    for cuts in itertools.product([False, True], repeat=len(ordered) - 1):
        parts: list[list[int]] = [[ordered[0]]]
        for cut, size in zip(cuts, ordered[1:], strict=True):
            parts.append([size]) if cut else parts[-1].append(size)
        if all(len(p) == 1 or max(p) * len(p) <= limit for p in parts):
            options.append(cost(parts))
    mine = [[sizes[i] for i in p] for p in plan_microbatches(np.array(sizes), limit, overhead)]
    assert cost(mine) == min(options)


def test_hidden_states_are_taken_one_before_the_token_and_unrestricted_tokens_come_first() -> None:
    made = batch([sample("x", turns=[(2, 2)], restricted=True), sample("y", turns=[(3, 1), (1, 1)])])
    used = made.used_lengths
    assert used.tolist() == [3, 5]
    micro = build_microbatch(made, np.array([0, 1]), used, torch.device("cpu"))
    assert micro.ids.shape == (2, 5)
    assert micro.free == 2
    assert micro.at.tolist() == [7, 9, 1, 2]
    assert micro.pick.tolist() == [2, 3, 0, 1]
    assert (micro.real_tokens, micro.padded_tokens) == (8, 10)


def test_the_wire_keeps_every_field() -> None:
    one = sample("x", turns=[(2, 2), (1, 1)], restricted=True, version=3, domain="b")
    two = sample("y", turns=[(1, 0)], version=4)
    made = batch([one, two])
    assert made.tokens.tolist() == [*one.token_ids, *two.token_ids]
    assert made.mask.tolist() == [*one.loss_mask, *two.loss_mask]
    assert made.versions.tolist() == [*one.versions, *two.versions]
    assert made.turn.tolist() == [*one.turn, *two.turn]
    assert made.rewards.tolist() == [*one.rewards, *two.rewards]
    assert made.logprobs.tolist() == [*one.logprobs, *two.logprobs]
    assert made.score.tolist() == [one.score, two.score]
    assert [made.domains[d] for d in made.domain] == ["b", "a"]
    assert made.lengths.tolist() == [6, 1]
    for position, allowed in enumerate(one.allowed):
        row = made.legal[position]
        assert (None if row == 0 else tuple(made.sets.ids[row][made.sets.valid[row]].tolist())) == allowed


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"token_ids": (1, 2, VOCAB)}, "sample x: a token id is outside the 24 of the model"),
        ({"loss_mask": (True, True, True)}, "sample x: its first token cannot carry loss"),
        ({"logprobs": (0.0, float("nan"), -1.0)}, "sample x: a log-probability is not finite"),
        ({"logprobs": (0.0, 0.5, -1.0)}, "above 0"),
        ({"rewards": (0.0, float("inf"), 0.0)}, "sample x: a reward is not finite"),
        ({"allowed": (None, (5,), None), "token_ids": (1, 2, 3)}, "sample x: a sampled token is not in its own legal"),
        ({"score": float("nan")}, "sample x: its score is not finite"),
    ],
)
def test_a_sample_that_cannot_be_trained_on_is_named(change: dict[str, object], rule: str) -> None:
    good = sample("x", turns=[(1, 2)])
    with pytest.raises(ValueError, match=rule):
        batch([sample("ok"), dataclasses.replace(good, **change)])  # type: ignore[arg-type]


def test_every_sample_that_cannot_be_trained_on_is_named() -> None:
    bad = [dataclasses.replace(sample(n), score=float("nan")) for n in "xy"]
    with pytest.raises(InvalidSamples, match=r"^sample x: its score is not finite \(and 1 other samples\)$") as refused:
        batch([sample("ok"), *bad])
    assert refused.value.samples == ("x", "y")


def test_a_malformed_body_is_one_error() -> None:
    wire = encode_samples([sample("x")])
    changes: list[dict[str, object]] = [{"tokens": b"123"}, {"turn": b""}, {"domain": b"\x09\0\0\0"}, {"ids": None}]
    for change in changes:
        broken = wire | change
        with pytest.raises(ValueError, match="malformed samples"):
            decode_batch(broken, VOCAB)
