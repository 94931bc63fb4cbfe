"""Which groups a batch must wait for so that none expires because of its length (schedule `paced`).

A group begun under v0 can be trained from version v0 + alpha at the latest: that version is its deadline. Batches are
consumed one per version, `quota` samples of a domain each, so deadlines are kept exactly if every batch holds enough of
the groups with early deadlines (earliest deadline first). With count(k) = samples of the domain, complete or not, whose
deadline is at most k versions away, the batch for the current version needs

    need(0) = count(0)                             all groups for which it is the last batch, and
    need(k) = min(quota, count(k) - k * quota)     of those with k = 1 .. alpha versions left.

The admission window keeps count(k) <= (k + 1) * quota, by induction over batches: at admission k = alpha, and a batch
that holds need(k + 1) leaves at most (k + 1) * quota of them. So need(k) never exceeds the quota, and a batch of
`quota` samples can always meet it. Where more slots than the window's exist (redundant groups), or batches are smaller
than their quota (token budgets, deadlines), need(0) may exceed the quota: then the batch is larger.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = ["PacedGroup", "groups_to_wait_for", "last_chance", "may_join"]


@dataclass(frozen=True, slots=True)
class PacedGroup:
    """A group of one domain that holds slots, complete or not. `v0` is that of its oldest sample."""

    id: str
    v0: int
    samples: int


def last_chance(v0: int, version: int, alpha: int) -> bool:
    """True if no batch after the one for `version` may hold a group begun under `v0`."""
    return v0 <= version - alpha


def groups_to_wait_for(
    ready: Iterable[PacedGroup], unfinished: Sequence[PacedGroup], *, quota: int, version: int, alpha: int
) -> tuple[PacedGroup, ...]:
    """The unfinished groups that the batch for `version` waits for, if it takes the oldest of `ready` first.

    Empty: the batch need not wait. Otherwise the groups of the earliest deadline that would be missed.
    """
    complete = list(ready)
    for k, need in enumerate(_needs([*complete, *unfinished], quota=quota, version=version, alpha=alpha)):
        held = _count(complete, version - alpha + k)
        if (held if k == 0 else min(held, quota)) < need:
            return tuple(m for m in unfinished if m.v0 <= version - alpha + k)
    return ()


def may_join(
    candidate: PacedGroup,
    taken: Sequence[PacedGroup],
    others: Iterable[PacedGroup],
    *,
    quota: int,
    version: int,
    alpha: int,
) -> bool:
    """True if a growing batch can take `candidate` beside `taken` and keep room for every group that needs it.
    `others`: the rest of the domain's groups, complete or not."""
    if last_chance(candidate.v0, version, alpha):
        return True
    batch = [*taken, candidate]
    room = quota - sum(m.samples for m in batch)
    needs = _needs([*batch, *others], quota=quota, version=version, alpha=alpha)
    return room >= 0 and all(need - _count(batch, version - alpha + k) <= room for k, need in enumerate(needs) if need)


def _needs(members: Sequence[PacedGroup], *, quota: int, version: int, alpha: int) -> list[int]:
    counts = [_count(members, version - alpha + k) for k in range(alpha + 1)]
    return [counts[0], *(max(min(quota, counts[k] - k * quota), 0) for k in range(1, alpha + 1))]


def _count(members: Iterable[PacedGroup], v0: int) -> int:
    return sum(m.samples for m in members if m.v0 <= v0)
