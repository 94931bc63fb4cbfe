"""What the benchmarks of Ray count: copies of the weights, and how sure a median is."""

from __future__ import annotations

import asyncio
import math
import random
from statistics import median

import pytest

from benchmarks import ray_overhead, ray_weights


def test_the_interval_holds_the_median_as_often_as_it_says() -> None:
    """Of a distribution with a tail as long as a busy machine's."""
    rng, true, held = random.Random(0), math.exp(0.0), 0
    for _ in range(400):
        values = [rng.lognormvariate(0.0, 2.0) for _ in range(24)]
        low, high = ray_overhead.interval(values)
        assert low <= median(values) <= high
        held += low <= true <= high
    assert held / 400 >= 0.93
    assert ray_overhead.interval([1.0, 2.0, 3.0]) == (-math.inf, math.inf), "three say nothing for certain"
    assert ray_overhead.interval([float(n) for n in range(6)]) == (0.0, 5.0)


@pytest.mark.slow  # a Ray cluster of two nodes and four engines, each a process: about half a minute
@pytest.mark.timeout(400)
def test_one_copy_of_the_weights_goes_to_each_node() -> None:
    pytest.importorskip("ray")
    (row,) = asyncio.run(ray_weights.measure(20.0, 1))
    assert ray_weights.one_copy_each(row), row
    assert row["bytes"] == pytest.approx(20e6, rel=0.05)
    doubled = {**row, "bytes_to_nodes": {node: 2 * count for node, count in row["bytes_to_nodes"].items()}}
    assert not ray_weights.one_copy_each(doubled)
