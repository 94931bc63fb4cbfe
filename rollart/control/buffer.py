"""The sample buffer: complete groups in any order in, whole batches out, each group exactly once (I3, I6).

It keeps a table of samples (`policy.sample_table`). Training is one of the tasks that consume its rows, and takes whole
groups; other tasks may be declared, and read the same rows at their own speed. A sampler chooses the rows for training.
"""

from __future__ import annotations

import asyncio
import dataclasses
import enum
import math
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from rollart.control.groups import PacedGroup
from rollart.control.pacing import BatchPace, groups_to_wait_for, last_chance, may_join
from rollart.errors import RunFailed
from rollart.model import Group, GroupId, TrainSample
from rollart.policy.batching import ReadyGroup, select_batch
from rollart.policy.sample_table import Deadline, Fifo, PickedRow, ReadyRows, Sampler, SampleRow, SampleTable, Selection
from rollart.policy.staleness import StalenessBound

COLUMNS = ("trajectory", "reward")
"""Columns that are written before a sample enters the buffer; training reads both."""


class SampleColumn(enum.StrEnum):
    """Columns of a sample that are written by separate tasks, each named after its column."""

    REFERENCE = "ref_logprobs"
    """From the trajectory, sample by sample."""
    ADVANTAGE = "advantage"
    """From the rewards of a whole group."""


COLUMN_INPUTS = {SampleColumn.REFERENCE: ("trajectory",), SampleColumn.ADVANTAGE: ("trajectory", "reward")}

MAX_ROWS_PER_CALL = 16
"""Maximum rows per call: few enough that newly arrived rows do not wait long."""

TRAINING = "training"
UNBOUNDED_CAPACITY = 2**62
"""Capacity of the table in rows: admission bounds the rows, through waiting, running and training samples."""


@dataclass(frozen=True, slots=True)
class BatchDeadline:
    """Deadline of a batch: after `seconds` of waiting a partial batch is taken, if it has at least the share `least` of
    each domain's quota."""

    seconds: float
    least: float = 0.5
    decay: float = 1.0
    """Factor on a sample's weight in the loss for every version that it lags."""


class BatchShares(Protocol):
    """Shares of the domains in a batch, in place of quotas. Counts are in samples per domain; synchronous."""

    ready: Mapping[str, int]
    """The complete samples, a mapping that the buffer updates."""
    growing: Counter[str]
    """Groups per domain of the growing batch."""

    def quotas(self, ready: Mapping[str, int]) -> dict[str, int] | None:
        """The domains' parts of a batch drawn from `ready`; None while the batch waits."""
        ...

    def room(self, ready: Mapping[str, int], taken: Sequence[Group]) -> dict[str, int] | None:
        """Samples that the growing batch `taken` may add now; None once it is whole."""
        ...

    def take(self, groups: Sequence[Group]) -> None:
        """The groups are a batch."""
        ...


UNBOUNDED_STALENESS = 2**31
"""A bound that no group exceeds."""


