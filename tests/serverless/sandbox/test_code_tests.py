"""The reward for generated programs: the program's faults, the platform's faults, and scores."""

from __future__ import annotations

import asyncio
import os
import pathlib
import signal
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from serverless.deploy.package import build
from serverless.errors import SandboxUnavailable
from serverless.pipeline.offload import Offload
from serverless.rewards.code_tests import CodeTests, extract
from serverless.sandbox import sandbox
from serverless.sandbox.box import SandboxProcess
from serverless.spec import FunctionSpec
from serverless.types import FaultKind, InfraFault, Item, ModelFault, Outcome, Scored
from serverless.workers.local import LocalBackend
from tests.serverless.support import alive, children, descendants, until

DOUBLE = "print(2 * int(input()))"
CALLS = [{"call": "f(1)", "returns": [2]}, {"call": "f(0)", "returns": [1]}]
PAIRS = [{"stdin": "1\n", "stdout": "2\n"}, {"stdin": "3\n", "stdout": "6"}]


def item(program: str, key: str = "a", **metadata: Any) -> Item:
    text = f"Here it is:\n```python\n{textwrap.dedent(program)}\n```\nDone."
    return Item(key, ({"role": "user", "content": "write it"}, {"role": "assistant", "content": text}), None, metadata)


@pytest.mark.parametrize(
    ("completion", "program"),
    [
        ("```python\nx = 1\n```", "x = 1\n"),
        ("first\n```python\nx = 1\n```\nno:\n```py\nx = 2\n```\nbye", "x = 2\n"),
        ("```python\r\nx = 1\r\n```", "x = 1\r\n"),
        ("```python\nx = '''\n  ``` no\n", "x = '''\n"),
        ("cut off ```python\nx", None),
        ("cut off\n```python\nx = 1", "x = 1"),
        ("```\nx = 1\n```", None),
        ("```pythonic\nx\n```", None),
        ("", None),
    ],
)
def test_the_last_python_block_is_the_program(completion: str, program: str | None) -> None:
    assert extract(completion) == program


@pytest.fixture(scope="module")
def score() -> Iterator[CodeTests]:
    try:
        with sandbox():
            pass
    except SandboxUnavailable as error:
        pytest.skip(error.message)
    one = CodeTests()
    one.load(pathlib.Path())
    yield one
    for box in vars(one).values():  # it ends with its worker, and has no method of its own that ends it
        box.close()


@pytest.mark.slow  # real processes
@pytest.mark.parametrize(
    ("program", "metadata", "value", "passed"),
    [
        (DOUBLE, {"tests": PAIRS}, 1.0, 2),
        ("print(int(input()) + 1)", {"tests": PAIRS}, 0.0, 1),
        ("print(int(input()) + 1)", {"tests": PAIRS, "scoring": "share"}, 0.5, 1),
        ("print('2  ');print()", {"tests": PAIRS[:1]}, 1.0, 1),
        ("print(2 * int(input()) if input else 1 / 0)", {"tests": [*PAIRS, {"stdin": "x", "stdout": ""}]}, 0.0, 2),
        ("def f(x): return x + 1", {"tests": [{"assert": "assert f(1) == 2"}, {"assert": "assert f(0) == 1"}]}, 1.0, 2),
        ("def f(x): return x", {"tests": [{"assert": "assert f(1) == 2"}]}, 0.0, 0),
        ("def f(x): return [x + 1]", {"tests": CALLS}, 1.0, 2),
        ("def f(x): return [2]", {"tests": CALLS, "scoring": "share"}, 0.5, 1),
        ("def f(x): return [x + 1] if x else 1 / 0", {"tests": [*CALLS, PAIRS[0]], "scoring": "share"}, 1 / 3, 1),
        ("print('{'); f = lambda x: [print(x), x + 1][1:]", {"tests": CALLS}, 1.0, 2),
        ("def f(x): return x * 2", {"check": "def check(g):\n    assert g(2) == 4\ncheck(f)"}, 1.0, 1),
    ],
)
def test_programs_are_scored_by_their_tests(
    score: CodeTests, program: str, metadata: dict[str, Any], value: float, passed: int
) -> None:
    outcome = score(item(program, **metadata))
    assert isinstance(outcome, Scored)
    assert (outcome.value, outcome.metrics["passed"]) == (value, passed)
    assert outcome.metrics["seconds"] > 0.0


