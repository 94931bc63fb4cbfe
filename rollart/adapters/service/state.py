"""The state behind the service: the sample table, the opaque payloads of its rows, the leases on rows that consumers
have not finished, and the current weights.

Only `get`, `lease_rows`, `room` and `weights` wait for a change of state; every other call awaits at most the disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

from rollart.adapters.service.packed import pack
from rollart.adapters.service.storage import (
    MAX_REMEMBERED_KEYS,
    RowLease,
    ServiceRow,
    ServiceStore,
    StoredState,
    VolatileStore,
)
from rollart.policy.sample_table import Balanced, Fifo, Sampler, SampleRow, SampleTable, Selection, WholeGroups
from rollart.policy.staleness import StalenessBound

Polled = TypeVar("Polled")

DONE_KEY_PREFIX = "lease "
"""Prefix of the stored keys of finished leases, beside the keys of answered requests."""


class RequestRefused(Exception):
    """A call that breaks a rule. The message is for the caller; `status` is the HTTP status."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class ServiceTask:
    """A consuming task: the columns that it reads, and whether it takes whole groups."""

    columns: tuple[str, ...]
    whole_groups: bool = False


@dataclass(frozen=True, slots=True)
class ServiceSetup:
    """The configuration shared by all clients of a service. `staleness`: publishes that a sample may outlive; None:
    unlimited."""

    columns: tuple[str, ...]
    tasks: Mapping[str, ServiceTask]
    capacity: int = 4096
    staleness: int | None = None


@dataclass(frozen=True, slots=True)
class ExperienceRequest:
    """A request for experience: `count` rows, or groups if the task takes whole groups, for each of `consumers`."""

    task: str
    count: int
    at_least: int | None = None
    consumers: int = 1
    columns: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class ExperienceRow:
    """A row as it is handed to a consumer."""

    id: str
    group: str
    version: int | None
    values: Mapping[str, Any]


