"""Control state of the data plane: a sample table with readiness per column and consumption per task (AsyncFlow §6.1).

A row is a sample; a column is a field of it (responses, reward, reference log-probabilities, advantage, ...). A task
declares the columns that it reads; a row becomes ready for the task once all of them are written, and the task takes it
once. So reward, reference, advantage and training stream independently, each at its own pace, and a consumer that asks
more often gets more. The table holds sizes and versions, never payloads: payloads stay where `put` left them until the
row is freed.

A sampler (`rollart.policy.samplers`) decides which ready rows a task takes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rollart.policy.staleness import StalenessBound

__all__ = ["PickedRow", "ReadyRows", "SampleRow", "SampleTable", "Sampler", "Selection", "TakenRows"]


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
class ReadyRows:
    """The input of a sampler: the rows that a task may take, by id, in order of readiness; and the number of rows of a
    group that are not ready for the task yet."""

    rows: Mapping[str, SampleRow]
    missing: Callable[[str], int]


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
        mine = self._task(task)

        def missing(group: str) -> int:
            return self._groups[group].size - mine.counts.get(group, 0)

        return ReadyRows(mine.ready, missing)

    def take(self, task: str, sampler: Sampler, *, hold: bool = False) -> TakenRows | None:
        """Let the sampler choose among the task's ready rows, and mark its choice consumed: at once, or with `hold`
        only when it is settled. None: the sampler chose to wait. ValueError for a selection that breaks a rule of the
        table, which is the sampler's error; then nothing is consumed."""
        mine = self._task(task)
        selection = sampler(self.ready(task))
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

    def stale(self, version: int, bound: StalenessBound) -> tuple[str, ...]:
        """Groups with a row that may no longer be trained at `version`: to be dropped whole (I3, I6)."""
        old = (e.row.group for e in self._rows.values() if bound.stale(e.row.version, version))
        return tuple(dict.fromkeys(old))

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
