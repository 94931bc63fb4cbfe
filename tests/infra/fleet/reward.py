"""A reward that the fleet's functions score with."""

from __future__ import annotations

import rollart


@rollart.reward(memory_mb=256, timeout_s=5, deterministic=True)
def exact(sample: rollart.Sample) -> float:
    return float(sample.completion.strip() == sample.reference_answer)
