"""Deadlines on one timer: each at its time, none that is over, and no memory for those."""

from __future__ import annotations

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.sim import loop as virtual
from serverless.pipeline_timers import Timers


@settings(max_examples=40, deadline=None)
@given(steps=st.lists(st.tuples(st.floats(0.0, 0.5), st.floats(0.0, 5.0), st.booleans()), max_size=60))
def test_each_fires_once_at_its_time_unless_over(steps: list[tuple[float, float, bool]]) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        fired: dict[int, float] = {}
        over: set[int] = set()
        timers: Timers[int] = Timers(lambda n: fired.__setitem__(n, loop.time()), lambda n: n in over or n in fired)
        due: dict[int, float] = {}
        for n, (gap, wait, ends) in enumerate(steps):
            due[n] = loop.time() + wait
            timers.add(due[n], n)
            await asyncio.sleep(gap)
            if ends and n not in fired:
                over.add(n)
        await asyncio.sleep(10.0)
        assert set(fired) == set(due) - over
        assert all(abs(fired[n] - due[n]) < 1e-6 for n in fired)

    virtual.run(main())


def test_what_is_over_is_forgotten() -> None:
    async def main() -> None:
        over: set[int] = set()
        timers: Timers[int] = Timers(over.add, over.__contains__)
        for n in range(10_000):
            timers.add(1e6, n)
            over.add(n)
            assert len(timers._heap) <= 65
        timers.close()

    virtual.run(main())
