"""Jobs are polled across failures of their host, and ended with their caller, on virtual time."""

from __future__ import annotations

import asyncio

import pytest

from rollart.sim import loop as virtual
from serverless.providers.jobs import poll_job


class Job:
    """A job that answers after `runs_s`, on a host that is unreachable in the seconds `down`. A request waits 10 s."""

    def __init__(self, runs_s: float, down: tuple[float, float] = (0.0, 0.0), end_s: float = 0.0) -> None:
        self._runs_s, self._down, self._end_s = runs_s, down, end_s
        self.ended = False

    async def ask(self) -> str | None:
        now = asyncio.get_running_loop().time
        if self._down[0] <= now() < self._down[1]:
            raise ConnectionError("no route")
        await asyncio.sleep(min(10.0, max(0.0, self._runs_s - now())))
        return "the answer" if now() >= self._runs_s else None

    async def end(self) -> None:
        await asyncio.sleep(self._end_s)
        self.ended = True
        raise ConnectionError("no route")

    async def poll(self) -> tuple[str, float]:
        answer = await poll_job(self.ask, self.end, lost=(ConnectionError,), pause_s=1.0)
        return answer, asyncio.get_running_loop().time()


def test_a_job_is_polled_until_it_answers() -> None:
    assert virtual.run(Job(35.0).poll()) == ("the answer", 35.0)


def test_a_host_that_is_unreachable_for_less_than_a_minute_loses_no_job() -> None:
    assert virtual.run(Job(100.0, down=(20.0, 79.0)).poll()) == ("the answer", 100.0)
    with pytest.raises(ConnectionError, match="no route"):
        virtual.run(Job(100.0, down=(20.0, 81.5)).poll())


@pytest.mark.parametrize(("end_s", "ended"), [(1.0, True), (1e6, False)])
def test_a_deadline_ends_the_job_in_bounded_time(end_s: float, ended: bool) -> None:
    job = Job(1e6, end_s=end_s)

    async def main() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(30.0):
                await job.poll()
        return asyncio.get_running_loop().time()

    assert virtual.run(main()) == 30.0 + min(end_s, 5.0)
    assert job.ended is ended
