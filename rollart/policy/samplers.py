"""Samplers: which of the ready rows a consumer of the sample table takes next. A sampler is a callable value.

By default samplers keep the table's order of readiness. They return None until they can form a whole batch: waiting is
the caller's task. Random choices are hashes of the row's id, so a resumed run makes the same choices.
"""

from __future__ import annotations

import enum
import hashlib
import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from rollart.policy.table import PickedRow, ReadyRows, Sampler, SampleRow, Selection

__all__ = ["Balanced", "Balancing", "Deadline", "Fifo", "TokenBudget", "WholeGroups", "age_weights", "partition"]


class Balancing(enum.StrEnum):
    """How rows are spread over consumers."""

    LPT = "lpt"
    """Longest first to the least loaded: at most 4/3 - 1/(3n) times the best largest load (Graham 1969)."""
    KK = "kk"
    """Largest differencing (Karmarkar and Karp 1982): usually better, slower, no better bound."""


@dataclass(frozen=True, slots=True)
class Fifo:
    """The `count` rows that became ready first; with `at_least`, that many suffice."""

    count: int
    at_least: int | None = None

    def __call__(self, ready: ReadyRows) -> Selection | None:
        enough = self.count if self.at_least is None else self.at_least
        if len(ready.rows) < max(enough, 1):
            return None
        return Selection.of(islice(ready.rows.values(), self.count))


@dataclass(frozen=True, slots=True)
class WholeGroups:
    """The first `groups` groups whose rows are all ready, all or nothing: GRPO's advantage needs whole groups."""

    groups: int

    def __call__(self, ready: ReadyRows) -> Selection | None:
        whole = _whole(ready)
        if len(whole) < self.groups:
            return None
        return Selection.of(row for rows in whole[: self.groups] for row in rows)


@dataclass(frozen=True, slots=True)
class Balanced:
    """The selection of another sampler, spread over `consumers` so that their tokens are about equal.

    A row goes to one consumer whole; the members of a group need not stay together (advantages are known by then).
    """

    inner: Sampler
    consumers: int
    how: Balancing = Balancing.LPT

    def __call__(self, ready: ReadyRows) -> Selection | None:
        chosen = self.inner(ready)
        if chosen is None:
            return None
        picks = [p for batch in chosen.batches for p in batch]
        parts = partition([p.tokens for p in picks], self.consumers, self.how)
        return Selection(tuple(tuple(picks[i] for i in part) for part in parts), chosen.consumed)


@dataclass(frozen=True, slots=True)
class TokenBudget:
    """Batches of exactly `tokens` tokens, so that every training step takes the same time (Ring-lite's C3PO).

    Whole groups are taken in order until their tokens reach the budget. Their rows are then visited in an order drawn
    from `salt` and row id, and all tokens are kept until the budget is full; the row at the edge is cut, and the
    remaining rows are consumed without being trained. Less than one group is lost. Every row is equally likely to be
    lost: the cut does not favour short rows. The salt changes with each step.
    """

    tokens: int
    salt: str

    def __call__(self, ready: ReadyRows) -> Selection | None:
        taken: list[SampleRow] = []
        total = 0
        for rows in _whole(ready):
            if total >= self.tokens:
                break
            taken += rows
            total += sum(r.tokens for r in rows)
        if total < self.tokens:
            return None
        picks, left = [], self.tokens
        for row in sorted(taken, key=lambda r: (_draw(self.salt, r.id), r.id)):
            kept = min(row.tokens, left)
            left -= kept
            if kept:
                picks.append(PickedRow(row, kept))
        return Selection((tuple(picks),), tuple(r.id for r in taken))


