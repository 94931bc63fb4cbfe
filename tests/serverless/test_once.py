"""One execution per key, on virtual time."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.sim import loop as virtual
from serverless.backends.once import IdempotencyStore, IdempotentResponse, KeyReused, ResponseGone


class Work:
    def __init__(self, group: asyncio.TaskGroup, **settings: Any) -> None:
        self.once = IdempotencyStore(group.create_task, **settings)
        self.runs: list[str] = []

    async def call(
        self, key: str, *, seconds: float = 1.0, body: bytes = b"x", executed: bool = True
    ) -> IdempotentResponse:
        async def run() -> IdempotentResponse:
            self.runs.append(key)
            await asyncio.sleep(seconds)
            return IdempotentResponse(200, body, executed=executed)

        return await self.once.call(key, b"digest", run)


def test_calls_of_one_key_share_one_execution_while_it_runs_and_after() -> None:
    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            work = Work(group)
            first = group.create_task(work.call("k"))
            await asyncio.sleep(0.5)
            assert await work.call("k") == await first == await work.call("k")
            assert work.runs == ["k"]
            await asyncio.sleep(31.0)
            await work.call("k")
            assert work.runs == ["k", "k"], "half a minute later it is another call's"
            with pytest.raises(KeyReused):
                await work.once.call("k", b"another", lambda: asyncio.sleep(0.0, IdempotentResponse(200, b"")))

    virtual.run(main())


def test_who_comes_back_in_time_finds_the_call_and_who_does_not_ends_it() -> None:
    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            work = Work(group, linger_s=1.0)
            for away, outcome in ((0.9, IdempotentResponse(200, b"x")), (1.1, ResponseGone)):
                key = str(away)
                first = group.create_task(work.call(key, seconds=5.0))
                await asyncio.sleep(0.1)
                first.cancel()
                await asyncio.sleep(away)
                if outcome is ResponseGone:
                    with pytest.raises(ResponseGone):
                        await work.call(key)
                else:
                    assert await work.call(key) == outcome
            assert work.runs == ["0.9", "1.1"]

    virtual.run(main())


def test_what_was_not_executed_leaves_its_key_free() -> None:
    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            work = Work(group)
            await work.call("k", executed=False)
            await work.call("k")
            assert work.runs == ["k", "k"]

    virtual.run(main())


def test_answers_are_bounded_in_bytes_and_a_key_without_its_answer_is_not_repeated() -> None:
    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            work = Work(group, most_bytes=100)
            for key in "abc":
                await work.call(key, body=bytes(40))
            with pytest.raises(ResponseGone):
                await work.call("a")
            assert (await work.call("c")).body == bytes(40)
            assert work.runs == ["a", "b", "c"]

    virtual.run(main())


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**16), keys=st.integers(1, 6), count=st.integers(1, 60))
def test_no_key_is_executed_twice_whoever_comes_and_goes(seed: int, keys: int, count: int) -> None:
    rng = random.Random(seed)

    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            work = Work(group, linger_s=0.3, most_bytes=200)
            tasks: list[asyncio.Task[None]] = []

            async def one(key: str, seconds: float) -> None:
                try:
                    answer = await work.call(key, seconds=seconds, body=key.encode() * 40)
                    assert answer.body == key.encode() * 40
                except ResponseGone:
                    pass

            for _ in range(count):
                tasks.append(group.create_task(one(str(rng.randrange(keys)), rng.choice([0.0, 0.1, 1.0]))))
                await asyncio.sleep(rng.choice([0.0, 0.01, 0.2]))
                if rng.random() < 0.4:
                    rng.choice(tasks).cancel()
            await asyncio.sleep(2.0)
            assert len(work.runs) == len(set(work.runs))
            await asyncio.sleep(40.0)
            await work.call("last", seconds=0.0)
            assert len(work.once) == 1, "nothing is remembered for ever"

    virtual.run(main(), seed=seed)
