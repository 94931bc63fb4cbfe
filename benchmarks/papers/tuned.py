"""Every constant that was chosen so that a published figure comes out: once, for all rows, with the reason.

Tuned besides, where they are used: the bandwidths of `rollart.sim.links` (to RA-7) and `workloads` (to RA-16),
FrozenLake's tokens and the seconds of resets in `rollart.sim.workload` (to RA-3 and RA-5). Everything else is a
datasheet's or a paper's.
"""

from __future__ import annotations

from dataclasses import replace

from rollart.sim.workload import PRESETS, AnswerLengths, LogNormal, ParetoTailed

__all__ = ["SWE", "SWE_BODY", "TRAIN_FIXED_S", "TRAIN_MFU"]

TRAIN_MFU, TRAIN_FIXED_S = 0.20, 40.0
"""A training step takes FLOPs of one forward and backward pass at this share of the dense bf16 peak, plus seconds that
do not depend on the tokens. The share covers the other passes (behaviour and reference log-probabilities, 5/3;
recomputed activations, 4/3): 0.44 in the hardware's own count. The seconds are loading, offloading, optimizer and data.
Tuned together, to RA-1's 84 s (8B, 3.9M tokens, 32 H800) and to RP-2's 23 % (14B, 1.2M tokens, 32 H800)."""

SWE = replace(
    PRESETS["swe"],
    observation=LogNormal(300, 0.7, high=8_000),
    answers=AnswerLengths(290, 0.8, cap=4_096, prompt_share=0.3),
    step_s=LogNormal(0.4, 1.0, high=60.0),
)
"""SWE with tokens of answers such that generation is 53.8 % of RA-1's step, and seconds of 40 environment steps such
that they are the 8.5 % that are neither generation nor training nor resets. Neither was published."""

assert isinstance(SWE.reset_s, ParetoTailed)
SWE_BODY = SWE.reset_s.body
"""Seconds of SWE's resets without their tail, as in an iteration without failures."""