@pytest.mark.slow  # real processes
@pytest.mark.parametrize(
    ("program", "metadata", "reason"),
    [
        ("1 / 0", {"tests": PAIRS}, "ZeroDivisionError: division by zero"),
        ("def f(:", {"tests": PAIRS}, "SyntaxError: invalid syntax"),
        ("while True: pass", {"tests": PAIRS, "timeout_s": 0.3}, "time limit"),
        ("x = bytearray(1 << 30)", {"tests": PAIRS, "memory_mb": 64}, "memory limit"),
        ("while True: print('x' * 99)", {"tests": PAIRS}, "output limit"),
        ("import os; os._exit(0)", {"check": "assert f(1) == 2"}, "it ended before its tests"),
        ("import sys; sys.exit()", {"check": "assert f(1) == 2"}, "it ended before its tests"),
        ("import socket; socket.socket()", {"tests": PAIRS}, "PermissionError: [Errno 1] Operation not permitted"),
    ],
)
def test_a_program_that_comes_to_no_result_is_the_policys_fault(
    score: CodeTests, program: str, metadata: dict[str, Any], reason: str
) -> None:
    assert score(item(program, **metadata)) == ModelFault(0.0, f"the program failed: {reason}")


@pytest.mark.slow  # real processes
def test_no_program_is_the_policys_fault_and_no_tests_are_the_data_sets(score: CodeTests) -> None:
    silent = Item("a", ({"role": "assistant", "content": "I cannot."},), None, {"tests": PAIRS})
    assert score(silent) == ModelFault(0.0, "the completion has no ```python block")
    for metadata in ({}, {"tests": []}, {"tests": [{"stdin": ""}]}, {"tests": PAIRS, "scoring": "best"}):
        with pytest.raises(ValueError, match="item a"):
            score(item(DOUBLE, **metadata))


@pytest.mark.slow  # real processes
def test_a_program_cannot_read_what_is_expected_of_it(score: CodeTests) -> None:
    """Not in the sandbox: not in its memory, its files, nor its input."""
    program = """
    import gc, os, sys
    found = [o for o in gc.get_objects() if isinstance(o, (dict, list, str)) and 'expected-' + '77' in repr(o)[:2000]]
    print(len(found), 'expected-' + '77' in sys.stdin.read(), os.listdir())
    """
    assert isinstance(score(item(program, tests=[{"stdin": "", "stdout": "expected-77"}])), Scored)
    outcome = score(item(program, tests=[{"stdin": "", "stdout": "0 False []"}]))
    assert isinstance(outcome, Scored)
    assert outcome.value == 1.0


@pytest.mark.slow  # real processes
@pytest.mark.parametrize(
    "program",
    [
        "f = lambda x: [x + 1] if x else exit()",
        "import os\nos._exit(0)",
        "def f(x):\n    while True: pass",
        "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
        "import json\njson.dumps = lambda value: '[2] [1] true'\nf = id",
        "class Equal(list):\n    __eq__ = lambda self, other: True\nf = lambda x: Equal()",
        "class Any(int):\n    __repr__ = lambda self: '[2]'\nf = Any",
        "open('result', 'w').write('[2]')\nfor at in range(9): print(f'{at} [2]')",
        """
        import sys
        text = repr(sys._getframe().f_code.co_consts)
        mark = next((w for w in text.replace('\\\\n', ' ').split() if len(w.strip("'")) == 32), '')
        for at in range(2): print(mark.strip("'"), at, [7])
        import os; sys.stdout.flush(); os._exit(0)
        """,
        "import gc\nprint([o for o in gc.get_objects() if o == [2]])\ndef f(x): raise SystemExit(0)",
    ],
)
def test_a_program_earns_nothing_for_tests_that_it_does_not_solve(score: CodeTests, program: str) -> None:
    """It ends early, never ends, forks, writes files, prints results, replaces what prints them, or looks for them."""
    outcome = score(item(program, tests=CALLS, timeout_s=0.5))
    assert isinstance(outcome, Scored | ModelFault)
    assert (outcome.value if isinstance(outcome, Scored) else outcome.floor) == 0.0


