"""Batches of given samples: an epoch has each sample once, and a step's batch depends on nothing but its number."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from rollart.control.given import GivenBatches


def batches(count: int, size: int, seed: int) -> GivenBatches:
    return GivenBatches([([7, i, 8], b"\0\1\0") for i in range(count)], size, seed)


@given(count=st.integers(1, 40), size=st.integers(1, 50), seed=st.integers(0, 3), shuffle=st.randoms())
def test_an_epoch_has_each_sample_once_in_whatever_order_its_steps_are_asked_for(
    count: int, size: int, seed: int, shuffle: random.Random
) -> None:
    steps = -(-count // size)
    order = list(range(3 * steps))
    shuffle.shuffle(order)
    asked = batches(count, size, seed)
    found = {step: asked((), step) for step in order}
    for epoch in range(3):
        of_epoch = [s for step in range(epoch * steps, (epoch + 1) * steps) for s in found[step]]
        assert sorted(s.token_ids[1] for s in of_epoch) == list(range(count))
    assert all(len(found[step]) == min(size, count - step % steps * size) for step in order)
    assert batches(count, size, seed)((), order[-1]) == found[order[-1]]


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    one, other = batches(30, 30, 0), batches(30, 30, 1)
    assert len({tuple(of.indices(step)) for of in (one, other) for step in range(3)}) == 6
    (sample, *_) = one((), 0)
    assert sample.loss_mask == (False, True, False)
    assert sample.id == f"data-{sample.token_ids[1] + 1}"
