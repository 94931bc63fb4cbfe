"""The reward of simulated trajectories: the sum of their environment rewards. The cost of scoring comes from the
profile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def score(samples: Sequence[Any]) -> list[float]:
    return [float(sum(sample.metadata["env_rewards"])) for sample in samples]
