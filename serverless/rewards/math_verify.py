"""A ready-made reward for mathematics: the completion's answer against the reference, by the math-verify library.

The library implements time limits by signals (so it raises in threads), and sympy may take unlimited time or memory on
an expression of the policy. So each comparison runs in its own process, forked from one with the library loaded.

An item's metadata: timeout_s (default 10; adaptive limits arrive here), memory_mb (default 1024).

Scored      1.0 for an equivalent answer, else 0.0 (also where the completion has none)
ModelFault  0.0 where the comparison runs out of time or memory, or crashes: the reference is parsed first, so the
            completion is the cause
InfraFault  ENVIRONMENT if no process can be started; the item's error if it has no parsable reference
"""
# ruff: noqa: TID251 - it waits for its own child in a worker, which has no loop

from __future__ import annotations

import importlib
import json
import logging
import os
import pathlib
import re
import resource
import select
import signal
import time
from typing import Any, NoReturn

from serverless.declare import reward
from serverless.errors import ExtraMissing
from serverless.types import FaultKind, InfraFault, Item, ModelFault, Outcome, Scored

_MARKED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_LATEX = re.compile(r"[\\$]")
_ANSWER_BYTES = 65_536


@reward(
    memory_mb=2048,
    timeout_s=60.0,
    init_timeout_s=60.0,
    batch={"max_items": 8},
    requirements=("math-verify",),
    preload=("math_verify",),
)
class MathVerify:
    """Loads the library once. Raises `ExtraMissing` if it is not installed."""

    def load(self, artefacts: pathlib.Path) -> None:
        try:
            self._library: Any = importlib.import_module("math_verify")
        except ImportError:
            raise ExtraMissing("math-verify", "math") from None
        # Its messages about timeouts and failed parses of each answer are in the outcome.
        logging.getLogger("math_verify").setLevel(logging.CRITICAL)
        # Parsers are built, and much of sympy imported, at the first use: here once instead of in every child.
        for one, other in ((r"$\frac{1}{2}$", "0.5"), ("$x^2+2x+1$", "$(x+1)^2$"), (r"$\{1,2\}$", r"$\{2,1\}$")):
            self._library.verify(self._parse(one), self._parse(other), timeout_seconds=None)

    def __call__(self, item: Item) -> Outcome:
        if item.reference_answer is None or not item.reference_answer.strip():
            raise ValueError(f"item {item.id} has no reference_answer to compare with")
        if not item.completion.strip():
            return ModelFault(0.0, "empty completion")
        seconds = float(item.metadata.get("timeout_s", 10.0))  # type: ignore[arg-type]
        memory = int(item.metadata.get("memory_mb", 1024))  # type: ignore[call-overload]
        stages, why = self._apart(item.reference_answer, item.completion, seconds, memory)
        if not stages:
            return InfraFault(FaultKind.ENVIRONMENT, retryable=True, detail=f"the comparison did not start: {why}")
        if "reference" not in stages:
            shown = item.reference_answer[:80]
            raise ValueError(f"item {item.id}: reference_answer {shown!r} cannot be parsed ({why})")
        if "equal" not in stages:
            return ModelFault(0.0, f"the comparison failed: {why}")
        metrics = {"parsed": float(stages.get("parsed", False)), "seconds": float(stages["seconds"])}
        return Scored(float(stages["equal"]), metrics)

    def _parse(self, text: str) -> Any:
        return self._library.parse(text, parsing_timeout=None)

    def _apart(self, reference: str, completion: str, seconds: float, memory_mb: int) -> tuple[dict[str, Any], str]:
        """Run a comparison in a child. Returns the stages that it reached and the cause of its end."""
        reading, writing = os.pipe()
        try:
            pid = os.fork()
        except OSError as error:
            os.close(reading)
            os.close(writing)
            return {}, str(error)
        if pid == 0:
            os.close(reading)
            self._compare(reference, completion, seconds, memory_mb, writing)
        os.close(writing)
        try:
            text, timed_out = _read(reading, seconds)
        finally:
            os.close(reading)
            os.kill(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
        stages: dict[str, Any] = {}
        for line in text.splitlines():
            stages |= json.loads(line)
        if timed_out:
            return stages, f"no result in {seconds:g} s"
        return stages, str(stages.get("failed") or f"exit {os.waitstatus_to_exitcode(status)}")

    def _compare(self, reference: str, completion: str, seconds: float, memory_mb: int, out: int) -> NoReturn:
        """In the child: report each completed stage, one line of JSON each."""
        began = time.monotonic()

        def report_stage(**stage: Any) -> None:
            os.write(out, json.dumps(stage).encode() + b"\n")

        try:
            report_stage(started=True)
            bytes_ = _address_space() + memory_mb * 2**20
            resource.setrlimit(resource.RLIMIT_AS, (bytes_, bytes_))
            cpu = int(seconds) + 2
            resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu))
            gold = self._parse(_delimited(reference))
            if gold:
                report_stage(reference=True)
                answers = self._parse(_marked(completion))
                equal = bool(self._library.verify(gold, answers, timeout_seconds=None))
                report_stage(parsed=bool(answers), equal=equal, seconds=time.monotonic() - began)
            os._exit(0)
        except MemoryError:
            report_stage(failed=f"more than {memory_mb} MB")
        except BaseException as error:
            report_stage(failed=f"{type(error).__name__}: {error}"[:200])
        finally:
            os._exit(1)


def _read(fd: int, seconds: float) -> tuple[str, bool]:
    """Read until the end or the time limit. Returns the text, and True if it was the limit."""
    parts = bytearray()
    deadline = time.monotonic() + seconds
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    while (left := deadline - time.monotonic()) > 0:
        if not poll.poll(left * 1000.0 + 1.0):
            break
        part = os.read(fd, _ANSWER_BYTES)
        if not part or len(parts) > _ANSWER_BYTES:
            return parts.decode(), False
        parts += part
    return parts.decode(), True


def _marked(completion: str) -> str:
    """The last marked answer, or the whole completion, in which the library searches itself."""
    marks = _MARKED.findall(completion)
    return _delimited(marks[-1]) if marks else completion


def _delimited(answer: str) -> str:
    """Add the delimiters that LaTeX recognition needs to a bare answer that is no plain expression."""
    text = answer.strip()
    if "$" in text or "\\boxed" in text or "\\(" in text or "\\[" in text:
        return text
    return f"${text}$" if _LATEX.search(text) or any(c in text for c in "^_={}") or text.isidentifier() else text


def _address_space() -> int:
    return int(pathlib.Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