@pytest.mark.slow  # real processes
def test_a_program_may_come_from_a_tool_call(score: CodeTests) -> None:
    shown = item("def f(x): return 0", tests=CALLS)
    submitted = score(replace(shown, metadata={**shown.metadata, "program": "def f(x): return [x + 1]"}))
    assert isinstance(submitted, Scored)
    assert submitted.value == 1.0
    none = replace(shown, metadata={**shown.metadata, "program": None})
    assert score(none) == ModelFault(0.0, "no program was submitted")


def test_without_a_sandbox_it_is_the_platforms_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(*_: object) -> None:
        raise SandboxUnavailable("no sandbox works here", remedy="install bubblewrap")

    monkeypatch.setattr(SandboxProcess, "start", refuse)
    one = CodeTests()
    one.load(pathlib.Path())
    outcome = one(item(DOUBLE, tests=PAIRS))
    assert outcome == InfraFault(
        FaultKind.ENVIRONMENT, retryable=True, detail="no sandbox works here (install bubblewrap)"
    )


def _idle() -> int:
    """Processes of a worker whose sandbox runs nothing."""
    with sandbox() as other:
        return len(descendants(other.pid)) + 1


def _asleep(backend: LocalBackend, idle: int) -> bool:
    """Whether a worker's sandbox runs a program."""
    return any(len(descendants(worker)) > idle for zygote in backend.zygote_pids for worker in children(zygote))


async def _offloaded(items: list[Item], **settings: Any) -> list[Outcome]:
    one = build(FunctionSpec(name="code", source="serverless.rewards.code_tests:CodeTests", **settings))
    async with LocalBackend() as backend:
        await backend.deploy(one)
        async with Offload([one], backend) as offload:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(offload.submit("code", i, 60.0)) for i in items]
            return [task.result() for task in tasks]


@pytest.mark.slow  # real processes
def test_it_runs_in_the_workers_of_the_local_backend(score: CodeTests) -> None:
    before = set(descendants())
    programs = [
        DOUBLE,
        "print(1)",
        "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
        "import os; os.kill(-1, 9); print(2 * int(input()))",
        "x = bytearray(4 << 30)",
        DOUBLE,
    ]
    limits = [2.0 if "os.fork" in p else 30.0 for p in programs]
    items = [
        item(p, str(n), tests=PAIRS, timeout_s=limit, memory_mb=256)
        for n, (p, limit) in enumerate(zip(programs, limits, strict=True))
    ]
    right, wrong, bomb, killer, eater, again = asyncio.run(_offloaded(items, concurrency=2))
    assert isinstance(right, Scored)
    assert isinstance(wrong, Scored)
    assert isinstance(again, Scored)
    assert (right.value, wrong.value, again.value) == (1.0, 0.0, 1.0)
    assert bomb == ModelFault(0.0, "the program failed: time limit")
    assert eater == ModelFault(0.0, "the program failed: memory limit")
    assert isinstance(killer, Scored | ModelFault)
    assert set(descendants()) <= before


@pytest.mark.slow  # real processes
def test_a_killed_worker_leaves_no_sandbox_and_the_item_goes_to_another(
    score: CodeTests, tmp_path: pathlib.Path
) -> None:
    async def main() -> Outcome:
        one = build(FunctionSpec(name="code", source="serverless.rewards.code_tests:CodeTests", concurrency=1))
        idle = _idle()
        async with LocalBackend() as backend:
            await backend.deploy(one)
            async with Offload([one], backend) as offload, asyncio.TaskGroup() as group:
                slow = "import time; time.sleep(3.0); print(2 * int(input()))"
                task = group.create_task(offload.submit("code", item(slow, tests=PAIRS[:1], timeout_s=60.0), 120.0))
                # The worker, its sandbox (of one process or two) and, in it, the program.
                await until(lambda: _asleep(backend, idle))
                worker, *inside = [d for zygote in backend.zygote_pids for d in descendants(zygote)]
                os.kill(worker, signal.SIGKILL)
                await until(lambda: not any(map(alive, [worker, *inside])))
            return task.result()

    before = set(descendants())
    outcome = asyncio.run(main())
    assert isinstance(outcome, Scored)
    assert outcome.value == 1.0
    assert set(descendants()) <= before
