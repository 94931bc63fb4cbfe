"""Control state of the data plane: a sample table with readiness per column and consumption per task (AsyncFlow §6.1).

A row is a sample; a column is a field of it (responses, reward, reference log-probabilities, advantage, ...). A task
declares the columns that it reads; a row becomes ready for the task once all of them are written, and the task takes it
once. So reward, reference, advantage and training stream independently, each at its own pace, and a consumer that asks
more often gets more. The table holds sizes and versions, never payloads: payloads stay where `put` left them until the
row is freed.

A sampler, a callable value, decides which ready rows a task takes next: by default in their order of readiness. It
returns None until it can form a whole batch: waiting is the caller's task. Random choices are hashes of the row's id,
so a resumed run makes the same choices.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from rollart.shares import balanced_portions


@dataclass(frozen=True, slots=True)
class SampleRow:
    """The table's view of a sample. `version` = its v0; `tokens` measures a consumer's work."""

    id: str
    group: str
    group_size: int
    tokens: int
    version: int = 0

    def __post_init__(self) -> None:
        if self.group_size < 1 or self.tokens < 0:
            raise ValueError(
                f"row {self.id}: group size {self.group_size} must be positive, tokens {self.tokens} not negative"
            )


@dataclass(frozen=True, slots=True)
class PickedRow:
    """A row of a batch: the first `tokens` of its tokens count, with this weight in the loss."""

    row: SampleRow
    tokens: int
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Selection:
    """One batch per consumer, and the rows that it consumes: all picked rows, and the rows cut by a token budget."""

    batches: tuple[tuple[PickedRow, ...], ...]
    consumed: tuple[str, ...]

    @staticmethod
    def of(rows: Iterable[SampleRow]) -> Selection:
        """One batch of whole rows."""
        picks = tuple(PickedRow(r, r.tokens) for r in rows)
        return Selection((picks,), tuple(p.row.id for p in picks))


ReadyRows = Mapping[str, SampleRow]
"""The rows that a task may take, by id, in order of readiness."""

Sampler = Callable[[ReadyRows], Selection | None]
"""Chooses among the ready rows; None: not enough yet."""


@dataclass(frozen=True, slots=True)
class TakenRows:
    """The rows given to a task. `freed`: rows that no task needs any more; fetch them before their payload is
    released."""

    batches: tuple[tuple[PickedRow, ...], ...]
    consumed: tuple[str, ...]
    freed: tuple[str, ...]


@dataclass(slots=True)
class _Task:
    need: int
    whole_groups: bool
    ready: OrderedDict[str, SampleRow] = field(default_factory=OrderedDict)
    held: dict[str, SampleRow] = field(default_factory=dict)
    """Taken, and not settled."""
    counts: dict[str, int] = field(default_factory=dict)
    """Rows per group whose columns are written, consumed ones included."""


@dataclass(slots=True)
class _Entry:
    row: SampleRow
    left: int
    """Tasks that have not consumed the row."""
    written: int = 0


@dataclass(slots=True)
class _Group:
    size: int
    rows: list[str] = field(default_factory=list)
    freed: int = 0


class SampleTable:
    """Rows from `add` until every task has consumed them.

    Invariants: a task takes a row at most once and never before all of its columns are written; a task that was
    declared with `whole_groups` takes groups whole or not at all (I6); tasks are independent of each other. Bound: a
    group's first row reserves room for all of its rows, so at most `capacity` rows are held and every group that began
    can complete.
    """

    def __init__(self, columns: Sequence[str], *, capacity: int) -> None:
        if not columns or len(set(columns)) != len(columns):
            raise ValueError(f"columns {list(columns)} must be named, each once")
        if capacity < 1:
            raise ValueError(f"capacity {capacity} must be at least one row")
        self._bits = {name: 1 << i for i, name in enumerate(columns)}
        self._capacity = capacity
        self._reserved = 0
        self._tasks: dict[str, _Task] = {}
        self._rows: dict[str, _Entry] = {}
        self._groups: dict[str, _Group] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def declare(self, task: str, columns: Sequence[str], *, whole_groups: bool = False) -> None:
        """A task that reads these columns. All tasks are declared before the first row: a later task would have missed
        the rows that were freed already."""
        if task in self._tasks:
            raise ValueError(f"task {task} is declared already")
        if self._groups:
            raise ValueError(f"task {task}: declare it before the first row")
        if not columns:
            raise ValueError(f"task {task} reads no column: nothing would ever make a row ready for it")
        self._tasks[task] = _Task(self._mask(columns), whole_groups)

    def room(self) -> int:
        """Rows of new groups that may be added."""
        return self._capacity - self._reserved

    def add(self, row: SampleRow, *columns: str) -> None:
        """A new row, with the columns that are written already. ValueError if a new group does not fit."""
        if not self._tasks:
            raise ValueError("no task is declared: no row would ever be freed")
        if row.id in self._rows:
            raise ValueError(f"row {row.id} is in the table already")
        group = self._groups.get(row.group)
        if group is None:
            if row.group_size > self.room():
                raise ValueError(
                    f"group {row.group} of {row.group_size} rows does not fit: "
                    f"{self._reserved} of {self._capacity} are taken"
                )
            group = self._groups[row.group] = _Group(row.group_size)
            self._reserved += row.group_size
        if row.group_size != group.size or len(group.rows) == group.size:
            raise ValueError(f"row {row.id}: group {row.group} has {group.size} rows, {len(group.rows)} are here")
        group.rows.append(row.id)
        self._rows[row.id] = _Entry(row, len(self._tasks))
        self.put(row.id, *columns)

    def put(self, row: str, *columns: str) -> bool:
        """Mark columns of a row as written. False: the row was dropped, and the result is not needed. ValueError if a
        column was written before."""
        entry = self._rows.get(row)
        if entry is None:
            return False
        mask, before = self._mask(columns), entry.written
        if mask & before:
            twice = [c for c in columns if self._bits[c] & before]
            raise ValueError(f"row {row}: column {', '.join(twice)} was written before")
        entry.written = after = before | mask
        for task in self._tasks.values():
            if task.need & after == task.need and task.need & before != task.need:
                self._make_ready(task, entry.row)
        return True

    def ready(self, task: str) -> ReadyRows:
        """The rows that `take` would show to a sampler; a view, valid until the table changes."""
        return self._task(task).ready

    def take(self, task: str, sampler: Sampler, *, hold: bool = False) -> TakenRows | None:
        """Let the sampler choose among the task's ready rows, and mark its choice consumed: at once, or with `hold`
        only when it is settled. None: the sampler chose to wait. ValueError for a selection that breaks a rule of the
        table, which is the sampler's error; then nothing is consumed."""
        mine = self._task(task)
        selection = sampler(mine.ready)
        if selection is None:
            return None
        self._check(task, mine, selection)
        for row in selection.consumed:
            mine.held[row] = mine.ready.pop(row)
        freed = () if hold else self.settle(task, selection.consumed)
        return TakenRows(selection.batches, selection.consumed, freed)

    def settle(self, task: str, rows: Iterable[str]) -> tuple[str, ...]:
        """Mark taken rows as consumed by the task; returns the rows that no task needs any more. Rows dropped meanwhile
        are ignored."""
        mine, freed = self._task(task), []
        for row in rows:
            if mine.held.pop(row, None) is not None:
                entry = self._rows[row]
                entry.left -= 1
                if not entry.left:
                    self._free(entry.row)
                    freed.append(row)
        return tuple(freed)

    def restore(self, task: str, rows: Sequence[str]) -> None:
        """Make taken rows ready for the task again, before all others. Rows dropped meanwhile are ignored."""
        mine = self._task(task)
        for row in reversed(rows):
            held = mine.held.pop(row, None)
            if held is not None:
                mine.ready[row] = held
                mine.ready.move_to_end(row, last=False)

    def drop(self, group: str) -> tuple[str, ...]:
        """Give a group up for all tasks that have not consumed it; returns its rows that were still held. Later results
        for the group are ignored."""
        found = self._groups.pop(group, None)
        if found is None:
            return ()
        self._reserved -= found.size - found.freed
        held = tuple(r for r in found.rows if self._rows.pop(r, None) is not None)
        for task in self._tasks.values():
            task.counts.pop(group, None)
            for row in held:
                task.ready.pop(row, None)
                task.held.pop(row, None)
        return held

    def _make_ready(self, task: _Task, row: SampleRow) -> None:
        count = task.counts[row.group] = task.counts.get(row.group, 0) + 1
        if not task.whole_groups:
            task.ready[row.id] = row
        elif count == row.group_size:
            for member in self._groups[row.group].rows:
                task.ready[member] = self._rows[member].row

    def _free(self, row: SampleRow) -> None:
        del self._rows[row.id]
        group = self._groups[row.group]
        group.freed += 1
        self._reserved -= 1
        if group.freed == group.size:
            del self._groups[row.group]
            for task in self._tasks.values():
                task.counts.pop(row.group, None)

    def _check(self, name: str, task: _Task, selection: Selection) -> None:
        consumed = set(selection.consumed)
        if len(consumed) != len(selection.consumed) or not consumed <= task.ready.keys():
            bad = sorted(consumed - task.ready.keys()) or "a row twice"
            raise ValueError(f"task {name}: the sampler consumed {bad}, which is not ready")
        picked = [p for batch in selection.batches for p in batch]
        ids = {p.row.id for p in picked}
        if len(ids) != len(picked) or not ids <= consumed:
            raise ValueError(f"task {name}: the sampler picked a row twice, or one that it did not consume")
        if not all(0 < p.tokens <= p.row.tokens or p.tokens == p.row.tokens for p in picked):
            raise ValueError(f"task {name}: the sampler picked more tokens of a row than it has, or none")
        if task.whole_groups:
            for group in {task.ready[row].group for row in consumed}:
                if not consumed.issuperset(self._groups[group].rows):
                    raise ValueError(f"task {name}: the sampler split group {group}, which is taken whole")

    def _task(self, name: str) -> _Task:
        if name not in self._tasks:
            raise ValueError(f"unknown task {name}: declared are {', '.join(self._tasks) or 'none'}")
        return self._tasks[name]

    def _mask(self, columns: Iterable[str]) -> int:
        mask = 0
        for column in columns:
            if column not in self._bits:
                raise ValueError(f"unknown column {column}: the table has {', '.join(self._bits)}")
            mask |= self._bits[column]
        return mask


