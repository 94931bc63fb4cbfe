"""A ready-made reward for generated programs: the last ```python block of the completion against tests.

An item's metadata:
  program    the program, where an environment has read it from a tool call, or None if none was submitted; by default
             the last ```python block
  tests      a list of {"stdin": text, "stdout": text} (a program that reads and prints), {"call": expression,
             "returns": value} (the value of an expression in its namespace, as JSON) or {"assert": code} (run after the
             program, in its namespace); or
  check      one such code for all
  scoring    "all" (default): 1.0 if every test passed, else 0.0; "share": the share of tests that passed
  timeout_s  time limit of one test (default 6); adaptive limits arrive here
  memory_mb  memory limit of one test (default 512)

Scored      with the metrics `passed`, `tests` and `seconds` (of the slowest test that ran)
ModelFault  0.0 without a program, or if no test came to a result: it raised, ran out of time or memory, exceeded its
            output limit or attacked its sandbox. The reason names the cause for the first test
InfraFault  ENVIRONMENT, retryable, if no sandbox is available: never a score

Expected outputs never enter the sandbox, so tests with `stdout` or `returns` cannot be read by the program; all tests
with `returns` share one run of the program and its time limit, and those after one that ends the run are failed. Code
of `assert` shares the process of the program: a program that merely ends early does not pass, but a program written to
tamper with its tests can. Lines are compared without white space at their ends, and without empty lines at the end of
the output.
"""

from __future__ import annotations

import json
import pathlib
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from serverless.declare import reward
from serverless.errors import SandboxUnavailable
from serverless.sandbox import Box, Limits, Status, sandbox
from serverless.types import FaultKind, InfraFault, Item, ModelFault, Outcome, Scored

