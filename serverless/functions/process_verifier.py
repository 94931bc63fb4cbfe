"""A process verifier: pays each turn for progress, seen as a state that the trajectory had not been in before."""

from __future__ import annotations

from serverless.declare import reward
from serverless.types import Item, Scored


@reward(memory_mb=128, timeout_s=5)
def process_verifier(sample: Item) -> Scored:
    """One step reward per turn: 1/turns if it led to a new observation, 0 if it repeated one. Their sum is the score.

    Agents loop and bump into walls; the outcome reward cannot say where. Reads `metadata["observations"]`: what was
    shown before each turn, and after the last.
    """
    observations = sample.metadata.get("observations")
    if not isinstance(observations, list) or len(observations) < 2:
        raise ValueError(f"item {sample.id}: metadata['observations'] needs one observation per turn and the final one")
    seen = {observations[0]}
    turns = len(observations) - 1
    steps = []
    for observation in observations[1:]:
        steps.append(0.0 if observation in seen else 1.0 / turns)
        seen.add(observation)
    repeats = sum(step == 0.0 for step in steps)
    return Scored(sum(steps), {"repeats": float(repeats)}, tuple(steps))
