"""A persistent service: after any crash, every row is consumed once per task, and groups stay whole."""

from __future__ import annotations

import asyncio
import random
import threading
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.adapters.service.state import (
    ExperienceRequest,
    RequestRefused,
    ServiceSetup,
    ServiceState,
    ServiceTask,
)
from rollart.adapters.service.storage import ServiceStore
from rollart.errors import StorageFailed, UsageError
from rollart.sim import loop
from tests.service import put

COLUMNS = ("prompt", "response")
TASKS = {"rollout": ServiceTask(("prompt",)), "train": ServiceTask(COLUMNS, whole_groups=True)}


def virtual(main: Callable[[], Awaitable[None]]) -> None:
    loop.run(main(), seed=1)


class Life:
    """A service state on a directory. It may die at any time and then loses unflushed changes."""

    def __init__(self, root: Path, **setup: Any) -> None:
        self.root, self.setup = root, ServiceSetup(COLUMNS, TASKS, **setup)

    async def begin(self) -> ServiceState:
        self.store = ServiceStore(self.root)
        found = ServiceState.recovered(self.store)
        self.desk = found or ServiceState(self.setup, self.store)
        if found is None:
            await self.desk.begin()
        return self.desk

    async def die(self) -> ServiceState:
        self.store.close()
        return await self.begin()


def test_what_was_answered_is_there_again(tmp_path: Path) -> None:
    async def main() -> None:
        life = Life(tmp_path, staleness=1)
        desk = await life.begin()
        ids = await desk.put_prompts([{"prompt": "a" * 70_000}, {"prompt": "b"}], 2, key="first")
        lease, ((row, *_),) = await desk.lease_rows(ExperienceRequest("rollout", 3), 0.0, lease_s=60.0, key="mine")
        assert await put(desk, row.id, {"response": [1, 2]}, 0)
        await desk.notify(1, "/v1")
        desk = await life.die()
        assert await desk.put_prompts([{"prompt": "a" * 70_000}, {"prompt": "b"}], 2, key="first") == ids
        assert (desk.version, desk.path, desk.status()["rows"]) == (1, "/v1", 4)
        again, ((same, *_),) = await desk.lease_rows(ExperienceRequest("rollout", 3), 0.0, lease_s=60.0, key="mine")
        assert (again, same.id, same.values["prompt"]) == (lease, row.id, "a" * 70_000)
        assert await put(desk, row.id, {"response": [1, 2]}, 0), "said again"
        assert await desk.done(lease)
        desk = await life.die()
        assert await desk.done(lease), "said again"
        ((left,),) = await desk.get(ExperienceRequest("rollout", 1), 0.0)
        assert left.id == ids[3]
        assert desk.status()["counts"]["taken.rollout"] == 4
        await desk.notify(1, "/v1")
        await desk.notify(2, "/v2")
        assert desk.status()["rows"] == 2, "its group was sampled two publishes ago"
        life.store.close()

    virtual(main)


@pytest.mark.parametrize("turns", range(6))
@pytest.mark.asyncio
async def test_a_client_that_goes_away_tears_no_writing(tmp_path: Path, turns: int) -> None:
    """Real threads: the call is cancelled before its changes are written, and during the write."""
    life = Life(tmp_path)
    desk = await life.begin()
    going = asyncio.Event()
    loop, write, go_on = asyncio.get_running_loop(), life.store.write, threading.Event()

    def held(batch: Any) -> None:
        loop.call_soon_threadsafe(going.set)
        assert go_on.wait(60)
        write(batch)

    life.store.write = held  # type: ignore[method-assign]
    leaving = asyncio.ensure_future(desk.put_prompts([{"prompt": "a"}], 1))
    for _ in range(turns):
        await asyncio.sleep(0)
    if turns == 5:
        await going.wait()
    leaving.cancel()
    staying = asyncio.ensure_future(desk.put_prompts([{"prompt": "b"}], 1))
    await asyncio.gather(leaving, return_exceptions=True)
    go_on.set()
    assert len(await staying) == 1
    held_now = desk.status()["rows"]
    assert (await life.die()).status()["rows"] == held_now


