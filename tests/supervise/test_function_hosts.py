"""The fleet of function workers' hosts on virtual time: starts, deaths, hangs, retirement, hosts that never stay."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollart.errors import EnvironmentFault, PartDied
from rollart.hosted import HostHealth
from rollart.supervise.function_hosts import FunctionHostSupervisor
from rollart.supervise.supervisor import HostLimits
from rollart.testing.laws import find_tiling_errors
from tests.supervise.hosts import HostBench, HostProcess, play, running

LIMITS = HostLimits(health_s=10.0, start_s=5.0)


class Link:
    """A host's client: one life of it."""

    def __init__(self, name: str, notify: Callable[[], None]) -> None:
        self.id, self.resting = name, False
        self.live = self.answered = self.workers = 0
        self.silent = self.leaving = False
        self._notify = notify
        self._gone, self._changed = asyncio.Event(), asyncio.Event()

    def call(self, change: int) -> None:
        """A call begins or ends, in a worker of its own."""
        self.live += change
        self.workers += change
        self.answered += change < 0
        self._changed.set()
        self._notify()

    async def health(self) -> HostHealth:
        if self.silent:
            await self._gone.wait()
        if self._gone.is_set():
            raise EnvironmentFault(self.id, "it is gone", incident="its end")
        return HostHealth(self.live)

    async def lost(self) -> str:
        await self._gone.wait()
        return "its connection broke"

    def leave(self) -> None:
        self.leaving = True
        self._changed.set()

    async def emptied(self) -> None:
        while self.workers or not self.leaving:
            self._changed.clear()
            await self._changed.wait()

    async def aclose(self) -> None:
        self._gone.set()


class Part(HostProcess[Link]):
    role = "reward"

    async def start(self, notify: Callable[[], None]) -> Link:
        return await self.begin(lambda: Link(self.id, notify))


class Bench(HostBench[Part]):
    def __init__(self, count: int, limits: HostLimits = LIMITS) -> None:
        super().__init__(Part)
        names = (f"reward-{n}" for n in itertools.count())
        self.fleet = FunctionHostSupervisor(
            self.part, names, count, leases=self.leases, recorder=self.recorder, limits=limits
        )


def test_a_host_is_busy_while_calls_are_in_it() -> None:
    async def main() -> None:
        bench = Bench(1)
        async with running(bench):
            (link,) = bench.parts["reward-0"].lives
            await asyncio.sleep(1.0)
            link.call(1)
            await asyncio.sleep(2.0)
            link.call(1)
            await asyncio.sleep(2.0)
            link.call(-1)
            link.call(-1)
            await asyncio.sleep(3.0)
        seconds: dict[str, float] = {}
        for one in bench.recorder.intervals:
            seconds[one.state] = seconds.get(one.state, 0.0) + one.t1 - one.t0
        assert seconds == {"startup": 1.0, "idle": 4.0, "busy": 4.0}
        assert bench.parts["reward-0"].closed

    play(main)


def test_a_host_that_dies_is_started_again_and_no_other_is_touched() -> None:
    async def main() -> None:
        bench = Bench(2)
        async with running(bench):
            part = bench.parts["reward-1"]
            part.lives[0].call(1)
            await part.die()
            await asyncio.sleep(3.0)
            assert bench.events("host_lost") == [
                ("reward-1", {"cause": "its process was killed by SIGKILL", "calls": 1})
            ]
            assert [len(one.lives) for one in bench.parts.values()] == [1, 2]
        assert find_tiling_errors(bench.recorder.intervals) == []
        assert ("startup", "host_restart") in {(i.state, i.cause) for i in bench.recorder.intervals}

    play(main)


def test_a_host_that_hangs_is_started_again() -> None:
    async def main() -> None:
        bench = Bench(1)
        async with running(bench):
            bench.parts["reward-0"].lives[0].silent = True
            await asyncio.sleep(20.0)
            assert [f["cause"] for _, f in bench.events("host_lost")] == ["it was silent for 10 s"]
            assert len(bench.parts["reward-0"].lives) == 2

    play(main)


