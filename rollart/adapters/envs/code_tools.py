"""Programming tasks with tools: the policy runs code in a sandbox, then submits a program, which reward functions test.

    environment: rollart.adapters.envs.code_tools:CodeTools
    environment_args: {tasks: "my_tasks:task"}
    chat: {observations: tool, tools: "rollart.adapters.envs.code_tools:TOOLS"}
    rewards: [{function: tests}]
    success_at: 1.0

The tests travel with the last step's metadata to `serverless.rewards.code_tests:CodeTests`. Nothing here runs them: no
program of the policy shares a sandbox with them.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

from rollart.adapters.envs.lookup import attribute_at
from rollart.adapters.proxy.messages import ToolCall
from rollart.adapters.proxy.tool_calls import CLOSE_TAG, OPEN_TAG, parse_answer
from rollart.model import Observation, Step
from serverless.sandbox import AsyncBox, Limits, Ran, Status, sandbox


def _tool(name: str, description: str, argument: str) -> dict[str, Any]:
    code = {"type": "string", "description": argument}
    parameters = {"type": "object", "properties": {"code": code}, "required": ["code"]}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


RUN, SUBMIT = "run_python", "submit"

TOOLS = [
    _tool(RUN, "Runs a program and shows what it prints.", "the program"),
    _tool(SUBMIT, "Hands in the final program and ends the task.", "the final program"),
]
"""The schemas that the model's chat template shows."""


@dataclass(frozen=True, slots=True)
class CodeTask:
    """A task. `tests` are those of `serverless.rewards.code_tests`; `files` are in the directory in which programs of
    `run_python` run; `solution` is a worked example: pairs of a tool's name and a program, the last one submitted."""

    question: str
    tests: list[dict[str, Any]]
    files: Mapping[str, str] = field(default_factory=dict)
    solution: tuple[tuple[str, str], ...] = ()


class CodeTools:
    """One task per episode. Implements `rollart.ports.Environment`.

    `tasks` is `package.module:function`, from a seed to a `CodeTask`; it keeps apart what held-out seeds draw
    (`adapters.envs.split`). An answer is one call of a tool, as Hermes and Qwen write it: `<tool_call>{"name": ...,
    "arguments": {...}}</tool_call>`. Anything else is answered by an error message, and costs a turn. The metadata of
    every step has the `tests`, the `program`, None before a submission, and `scoring` (share: of tests that pass; all).

    `sandboxes`: programs that run at a time in this process. A sandbox that cannot run a program raises
    `SandboxUnavailable`: an infrastructure fault, never an observation. A program that crashes, or exceeds `seconds` or
    `memory_mb`, is the policy's own: it reads so, in at most `characters`.
    """

    def __init__(
        self,
        tasks: str,
        *,
        scoring: str = "share",
        sandboxes: int = 2,
        seconds: float = 5.0,
        memory_mb: int = 256,
        characters: int = 1000,
    ) -> None:
        if scoring not in ("all", "share"):
            raise ValueError(f"scoring must be 'all' or 'share', got {scoring!r}")
        self._draw, self._scoring = attribute_at(tasks, "tasks"), scoring
        self._sandboxes, self._characters = sandboxes, characters
        self._limits = Limits(wall_s=seconds, cpu_s=seconds, memory_mb=memory_mb, output_bytes=1 << 16, files_mb=8)
        self._task: CodeTask | None = None
        self._pool: SandboxPool | None = None

    async def reset(self, seed: int) -> Observation:
        await self.close()
        self._task = self._draw(seed)
        return Observation(self._task.question)

    async def step(self, action: str) -> Step:
        task = self._task
        if task is None:
            raise RuntimeError("step before reset")
        call = read_call(action)
        program = call.arguments["code"] if isinstance(call, ToolCall) and call.name == SUBMIT else None
        metadata = {"tests": task.tests, "program": program, "scoring": self._scoring}
        if program is not None:
            return Step(Observation(""), done=True, metadata=metadata)
        text = call if isinstance(call, str) else await self._run(task, call.arguments["code"])
        return Step(Observation(text), metadata=metadata)

    async def close(self) -> None:
        self._task = None
        pool, self._pool = self._pool, None
        if pool is not None:
            await pool.leave()

    def worked_example(self, seed: int) -> tuple[str, ...]:
        """The question, calls and their results, for a warm start; a result is what the solution's program prints when
        it only shows a file of the task."""
        task: CodeTask = self._draw(seed)
        if not task.solution:
            raise ValueError("its tasks have no solution")
        texts = [task.question]
        for tool, program in task.solution:
            texts.append(written_call(tool, program))
            texts += [task.files[name] for name in task.files if program == show_file(name)]
        return tuple(texts)

    async def _run(self, task: CodeTask, program: str) -> str:
        if self._pool is None:
            self._pool = SandboxPool.of_loop(self._sandboxes)
            await self._pool.join()
        ran = await self._pool.run(_with_files(task.files, program), self._limits)
        return _shown(ran, self._characters)