class ServiceState:
    """Serves any number of clients; all calls on one loop. A call that waits polls at every change. Invariants: those
    of `SampleTable`; a row is in at most one open lease of a task; a payload is held exactly as long as its row; no row
    is handed out that was sampled more than `staleness` publishes ago."""

    def __init__(self, setup: ServiceSetup, store: ServiceStore | None = None) -> None:
        """RequestRefused for an invalid setup. With a `store`, changes are persisted; `recovered` loads them."""
        self._store = store or VolatileStore()
        self.setup = setup
        self.version, self.path = 0, ""
        self.counts: Counter[str] = Counter()
        self._bound = None if setup.staleness is None else StalenessBound(setup.staleness)
        self.rows: dict[str, ServiceRow] = {}
        """The rows that a task still needs."""
        self._groups = 0
        self._changed = asyncio.Event()
        """Set at the next change, and then replaced."""
        self._leases: dict[str, RowLease] = {}
        """The open leases by id; a lease ends once, done or returned."""
        self._done_leases: OrderedDict[str, None] = OrderedDict()
        """The ids of leases that were done; the oldest are forgotten."""
        self._granted = 0
        """Number of the latest lease."""
        self.answered: OrderedDict[str, list[str]] = OrderedDict()
        """Row ids by the key of the request that put the prompts."""
        with refuse_value_errors():
            self.table = SampleTable(setup.columns, capacity=setup.capacity)
            for name, task in setup.tasks.items():
                self.table.declare(name, task.columns, whole_groups=task.whole_groups)

    @classmethod
    def recovered(cls, store: ServiceStore) -> ServiceState | None:
        """The state at the last answered call; leases start again with their full time. None before the first
        setup."""
        stored = store.load()
        if "setup" not in stored.meta:
            return None
        setup = stored.meta["setup"]
        tasks = {n: ServiceTask(tuple(t["columns"]), t["whole_groups"]) for n, t in setup["tasks"].items()}
        state = cls(ServiceSetup(tuple(setup["columns"]), tasks, setup["capacity"], setup["staleness"]), store)
        state.version, state.path = stored.meta.get("weights", (0, ""))
        state._groups = stored.meta.get("groups", 0)
        state.counts.update(stored.meta.get("counts", {}))
        now = asyncio.get_running_loop().time()
        for lease in stored.leases:
            state._leases[lease.id] = replace(lease, until=now + lease.seconds)
            state._granted = max(state._granted, int(lease.id[1:]))
        # Group by group, in order of arrival: each fits once the earlier groups have their former progress.
        for _, group in itertools.groupby(stored.rows, key=lambda held: held.row.group):
            state._recover(list(group), stored)
        for name, answer in stored.keys.items():
            if name.startswith(DONE_KEY_PREFIX):
                state._remember_done(name.removeprefix(DONE_KEY_PREFIX))
            else:
                state.answered[name] = answer
        return state

    def _recover(self, group: Sequence[ServiceRow], stored: StoredState) -> None:
        for held in group:
            self.table.add(held.row, *(self.setup.columns if held.freed else held.values))
            if not held.freed:
                self.rows[held.row.id] = held

        def taking(rows: Collection[str]) -> Sampler:
            return lambda ready: Selection.of(ready[h.row.id] for h in group if h.row.id in rows)

        for task, rows in stored.consumed.items():
            self.table.take(task, taking(rows))
        for lease in stored.leases:
            self.table.take(lease.task, taking(set(lease.consumed)), hold=True)

    async def begin(self) -> None:
        """Persist the setup."""
        self._store.meta(setup=asdict(self.setup))
        await self._flush()

    async def put_prompts(
        self, prompts: Sequence[Mapping[str, Any]], size: int, *, tokens: int = 0, key: str = ""
    ) -> list[str]:
        """Add one group of `size` rows per prompt, with the prompt's columns written; returns the row ids in order.
        All or none: RequestRefused (503) if they do not fit. A repeated `key` returns the earlier request's ids."""
        if key and key in self.answered:
            await self._flush()
            return self.answered[key]
        if size < 1:
            raise RequestRefused(f"group_size {size} (rule: at least 1)")
        if size * len(prompts) > self.table.room():
            raise RequestRefused(f"{size * len(prompts)} rows do not fit: there is room for {self.table.room()}", 503)
        ids: list[str] = []
        for values in prompts:
            self._check_columns(values)
        for values in ({column: pack(value) for column, value in prompt.items()} for prompt in prompts):
            group, self._groups = f"g{self._groups}", self._groups + 1
            for member in range(size):
                row = SampleRow(_row_id(group, member), group, size, tokens, self.version)
                with refuse_value_errors():
                    self.table.add(row, *values)
                self.rows[row.id] = ServiceRow(row, dict(values))
                ids.append(row.id)
                self._store.row(row, values)
        self.counts["put"] += len(ids)
        if key:
            self.answered[key] = ids
            if len(self.answered) > MAX_REMEMBERED_KEYS:
                self.answered.popitem(last=False)
        self._store.meta(groups=self._groups)
        if key:
            self._store.key(key, ids)
        await self._notify_and_flush()
        return ids

    async def put_all(self, rows: Sequence[tuple[str, Mapping[str, Any], int | None]]) -> dict[str, bool]:
        """Write columns of rows, and the version that each was sampled with, persisted together. False for a row that
        is gone; its data is then dropped. On RequestRefused, the rows before the refused one stay written. Idempotent.
        """
        try:
            stored = {row: self._put(row, values, version) for row, values, version in rows}
        finally:
            self._drop_stale()
            self._wake()
        await self._flush()
        return {row: was and row in self.rows for row, was in stored.items()}

    def _put(self, row: str, values: Mapping[str, Any], version: int | None) -> bool:
        self._check_columns(values)
        held = self.rows.get(row)
        values = {column: pack(value) for column, value in values.items()}
        if held is not None and values and values.items() <= self._stored(held, values).items():
            return True
        if version is not None and version > self.version:
            raise RequestRefused(f"row {row} was sampled with version {version}, the service knows {self.version}")
        with refuse_value_errors():
            if held is None or not self.table.put(row, *values):
                self.counts["late"] += 1
                return False
        held.values.update(values)
        if version is not None:
            held.sampled = version if held.sampled is None else min(version, held.sampled)
        self._store.cells(row, values, held.sampled)
        return True

    async def get(self, request: ExperienceRequest, seconds: float) -> list[list[ExperienceRow]]:
        """Take rows that are ready for the task: one batch per consumer, about equal in tokens, marked as consumed.
        Empty if too few rows are ready within `seconds`."""
        columns, sampler = self._columns_and_sampler(request)
        with refuse_value_errors():
            taken = await self._until(lambda: self.table.take(request.task, sampler), seconds)
        if taken is None:
            return []
        batches = [[self._experience_row(p.row.id, columns) for p in batch] for batch in taken.batches]
        self.counts[f"taken.{request.task}"] += len(taken.consumed)
        await self._finish_consumed(request.task, taken.consumed, taken.freed)
        return batches

    async def lease_rows(
        self, request: ExperienceRequest, seconds: float, *, lease_s: float, key: str = ""
    ) -> tuple[str, list[list[ExperienceRow]]]:
        """As `get`, but the rows are consumed only when the consumer calls `done`: `lease_s` later they are ready for
        the task again. Returns the lease's id and its batches; the `key` of an open lease returns that lease again."""
        require_positive_lease(lease_s)
        columns, sampler = self._columns_and_sampler(request)

        def poll() -> RowLease | None:
            # The latest lease with this key: it may have been granted while this request waited.
            lease = next((one for one in reversed(self._leases.values()) if key and one.key == key), None)
            if lease is not None and any(row in self.rows for row in lease.consumed):
                return lease
            if lease is not None:  # all of its rows were dropped
                self._return_lease(lease.id)
            taken = self.table.take(request.task, sampler, hold=True)
            if taken is None:
                return None
            self._granted += 1
            id, until = f"l{self._granted}", asyncio.get_running_loop().time() + lease_s
            batches = tuple(tuple(p.row.id for p in batch) for batch in taken.batches)
            lease = self._leases[id] = RowLease(id, request.task, batches, taken.consumed, lease_s, until, key)
            self._store.lease(lease)
            self._wake()  # waiting callers must consider the new lease's deadline
            return lease

        with refuse_value_errors():
            lease = await self._until(poll, seconds)
        if lease is None:
            return "", []
        await self._flush()
        rows = [[self._experience_row(row, columns) for row in batch if row in self.rows] for batch in lease.batches]
        return lease.id, rows

    async def done(self, lease_id: str) -> bool:
        """Consume the rows of a lease. False if the lease had expired, so that other consumers may have its rows."""
        self._expire()
        lease = self._leases.pop(lease_id, None)
        if lease is None:
            await self._flush()
            return lease_id in self._done_leases
        self._remember_done(lease_id)
        held = [row for row in lease.consumed if row in self.rows]
        self.counts[f"taken.{lease.task}"] += len(held)
        self._store.end_lease(lease_id)
        self._store.key(DONE_KEY_PREFIX + lease_id, True)
        await self._finish_consumed(lease.task, held, self.table.settle(lease.task, held))
        return True

    async def renew(self, lease_id: str, seconds: float) -> bool:
        """Extend a lease; False if it is over."""
        require_positive_lease(seconds)
        self._expire()
        lease = self._leases.get(lease_id)
        if lease is not None:
            until = asyncio.get_running_loop().time() + seconds
            self._leases[lease_id] = replace(lease, seconds=seconds, until=until)
        self._wake()
        return lease is not None

    async def return_lease(self, lease_id: str) -> bool:
        """Make the rows of a lease ready for its task again; False if the lease is over."""
        found = self._return_lease(lease_id)
        await self._notify_and_flush()
        return found

    def _columns_and_sampler(self, request: ExperienceRequest) -> tuple[Sequence[str], Sampler]:
        task = self.setup.tasks.get(request.task)
        if task is None:
            raise RequestRefused(f"unknown task {request.task!r} (rule: {', '.join(self.setup.tasks)})", 404)
        columns = task.columns if request.columns is None else request.columns
        self._check_columns(columns)
        if request.count < 1 or request.consumers < 1:
            raise RequestRefused(f"count {request.count}, consumers {request.consumers} (rule: at least 1)")
        if task.whole_groups and request.at_least is not None:
            raise RequestRefused("at_least is for tasks that take single rows")
        sampler: Sampler = WholeGroups(request.count) if task.whole_groups else Fifo(request.count, request.at_least)
        return columns, sampler if request.consumers == 1 else Balanced(sampler, request.consumers)

    async def room(self, rows: int, seconds: float) -> int:
        """Free capacity in rows, as soon as `rows` fit or after `seconds`. RequestRefused (400) for more rows than the
        capacity."""
        if rows > self.setup.capacity:
            raise RequestRefused(f"{rows} rows do not fit (rule: at most the capacity at once, {self.setup.capacity})")
        await self._until(lambda: self.table.room() if self.table.room() >= rows else None, seconds)
        return self.table.room()

    async def drop(self, group: str, reason: str) -> list[str]:
        """Drop a group for all tasks; returns its rows that were still held."""
        held = self._drop(group, reason)
        await self._notify_and_flush()
        return held

    def _drop(self, group: str, reason: str) -> list[str]:
        held = self.table.drop(group)
        for row in held:
            del self.rows[row]
        self.counts[f"dropped.{reason}"] += len(held)
        self._store.group_gone(group)
        return list(held)

    def permit(self, version: int, group: str) -> None:
        """RequestRefused (409) for a version that may not be announced now. `group`: a batch that it was trained on."""

    async def notify(self, version: int, path: str, group: str = "") -> None:
        """Announce new weights. Groups with a row that is now too stale are dropped. Idempotent."""
        if (version, path) == (self.version, self.path):
            return await self._flush()
        self.permit(version, group)
        if version <= self.version:
            raise RequestRefused(f"version {version} after {self.version} (rule: versions grow)", 409)
        self.version, self.path = version, path
        self._store.meta(weights=[version, path])
        self._drop_stale()
        await self._notify_and_flush()
        return None

    async def reset(self, version: int, path: str) -> None:
        """Go back to a version, whatever was published since."""
        self.version, self.path = version, path
        await self._notify_and_flush()

    async def weights(self, after: int, seconds: float) -> tuple[int, str]:
        """The current version and its path, as soon as it is above `after`, or after `seconds`."""
        await self._until(lambda: True if self.version > after else None, seconds)
        await self._flush()
        return self.version, self.path

    def status(self) -> dict[str, Any]:
        return {
            "version": self.version,
            "path": self.path,
            "rows": len(self.table),
            "room": self.table.room(),
            "ready": {name: len(self.table.ready(name)) for name in self.setup.tasks},
            "leases": len(self._leases),
            "counts": dict(sorted(self.counts.items())),
        }

    def _drop_stale(self) -> None:
        if self._bound is not None:
            old = [
                held.row.group
                for held in self.rows.values()
                if held.sampled is not None and self._bound.stale(held.sampled, self.version)
            ]
            for group in dict.fromkeys(old):
                self._drop(group, "stale")

    async def _finish_consumed(self, task: str, consumed: Sequence[str], freed: Sequence[str]) -> None:
        gone = [self.rows.pop(row).row for row in freed]
        self._store.consumed(task, consumed)
        self._store.freed(freed)
        for group, size in {row.group: row.group_size for row in gone}.items():
            if not any(_row_id(group, member) in self.rows for member in range(size)):
                self._store.group_gone(group)
        await (self._notify_and_flush() if freed else self._flush())

    def _return_lease(self, lease_id: str) -> bool:
        lease = self._leases.pop(lease_id, None)
        if lease is None:
            return False
        self.table.restore(lease.task, lease.consumed)
        self.counts[f"returned.{lease.task}"] += len(lease.consumed)
        self._store.end_lease(lease_id)
        return True

    def _remember_done(self, lease_id: str) -> None:
        self._granted = max(self._granted, int(lease_id[1:]))
        self._done_leases[lease_id] = None
        if len(self._done_leases) > MAX_REMEMBERED_KEYS:
            self._done_leases.popitem(last=False)

    def _expire(self) -> None:
        """Return the rows of expired leases."""
        now = asyncio.get_running_loop().time()
        for lease in [lease for lease in self._leases.values() if lease.until <= now]:
            self._return_lease(lease.id)

    async def _flush(self) -> None:
        if self._store.pending:
            self._store.meta(counts=dict(self.counts))
        await self._store.flush()
        while self._store.written:
            row, column, location = self._store.written.popleft()
            if row in self.rows and column in self.rows[row].values:
                self.rows[row].values[column] = location

    def _experience_row(self, row: str, columns: Sequence[str]) -> ExperienceRow:
        held = self.rows[row]
        return ExperienceRow(row, held.row.group, held.sampled, self._stored(held, columns))

    def _stored(self, held: ServiceRow, columns: Iterable[str]) -> dict[str, Any]:
        """The columns among these that are written."""
        return {c: self._store.read(held.values[c]) for c in columns if c in held.values}

    def _check_columns(self, columns: Mapping[str, Any] | Sequence[str]) -> None:
        unknown = [c for c in columns if c not in self.setup.columns]
        if unknown:
            raise RequestRefused(f"unknown column {unknown[0]!r} (rule: {', '.join(self.setup.columns)})")

    async def _notify_and_flush(self) -> None:
        """Wake the waiting callers, then wait for the disk. In this order, a caller that is cancelled during the
        flush, or whose flush fails, delays no other. The woken callers answer only after their own flush."""
        self._wake()
        await self._flush()

    def _wake(self) -> None:
        """Let all waiting callers poll again."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def _until(self, poll: Callable[[], Polled | None], seconds: float) -> Polled | None:
        """The first result of `poll` that is not None; None after `seconds`. `poll` is called at once, at every change
        and at every lease's expiry."""
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        while True:
            self._expire()
            found = poll()
            if found is not None or loop.time() >= end:
                return found
            due, changed = (lease.until for lease in self._leases.values()), self._changed
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(min([end, *due])):
                    await changed.wait()


def _row_id(group: str, member: int) -> str:
    return f"{group}.{member}"


def require_positive_lease(lease_s: float) -> None:
    if lease_s <= 0:
        raise RequestRefused(f"lease_s {lease_s} (rule: above 0)")


@contextlib.contextmanager
def refuse_value_errors() -> Iterator[None]:
    """Turn the table's ValueErrors into RequestRefused."""
    try:
        yield
    except ValueError as error:
        raise RequestRefused(str(error)) from None
