"""The state behind the service: the sample table, the payloads it knows nothing of, and the current weights.

No await but for waiting: `get`, `room` and `weights` wait for a change, everything else is at once.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from rollart.policy.samplers import Balanced, Fifo, WholeGroups
from rollart.policy.staleness import StalenessBound
from rollart.policy.table import Row, Sampler, SampleTable, Taken

__all__ = ["Desk", "Given", "Refused", "Setup", "Wish"]

T = TypeVar("T")


class Refused(Exception):
    """A call that breaks a rule, in words. `status` is HTTP's."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class Task:
    """A consumer's work: the columns it reads, and whether it takes groups whole."""

    columns: tuple[str, ...]
    whole_groups: bool = False


@dataclass(frozen=True, slots=True)
class Setup:
    """What all who share a service agree on. `staleness`: publishes that a sample may live through; None: any."""

    columns: tuple[str, ...]
    tasks: Mapping[str, Task]
    capacity: int = 4096
    staleness: int | None = None


@dataclass(frozen=True, slots=True)
class Wish:
    """A request for experience: `count` rows, or groups where the task takes them whole, for each of `consumers`."""

    task: str
    count: int
    at_least: int | None = None
    consumers: int = 1
    columns: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class Given:
    """A row on its way out."""

    id: str
    group: str
    version: int | None
    values: Mapping[str, Any]