_BLOCK = re.compile(r"^[ \t]*```(?:python|py|python3)[ \t]*\r?\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)

_TOTAL_S = 45.0
"""Time limit of all tests of an item, well below `timeout_s` of the function. Tests beyond it count as failed."""

_OUTPUT_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class _TestVerdict:
    """The verdict of one test. `result`: the program produced a result, right or wrong."""

    passed: bool
    result: bool
    seconds: float
    reason: str = ""


@reward(
    trust="untrusted",
    memory_mb=1024,
    timeout_s=60.0,
    batch={"max_items": 1},
    preload=("serverless.sandbox",),
    deterministic=False,  # a program may time out under load
)
class CodeTests:
    """Owns a sandbox that starts with the worker and ends with it."""

    def load(self, artefacts: pathlib.Path) -> None:
        self._box: Box = sandbox().box()
        try:
            self._box.start()
        except SandboxUnavailable:
            pass  # reported for every item, and retried: the cause may go away

    def __call__(self, item: Item) -> Outcome:
        tests, share, limits = _settings(item)
        submitted = "program" in item.metadata
        program = item.metadata["program"] if submitted else extract(item.completion)
        if not isinstance(program, str):
            return ModelFault(0.0, "no program was submitted" if submitted else "the completion has no ```python block")
        verdicts: list[_TestVerdict] = []
        spent = 0.0
        try:
            calls = [test for test in tests if "call" in test]
            if calls:
                verdicts += _call_tests(self._box, program, calls, limits)
                spent = verdicts[0].seconds
            for test in tests:
                if spent >= _TOTAL_S or not (share or all(verdict.passed for verdict in verdicts)):
                    break
                if "call" not in test:
                    verdicts.append(_test(self._box, program, test, limits))
                    spent += verdicts[-1].seconds
        except SandboxUnavailable as error:
            return InfraFault(FaultKind.ENVIRONMENT, retryable=True, detail=str(error))
        return _outcome(verdicts, len(tests), share)


def extract(completion: str) -> str | None:
    """The last ```python block, whose end may be missing (a truncated completion); None if there is none."""
    blocks = _BLOCK.findall(completion)
    return blocks[-1] if blocks else None


def _settings(item: Item) -> tuple[list[Mapping[str, Any]], bool, Limits]:
    """Read the test settings. Raises `ValueError` for metadata that cannot be scored: an error of the data set."""
    metadata = item.metadata
    tests = [{"assert": metadata["check"]}] if "check" in metadata else metadata.get("tests")
    if not isinstance(tests, list) or not tests or not all(map(_is_test, tests)):
        kinds = "{stdin, stdout}, {call, returns} or {assert}"
        raise ValueError(f"item {item.id}: metadata has no tests ({kinds}) and no check")
    scoring = metadata.get("scoring", "all")
    if scoring not in ("all", "share"):
        raise ValueError(f"item {item.id}: scoring={scoring!r} is neither 'all' nor 'share'")
    seconds = float(metadata.get("timeout_s", 6.0))  # type: ignore[arg-type]
    memory = int(metadata.get("memory_mb", 512))  # type: ignore[call-overload]
    limits = Limits(wall_s=min(seconds, _TOTAL_S), cpu_s=seconds, memory_mb=memory, output_bytes=_OUTPUT_BYTES)
    return tests, scoring == "share", limits


def _is_test(test: object) -> bool:
    if not isinstance(test, Mapping):
        return False
    if "call" in test:
        return isinstance(test["call"], str) and "returns" in test
    return isinstance(test.get("assert"), str) or (
        isinstance(test.get("stdout"), str) and isinstance(test.get("stdin", ""), str)
    )


def _call_tests(box: Box, program: str, tests: Sequence[Mapping[str, Any]], limits: Limits) -> list[_TestVerdict]:
    """One run of the program, which prints a line of JSON for each expression; they are compared here, where the
    program cannot reach. The marker tells these lines from what the program prints by itself: a program that finds it
    still lacks the values."""
    marker = secrets.token_hex(16)
    driver = "".join(_CALL.format(marker=marker, number=number, call=test["call"]) for number, test in enumerate(tests))
    ran = box.run(f"{program}\n\n{driver}", "", limits)
    shown = dict(re.findall(rf"^{marker} (\d+) (.*)$", ran.stdout, re.MULTILINE))
    verdicts = []
    for number, test in enumerate(tests):
        line = shown.get(str(number))
        passed = line is not None and _equals(line, test["returns"])
        # The run ended before this test, or its expression raised.
        reason = "" if passed else "wrong value" if line else _reason(ran.status, ran.stderr)
        verdicts.append(_TestVerdict(passed, line is not None, ran.wall_s, reason))
    return verdicts


_CALL = """
try:
    print("\\n{marker} {number}", __import__("json").dumps({call}))
except Exception as error:
    print("\\n{marker} {number} raised", type(error).__name__)
"""


def _equals(line: str, value: object) -> bool:
    try:
        return bool(json.loads(line) == value)
    except (ValueError, RecursionError):
        return False


def _test(box: Box, program: str, test: Mapping[str, Any], limits: Limits) -> _TestVerdict:
    if "assert" in test:
        # Printed last, so that a program that ends the process before its tests does not pass them.
        token = secrets.token_hex(16)
        ran = box.run(f"{program}\n\n{test['assert']}\n\nprint('\\n' + {token!r})\n", "", limits)
        reached = ran.ok and ran.stdout.rstrip().endswith(token)
        failed = "AssertionError" in ran.stderr.rstrip().rpartition("\n")[2]
        passed, result = reached, reached or failed
        reason = "it ended before its tests" if ran.ok else _reason(ran.status, ran.stderr)
    else:
        ran = box.run(program, test.get("stdin", ""), limits)
        passed, result = ran.ok and _lines(ran.stdout) == _lines(test["stdout"]), ran.ok
        reason = _reason(ran.status, ran.stderr)
    return _TestVerdict(passed, result, ran.wall_s, "" if passed else reason)


def _reason(status: Status, stderr: str) -> str:
    last = stderr.rstrip().rpartition("\n")[2][:200]
    return {
        Status.OK: "wrong output",
        Status.TIME: "time limit",
        Status.MEMORY: "memory limit",
        Status.OUTPUT: "output limit",
        Status.KILLED: "it ended its supervisor",
    }.get(status, last or str(status))


def _outcome(verdicts: list[_TestVerdict], tests: int, share: bool) -> Outcome:
    passed = sum(v.passed for v in verdicts)
    if not any(v.result for v in verdicts):
        return ModelFault(0.0, f"the program failed: {verdicts[0].reason}")
    metrics = {"passed": float(passed), "tests": float(tests), "seconds": max(v.seconds for v in verdicts)}
    return Scored(passed / tests if share else float(passed == tests), metrics)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]
