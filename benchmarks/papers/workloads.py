"""Variants of the published workloads."""

from __future__ import annotations

from dataclasses import replace

from rollart.sim.workload import WorkloadShape

__all__ = ["cap_answers"]


def cap_answers(shape: WorkloadShape, cap: int) -> WorkloadShape:
    """The shape with answers of at most `cap` tokens: RollPacker's 8k, 16k and 32k. Run-away answers reach about the
    cap in each case: the published 25 to 32 medians are 16k, and the gain of tail batching grows up to 32k."""
    a = shape.answers
    near, far = (x * cap / a.cap for x in a.farthest)
    return replace(shape, answers=replace(a, cap=cap, farthest=(near, far)), context=max(shape.context, 2 * cap))
