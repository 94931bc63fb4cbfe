"""The service's table with its payloads: no row twice, no row early, no row left over."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.adapters.service.state import ExperienceRequest, RequestRefused, ServiceSetup, ServiceState, ServiceTask
from rollart.sim import loop
from tests.service import put

COLUMNS = ("prompt", "response", "reward")
TASKS = {
    "rollout": ServiceTask(("prompt",)),
    "score": ServiceTask(("response",)),
    "train": ServiceTask(COLUMNS, whole_groups=True),
}


def desk(**more: Any) -> ServiceState:
    return ServiceState(ServiceSetup(COLUMNS, TASKS, **more))


def virtual(main: Callable[[], Awaitable[None]]) -> None:
    loop.run(main(), seed=1)


def test_rows_go_from_task_to_task_and_are_freed_by_the_last() -> None:
    async def main() -> None:
        it = desk()
        ids = await it.put_prompts([{"prompt": "a"}, {"prompt": "b"}], 2)
        assert ids == ["g0.0", "g0.1", "g1.0", "g1.1"]
        ((first, *_),) = await it.get(ExperienceRequest("rollout", 4), 0.0)
        assert (first.id, first.group, first.values) == ("g0.0", "g0", {"prompt": "a"})
        assert await it.get(ExperienceRequest("rollout", 1), 0.0) == [], "each row once"
        for row in ids:
            assert await put(it, row, {"response": row.upper(), "reward": 1.0}, 0)
        ((trained, other),) = await it.get(ExperienceRequest("train", 1, columns=("response",)), 0.0)
        assert [g.values for g in (trained, other)] == [{"response": "G0.0"}, {"response": "G0.1"}]
        assert it.status()["rows"] == 4, "score has not taken them"
        await it.get(ExperienceRequest("score", 4), 0.0)
        assert (it.status()["rows"], set(it.rows)) == (2, {"g1.0", "g1.1"})

    virtual(main)


def test_a_taker_waits_for_what_comes_and_no_longer() -> None:
    async def main() -> None:
        it, clock = desk(), asyncio.get_running_loop()
        async with asyncio.TaskGroup() as tasks:
            taking = tasks.create_task(it.get(ExperienceRequest("rollout", 2), 10.0))
            late = tasks.create_task(it.get(ExperienceRequest("score", 1), 5.0))
            await asyncio.sleep(3.0)
            await it.put_prompts([{"prompt": "a"}], 2)
        assert len(taking.result()[0]) == 2
        assert (late.result(), clock.time()) == ([], 5.0)

    virtual(main)


def test_what_does_not_fit_is_refused_or_waited_for() -> None:
    async def main() -> None:
        it = ServiceState(ServiceSetup(COLUMNS, {"rollout": ServiceTask(("prompt",))}, capacity=4))
        await it.put_prompts([{"prompt": "a"}], 3)
        with pytest.raises(RequestRefused, match="there is room for 1") as refused:
            await it.put_prompts([{"prompt": "b"}], 2)
        assert refused.value.status == 503
        async with asyncio.TaskGroup() as tasks:
            waiting = tasks.create_task(it.room(2, 10.0))
            await asyncio.sleep(1.0)
            await it.get(ExperienceRequest("rollout", 3), 0.0)
        assert waiting.result() == 4

    virtual(main)


def test_new_weights_are_heard_of_and_drop_what_is_too_old() -> None:
    async def main() -> None:
        it = desk(staleness=1)
        await it.put_prompts([{"prompt": "a"}, {"prompt": "b"}], 2)
        await put(it, "g0.0", {"response": "x"}, 0)
        async with asyncio.TaskGroup() as tasks:
            hearing = tasks.create_task(it.weights(1, 60.0))
            for version in (1, 2):
                await asyncio.sleep(1.0)
                await it.notify(version, f"v{version}")
        assert hearing.result() == (2, "v2")
        assert not await put(it, "g0.1", {"response": "y"}, 2), (
            "its group went with the other, sampled two publishes ago"
        )
        assert await put(it, "g1.0", {"response": "z"}, 2)
        assert it.status()["counts"]["dropped.stale"] == 2
        assert not await put(it, "g1.1", {"response": "z"}, 0), "sampled too long ago already"
        with pytest.raises(RequestRefused, match="versions grow"):
            await it.notify(2, "")
        with pytest.raises(RequestRefused, match="the service knows 2"):
            await put(it, "g1.1", {"response": "z"}, 3)

    virtual(main)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda it: it.put_prompts([{"odd": 1}], 1), "unknown column 'odd'"),
        (lambda it: it.put_prompts([{"prompt": 1}], 0), "group_size 0"),
        (lambda it: it.get(ExperienceRequest("sleep", 1), 0.0), "unknown task 'sleep'"),
        (lambda it: it.get(ExperienceRequest("rollout", 0), 0.0), "count 0"),
        (
            lambda it: it.get(ExperienceRequest("train", 1, at_least=1), 0.0),
            "at_least is for tasks that take single rows",
        ),
        (lambda it: put(it, "g0.0", {"prompt": 2}, None), "was written before"),
    ],
)
def test_a_call_that_breaks_a_rule_is_told(wrong: Callable[[ServiceState], Awaitable[object]], said: str) -> None:
    async def main() -> None:
        it = desk()
        await it.put_prompts([{"prompt": "a"}], 1)
        with pytest.raises(RequestRefused, match=said):
            await wrong(it)

    virtual(main)


def test_batches_for_several_consumers_are_even() -> None:
    async def main() -> None:
        it = desk()
        await it.put_prompts([{"prompt": "a"}], 6, tokens=5)
        batches = await it.get(ExperienceRequest("rollout", 6, consumers=3), 0.0)
        assert [len(b) for b in batches] == [2, 2, 2]

    virtual(main)


STEPS = st.lists(
    st.tuples(st.sampled_from(["prompts", "respond", "reward", "take", "publish", "drop"]), st.integers(0, 7)),
    max_size=40,
)


class Play:
    """Producers, a scorer, a trainer and a client that drops groups, in any order."""

    def __init__(self) -> None:
        self.desk = desk(capacity=12, staleness=1)
        self.put: list[str] = []
        self.taken: dict[str, list[str]] = {name: [] for name in TASKS}
        self.sampled: dict[str, int] = {}

    async def step(self, what: str, n: int) -> None:
        if what == "prompts":
            self.put += await self.desk.put_prompts([{"prompt": n}], 1 + n % 3)
        elif what == "publish":
            await self.desk.notify(self.desk.version + 1, "")
        elif what == "take":
            await self.take(list(TASKS)[n % 3])
        elif self.put:
            await self.change(what, self.put[n % len(self.put)])

    async def change(self, what: str, row: str) -> None:
        if what == "drop":
            await self.desk.drop(row.partition(".")[0], "asked")
        elif what == "reward":
            await put(self.desk, row, {"reward": 1}, None)
        elif await put(self.desk, row, {"response": 1}, self.desk.version):
            self.sampled[row] = self.desk.version

    async def take(self, name: str) -> None:
        for batch in await self.desk.get(ExperienceRequest(name, 1), 0.0):
            self.taken[name] += [g.id for g in batch]
            for one in batch:
                assert set(one.values) == set(TASKS[name].columns), "never before all is written"
                assert self.desk.version - self.sampled.get(one.id, self.desk.version) <= 1


@settings(max_examples=40)
@given(steps=STEPS)
def test_every_row_is_taken_once_by_each_task_or_dropped(steps: list[tuple[str, int]]) -> None:
    async def main() -> None:
        play = Play()
        for what, n in steps:
            with contextlib.suppress(RequestRefused):
                await play.step(what, n)
        for name, rows in play.taken.items():
            assert len(rows) == len(set(rows)), f"{name} took a row twice"
        held = set(play.desk.rows)
        assert len(play.desk.table) == len(held)
        assert all(name == one.row.id for name, one in play.desk.rows.items())
        assert len(held) <= 12
        dropped = sum(count for name, count in play.desk.counts.items() if name.startswith("dropped."))
        freed = set.intersection(*(set(rows) for rows in play.taken.values()))
        assert len(play.put) == len(held) + dropped + len(freed)

    virtual(main)