@dataclass(frozen=True, slots=True)
class Deadline:
    """`target` rows, or at the deadline (`due`) the available rows, if there are at least `least` (asynchronous
    federated learning aggregates on a clock).

    Order: oldest version first, then the group closest to completion, then readiness (Pangu's priority queues): rows
    close to their staleness bound are trained before they expire, and nearly complete groups are completed. With
    `whole_groups`, only complete groups are taken, and only if they fit into `target`. Each row has weight gamma **
    age.
    """

    target: int
    least: int
    version: int
    due: bool = False
    gamma: float = 1.0
    whole_groups: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.target:
            raise ValueError(f"1 <= least {self.least} <= target {self.target} does not hold")

    def __call__(self, ready: ReadyRows) -> Selection | None:
        units = _whole(ready) if self.whole_groups else [[row] for row in ready.rows.values()]
        units.sort(key=lambda rows: (min(r.version for r in rows), ready.missing(rows[0].group)))
        if units and len(units[0]) > self.target:
            raise ValueError(f"group {units[0][0].group} of {len(units[0])} rows fits into no batch of {self.target}")
        rows: list[SampleRow] = []
        for unit in units:
            if len(rows) + len(unit) <= self.target:
                rows += unit
            elif self.whole_groups:
                # A younger, smaller group must not overtake a group that does not fit: it waits for the next batch.
                break
        full = len(rows) == self.target or len(rows) < sum(map(len, units))
        if not (full or self.due) or len(rows) < self.least:
            return None
        weights = age_weights([r.version for r in rows], self.version, self.gamma)
        picks = tuple(PickedRow(r, r.tokens, w) for r, w in zip(rows, weights, strict=True))
        return Selection((picks,), tuple(r.id for r in rows))


def age_weights(versions: Sequence[int], version: int, gamma: float) -> tuple[float, ...]:
    """gamma ** age, with age in publishes since v0, scaled to a mean of 1 so that the step size is unchanged. gamma 1
    is no weighting."""
    if not 0 < gamma <= 1:
        raise ValueError(f"gamma {gamma} must lie within (0, 1]")
    ages = [version - v for v in versions]
    # Relative to the youngest: only ratios matter, and gamma ** 1000 would be 0.
    raw = [gamma ** (age - min(ages)) for age in ages]
    return tuple(w * len(raw) / sum(raw) for w in raw)


def partition(sizes: Sequence[int], parts: int, how: Balancing = Balancing.LPT) -> tuple[tuple[int, ...], ...]:
    """Indices of `sizes` in `parts` lists of about equal sums; some are empty where there are fewer sizes than parts.

    The largest sum is at most the mean plus the largest size. Ties go to the earlier index and the earlier part.
    """
    if parts < 1:
        raise ValueError(f"{parts} consumers: at least 1 is needed")
    order = sorted(range(len(sizes)), key=lambda i: (-sizes[i], i))
    found = _lpt(sizes, order, parts) if how is Balancing.LPT else _differencing(sizes, order, parts)
    return tuple(tuple(sorted(part)) for part in found)


def _lpt(sizes: Sequence[int], order: Sequence[int], parts: int) -> list[list[int]]:
    loads = [(0, part) for part in range(parts)]
    found: list[list[int]] = [[] for _ in range(parts)]
    for i in order:
        load, part = heapq.heappop(loads)
        found[part].append(i)
        heapq.heappush(loads, (load + sizes[i], part))
    return found


def _differencing(sizes: Sequence[int], order: Sequence[int], parts: int) -> list[list[int]]:
    """Repeatedly join the two partial solutions whose sums differ most, heaviest part to lightest."""
    heap: list[tuple[int, int, list[tuple[int, list[int]]]]] = []
    for number, i in enumerate(order):
        empty: list[tuple[int, list[int]]] = [(0, []) for _ in range(parts - 1)]
        heap.append((-sizes[i] if parts > 1 else 0, number, [*empty, (sizes[i], [i])]))
    heapq.heapify(heap)
    number = len(heap)
    while len(heap) > 1:
        (_, _, a), (_, _, b) = heapq.heappop(heap), heapq.heappop(heap)
        pairs = zip(a, reversed(b), strict=True)
        joined = sorted(((x + y, [*xs, *ys]) for (x, xs), (y, ys) in pairs), key=lambda part: part[0])
        heapq.heappush(heap, (joined[0][0] - joined[-1][0], number, joined))
        number += 1
    return [part for _, part in heap[0][2]] if heap else [[] for _ in range(parts)]


def _whole(ready: ReadyRows) -> list[list[SampleRow]]:
    """Groups whose rows are all ready, in the order in which they became ready."""
    groups: dict[str, list[SampleRow]] = {}
    whole: list[list[SampleRow]] = []
    for row in ready.rows.values():
        rows = groups.setdefault(row.group, [])
        rows.append(row)
        if len(rows) == row.group_size:
            whole.append(rows)
    return whole


def _draw(salt: str, row: str) -> bytes:
    return hashlib.blake2b(f"{salt}\0{row}".encode(), digest_size=8).digest()
