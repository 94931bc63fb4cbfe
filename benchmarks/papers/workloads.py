"""Variants of the published workloads, and the link into the store of weights."""

from __future__ import annotations

import math
from dataclasses import replace

from placement.publish import PRESETS
from rollart.sim.links import LinkProfile
from rollart.sim.workload import WorkloadShape

__all__ = ["PUSH", "alone_s", "cap_answers"]

PUSH = LinkProfile(PRESETS["rollart"].push_gb_per_s or math.inf)
"""Weights from a trainer into the store: 0.41 to 0.48 GB/s were measured on the 200 Gb/s link (RA-16); tuned once."""


def alone_s(link: LinkProfile, gb: float, streams: int) -> float:
    """Seconds of a transfer that is alone on the link."""
    return link.latency_s + gb / min(link.gb_per_s, streams * link.stream_gb_per_s)


def cap_answers(shape: WorkloadShape, cap: int) -> WorkloadShape:
    """The shape with answers of at most `cap` tokens: RollPacker's 8k, 16k and 32k. Run-away answers reach about the
    cap in each case: the published 25 to 32 medians are 16k, and the gain of tail batching grows up to 32k."""
    a = shape.answers
    near, far = (x * cap / a.cap for x in a.farthest)
    return replace(shape, answers=replace(a, cap=cap, farthest=(near, far)), context=max(shape.context, 2 * cap))
