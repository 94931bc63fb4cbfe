"""Rewards for rendered infrastructure."""

from __future__ import annotations

import rollart


@rollart.reward(memory_mb=256, timeout_s=5, concurrency=3, warm=1, deterministic=True)
def exact(sample: rollart.Sample) -> float:
    return float(sample.completion.strip() == sample.reference_answer)


@rollart.reward(deterministic=True)
def length(sample: rollart.Sample) -> float:
    return 1.0 / (1 + len(sample.completion))
