"""Environments in the controller's process: whatever a call does, its caller gets an error in time."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from rollart import controller_loop
from rollart.adapters.envs.in_process import in_process
from rollart.errors import one_line
from rollart.model import Observation, Step
from rollart.ports import Environment
from rollart.sim import loop
from rollart.user_code import GRACE_S, UserCodeGuard, declares_quick


class Asked:
    """Its step does what it is given."""

    def __init__(self, step: Callable[[], Awaitable[object]]) -> None:
        self._step = step
        self.closed = False

    async def reset(self, seed: int) -> Observation:
        return Observation(str(seed))

    async def step(self, action: str) -> Step:
        await self._step()
        return Step(Observation(action), 1.0, done=True)

    async def close(self) -> None:
        self.closed = True


class Quick(Asked):
    quick = True


async def swallowing() -> None:
    while True:
        try:
            await asyncio.sleep(3600.0)
        except asyncio.CancelledError:
            pass


async def slow_to_end() -> None:
    try:
        await asyncio.sleep(3600.0)
    finally:
        await asyncio.sleep(2.0)


async def helper_cancelled() -> None:
    helper = asyncio.get_running_loop().create_task(asyncio.sleep(3600.0))
    helper.cancel()
    await helper


async def itself_cancelled() -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await asyncio.sleep(0.0)


async def interrupting() -> None:
    raise KeyboardInterrupt


async def exiting() -> None:
    sys.exit(3)


async def leaving() -> None:
    raise GeneratorExit


class Unreadable(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


async def given_up(environment: Environment, after_s: float) -> float:
    """When the caller of a step that is cancelled goes on."""
    clock = asyncio.get_running_loop()
    began = clock.time()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(after_s):
            await environment.step("")
    return clock.time() - began


def test_a_caller_that_is_cancelled_goes_on_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    made = Asked(swallowing)

    async def main() -> None:
        environment = in_process(lambda: made)()
        assert await given_up(environment, 5.0) == 5.0
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.0):
                await environment.close()
        await asyncio.sleep(GRACE_S)

    loop.run(main(), seed=1)
    assert "step of Asked did not end when it was cancelled: left behind" in capsys.readouterr().err
    assert not made.closed


def test_a_close_waits_for_the_call_before_it() -> None:
    made = Asked(slow_to_end)

    async def main() -> None:
        environment = in_process(lambda: made)()
        assert await given_up(environment, 5.0) == 5.0
        await environment.close()
        assert asyncio.get_running_loop().time() == 7.0

    loop.run(main(), seed=1)
    assert made.closed


@pytest.mark.parametrize("kind", [Asked, Quick])
@pytest.mark.parametrize(
    ("step", "words"),
    [
        (interrupting, "it raised KeyboardInterrupt"),
        (exiting, "it exited with 3"),
        (leaving, "it raised GeneratorExit"),
    ],
)
def test_what_is_no_exception_is_one_outside(
    kind: type[Asked], step: Callable[[], Awaitable[object]], words: str
) -> None:
    async def main() -> None:
        with pytest.raises(RuntimeError, match=words):
            await in_process(lambda: kind(step))().step("")

    loop.run(main(), seed=1)


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (helper_cancelled, "CancelledError of its own"),
        (itself_cancelled, "cancelled its own task"),
    ],
)
def test_a_cancellation_of_its_own_is_an_error(step: Callable[[], Awaitable[object]], words: str) -> None:
    async def main() -> None:
        with pytest.raises(RuntimeError, match=words):
            await in_process(lambda: Asked(step))().step("")

    loop.run(main(), seed=1)


def test_a_quick_environment_that_cancels_its_task_is_no_cancellation_of_the_caller() -> None:
    async def cancelled() -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()

    async def main() -> None:
        with pytest.raises(RuntimeError, match="it cancelled its own task"):
            await in_process(lambda: Quick(cancelled))().step("")
        await asyncio.sleep(1.0)

    loop.run(main(), seed=1)


def test_a_process_that_a_call_forks_ends_where_it_waits(tmp_path: Path) -> None:
    """The loop's sockets are the controller's."""
    children: list[int] = []

    async def forks() -> None:
        children.append(os.fork())
        if children == [0]:
            await asyncio.sleep(0.0)
            (tmp_path / "went on").touch()

    async def main() -> None:
        await in_process(lambda: Asked(forks))().step("")

    try:
        controller_loop.run(main())
    finally:
        if children == [0]:
            os._exit(77)
    assert os.waitpid(children[0], 0)[1] == 0
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_while_users_code_is_made_is_no_error_of_that_code() -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), UserCodeGuard():
        signal.raise_signal(signal.SIGINT)
    with pytest.raises(RuntimeError, match="it raised KeyboardInterrupt"), UserCodeGuard():
        raise KeyboardInterrupt
    with UserCodeGuard():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    assert signal.getsignal(signal.SIGINT) is before


def test_an_error_whose_text_cannot_be_read_has_a_name() -> None:
    assert one_line(Unreadable()) == "Unreadable: (its text cannot be read)"


def test_a_subclass_that_overrides_a_call_promises_for_itself() -> None:
    class Plain:
        quick = True

        async def step(self, action: str) -> None: ...

    class Named(Plain):
        name = "other"

    class Waits(Plain):
        async def step(self, action: str) -> None:
            await asyncio.sleep(1.0)

    class Again(Waits):
        quick = True

    assert [declares_quick(kind()) for kind in (Plain, Named, Waits, Again)] == [True, True, False, True]


def test_a_quick_environment_is_held_to_it() -> None:
    async def nothing() -> None:
        return None

    async def main() -> None:
        assert (await in_process(lambda: Quick(nothing))().step("a")).observation.text == "a"
        with pytest.raises(RuntimeError, match=r"step waited, but its class says `quick = True`"):
            await in_process(lambda: Quick(lambda: asyncio.sleep(1.0)))().step("")

    loop.run(main(), seed=1)


@pytest.mark.parametrize("kind", [Asked, Quick])
@pytest.mark.parametrize(("leave", "code"), [(lambda: None, 0), (lambda: sys.exit(3), 3), (lambda: {}["a"], 1)])
def test_a_process_that_a_call_forks_ends_with_the_call(
    kind: type[Asked], leave: Callable[[], object], code: int
) -> None:
    """It would go on as a second controller, over one ledger and one event loop."""
    children: list[int] = []

    async def forks() -> None:
        children.append(os.fork())
        if children == [0]:
            leave()

    try:
        answer = asyncio.run(in_process(lambda: kind(forks))().step("left"))
    finally:
        if children == [0]:
            os._exit(77)
    assert answer.observation == Observation("left")
    assert os.waitstatus_to_exitcode(os.waitpid(children[0], 0)[1]) == code
