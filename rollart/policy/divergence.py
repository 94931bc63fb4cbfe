"""Distance of the policy from its earlier versions: mean KL, grouped by the version that sampled the tokens."""

from __future__ import annotations

import math
from collections.abc import Iterable

__all__ = ["mean_kl"]

LARGEST = 20.0
"""Log-ratios are clipped to this magnitude, in nats: one token that the new policy all but forbids is far enough."""


def mean_kl(tokens: Iterable[tuple[int, float, float]]) -> dict[int, float]:
    """KL(version ‖ now) in nats per token, by sampling version, from (version, log-probability then, log-probability
    now). The estimator is e^r − 1 − r with r = now − then, over tokens drawn then: unbiased and never negative
    (Schulman 2020, "Approximating KL divergence")."""
    total: dict[int, float] = {}
    count: dict[int, int] = {}
    for version, then, now in tokens:
        r = min(max(now - then, -LARGEST), LARGEST)
        total[version] = total.get(version, 0.0) + math.expm1(r) - r
        count[version] = count.get(version, 0) + 1
    return {version: total[version] / count[version] for version in total}