@dataclass(frozen=True, slots=True)
class Fifo:
    """The `count` rows that became ready first; with `at_least`, that many suffice."""

    count: int
    at_least: int | None = None

    def __call__(self, ready: ReadyRows) -> Selection | None:
        enough = self.count if self.at_least is None else self.at_least
        if len(ready) < max(enough, 1):
            return None
        return Selection.of(islice(ready.values(), self.count))


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

    def __call__(self, ready: ReadyRows) -> Selection | None:
        chosen = self.inner(ready)
        if chosen is None:
            return None
        picks = [p for batch in chosen.batches for p in batch]
        parts = balanced_portions([p.tokens for p in picks], self.consumers)
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
    """Complete groups of `target` rows, or at the deadline (`due`) the available groups, if they have at least `least`
    rows (asynchronous federated learning aggregates on a clock).

    Order: oldest version first, then readiness (Pangu's priority queues): rows close to their staleness bound are
    trained before they expire. A group is taken only if it fits into `target`. Each row has weight gamma ** age.
    """

    target: int
    least: int
    version: int
    due: bool = False
    gamma: float = 1.0

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.target:
            raise ValueError(f"1 <= least {self.least} <= target {self.target} does not hold")

    def __call__(self, ready: ReadyRows) -> Selection | None:
        groups = sorted(_whole(ready), key=lambda group: min(r.version for r in group))
        if groups and len(groups[0]) > self.target:
            raise ValueError(f"group {groups[0][0].group} of {len(groups[0])} rows fits into no batch of {self.target}")
        rows: list[SampleRow] = []
        for group in groups:
            if len(rows) + len(group) > self.target:
                # A younger, smaller group must not overtake a group that does not fit: it waits for the next batch.
                break
            rows += group
        full = len(rows) == self.target or len(rows) < sum(map(len, groups))
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


def _whole(ready: ReadyRows) -> list[list[SampleRow]]:
    """Groups whose rows are all ready, in the order in which they became ready."""
    groups: dict[str, list[SampleRow]] = {}
    whole: list[list[SampleRow]] = []
    for row in ready.values():
        rows = groups.setdefault(row.group, [])
        rows.append(row)
        if len(rows) == row.group_size:
            whole.append(rows)
    return whole


def _draw(salt: str, row: str) -> bytes:
    return hashlib.blake2b(f"{salt}\0{row}".encode(), digest_size=8).digest()