def test_whatever_the_disk_refuses_nothing_is_answered_after(tmp_path: Path) -> None:
    async def main() -> None:
        desk = await Life(tmp_path).begin()
        for _ in range(2):
            with pytest.raises(StorageFailed, match="too large"):
                await desk.put_prompts([{"prompt": "a"}], 1, tokens=2**70)

    virtual(main)


def test_rows_of_a_consumer_that_dies_return_at_the_deadline(tmp_path: Path) -> None:
    async def main() -> None:
        desk = await Life(tmp_path).begin()
        ids = await desk.put_prompts([{"prompt": 1}], 2)
        for row in ids:
            await put(desk, row, {"response": 1}, None)
        clock = asyncio.get_running_loop()
        dead, ((one, other),) = await desk.lease_rows(ExperienceRequest("train", 1), 0.0, lease_s=30.0)
        assert await desk.get(ExperienceRequest("train", 1), 0.0) == []
        assert await desk.renew(dead, 40.0)
        lease, (rows,) = await desk.lease_rows(ExperienceRequest("train", 1), 100.0, lease_s=30.0)
        assert clock.time() == 40.0
        assert [r.id for r in rows] == [one.id, other.id], "whole"
        assert not await desk.done(dead)
        assert not await desk.renew(dead, 9.0)
        assert await desk.return_lease(lease)
        assert not await desk.return_lease(lease)
        lease, _ = await desk.lease_rows(ExperienceRequest("train", 1), 0.0, lease_s=30.0)
        assert await desk.done(lease)
        assert await desk.get(ExperienceRequest("train", 1), 0.0) == []
        with pytest.raises(RequestRefused, match="lease_s 0"):
            await desk.lease_rows(ExperienceRequest("train", 1), 0.0, lease_s=0)

    virtual(main)


def test_a_request_that_is_made_again_while_it_waits_is_lent_rows_once(tmp_path: Path) -> None:
    async def main() -> None:
        desk = await Life(tmp_path).begin()
        wish = ExperienceRequest("rollout", 2)
        async with asyncio.TaskGroup() as tasks:
            asked = [tasks.create_task(desk.lease_rows(wish, 30.0, lease_s=60.0, key="k")) for _ in range(2)]
            await asyncio.sleep(1.0)
            await desk.put_prompts([{"prompt": "a"}], 4)
        (first, one), (again, other) = (task.result() for task in asked)
        assert (first, one) == (again, other)
        assert (await desk.lease_rows(wish, 0.0, lease_s=60.0, key="other"))[0] not in ("", first), "two rows are left"
        for seconds in (0.0, -1.0):
            with pytest.raises(RequestRefused, match="above 0"):
                await desk.renew(first, seconds)
        assert await desk.done(first)

    virtual(main)


def test_a_directory_is_one_services(tmp_path: Path) -> None:
    async def main() -> None:
        store = ServiceStore(tmp_path)
        with pytest.raises(UsageError, match="another service uses"):
            ServiceStore(tmp_path)
        store.close()
        ServiceStore(tmp_path).close()
        (tmp_path / "file").touch()
        with pytest.raises(UsageError, match="cannot write"):
            ServiceStore(tmp_path / "file")

    virtual(main)


