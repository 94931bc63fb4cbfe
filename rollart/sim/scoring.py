"""The reward of simulated trajectories: what their environments said of them; what scoring takes is the profile's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["score"]


def score(samples: Sequence[Any]) -> list[float]:
    return [float(sum(sample.metadata["env_rewards"])) for sample in samples]