class Desk:
    """Any number of clients; all calls on one loop. Invariants: those of `SampleTable`; a payload is held exactly while
    its row is; no row is given out that was sampled more than `staleness` publishes ago."""

    def __init__(self, setup: Setup) -> None:
        """Refused for a setup that breaks a rule."""
        self.setup = setup
        self.version, self.path = 0, ""
        self.counts: Counter[str] = Counter()
        self._bound = None if setup.staleness is None else StalenessBound(setup.staleness)
        self._values: dict[str, dict[str, Any]] = {}
        self._rows: dict[str, Row] = {}
        self._sampled: dict[str, int] = {}
        """Version by row, of those that were sampled."""
        self._groups = 0
        self._changed = asyncio.Condition()
        with _rules():
            self.table = SampleTable(setup.columns, capacity=setup.capacity)
            for name, task in setup.tasks.items():
                self.table.declare(name, task.columns, whole_groups=task.whole_groups)

    async def put_prompts(self, prompts: Sequence[Mapping[str, Any]], size: int, *, tokens: int = 0) -> list[str]:
        """New groups, one per prompt, of `size` rows each, with these columns written. Their ids, in order. All or
        none: Refused (503) if they do not fit."""
        if size < 1:
            raise Refused(f"group_size {size} (rule: at least 1)")
        if size * len(prompts) > self.table.room():
            raise Refused(f"{size * len(prompts)} rows do not fit: there is room for {self.table.room()}", 503)
        ids: list[str] = []
        for values in prompts:
            self._known(values)
        for values in prompts:
            group, self._groups = f"g{self._groups}", self._groups + 1
            for member in range(size):
                row = Row(f"{group}.{member}", group, size, tokens, self.version)
                with _rules():
                    self.table.add(row, *values)
                self._rows[row.id], self._values[row.id] = row, dict(values)
                ids.append(row.id)
        self.counts["put"] += len(ids)
        await self._tell()
        return ids

    async def put(self, row: str, values: Mapping[str, Any], version: int | None) -> bool:
        """Columns of a row, and the version it was sampled with. False: the row is gone, and the work with it."""
        self._known(values)
        if version is not None and version > self.version:
            raise Refused(f"row {row} was sampled with version {version}, the service knows {self.version}")
        with _rules():
            if not self.table.put(row, *values):
                self.counts["late"] += 1
                return False
        self._values[row].update(values)
        if version is not None:
            self._sampled[row] = min(version, self._sampled.get(row, version))
            await self._drop_stale()
        await self._tell()
        return row in self._values

    async def get(self, wish: Wish, seconds: float) -> list[list[Given]]:
        """Rows that are ready for the task, marked as consumed by it, for each consumer: about equal in tokens. Nothing
        after `seconds` without enough."""
        task = self.setup.tasks.get(wish.task)
        if task is None:
            raise Refused(f"unknown task {wish.task!r} (rule: {', '.join(self.setup.tasks)})", 404)
        columns = task.columns if wish.columns is None else wish.columns
        self._known(columns)
        sampler = _sampler(wish, task)
        with _rules():
            taken = await self._until(lambda: self.table.take(wish.task, sampler), seconds)
        if taken is None:
            return []
        given = [[self._given(p.row.id, columns) for p in batch] for batch in taken.batches]
        self.counts[f"taken.{wish.task}"] += len(taken.consumed)
        await self._freed(taken)
        return given

    async def room(self, rows: int, seconds: float) -> int:
        """Rows of new groups that fit, once `rows` do or after `seconds`. Refused (400) for more than ever do."""
        if rows > self.setup.capacity:
            raise Refused(f"{rows} rows do not fit (rule: at most the capacity at once, {self.setup.capacity})")
        await self._until(lambda: self.table.room() if self.table.room() >= rows else None, seconds)
        return self.table.room()

    async def drop(self, group: str, reason: str) -> list[str]:
        """Give a group up for all tasks; the rows that were held."""
        held = self.table.drop(group)
        for row in held:
            self._forget(row)
        self.counts[f"dropped.{reason}"] += len(held)
        if held:
            await self._tell()
        return list(held)

    async def notify(self, version: int, path: str) -> None:
        """New weights are published. What is too old for them is dropped, group by group."""
        if version <= self.version:
            raise Refused(f"version {version} after {self.version} (rule: versions grow)", 409)
        self.version, self.path = version, path
        await self._drop_stale()
        await self._tell()

    async def weights(self, after: int, seconds: float) -> tuple[int, str]:
        """The current version and where it lies, once it is beyond `after`, or after `seconds`."""
        await self._until(lambda: True if self.version > after else None, seconds)
        return self.version, self.path

    def status(self) -> dict[str, Any]:
        ready = {name: len(self.table.ready(name).rows) for name in self.setup.tasks}
        return {"version": self.version, "path": self.path, "rows": len(self.table), "room": self.table.room(),
                "ready": ready, "counts": dict(sorted(self.counts.items()))}  # fmt: skip

    async def _drop_stale(self) -> None:
        if self._bound is not None:
            old = [r for r, v in self._sampled.items() if self._bound.stale(v, self.version)]
            for group in dict.fromkeys(self._rows[r].group for r in old):
                await self.drop(group, "stale")

    async def _freed(self, taken: Taken) -> None:
        for row in taken.freed:
            self._forget(row)
        if taken.freed:
            await self._tell()

    def _forget(self, row: str) -> None:
        del self._values[row], self._rows[row]
        self._sampled.pop(row, None)

    def _given(self, row: str, columns: Sequence[str]) -> Given:
        held = self._values[row]
        return Given(row, self._rows[row].group, self._sampled.get(row), {c: held[c] for c in columns if c in held})

    def _known(self, columns: Mapping[str, Any] | Sequence[str]) -> None:
        unknown = [c for c in columns if c not in self.setup.columns]
        if unknown:
            raise Refused(f"unknown column {unknown[0]!r} (rule: {', '.join(self.setup.columns)})")

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _until(self, look: Callable[[], T | None], seconds: float) -> T | None:
        """What `look` finds, looked for again at every change; None after `seconds`."""
        found = look()
        if found is not None or seconds <= 0:
            return found
        try:
            async with asyncio.timeout(seconds), self._changed:
                while (found := look()) is None:
                    await self._changed.wait()
        except TimeoutError:
            return None
        return found


def _sampler(wish: Wish, task: Task) -> Sampler:
    if wish.count < 1 or wish.consumers < 1:
        raise Refused(f"count {wish.count}, consumers {wish.consumers} (rule: at least 1)")
    sampler: Sampler
    if task.whole_groups:
        if wish.at_least is not None:
            raise Refused("at_least is for tasks that take single rows")
        sampler = WholeGroups(wish.count)
    else:
        sampler = Fifo(wish.count, wish.at_least)
    return Balanced(sampler, wish.consumers) if wish.consumers > 1 else sampler


class _rules:
    """The table's ValueErrors are the caller's."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, ValueError):
            raise Refused(str(error)) from None
