"""Idle environments of a host: bounds, and that no environment plays again after a failure."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollart.adapters.envs.seats import DomainFactory, EnvironmentLoop
from rollart.adapters.envs.warm import IdleEnvironment, WarmPool, start_environment
from tests.contracts.warm_worlds import Again, Once


async def settled(pool: WarmPool) -> None:
    """Everything that is being made is made. No clock: each making takes a few turns of the loop."""
    while pool.making:
        await asyncio.sleep(0)


def pool_of(make: Callable[[], Once], *, size: int, reuse: int = 1) -> WarmPool:
    loop = asyncio.get_running_loop()
    return WarmPool("lake", DomainFactory(make), lambda name: EnvironmentLoop(loop), size, reuse)


@given(
    st.integers(0, 4),
    st.integers(1, 4),
    st.booleans(),
    st.lists(st.tuples(st.sampled_from(["begin", "end", "fail", "settle"]), st.integers(0, 5)), max_size=30),
)
def test_bounds_hold_after_any_moves(size: int, reuse: int, again: bool, moves: list[tuple[str, int]]) -> None:
    async def play() -> None:
        kind = Again if again else Once
        playing: list[IdleEnvironment] = []
        failed: list[object] = []
        async with asyncio.TaskGroup() as tasks:
            pool = pool_of(kind, size=size, reuse=reuse)
            pool.open(tasks)
            for move, which in moves:
                if move == "begin":
                    idle = pool.take()
                    if idle is None:  # as a host does: the episode makes its own
                        made = await start_environment(kind)
                        idle = IdleEnvironment(EnvironmentLoop(asyncio.get_running_loop()), made)
                        pool.mark_in_use(made)
                    assert idle.environment not in [other.environment for other in playing]
                    assert all(idle.environment is not one for one in failed)
                    assert idle.played < reuse
                    playing.append(idle)
                elif move == "settle":
                    await settled(pool)
                elif playing:
                    idle = playing.pop(which % len(playing))
                    if move == "fail":
                        failed.append(idle.environment)
                    idle = dataclasses.replace(idle, played=idle.played + 1)
                    if pool.give_back(idle, healthy=move == "end"):
                        assert again
                        assert move == "end"
                        assert idle.played < reuse
                assert len(pool.idle) + pool.making <= size
                assert pool.in_use == (len(playing) if again and reuse > 1 and size else 0)
            await settled(pool)
            waiting = [idle.environment for idle in pool.idle]
            await pool.close()
            assert all(isinstance(one, Once) and one.closed for one in waiting)
            assert not pool.idle

    asyncio.run(play())


def test_as_many_as_wanted_are_made_ahead_and_made_again() -> None:
    async def play() -> None:
        async with asyncio.TaskGroup() as tasks:
            pool = pool_of(Once, size=3)
            pool.open(tasks)
            await settled(pool)
            assert len(pool.idle) == 3
            idle = pool.take()
            assert idle is not None
            assert isinstance(idle.environment, Once)
            assert idle.environment.began
            assert pool.making == 1
            assert not pool.give_back(idle, healthy=True)  # it does not say that it may be used again
            await settled(pool)
            assert len(pool.idle) == 3
            await pool.close()

    asyncio.run(play())


def test_an_environment_that_cannot_be_made_is_not_retried_for_ever() -> None:
    tries: list[int] = []

    def broken() -> Once:
        tries.append(1)
        if len(tries) < 4:
            raise OSError("no room")
        return Once()

    async def play() -> None:
        async with asyncio.TaskGroup() as tasks:
            pool = pool_of(broken, size=3)
            pool.open(tasks)
            await settled(pool)
            assert (len(tries), len(pool.idle), pool.failing) == (3, 0, True)
            assert pool.take() is None
            made = await start_environment(broken)  # an episode's own try, which goes well
            pool.mark_in_use(made)
            await settled(pool)
            assert (len(tries), len(pool.idle)) == (7, 3)
            await pool.close()

    asyncio.run(play())


def test_an_environment_whose_start_fails_is_closed() -> None:
    class Half(Once):
        made: list[Half] = []  # noqa: RUF012

        async def start(self) -> None:
            self.made.append(self)
            raise OSError("no container")

    with pytest.raises(OSError, match="no container"):
        asyncio.run(start_environment(Half))
    assert [one.closed for one in Half.made] == [True]