class SampleBuffer:
    """Owns the complete groups that no batch has taken. Admission bounds it: it holds at most (alpha + 1) batches.

    `add` is called by the scheduler and never waits. `take` and `grow` are called by training alone; `take` waits for a
    whole batch, `grow` for any group of it, both unblocked by `add` or `published`. Invariants: a group enters once and
    leaves once, by `take`, `grow` or `discard`; with `enforced`, none leaves for training past its bound (I3). `_take`
    is the only place where groups leave for training, and checks the bound for every selection.
    """

    def __init__(
        self,
        quotas: Mapping[str, int],
        *,
        bound: StalenessBound,
        enforced: bool = True,
        on_excess: Callable[[int, Sequence[Group]], None] = lambda *_: None,
        pace: BatchPace | None = None,
        token_budget: int | None = None,
        due: BatchDeadline | None = None,
        measure: Callable[[Sequence[int]], int] = len,
        shares: BatchShares | None = None,
        columns: Sequence[SampleColumn] = (),
    ) -> None:
        """`enforced`: groups past `bound` are never trained; otherwise they are, and `on_excess` gets the version and
        the groups of each such batch. `pace`: batches wait for groups at their bound. `measure`: the number of tokens
        that ids stand for, the unit of the budget. `shares` replace the quotas of a batch. `columns` are filled by
        separate tasks; training reads them all."""
        self._measure = measure
        self._due = due
        every = (*COLUMNS, *columns)
        self.table = SampleTable(every, capacity=UNBOUNDED_CAPACITY)
        self.table.declare(TRAINING, every, whole_groups=True)
        self._columns = {column: asyncio.Event() for column in columns}
        for column in columns:
            self.table.declare(column, COLUMN_INPUTS[column], whole_groups=column is SampleColumn.ADVANTAGE)
        self.filled: dict[str, TrainSample] = {}
        """Samples in the table with their columns so far, if there are columns to fill."""
        self._quotas = dict(quotas)
        self._limit = bound
        self._bound = bound if enforced else StalenessBound(UNBOUNDED_STALENESS)
        """The staleness bound of every selection."""
        self._on_excess = on_excess
        self.pace = pace
        self._token_budget = token_budget
        self.groups: dict[str, Group] = {}
        self._ready: dict[str, ReadyGroup] = {}
        self.held = dict.fromkeys(self._quotas, 0)
        self._shares = shares
        if shares is not None:
            shares.ready = self.held
        self.short = dict.fromkeys(self._quotas, 0)
        """Samples by domain missing from batches so far: the shortfall against the quota after `take`."""
        self._last: tuple[Group, ...] = ()
        self._counted = -1
        """The version of the last batch that `short` counts."""
        self._seen = 0
        self._changed = asyncio.Event()

    def add(self, group: Group) -> None:
        if group.id in self.groups:
            raise ValueError(f"group {group.id} is in the buffer already")
        self._seen += 1
        self.held[group.domain] += len(group.samples)
        size, tokens = len(group.samples), 0
        for sample in group.samples:
            length = self._measure(sample.token_ids)
            tokens += length
            if not self._columns:
                self.table.add(SampleRow(sample.id, group.id, size, length, sample.v0), *COLUMNS)
            elif sample.id not in self.filled:
                self.offer(sample, size)
        self.groups[group.id] = group
        self._ready[group.id] = ReadyGroup(group.id, group.domain, group.v0, size, tokens, self._seen)
        self._changed.set()

    def offer(self, sample: TrainSample, group_size: int) -> None:
        """A sample of a group that may not be complete yet: tasks may fill its columns from now on."""
        if not self._columns:
            return
        row = SampleRow(sample.id, sample.group, group_size, self._measure(sample.token_ids), sample.v0)
        self.filled[sample.id] = sample
        self.table.add(row, *COLUMNS)
        for changed in self._columns.values():
            changed.set()

    def withdraw(self, group_id: GroupId) -> None:
        """A group was given up, complete or not: its columns are no longer filled, and no batch waits for it."""
        self._changed.set()
        for row in self.table.drop(group_id) if self._columns else ():
            self.filled.pop(row, None)

    async def lacking(self, column: SampleColumn) -> list[TrainSample]:
        """The next samples whose column the caller must fill: at least one, each sample once, for `ADVANTAGE` in whole
        groups. Unblocked by `offer`."""
        most = sys.maxsize if column is SampleColumn.ADVANTAGE else MAX_ROWS_PER_CALL
        sampler = Fifo(most, at_least=1)
        while (taken := self.table.take(column, sampler)) is None:
            self._columns[column].clear()
            await self._columns[column].wait()
        return [self.filled[row] for row in taken.consumed]

    def fill(self, column: SampleColumn, row: str, values: tuple[float, ...]) -> None:
        """Write a column of one sample, which may be gone by now. Empty values: training computes them."""
        if not self.table.put(row, column):
            return
        name = "reference" if column is SampleColumn.REFERENCE else "advantage"
        self.filled[row] = dataclasses.replace(self.filled[row], **{name: values})  # type: ignore[arg-type]
        self._changed.set()

    def discard(self, group_id: GroupId) -> bool:
        """Remove a dropped group. True if the buffer held it."""
        if group_id not in self._ready:
            return False
        self.table.drop(group_id)
        self._forget(group_id)
        return True

    def stale(self, version: int) -> list[Group]:
        """Groups that are too stale for any batch."""
        return [self.groups[r.id] for r in self._ready.values() if self._bound.stale(r.v0, version)]

    def changed(self) -> None:
        """The version advanced, or an attempt of a group started over: the available batch may have changed."""
        self._changed.set()

    async def take(self, version: int) -> tuple[Group, ...]:
        """The next batch for training from `version`; of no groups, at once, in a run without quotas."""
        if not self._quotas:
            return ()
        due = None if self._due is None else asyncio.get_running_loop().time() + self._due.seconds
        late = False
        while True:
            held_back: list[PacedGroup] = []
            if self._due is not None:
                by_deadline: Sampler = lambda ready, late=late: self._by_deadline(ready, version, late)  # type: ignore[misc]  # noqa: E731
                chosen = self._take(version, self._paced(version, by_deadline, held_back))
            elif self._may_suffice():
                chosen = self._take(version, self._paced(version, self._of(self._select(version)), held_back))
            else:
                chosen = ()
            if chosen:
                self._taken(chosen)
                self._counted = version
                return chosen
            self._changed.clear()
            if held_back:
                await self._hold(version, lambda: not self._lacking(version))
                continue
            try:
                async with asyncio.timeout_at(None if late else due):
                    await self._changed.wait()
            except TimeoutError:
                late = True

    @property
    def in_one_piece(self) -> bool:
        """True if `grow` gives a batch whole, or not at all."""
        paced_shares = self.pace is not None and self._shares is not None
        return self._token_budget is not None or self._due is not None or paced_shares

    async def grow(self, version: int, taken: Sequence[Group]) -> tuple[Group, ...]:
        """Groups for the batch that `taken` began, for training from `version`: all available groups that fit, at least
        one; none once the batch is whole.

        A growing batch takes groups in the order in which they finish, while `take` takes the oldest first. Available
        groups are taken in the order of `take`, and a paced batch reserves room for the groups that it waits for.
        Staleness is checked here, once: the version does not change before the batch is trained. With a token budget or
        a deadline, which concern the whole batch, it comes in one piece; so it does with paced domain shares.
        """
        if self.in_one_piece:
            return () if taken else await self.take(version)
        if self._shares is not None:
            return await self._grow_fairly(self._shares, version, taken)
        room = dict(self._quotas)
        for group in taken:
            room[group.domain] -= len(group.samples)
        while True:
            chosen = self._fitting(version, room, taken)
            if not chosen and not any(left > 0 for left in room.values()) and not self._lacking(version, taken):
                if self._counted < version:  # later batches need as many more as this one has beyond its quotas
                    self._counted = version
                    for name, left in room.items():
                        self.short[name] += min(left, 0)
                return ()
            if chosen:
                return self._take(version, self._of(chosen))
            self._changed.clear()
            if self._lacking(version, taken) and (self._fresh_groups(version) or not any(r > 0 for r in room.values())):
                await self._hold(
                    version,
                    lambda: not self._lacking(version, taken) or bool(self._fitting(version, room, taken)),
                    taken,
                )
            else:
                await self._changed.wait()

    def refused(self, groups: Sequence[Group]) -> None:
        """The trainer refused these groups. If they are the last batch, it does not count; if they are a part of a
        batch that comes in one piece, the batch is trained without them."""
        gone = {g.id for g in groups}
        left = tuple(g for g in self._last if g.id not in gone)
        if self._last and not left:
            self._count(self._last, -1)
        elif self._token_budget is not None or self._due is not None:
            for group in self._last:
                self.short[group.domain] += len(group.samples) if group.id in gone else 0
        self._last = left

    def beyond(self) -> list[Group]:
        """Groups that the next batch, which is whole, leaves here."""
        quotas = None if self._shares is None else self._shares.quotas(self.held)
        if quotas is None:
            return []
        ready = list(self._ready.values())
        chosen = {r.id for r in select_batch(ready, quotas, version=0, bound=StalenessBound(UNBOUNDED_STALENESS)) or ()}
        return [self.groups[r.id] for r in ready if r.id not in chosen]

    async def _grow_fairly(self, shares: BatchShares, version: int, taken: Sequence[Group]) -> tuple[Group, ...]:
        while (room := shares.room(self._fresh(version), taken)) is not None:
            if any(room.values()):
                chosen = self._fitting(version, room)
                shares.growing.update(ready.domain for ready in chosen)
                return self._take(version, self._of(chosen))
            self._changed.clear()
            await self._changed.wait()
        shares.take(taken)
        return ()

    def _taken(self, chosen: tuple[Group, ...]) -> None:
        if self._shares is not None:
            self._shares.take(chosen)
        else:
            self._last = chosen
            self._count(chosen, 1)

    def _count(self, groups: Sequence[Group], sign: int) -> None:
        for domain, quota in self._quotas.items():
            self.short[domain] += sign * (quota - sum(len(g.samples) for g in groups if g.domain == domain))

    def _fresh(self, version: int) -> dict[str, int]:
        """Samples by domain that a batch may take."""
        found = dict.fromkeys(self._quotas, 0)
        for ready in self._fresh_groups(version):
            found[ready.domain] += ready.samples
        return found

    def _fresh_groups(self, version: int) -> list[ReadyGroup]:
        """Groups that a batch may take."""
        return [r for r in self._whole() if not self._bound.stale(r.v0, version)]

    def _fitting(self, version: int, room: Mapping[str, int], taken: Sequence[Group] = ()) -> list[ReadyGroup]:
        left = dict(room)
        pace = None if self._shares is not None else self.pace
        if pace is not None and pace.given_up == version:
            pace = None
        batch: dict[str, list[PacedGroup]] = {name: [] for name in left}
        for group in taken:
            batch[group.domain].append(_pacing_member(group))
        others = {name: self._members(name, version) for name in left} if pace is not None else {}
        chosen: list[ReadyGroup] = []
        for ready in sorted(self._fresh_groups(version), key=lambda r: (r.v0, r.order)):
            name, member = ready.domain, PacedGroup(ready.id, ready.v0, ready.samples)
            if pace is None:
                joins = ready.samples <= left[name]
            else:
                others[name].remove(member)
                joins = may_join(
                    member, batch[name], others[name], quota=self._quotas[name], version=version, alpha=pace.alpha
                )
            if joins:
                left[name] -= ready.samples
                batch[name].append(member)
                chosen.append(ready)
            elif pace is not None:
                others[name].append(member)
        return chosen

    def _members(self, domain: str, version: int) -> list[PacedGroup]:
        """Groups of a domain that a batch for `version` may hold, complete or not."""
        assert self.pace is not None
        ready = [PacedGroup(r.id, r.v0, r.samples) for r in self._ready.values() if r.domain == domain]
        unfinished = [u.under(version) for u in self.pace.unfinished() if u.domain == domain]
        return [m for m in (*ready, *unfinished) if not self._bound.stale(m.v0, version)]

    def _lacking(self, version: int, taken: Sequence[Group] = ()) -> list[PacedGroup]:
        """Groups that the batch for `version` waits for, in addition to its present groups (`taken`)."""
        if self.pace is None or self.pace.given_up == version:
            return []
        whole = {r.id for r in self._whole()}
        found: list[PacedGroup] = []
        for name, quota in self._quotas.items():
            members = self._members(name, version)
            ready = [m for m in members if m.id in whole] + [_pacing_member(g) for g in taken if g.domain == name]
            unfinished = [m for m in members if m.id not in whole]
            found += groups_to_wait_for(ready, unfinished, quota=quota, version=version, alpha=self.pace.alpha)
        return found

    async def _hold(self, version: int, released: Callable[[], bool], taken: Sequence[Group] = ()) -> None:
        """Wait until the batch is `released`, or the lease of the wait expires."""
        assert self.pace is not None

        async def wait() -> None:
            while not released():
                self._changed.clear()
                await self._changed.wait()

        await self.pace.hold(version, self._lacking(version, taken), wait())

    def _paced(self, version: int, sampler: Sampler, held_back: list[PacedGroup]) -> Sampler:
        """The sampler's batch plus every group that would be stale in the next one, once no awaited group is missing;
        until then `held_back` receives the missing groups."""
        pace = self.pace
        if pace is None:
            return sampler

        def paced(ready: ReadyRows) -> Selection | None:
            chosen = sampler(ready)
            if chosen is None:
                return None
            if lacks := self._lacking(version):
                held_back.extend(lacks)
                return None
            if self._shares is not None:
                return chosen
            taken = {pick.row.group for pick in chosen.batches[0]}
            fresh = {r.id for r in self._fresh_groups(version) if last_chance(r.v0, version, pace.alpha)}
            last = [PickedRow(row, row.tokens) for row in ready.values() if row.group in fresh - taken]
            return Selection((chosen.batches[0] + tuple(last),), chosen.consumed + tuple(p.row.id for p in last))

        return paced

    def _take(self, version: int, sampler: Sampler) -> tuple[Group, ...]:
        """Remove the groups that the sampler chooses for training from `version`, in its order; none if it waits.

        RunFailed for a group past an enforced bound: the selection is wrong then, and training it would be too."""
        taken = self.table.take(TRAINING, sampler)
        if taken is None:
            return ()
        picks = [pick for batch in taken.batches for pick in batch]
        groups = tuple(self._forget(GroupId(group)) for group in dict.fromkeys(pick.row.group for pick in picks))
        if excess := [g for g in groups if self._limit.stale(g.v0, version)]:
            if self._bound is self._limit:
                raise RunFailed(
                    f"the batch for training from v{version} holds {excess[0].id}, begun under v{excess[0].v0} "
                    f"(rule: at most {self._limit.alpha} versions behind)",
                    remedy="report it with the run spec: no schedule may select such a group",
                )
            self._on_excess(version, excess)
        weights = {pick.row.id: pick.weight for pick in picks if pick.weight != 1.0}
        return tuple(_weighted(group, weights) for group in groups) if weights else groups

    def _of(self, chosen: Sequence[ReadyGroup] | None) -> Sampler:
        """A sampler that selects these groups; None: it waits."""

        def sampler(ready: ReadyRows) -> Selection | None:
            if chosen is None:
                return None
            return Selection.of(ready[s.id] for group in chosen for s in self.groups[group.id].samples)

        return sampler

    def _by_deadline(self, ready: ReadyRows, version: int, late: bool) -> Selection | None:
        """The quota of every domain, or the available samples once the deadline has passed."""
        assert self._due is not None
        by_domain: dict[str, dict[str, SampleRow]] = {name: {} for name in self._quotas}
        for row in ready.values():
            group = self._ready[row.group]
            if not self._bound.stale(group.v0, version):
                by_domain[group.domain][row.id] = row
        picks: list[PickedRow] = []
        for domain, quota in self._quotas.items():
            least = max(1, math.ceil(self._due.least * quota - 1e-9))
            sampler = Deadline(quota, least, version, due=late, gamma=self._due.decay)
            found = sampler(by_domain[domain])
            if found is None:
                return None
            picks += found.batches[0]
        return Selection((tuple(picks),), tuple(p.row.id for p in picks))

    def _whole(self) -> list[ReadyGroup]:
        """Complete groups with all of their columns."""
        if not self._columns:
            return list(self._ready.values())
        rows = self.table.ready(TRAINING)
        return [r for r in self._ready.values() if self.groups[r.id].samples[0].id in rows]

    def _forget(self, group_id: GroupId) -> Group:
        ready = self._ready.pop(group_id)
        self.held[ready.domain] -= ready.samples
        group = self.groups.pop(group_id)
        if not self._columns:
            return group
        return dataclasses.replace(group, samples=tuple(self.filled.pop(s.id) for s in group.samples))

    def _select(self, version: int) -> tuple[ReadyGroup, ...] | None:
        quotas = self._quotas if self._shares is None else self._shares.quotas(self._fresh(version))
        if quotas is None:
            return None
        return select_batch(
            self._whole(),
            quotas,
            version=version,
            bound=self._bound,
            token_budget=self._token_budget,
        )

    def _may_suffice(self) -> bool:
        """Cheap and necessary: without a token budget every domain must hold its quota. Asked at each added group."""
        if self._token_budget is not None:
            return True
        if self._shares is not None:
            return self._shares.quotas(self.held) is not None
        return all(self.held[domain] >= quota for domain, quota in self._quotas.items())


def _pacing_member(group: Group) -> PacedGroup:
    return PacedGroup(group.id, group.v0, len(group.samples))


def _weighted(group: Group, weights: Mapping[str, float]) -> Group:
    """The group with the weights of its samples in the loss."""
    samples = (dataclasses.replace(s, weight=weights[s.id]) if s.id in weights else s for s in group.samples)
    return dataclasses.replace(group, samples=tuple(samples))
