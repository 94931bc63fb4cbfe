"""The controller's loop and its watch: no callback and no call of users' code holds them."""

from __future__ import annotations

import asyncio
import re
import signal
import sys
from collections.abc import Callable

import pytest

from rollart import controller_loop
from rollart.adapters.envs.in_process import in_process
from rollart.controller_loop import ControllerLoop, LoopWatchdog
from rollart.leases import Expiry, Leases
from rollart.model import Observation, Step
from rollart.testing.ledger import MemoryRecorder


class World:
    """Its step does what it is given."""

    def __init__(self, step: Callable[[], object]) -> None:
        self._step = step

    async def reset(self, seed: int) -> Observation:
        return Observation(str(seed))

    async def step(self, action: str) -> Step:
        self._step()
        return Step(Observation(action), 1.0, done=True)

    async def close(self) -> None:
        return None


def watched(step: Callable[[], object], after_s: float = 0.0) -> Step:
    """One step of an environment on the controller's loop; calls that block it are interrupted after a second."""

    def end(why: str, interrupted: bool) -> None:
        raise AssertionError(why)

    async def main() -> Step:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, ControllerLoop)
        watch = LoopWatchdog(loop, stop=lambda: None, say=lambda holder, seconds: None, end=end, limit_s=1.0)
        with watch.watching():
            answer = await in_process(lambda: World(step))().step("a")
            await asyncio.sleep(after_s)
            assert signal.getsignal(signal.SIGINT) not in (signal.SIG_IGN, signal.SIG_DFL)
        return answer

    return controller_loop.run(main())


def interrupt() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("callback", [interrupt, sys.exit, lambda: asyncio.get_running_loop().stop()])
def test_a_callback_that_exits_or_stops_the_loop_ends_nothing(
    callback: Callable[[], object], capsys: pytest.CaptureFixture[str]
) -> None:
    assert watched(lambda: asyncio.get_running_loop().call_soon(callback)).reward == 1.0
    assert "rollart: a callback on the controller's loop: " in capsys.readouterr().err


def test_a_background_task_that_fails_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    async def fails() -> None:
        raise ValueError("no")

    assert watched(lambda: asyncio.get_running_loop().create_task(fails(), name="mine")).reward == 1.0
    told = capsys.readouterr().err
    assert "rollart: task 'mine' of users' code ended: ValueError: no (test_controller_loop.py:" in told
    assert "Traceback" not in told


class Jumping(ControllerLoop):
    """A loop whose process was stopped: its clock goes on by `ahead_s` in the middle of a turn."""

    ahead_s = 0.0

    def time(self) -> float:
        return super().time() + self.ahead_s

    def jump(self, seconds: float) -> None:
        self.ahead_s += seconds


def test_a_pause_moves_timers_and_deadlines() -> None:
    loop, rung = Jumping(), list[str]()
    leases = Leases(MemoryRecorder())
    loop.on_pause = leases.moved

    async def main() -> None:
        loop.call_later(5.0, rung.append, "before the pause")
        with leases.hold("lake-1", "a step of its environment", 5.0, Expiry.GAP_FILL) as lease:
            due = lease.deadline
            loop.call_soon(loop.jump, 1000.0)
            await asyncio.sleep(0.01)
            assert lease.deadline == pytest.approx(due + 1000.0, abs=1.0)
        loop.call_later(0.01, rung.append, "after it")
        await asyncio.sleep(0.02)

    loop.run_until_complete(main())
    loop.close()
    assert rung == ["after it"]
    assert loop.paused_s == pytest.approx(1000.0, abs=1.0)


@pytest.mark.slow  # the watch looks once a second
def test_a_callback_that_blocks_the_loop_is_interrupted(capsys: pytest.CaptureFixture[str]) -> None:
    def busy() -> None:
        while True:
            pass

    assert watched(lambda: asyncio.get_running_loop().call_soon(busy)).reward == 1.0
    assert "a callback of users' code ended: HeldTooLong: it held the controller" in capsys.readouterr().err


@pytest.mark.slow  # the watch looks once a second
def test_calls_that_block_one_turn_are_each_held_to_their_own_time() -> None:
    def busy() -> None:
        while True:
            pass

    async def main() -> list[object]:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, ControllerLoop)
        watch = LoopWatchdog(loop, stop=lambda: None, say=lambda *_: None, end=lambda *_: None, limit_s=2.0)
        with watch.watching():
            steps = [in_process(lambda: World(busy))().step("a") for _ in range(3)]
            return list(await asyncio.gather(*steps, return_exceptions=True))

    assert [str(error).partition(" in ")[0] for error in controller_loop.run(main())] == [
        "it held the controller for 2 s"
    ] * 3


@pytest.mark.slow  # the same by CPU time, 3 s
def test_a_call_that_holds_the_interpreter_is_interrupted() -> None:
    """The watch's thread cannot run meanwhile."""
    with pytest.raises(RuntimeError, match="it held the controller for 1 s in "):
        watched(lambda: re.match(r"(a+)+$", "a" * 60 + "b"))


@pytest.mark.slow  # the watch looks once a second
def test_signals_that_an_environment_takes_are_taken_back() -> None:
    assert watched(lambda: signal.signal(signal.SIGINT, signal.SIG_IGN), 2.5).reward == 1.0
