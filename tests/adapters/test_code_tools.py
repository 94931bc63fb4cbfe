"""Programming tasks with tools: how calls are read, what a program sees, and whose fault a failure is."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from rollart.adapters.envs.code_tools import RUN, SUBMIT, CodeTask, CodeTools, read_call, written_call
from rollart.adapters.proxy.messages import ToolCall
from rollart.model import Step
from serverless.errors import SandboxUnavailable
from serverless.sandbox import sandbox
from serverless.sandbox.box import SandboxProcess
from tests.serverless.support import descendants

TESTS = [{"call": "f(1)", "returns": 2}]


def task(seed: int) -> CodeTask:
    return CodeTask("Do it.", TESTS, {"a.txt": "add one"})


def tools(**arguments: Any) -> CodeTools:
    return CodeTools(f"{__name__}:task", **arguments)


@pytest.mark.parametrize(
    ("action", "problem"),
    [
        ("I will do it.", "no tool calls"),
        ("", "no tool calls"),
        ('<tool_call>\n{"name": "submit", "arguments": {"code": "x"}', "no tool calls"),
        ('<tool_call>{"name": "submit"}</tool_call>', "no tool calls"),
        (written_call(RUN, "1") + written_call(SUBMIT, "1"), "2 tool calls"),
        (written_call("rm", "x"), "no tool rm, only run_python and submit"),
        ('<tool_call>{"name": "submit", "arguments": {"code": 3}}</tool_call>', "submit needs code, a string"),
        ('<tool_call>{"name": "run_python", "arguments": {}}</tool_call>', "run_python needs code, a string"),
    ],
)
def test_what_is_no_call_is_answered_by_what_is_wrong_with_it(action: str, problem: str) -> None:
    async def main() -> Step:
        environment = tools()
        await environment.reset(0)
        return await environment.step(action)

    step = asyncio.run(main())
    assert step.observation.text.startswith(f"error: {problem}")
    assert (step.done, step.success, step.reward) == (False, None, 0.0)
    assert step.metadata == {"tests": TESTS, "program": None, "scoring": "share"}


def test_a_call_may_have_thoughts_before_it() -> None:
    program = 'def f(x):\n    return "<tool_call>é" * x'
    assert read_call(f"<think>so</think>{written_call(SUBMIT, program)}") == ToolCall(SUBMIT, {"code": program})


def test_a_submission_ends_the_episode_and_leaves_the_verdict_to_the_reward() -> None:
    async def main() -> Step:
        environment = tools(scoring="all")
        assert (await environment.reset(0)).text == "Do it."
        step = await environment.step(written_call(SUBMIT, "f = 1"))
        await environment.close()
        with pytest.raises(RuntimeError, match="step before reset"):
            await environment.step("")
        return step

    step = asyncio.run(main())
    assert (step.done, step.success, step.reward) == (True, None, 0.0)
    assert step.metadata == {"tests": TESTS, "program": "f = 1", "scoring": "all"}
    with pytest.raises(ValueError, match="scoring must be 'all' or 'share', got 'best'"):
        tools(scoring="best")


def test_a_failing_sandbox_is_an_error_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(*_: object) -> None:
        raise SandboxUnavailable("no sandbox works here")

    monkeypatch.setattr(SandboxProcess, "start", refuse)

    async def main() -> None:
        environment = tools()
        await environment.reset(0)
        with pytest.raises(SandboxUnavailable):
            await environment.step(written_call(RUN, "print(1)"))
        await environment.close()

    asyncio.run(main())


def played(coroutine: Coroutine[Any, Any, Any]) -> Any:
    try:
        with sandbox():
            pass
    except SandboxUnavailable as error:
        coroutine.close()
        pytest.skip(error.message)
    before = set(descendants())
    found = asyncio.run(coroutine)
    assert set(descendants()) <= before, "sandboxes end with the last episode"
    return found


@pytest.mark.slow  # real processes
def test_programs_see_the_files_of_their_task_and_nothing_of_earlier_ones() -> None:
    async def main() -> list[str]:
        first, second = tools(sandboxes=1), tools(sandboxes=1, seconds=0.5, characters=40)
        await first.reset(0)
        await second.reset(1)
        shown = []
        for environment, program in [
            (first, "print(open('a.txt').read()); x = 1; open('b.txt', 'w').write('mine'); f = lambda: x; print(f())"),
            (second, "import os; print(sorted(os.listdir())); print('tests' in globals(), 'x' in globals())"),
            (second, "print('seen')\n1 / 0"),
            (second, "while True: pass"),
            (second, "print('x' * 99)"),
            (second, "import socket; socket.socket()"),
            (second, "def f(:"),
            (second, "import sys; sys.exit()"),
        ]:
            step = await environment.step(written_call(RUN, program))
            assert not step.done
            shown.append(step.observation.text)
        await first.close()
        assert (await second.step(written_call(RUN, "print(2)"))).observation.text == "2", "others may end before"
        await second.close()
        return shown

    assert played(main()) == [
        "add one\n1",
        "['a.txt']\nFalse False",
        "seen\nerror: ZeroDivisionError: division ...",
        "error: time limit",
        "x" * 40 + "...",
        "error: PermissionError: [Errno 1] Operat...",
        "error: SyntaxError: invalid syntax",
        "",
    ]


@pytest.mark.slow  # real processes
def test_an_episode_that_is_given_up_leaves_a_sandbox_to_the_others() -> None:
    async def main() -> None:
        first, second = tools(sandboxes=1, seconds=60.0), tools(sandboxes=1)
        await first.reset(0)
        await second.reset(1)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await first.step(written_call(RUN, "while True: pass"))
        await first.close()
        assert (await second.step(written_call(RUN, "print(3)"))).observation.text == "3"
        await second.close()

    played(main())
