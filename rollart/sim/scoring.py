"""The reward of a simulated trajectory: what it scores is of no matter, what it takes is the profile's."""

from __future__ import annotations

from typing import Any

__all__ = ["score"]


def score(sample: Any) -> float:
    return 1.0