class Busy:
    """Prompts that are put until they are accepted, and consumers that die with their leased rows."""

    def __init__(self, life: Life, chance: random.Random, groups: int, size: int, deaths: int) -> None:
        self.life, self.chance, self.size, self.deaths = life, chance, size, deaths
        self.waiting = list(range(groups))
        self.done = {task: Counter[str]() for task in TASKS}

    async def maybe_die(self, share: float) -> None:
        if self.deaths and self.chance.random() < share:
            self.deaths -= 1
            await self.life.die()

    async def put(self) -> None:
        if self.waiting and self.life.desk.table.room() >= self.size:
            for _ in range(self.chance.choice((1, 2))):  # the answer was lost: the request is repeated
                await self.life.desk.put_prompts([{"prompt": 1}], self.size, key=f"p{self.waiting[0]}")
            self.waiting.pop(0)

    async def consume(self, task: str) -> None:
        lease, batches = await self.life.desk.lease_rows(ExperienceRequest(task, 1), 0.0, lease_s=5.0)
        rows = [row for batch in batches for row in batch]
        if task == "train":
            assert len(rows) in (0, self.size)
            assert len({r.group for r in rows}) <= 1
        for row in rows if task == "rollout" else ():
            assert await put(self.life.desk, row.id, {"response": row.id}, None)
        if not rows or self.chance.random() < 0.3:  # the consumer dies with its leased rows
            await asyncio.sleep(self.chance.choice((0.0, 2.0, 6.0)))
            return
        await self.maybe_die(0.3)
        if await self.life.desk.done(lease):
            self.done[task].update(row.id for row in rows)


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**32), groups=st.integers(1, 4), size=st.integers(1, 3), deaths=st.integers(0, 4))
def test_every_row_is_done_once_per_task(
    tmp_path_factory: pytest.TempPathFactory, seed: int, groups: int, size: int, deaths: int
) -> None:
    """Crashes of consumers with leased rows, and of the service between any two answers."""

    async def main() -> None:
        life = Life(tmp_path_factory.mktemp("service"), capacity=2 * size)
        await life.begin()
        busy = Busy(life, random.Random(seed), groups, size, deaths)
        for _ in range(5000):
            if all(sum(c.values()) == groups * size for c in busy.done.values()):
                break
            await busy.maybe_die(0.1)
            await busy.put()
            await busy.consume(busy.chance.choice(list(TASKS)))
        for counter in busy.done.values():
            assert set(counter.values()) == {1}
            assert len(counter) == groups * size
        assert (life.desk.status()["rows"], life.desk.table.room()) == (0, 2 * size)
        await life.die()
        assert life.desk.status()["rows"] == 0
        assert life.store.load().rows == []
        life.store.close()

    virtual(main)


def test_rows_that_come_together_are_on_disk_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        life = Life(tmp_path)
        desk = await life.begin()
        ids = await desk.put_prompts([{"prompt": n} for n in range(50)], 2)
        written, write = [], life.store.write
        monkeypatch.setattr(life.store, "write", lambda batch: (written.append(len(batch)), write(batch)))
        kept = await desk.put_all([(row, {"response": [n]}, 0) for n, row in enumerate(ids)])
        assert all(kept.values())
        assert len(written) == 1
        desk = await life.die()
        ((*rows,),) = await desk.get(ExperienceRequest("rollout", 100), 0.0)
        assert [r.id for r in rows] == ids, "in the order in which they were put, also after another life"

    virtual(main)


def test_who_waits_is_told_though_the_caller_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client may disconnect while its call is being written to disk."""
    going, go = threading.Event(), threading.Event()

    async def main() -> None:
        life = Life(tmp_path)
        desk = await life.begin()
        write = life.store.write

        def slow(batch: Any) -> None:
            going.set()
            assert go.wait(60)
            write(batch)

        monkeypatch.setattr(life.store, "write", slow)
        waiting = asyncio.create_task(desk.get(ExperienceRequest("rollout", 1), 3600.0))
        await asyncio.sleep(0)
        putting = asyncio.create_task(desk.put_prompts([{"prompt": 1}], 1))
        await asyncio.to_thread(going.wait, 60)
        putting.cancel()
        await asyncio.gather(putting, return_exceptions=True)
        go.set()
        async with asyncio.timeout(60):
            assert len((await waiting)[0]) == 1

    asyncio.run(main())
