"""Which group to start next, and whether (invariant I4).

Each domain has a window of (alpha + 1) x quota slots, quota being its samples per training step. A slot is held from
admission until the publish that follows the sample's training, or until the sample is dropped. So the samples
of a domain that wait or run never exceed (alpha + 1) x quota, and over all domains (alpha + 1) x batch.

Why not less: with quota slots held by the batch in training, alpha x quota remain for rollout; at alpha = 0 that is
none, which is the synchronous schedule. Why not more: see docs/concurrency.md.

Redundancy. Extra groups widen a domain's window by their own samples, once: (alpha + 1) x quota + extra. Extra members
hold no slot: whatever runs, a group brings at most `group_size` samples.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["AdmissionWindow", "DomainQuota"]


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
    """Decides from counts alone: `next_domain` has all that it looks at as arguments."""

    quotas: tuple[DomainQuota, ...]
    alpha: int

    def capacity(self, domain: str) -> int:
        """Slots of the domain, in samples."""
        return self._capacity(next(q for q in self.quotas if q.domain == domain))

    def next_domain(
        self,
        outstanding: Mapping[str, int],
        remaining: Mapping[str, int] | None = None,
        extra: Mapping[str, int] | None = None,
    ) -> str | None:
        """The domain that should start a group now, or None.

        `outstanding` = samples holding a slot per domain; `remaining` = samples that may still be started at all;
        `extra` = slots of redundant groups, by which a domain's window is wider for now.
        Picks the domain with the lowest share of its window in use; ties go to the earlier domain of the spec.
        """
        best: tuple[float, int, str] | None = None
        for order, quota in enumerate(self.quotas):
            used = outstanding.get(quota.domain, 0)
            capacity = self._capacity(quota) + (extra.get(quota.domain, 0) if extra else 0)
            left = quota.group_size if remaining is None else remaining.get(quota.domain, 0)
            if used + quota.group_size > capacity or left < quota.group_size:
                continue
            candidate = (used / capacity, order, quota.domain)
            best = candidate if best is None or candidate < best else best
        return best[2] if best else None

    def _capacity(self, quota: DomainQuota) -> int:
        return (self.alpha + 1) * quota.quota