def read_call(action: str) -> ToolCall | str:
    """The one call of an answer, whose `code` is a text, or the message that says what is wrong with it."""
    _, calls = parse_answer("hermes", action)
    if len(calls) != 1:
        form = f'{OPEN_TAG}{{"name": ..., "arguments": {{...}}}}{CLOSE_TAG}'
        return f"error: {'no' if not calls else len(calls)} tool calls, give one: {form}"
    (call,) = calls
    if call.name not in (RUN, SUBMIT):
        return f"error: no tool {call.name[:40]}, only {RUN} and {SUBMIT}"
    if not isinstance(call.arguments.get("code"), str):
        return f"error: {call.name} needs code, a string"
    return call


def written_call(name: str, code: str) -> str:
    """A call as Qwen's and Hermes' templates write it."""
    return f"{OPEN_TAG}\n{json.dumps({'name': name, 'arguments': {'code': code}})}\n{CLOSE_TAG}"


def show_file(name: str) -> str:
    """The program that shows a file."""
    return f"print(open({name!r}).read())"


def _with_files(files: Mapping[str, str], program: str) -> str:
    writing = f"for _n, _t in {dict(files)!r}.items():\n    with open(_n, 'w') as _f: _f.write(_t)\n" if files else ""
    return f"{writing}exec(compile({program!r}, 'program.py', 'exec'), {{'__name__': '__main__'}})"


def _shown(ran: Ran, characters: int) -> str:
    text = ran.stdout.rstrip("\n")
    if ran.status is not Status.OK:
        last = ran.stderr.rstrip().rpartition("\n")[2]
        why = {Status.TIME: "time limit", Status.MEMORY: "memory limit", Status.OUTPUT: "output limit"}
        text = f"{text}\nerror: {why.get(ran.status, last or str(ran.status))}".lstrip("\n")
    return text if len(text) <= characters else f"{text[:characters]}..."


class SandboxPool:
    """Sandboxes that the episodes of one event loop share, since a start takes longer than most programs: started for
    the first program, ended with the last episode that ran one. `join` waits for a start or an end under way."""

    _pools: ClassVar[WeakKeyDictionary[asyncio.AbstractEventLoop, dict[int, SandboxPool]]] = WeakKeyDictionary()

    def __init__(self, size: int) -> None:
        self._size, self._members = size, 0
        self._box: AsyncBox | None = None
        self._changing = asyncio.Lock()

    @classmethod
    def of_loop(cls, size: int) -> SandboxPool:
        """The pool of the running loop with `size` sandboxes."""
        pools = cls._pools.setdefault(asyncio.get_running_loop(), {})
        return pools.setdefault(size, cls(size))

    async def join(self) -> None:
        """`SandboxUnavailable` if no sandbox works here. `leave` is called once for each call, failed ones too."""
        self._members += 1
        async with self._changing:
            if self._box is None:
                self._box = await sandbox(size=self._size).__aenter__()

    async def leave(self) -> None:
        self._members -= 1
        async with self._changing:
            if not self._members and self._box is not None:
                box, self._box = self._box, None
                await box.__aexit__()

    async def run(self, program: str, limits: Limits) -> Ran:
        assert self._box is not None, "run before join"
        return await self._box.run(program, "", limits)
