"""Which group to start next, and whether one may start (invariant I4).

Each domain has a window of (alpha + 1) x quota slots, where quota is the domain's samples per training step. A slot is
held from admission until the publish that follows the sample's training, or until the sample is dropped. The samples of
a domain that wait or run therefore never exceed (alpha + 1) x quota, and over all domains (alpha + 1) x batch.

Why not less: the batch in training holds quota slots, so alpha x quota remain for rollout; at alpha = 0 none remain,
which is the synchronous schedule. Why not more: see docs/concurrency.md.

Redundancy. Extra groups widen a domain's window by their own samples, once: (alpha + 1) x quota + extra. Extra members
hold no slot: a group contributes at most `group_size` samples, however many members run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DomainQuota:
    """`quota` samples of the domain go into every batch, in groups of `group_size` (which divides it)."""

    domain: str
    quota: int
    group_size: int

    def __post_init__(self) -> None:
        if self.quota <= 0 or self.group_size <= 0 or self.quota % self.group_size:
            raise ValueError(
                f"domain {self.domain}: quota {self.quota} must be a positive multiple of group size {self.group_size}"
            )


@dataclass(frozen=True, slots=True)
class AdmissionWindow:
    """A stateless decision: all of its inputs are arguments of `next_domain`."""

    quotas: tuple[DomainQuota, ...]
    alpha: int

    def next_domain(
        self,
        outstanding: Mapping[str, int],
        remaining: Mapping[str, int] | None = None,
        extra: Mapping[str, int] | None = None,
    ) -> str | None:
        """The domain that should start a group now, or None.

        `outstanding` counts the samples that hold a slot, per domain; `remaining` counts the samples that may still be
        started; `extra` counts the slots of redundant groups, by which a domain's window is wider for now. The domain
        with the lowest share of its window in use is picked; ties go to the earlier domain of the spec.
        """
        best: tuple[float, int, str] | None = None
        for order, quota in enumerate(self.quotas):
            used = outstanding.get(quota.domain, 0)
            capacity = (self.alpha + 1) * quota.quota + (extra.get(quota.domain, 0) if extra else 0)
            left = quota.group_size if remaining is None else remaining.get(quota.domain, 0)
            if used + quota.group_size > capacity or left < quota.group_size:
                continue
            candidate = (used / capacity, order, quota.domain)
            best = candidate if best is None or candidate < best else best
        return best[2] if best else None
