"""Kill -9 loses nothing that was acknowledged. A real process, a real disk."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rollart.ledger.database import FILE
from rollart.ledger.reader import LedgerReader
from rollart.ledger.store import Ledger

CHILD = """
import asyncio, sys
from rollart.ledger.store import Ledger
from rollart.model import Group, GroupId, TrainSample, TrajectoryId
from rollart.ports import Charge, Interval
from tests.kept import kept

def sample(i, m):
    n = 6000 if i % 10 == 0 else 8
    return TrainSample(TrajectoryId(f"g{i}.{m}"), GroupId(f"g{i}"), "lake", 0, tuple(range(n)), (True,) * n,
                       (-0.5,) * n, (0,) * n, (0,) * n, (0.0,) * n, 1.0, True)

async def worker(ledger, start, lock):
    for i in range(start, 10**9, 8):
        await ledger.admit(f"g{i}", "lake", i)
        samples = (sample(i, 0), sample(i, 1))
        for s in samples:
            charge = Charge(s.id, "lake", "finished", 0, 0.5, 1, 1, 1, True, 1.0, "train", 0.0, 1.0)
            text = "answer " * 300
            ledger.keep(kept(s.id, f"{text} of {s.id}"))
            await ledger.finish(s, charge)
            print(f"finished {s.id}", flush=True)
        for k in range(20):
            ledger.interval(Interval("engine", "e", k, k + 1, "busy"))
        if i % 3 == 0:
            async with lock:
                counter[0] += 1
                group = Group(GroupId(f"g{i}"), "lake", samples)
                await ledger.commit(version=counter[0], step=counter[0], consumed=[group], metrics={})
                print(f"trained g{i} {counter[0]}", flush=True)

async def main():
    ledger = Ledger(sys.argv[1], clock=asyncio.get_running_loop().time, kept_mb=100)
    recovered = await ledger.recover()
    counter[0] = recovered.version if recovered else 0
    start = recovered.seeds_drawn["lake"] * 2 if recovered else 0
    lock = asyncio.Lock()
    await asyncio.gather(*(worker(ledger, start + w, lock) for w in range(8)))

counter = [0]
asyncio.run(main())
"""


@pytest.mark.slow
def test_acknowledged_writes_survive_kill_9(tmp_path: Path) -> None:
    """Slow: three processes that write for a while and are killed."""
    finished: set[str] = set()
    trained: dict[str, int] = {}
    for lives in (300, 700, 500):
        child = subprocess.Popen([sys.executable, "-c", CHILD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        for _ in range(lives):
            _note(child.stdout.readline(), finished, trained)
        child.kill()
        for line in child.stdout:
            if line.endswith("\n"):
                _note(line, finished, trained)
        child.wait()
        child.stdout.close()
        _check(tmp_path, finished, trained)
    assert rows_of(tmp_path, "PRAGMA integrity_check") == [("ok",)]


def rows_of(directory: Path, sql: str) -> list[tuple[Any, ...]]:
    with contextlib.closing(sqlite3.connect(directory / FILE)) as connection:
        return connection.execute(sql).fetchall()


def _note(line: str, finished: set[str], trained: dict[str, int]) -> None:
    match line.split():
        case ["finished", id_]:
            assert id_ not in finished
            finished.add(id_)
        case ["trained", group, version]:
            assert group not in trained
            trained[group] = int(version)


def _check(directory: Path, finished: set[str], trained: dict[str, int]) -> None:
    with Ledger(directory, clock=lambda: 0.0) as ledger:
        recovered = asyncio.run(ledger.recover())
        assert recovered is not None
        live = {str(s.id) for s in recovered.samples}
    samples = rows_of(directory, "SELECT id FROM samples ORDER BY id")
    trajectories = rows_of(directory, "SELECT id FROM trajectories ORDER BY id")
    assert trajectories == samples, "each sample has its trajectory's row"
    with LedgerReader(directory) as reader:
        assert sorted((kept.id,) for kept in reader.kept()) == samples, "each has its content, once"
    in_file = dict(rows_of(directory, "SELECT id, version FROM groups WHERE state = 1"))
    for group, version in trained.items():
        assert in_file[group] == version, "an acknowledged commit is there, once"
    lost = {id_ for id_ in finished if id_ not in live and id_.partition(".")[0] not in in_file}
    assert not lost, "an acknowledged sample is live or trained"
    assert not {id_ for id_ in live if id_.partition(".")[0] in in_file}, "nothing trained is live"
