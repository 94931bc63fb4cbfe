"""Which finished groups make the next batch (invariants I3 and I6).

Groups are taken oldest version first, then in order of completion: a sample closest to its staleness bound is trained
before it expires. With the admission window of `policy.admission`, a finished group of a running pipeline is never
overtaken by a younger group of its domain.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rollart.policy.staleness import StalenessBound


@dataclass(frozen=True, slots=True)
class ReadyGroup:
    """A complete group as batching sees it. `order` is its position in completion order."""

    id: str
    domain: str
    v0: int
    samples: int
    tokens: int
    order: int


def select_batch(
    ready: Sequence[ReadyGroup],
    quotas: Mapping[str, int],
    *,
    version: int,
    bound: StalenessBound,
    token_budget: int | None = None,
) -> tuple[ReadyGroup, ...] | None:
    """The groups of the next batch, or None while some domain has fewer than its quota.

    With a `token_budget`, a domain's groups are taken while the batch's tokens stay within the domain's share of the
    budget, and at least one group per domain is taken: a batch of long trajectories is smaller, never starved. No group
    with `version - v0 > alpha` is ever taken.
    """
    chosen: list[ReadyGroup] = []
    total = sum(quotas.values())
    for domain, quota in quotas.items():
        fresh = [g for g in ready if g.domain == domain and not bound.stale(g.v0, version)]
        fresh.sort(key=lambda g: (g.v0, g.order))
        share = None if token_budget is None else token_budget * quota / total
        taken: list[ReadyGroup] = []
        samples = tokens = 0
        for group in fresh:
            full = samples + group.samples > quota
            heavy = share is not None and taken and tokens + group.tokens > share
            if full or heavy:
                break
            taken.append(group)
            samples += group.samples
            tokens += group.tokens
        enough = samples == quota or (share is not None and bool(taken) and len(taken) < len(fresh))
        if not enough:
            return None
        chosen.extend(taken)
    return tuple(chosen)
