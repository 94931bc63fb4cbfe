"""The protocol of one sandbox without I/O: generators of steps that `box` drives, blocking or not."""

from __future__ import annotations

import json
import os
import struct
import subprocess
from collections.abc import Generator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias, TypeVar

from serverless.errors import SandboxUnavailable
from serverless.sandbox.launch import UNSAFE, Launched, LaunchMethod, RungUnavailable, launch_methods
from serverless.sandbox.values import Limits, Ran, Status

__all__ = ["SandboxProcess", "ExitStep", "Io", "ReceiveStep", "SendStep"]

R = TypeVar("R")

_START_S = 60.0
"""Maximum seconds for a start, preloads included."""

_GRACE_S = 10.0
"""Seconds beyond its wall limit that a job may take to be killed, cleaned up and answered."""

_STOP_S = 2.0
"""Seconds after which a sandbox that was asked to end is killed."""

_ESCAPED = 6
"""Maximum bytes of JSON per byte of output."""


@dataclass(frozen=True, slots=True)
class SendStep:
    """Send data. The result is True if it was sent; raises `TimeoutError` after `seconds`."""

    launched: Launched
    data: bytes
    seconds: float


@dataclass(frozen=True, slots=True)
class ReceiveStep:
    """Receive data. The result is `count` bytes, or None at the end of the stream; raises `TimeoutError` after
    `seconds`."""

    launched: Launched
    count: int
    seconds: float


@dataclass(frozen=True, slots=True)
class ExitStep:
    """Wait for the end of the process, at most `seconds`."""

    process: subprocess.Popen[bytes]
    seconds: float


Io: TypeAlias = Generator[SendStep | ReceiveStep | ExitStep, Any, R]


class SandboxProcess:
    """Owns the process of one sandbox, and starts another one after its end. Runs one job at a time.

    A process forked from the owner starts its own.
    """

    def __init__(
        self, rung: str | None, *, limits: Limits, preload: Sequence[str], allow_unsafe: bool, only: str = ""
    ) -> None:
        """`only`: use only the launch method of this name."""
        if rung == UNSAFE and not allow_unsafe:
            raise SandboxUnavailable("the rung 'unsafe' isolates nothing", remedy="pass allow_unsafe=True to accept it")
        self._limits = limits
        self._methods = launch_methods(rung, limits=limits, preload=preload)
        if rung is None and allow_unsafe:
            self._methods += launch_methods(UNSAFE, limits=limits, preload=preload)
        self._methods = [method for method in self._methods if only in ("", method.name)]
        self._launched: Launched | None = None
        self._owner = os.getpid()
        self.method: LaunchMethod | None = None

    @property
    def pid(self) -> int | None:
        """The process id of the sandbox's outermost process, None while there is none."""
        return self._launched.process.pid if self._launched is not None else None

    def start(self) -> Io[None]:
        """Use the best launch method that works. Raises `SandboxUnavailable` with the reason of each if none does."""
        if self._owner != os.getpid():
            self._launched, self._owner = None, os.getpid()
        if self._launched is not None:
            return
        reasons = []
        for method in [self.method] if self.method else self._methods:
            try:
                self._launched = method.start()
                yield from self._handshake(self._launched)
            except (RungUnavailable, TimeoutError) as refused:
                reasons.append(f"{method.rung} ({method.name}): {refused or 'not ready in time'}")
                self.discard()
                continue
            except BaseException:
                self.discard()
                raise
            self.method = method
            return
        remedy = "install bubblewrap, or allow unprivileged user namespaces (Landlock: Linux 6.2)"
        raise SandboxUnavailable(f"no sandbox works here: {'; '.join(reasons)}", remedy=remedy)

    def run(self, program: str, stdin: str, limits: Limits | None) -> Io[Ran]:
        limits = limits or self._limits
        order = _frame({"program": program, "stdin": stdin, "limits": asdict(limits)})
        for _ in range(2):
            yield from self.start()
            assert self._launched is not None
            try:
                ran = yield from self._exchange(self._launched, order, limits)
            except TimeoutError:
                self.discard()
                raise SandboxUnavailable("the sandbox does not answer", remedy="is the machine overloaded?") from None
            except BaseException:
                self.discard()
                raise
            if ran is not None:
                return ran
            self.discard()
        raise SandboxUnavailable("the sandbox died twice before it took the program", remedy="is memory short?")

    def close(self) -> Io[None]:
        """End the sandbox and wait until all its processes have ended."""
        launched, self._launched = self._launched, None
        if launched is not None and self._owner == os.getpid():
            try:
                launched.hang_up()
                yield ExitStep(launched.process, _STOP_S)
            finally:
                launched.end()

    def discard(self) -> None:
        """Kill the sandbox: the next job gets a new one."""
        launched, self._launched = self._launched, None
        if launched is not None:
            launched.end()

    def _handshake(self, launched: Launched) -> Io[None]:
        answer = None
        if (yield SendStep(launched, _frame(launched.config), _START_S)):
            answer = yield from _message(launched, _START_S, 1 << 16)
        if answer is None:
            raise RungUnavailable(launched.complaint() or "it ended before it was ready")
        if answer.get("ready") is not True:
            raise RungUnavailable(str(answer.get("error"))[:1000])

    def _exchange(self, launched: Launched, order: bytes, limits: Limits) -> Io[Ran | None]:
        """Run one job. None if the sandbox was dead before the job began."""
        seconds = limits.wall_s + _GRACE_S
        sent = yield SendStep(launched, order, seconds)
        started = (yield from _message(launched, seconds, 1 << 16)) if sent else None
        if started is None:
            return None
        answer = yield from _message(launched, seconds, _ESCAPED * limits.output_bytes + (1 << 16))
        if answer is not None and "error" in answer:
            raise SandboxUnavailable(f"a program could not be started: {answer['error']}")
        ran = _ran(answer) if answer is not None else None
        if ran is None or (answer or {}).get("clean") is not True:
            self.discard()
        return ran or Ran("", "the program ended its supervisor", Status.KILLED, -9, 0.0, 0.0, 0.0)


def _ran(answer: dict[str, Any]) -> Ran | None:
    """Validate an answer as if the program had written it."""
    try:
        return Ran(
            stdout=str(answer["stdout"]),
            stderr=str(answer["stderr"]),
            status=Status(answer["status"]),
            exit_code=int(answer["exit_code"]),
            wall_s=float(answer["wall_s"]),
            cpu_s=float(answer["cpu_s"]),
            max_rss_mb=float(answer["max_rss_mb"]),
        )
    except (KeyError, TypeError, ValueError):
        return None


def _message(launched: Launched, seconds: float, most: int) -> Io[dict[str, Any] | None]:
    """One frame, or None at the end of the stream and for invalid frames."""
    head = yield ReceiveStep(launched, 4, seconds)
    if head is None:
        return None
    (size,) = struct.unpack(">I", head)
    if size > most:
        return None
    body = yield ReceiveStep(launched, size, seconds)
    try:
        message = json.loads(body) if body is not None else None
    except ValueError:
        return None
    return message if isinstance(message, dict) else None


def _frame(message: dict[str, Any]) -> bytes:
    body = json.dumps(message).encode()
    return struct.pack(">I", len(body)) + body
