"""The estimate of how far a policy has moved."""

from __future__ import annotations

import math
import random

import pytest

from rollart.control.publish import mean_kl


def test_it_is_the_kl_of_two_distributions() -> None:
    old, new = (0.7, 0.2, 0.1), (0.5, 0.3, 0.2)
    exact = sum(p * math.log(p / q) for p, q in zip(old, new, strict=True))
    rng = random.Random(1)
    drawn = rng.choices(range(3), old, k=40_000)
    found = mean_kl((4, math.log(old[i]), math.log(new[i])) for i in drawn)
    assert found == {4: pytest.approx(exact, rel=0.03)}


def test_versions_apart_and_nothing_for_what_was_not_sampled() -> None:
    found = mean_kl([(1, -1.0, -1.0), (2, -1.0, -1.1), (2, -1.0, -0.9)])
    assert found[1] == 0.0
    assert 0 < found[2] < 0.01
    assert mean_kl([]) == {}
    assert math.isfinite(mean_kl([(0, -1.0, -1e9), (0, -1e9, -1.0)])[0])