def test_a_host_that_never_starts_is_given_up_while_another_serves() -> None:
    async def main() -> None:
        bench = Bench(2)
        async with running(bench):
            bench.broken.add("reward-0")
            await bench.parts["reward-0"].die()
            await asyncio.sleep(100.0)
            assert [name for name, _ in bench.events("host_given_up")] == ["reward-0"]
            assert bench.fleet.names == ("reward-1",)
            assert bench.parts["reward-0"].closed

    play(main)


def test_the_last_host_that_never_starts_ends_the_fleet() -> None:
    async def main() -> None:
        bench = Bench(1)
        bench.broken.add("reward-0")
        with pytest.raises(ExceptionGroup) as caught:
            await bench.fleet.run()
        (error,) = caught.value.exceptions
        assert isinstance(error, PartDied)
        assert "ended with status 1 before it was ready, after 5 restarts" in error.message
        assert bench.parts["reward-0"].closed

    play(main)


def test_the_last_host_waits_for_a_node_as_long_as_the_run_does() -> None:
    async def main() -> None:
        bench = Bench(2, replace(LIMITS, patience_s=7200.0))
        async with running(bench):
            first, last = bench.parts.values()
            first.homeless = last.homeless = True
            await first.die()
            await last.die()
            await asyncio.sleep(7000.0)
            assert [name for name, _ in bench.events("host_given_up")] == ["reward-0"]
            last.homeless = False
            await asyncio.sleep(60.0)
            assert bench.fleet.up() == {"reward-1"}
            last.homeless = True
            await last.die()
            await asyncio.sleep(7000.0)
            assert bench.fleet.names == ("reward-1",)

    play(main)


def test_one_that_answers_between_its_ends_is_never_given_up() -> None:
    async def main() -> None:
        bench = Bench(1)
        async with running(bench):
            part = bench.parts["reward-0"]
            for life in range(12):
                part.lives[-1].call(1)
                part.lives[-1].call(-1)
                await part.die()
                await asyncio.sleep(3.0)
                assert len(part.lives) == life + 2

    play(main)


def test_a_host_retires_with_its_last_call_and_new_ones_come() -> None:
    async def main() -> None:
        bench = Bench(2)
        async with running(bench):
            for part in bench.parts.values():
                part.lives[0].call(1)
            bench.parts["reward-0"].lives[0].call(1)
            await bench.fleet.resize(1)
            assert bench.fleet.names == ("reward-0",), "the one with the fewest workers goes"
            going = bench.parts["reward-1"]
            await asyncio.sleep(60.0)
            assert not going.closed
            going.lives[0].call(-1)
            await asyncio.sleep(0.1)
            assert going.closed
            await bench.fleet.resize(3)
            await asyncio.sleep(2.0)
            assert bench.fleet.names == ("reward-0", "reward-2", "reward-3")
            await bench.fleet.resize(0)
            assert len(bench.fleet.names) == 1
        assert all(part.closed for part in bench.parts.values())
        assert find_tiling_errors(bench.recorder.intervals) == []

    play(main)


@pytest.mark.slow
@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["die", "hang", "call", "answer", "resize"]), st.integers(0, 4)), max_size=20
    ),
    seed=st.integers(0, 2**16),
)
def test_whatever_happens_time_is_whole_and_nothing_stays_open(steps: list[tuple[str, int]], seed: int) -> None:
    async def main() -> None:
        bench = Bench(2)
        async with running(bench):
            for what, n in steps:
                if what == "resize":
                    await bench.fleet.resize(n)
                    assert len(bench.fleet.names) == max(1, n)
                links = [part.lives[-1] for part in bench.parts.values() if part.lives and not part.closed]
                if links and what != "resize":
                    link = links[n % len(links)]
                    if what == "die":
                        await bench.parts[link.id].die()
                    elif what == "hang":
                        link.silent = True
                    elif what == "call":
                        link.call(1)
                    elif link.live:
                        link.call(-1)
                await asyncio.sleep(1.5)
        assert all(part.closed for part in bench.parts.values())
        assert find_tiling_errors(bench.recorder.intervals) == []

    play(main, seed)
