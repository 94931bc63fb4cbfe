"""Ledgers as the dashboard reads them: on one thread, each value once per state of its ledger, and at a bounded share
of a core.

A ledger is opened read-only for each reading and closed after it, and every query ends before the next one begins: the
run's own writer never waits for a reader (SQLite's WAL), and its checkpoints are not held up.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from rollart.ledger.database import FILE
from rollart.ledger.reader import LedgerReader
from rollart.ports import RunEvent
from rollart.report.rows import RunRows, collect
from rollart.report.timeline import FAULT_EVENTS
from rollart.report.trajectories.listing import SecondPrices

T = TypeVar("T")

REFRESH_S = 2.0
"""Least seconds between two readings of a value of a ledger that changes."""

SHARE = 0.05
"""Largest share of a core that readings of one value take while its ledger changes: one that takes 1 s is refreshed
every 20 s."""

KEPT = 64
"""Most values kept, over all runs: the least recently used are forgotten first."""

LIFE_S = 5.0
"""Seconds for which the answer whether a run's controller lives is used again."""

EVENTS = 40
"""Events that a page shows."""


@dataclass(frozen=True, slots=True)
class RunSnapshot:
    """What the pages of a run share, read at one moment. `rows` is None before the run has a ledger. `stamp` names the
    state of the ledger."""

    name: str
    running: bool
    stamp: str
    rows: RunRows | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    steps: tuple[RunEvent, ...] = ()
    event_sums: tuple[tuple[str, int, float, float], ...] = ()
    faults: tuple[RunEvent, ...] = ()
    prices: SecondPrices | None = None

    @property
    def settings(self) -> Mapping[str, Any]:
        """The run's spec."""
        run: Mapping[str, Any] = self.config.get("run", {})
        return run

    @property
    def state(self) -> str:
        if self.rows is None:
            return "starting" if self.running else "stopped"
        steps, step = self.settings.get("steps"), self.rows.facts.step
        done = steps is not None and step is not None and step >= steps
        return "running" if self.running else "finished" if done else "stopped"


@dataclass(slots=True)
class _Kept(Generic[T]):
    stamp: str
    t: float
    cpu_s: float
    value: T

    def due(self, now: float) -> bool:
        return now - self.t >= max(REFRESH_S, self.cpu_s / SHARE)


class LedgerReadings:
    """Owns the reading thread and the values that were read last. `is_running`: whether the controller of the run in a
    directory lives. Used on one event loop; close it at the end."""

    def __init__(self, is_running: Callable[[Path], bool]) -> None:
        self._is_running = is_running
        self._thread = ThreadPoolExecutor(1, "ledger")
        self._kept: OrderedDict[tuple[Path, Hashable], _Kept[Any]] = OrderedDict()
        self._reading: dict[Hashable, asyncio.Lock] = {}
        self._lives: dict[Path, tuple[float, bool]] = {}

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)

    async def snapshot(self, directory: Path) -> RunSnapshot:
        """The run in a directory."""
        running = await self._running(directory)
        stamp = f"{_stamp(directory)}.{int(running)}"
        if not (directory / FILE).is_file():
            return RunSnapshot(directory.resolve().name, running, stamp)

        def read(reader: LedgerReader) -> RunSnapshot:
            rows = collect(reader, directory.resolve().name)
            return RunSnapshot(
                rows.run,
                running,
                stamp,
                rows,
                reader.config(),
                tuple(reader.events("step")),
                tuple(reader.event_sums()),
                tuple(reader.last_events(FAULT_EVENTS, EVENTS)),
                SecondPrices.of(reader, rows),
            )

        return await self._read(directory, "snapshot", stamp, read)

    async def read(self, directory: Path, key: Hashable, read: Callable[[LedgerReader], T]) -> T:
        """A value of a ledger, named by `key`."""
        return await self._read(directory, key, _stamp(directory), read)

    async def stamp(self, directory: Path) -> str:
        """The name of the present state of a run, as in its snapshot."""
        return f"{_stamp(directory)}.{int(await self._running(directory))}"

    def stamp_of(self, directory: Path, key: Hashable) -> str:
        """The state of the ledger from which a value was read; '' if it is not kept."""
        kept = self._kept.get((directory, key))
        return "" if kept is None else kept.stamp

    def due(self, directory: Path) -> bool:
        """True if every value of the run that is kept would be read again."""
        now = asyncio.get_running_loop().time()
        return all(kept.due(now) for at, kept in self._kept.items() if at[0] == directory)

    async def _read(self, directory: Path, key: Hashable, stamp: str, read: Callable[[LedgerReader], T]) -> T:
        loop, at = asyncio.get_running_loop(), (directory, key)
        async with self._reading.setdefault(at, asyncio.Lock()):
            kept = self._kept.get(at)
            if kept is None or (kept.stamp != stamp and kept.due(loop.time())):
                value, cpu_s = await loop.run_in_executor(self._thread, _timed, directory, read)
                kept = self._kept[at] = _Kept(stamp, loop.time(), cpu_s, value)
            self._kept.move_to_end(at)
            while len(self._kept) > KEPT:
                self._reading.pop(self._kept.popitem(last=False)[0], None)
        value = kept.value
        return value

    async def _running(self, directory: Path) -> bool:
        loop = asyncio.get_running_loop()
        known = self._lives.get(directory)
        if known is None or loop.time() - known[0] >= LIFE_S:
            # On a thread of its own: of a controller on another machine the answer takes until its next heartbeat.
            running = await asyncio.to_thread(self._is_running, directory)
            known = self._lives[directory] = loop.time(), running
        return known[1]


def _stamp(directory: Path) -> str:
    """Changes whenever the ledger is written."""
    found = []
    for name in (FILE, f"{FILE}-wal"):
        try:
            at = (directory / name).stat()
        except OSError:
            continue
        found.append(f"{at.st_mtime_ns:x}.{at.st_size:x}")
    return "-".join(found)


def _timed(directory: Path, read: Callable[[LedgerReader], T]) -> tuple[T, float]:
    """The value, and the seconds of a core that it took."""
    began = time.thread_time()
    with LedgerReader(directory) as reader:
        value = read(reader)
    return value, time.thread_time() - began
