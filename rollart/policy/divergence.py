"""How far a policy has moved from earlier versions: mean KL, by what was sampled under them."""

from __future__ import annotations

import math
from collections.abc import Iterable

__all__ = ["mean_kl"]

LARGEST = 20.0
"""Log-ratios beyond it, in nats, count as it: one token that the new policy all but forbids is far enough."""


def mean_kl(tokens: Iterable[tuple[int, float, float]]) -> dict[int, float]:
    """KL(version ‖ now) in nats per token, by the version that sampled it, from (version, log-probability then,
    log-probability now). The estimator e^r − 1 − r, r = now − then, of tokens drawn then: unbiased and never negative
    (Schulman 2020, "Approximating KL divergence")."""
    total: dict[int, float] = {}
    count: dict[int, int] = {}
    for version, then, now in tokens:
        r = min(max(now - then, -LARGEST), LARGEST)
        total[version] = total.get(version, 0.0) + math.expm1(r) - r
        count[version] = count.get(version, 0) + 1
    return {version: total[version] / count[version] for version in total}
