"""Sandboxes: a warm process that runs one generated program at a time, and a pool of them for asyncio.

with sandbox(preload=("numpy",)) as box:              # in a function's worker: no event loop
    ran = box.run("print(int(input()) + 1)", "41")
async with sandbox(size=4) as boxes:                  # as many programs at once
    ran = await boxes.run(program)

The protocol of one sandbox (`SandboxProcess`) is the same for both forms, which differ in their `SandboxIo`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
import struct
import subprocess
import threading
import time
import weakref
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import asdict
from typing import Any, ClassVar, Protocol, TypeVar

from serverless.errors import SandboxUnavailable
from serverless.sandbox.launch import LADDER, UNSAFE, Launched, LaunchMethod, RungUnavailable, exited, launch_methods
from serverless.sandbox.values import Limits, Ran, Rung, Status

# ruff: noqa: TID251 - the blocking form is for workers, which have no loop to be their clock


T = TypeVar("T")

_log = logging.getLogger(__name__)


def sandbox(
    rung: str | None = None,
    *,
    limits: Limits | None = None,
    preload: Sequence[str] = (),
    size: int = 1,
    allow_unsafe: bool = False,
) -> Sandbox:
    """A sandbox for untrusted programs: enter it with `with` (a `Box`) or `async with` (an `AsyncBox`).

    rung: a name of `detect()`, or None for the best that works here
    limits: default limits of programs
    preload: modules to import before any program; installed packages are visible only if there is one
    size: concurrent programs, of the asynchronous form
    allow_unsafe: if no rung works, run with limits of time and memory alone

    Entering raises `SandboxUnavailable` with the reason of each rung if none works.
    """
    chosen = limits or Limits()
    return Sandbox(lambda: SandboxProcess(rung, limits=chosen, preload=preload, allow_unsafe=allow_unsafe), size)


def detect() -> list[Rung]:
    """Every rung, best first, after a real trial: a sandbox is started and runs a program."""
    found = []
    for rung in (*LADDER, UNSAFE):
        try:
            with Box(SandboxProcess(rung, limits=Limits(), preload=(), allow_unsafe=True), quiet=True) as box:
                ran = box.run("print(6 * 7)")
            why = "" if ran.stdout == "42\n" else f"a program ended with {ran.status}: {ran.stderr[-200:]}"
            found.append(Rung(rung, not why, why))
        except SandboxUnavailable as error:
            found.append(Rung(rung, False, error.message.removeprefix("no sandbox works here: ")))
    return found


class Sandbox:
    """The settings from `sandbox`, to be entered in one of two ways."""

    def __init__(self, new: Callable[[], SandboxProcess], size: int) -> None:
        self._new = new
        self._size = size
        self._entered = contextlib.ExitStack()
        self._entered_async = contextlib.AsyncExitStack()

    def __enter__(self) -> Box:
        return self._entered.enter_context(self.box())

    def __exit__(self, *exc: object) -> None:
        self._entered.close()

    async def __aenter__(self) -> AsyncBox:
        return await self._entered_async.enter_async_context(AsyncBox([self._new() for _ in range(self._size)]))

    async def __aexit__(self, *exc: object) -> None:
        await self._entered_async.aclose()

    def box(self) -> Box:
        """The blocking form, for owners that keep it until the process ends, such as a worker's reward."""
        return Box(self._new())


class Box:
    """Runs one program at a time, blocking; callers from several threads take turns.

    It starts at the first program, or when entered, and again after a program broke it. It ends with `close`, with this
    process, and with the thread that started it (a rule of the kernel); the next program then starts another.
    """

    def __init__(self, core: SandboxProcess, *, quiet: bool = False) -> None:
        self._core = core
        self._quiet = quiet
        self._turn = threading.Lock()

    @property
    def rung(self) -> str:
        """The rung; '' before the start."""
        return self._core.method.rung if self._core.method else ""

    @property
    def way(self) -> str:
        """The name of the launch method; '' before the start."""
        return self._core.method.name if self._core.method else ""

    @property
    def pid(self) -> int | None:
        return self._core.pid

    def start(self) -> None:
        with self._turn:
            _completed(self._core.start(_BlockingIo()))
        if not self._quiet:
            _warn(self._core)

    def run(self, program: str, stdin: str = "", limits: Limits | None = None) -> Ran:
        """Run a program. Raises `SandboxUnavailable` if it could not be run, which the program cannot cause."""
        with self._turn:
            return _completed(self._core.run(_BlockingIo(), program, stdin, limits))

    def close(self) -> None:
        with self._turn:
            _completed(self._core.close(_BlockingIo()))

    def __enter__(self) -> Box:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class AsyncBox:
    """Runs as many concurrent programs as it has sandboxes. Owned by the task that enters it.

    `run` waits for a free sandbox, unblocked by the end of another program, then for its own program. Cancelling it
    kills the program and its sandbox; the next one starts anew.
    """

    def __init__(self, cores: list[SandboxProcess]) -> None:
        self._cores = cores
        self._idle: asyncio.LifoQueue[SandboxProcess] = asyncio.LifoQueue()

    @property
    def rung(self) -> str:
        return next((core.method.rung for core in self._cores if core.method), "")

    async def run(self, program: str, stdin: str = "", limits: Limits | None = None) -> Ran:
        """As `Box.run`."""
        core = await self._idle.get()
        try:
            return await core.run(_LoopIo(), program, stdin, limits)
        finally:
            self._idle.put_nowait(core)

    async def __aenter__(self) -> AsyncBox:
        try:
            for core in self._cores:
                await core.start(_LoopIo())
                self._idle.put_nowait(core)
        except BaseException:
            await self.__aexit__()
            raise
        _warn(self._cores[0])
        return self

    async def __aexit__(self, *exc: object) -> None:
        try:
            await asyncio.gather(*(core.close(_LoopIo()) for core in self._cores))
        finally:
            for core in self._cores:
                core.discard()


def _warn(core: SandboxProcess) -> None:
    if core.method is not None and core.method.rung == UNSAFE:
        _log.warning("UNSAFE: generated programs run without isolation and can read and send whatever this user can")


_START_S = 60.0
"""Maximum seconds for a start, preloads included."""

_GRACE_S = 10.0
"""Seconds beyond its wall limit that a job may take to be killed, cleaned up and answered."""

_STOP_S = 2.0
"""Seconds after which a sandbox that was asked to end is killed."""

_ESCAPED = 6
"""Maximum bytes of JSON per byte of output."""


class SandboxIo(Protocol):
    """Input and output of a sandbox. Every method raises `TimeoutError` after `seconds`."""

    async def send(self, channel: socket.socket, data: bytes, seconds: float) -> None: ...

    async def receive(self, channel: socket.socket, most: int, seconds: float) -> bytes: ...

    async def exited(self, process: subprocess.Popen[bytes], seconds: float) -> None: ...


class _BlockingIo:
    """Its coroutines never suspend."""

    async def send(self, channel: socket.socket, data: bytes, seconds: float) -> None:
        channel.settimeout(seconds)
        channel.sendall(data)

    async def receive(self, channel: socket.socket, most: int, seconds: float) -> bytes:
        channel.settimeout(seconds)
        return channel.recv(most)

    async def exited(self, process: subprocess.Popen[bytes], seconds: float) -> None:
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise TimeoutError from None


class _LoopIo:
    async def send(self, channel: socket.socket, data: bytes, seconds: float) -> None:
        channel.setblocking(False)
        async with asyncio.timeout(seconds):
            await asyncio.get_running_loop().sock_sendall(channel, data)

    async def receive(self, channel: socket.socket, most: int, seconds: float) -> bytes:
        async with asyncio.timeout(seconds):
            return await asyncio.get_running_loop().sock_recv(channel, most)

    async def exited(self, process: subprocess.Popen[bytes], seconds: float) -> None:
        async with asyncio.timeout(seconds):
            await exited(process.pid)


def _completed(work: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that never suspends."""
    try:
        work.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    raise AssertionError("a coroutine of the blocking form has suspended")


class SandboxProcess:
    """Owns the process of one sandbox, and starts another one after its end. Runs one job at a time.

    A process forked from the owner starts its own.
    """

    alive: ClassVar[weakref.WeakSet[SandboxProcess]] = weakref.WeakSet()
    """Those of this process: their processes may outlive a call of the function that owns them."""

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
        self.alive.add(self)

    @property
    def pid(self) -> int | None:
        """The process id of the sandbox's outermost process, None while there is none."""
        return self._launched.process.pid if self._launched is not None else None

    async def start(self, io: SandboxIo) -> None:
        """Use the best launch method that works. Raises `SandboxUnavailable` with the reason of each if none does."""
        if self._owner != os.getpid():
            self._launched, self._owner = None, os.getpid()
        if self._launched is not None:
            return
        reasons = []
        for method in [self.method] if self.method else self._methods:
            try:
                self._launched = launched = method.start()
                answer = await _ask(io, launched, encode_message(launched.config), _START_S)
                if answer is None:
                    raise RungUnavailable(launched.complaint() or "it ended before it was ready")
                if answer.get("ready") is not True:
                    raise RungUnavailable(str(answer.get("error"))[:1000])
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

    async def run(self, io: SandboxIo, program: str, stdin: str, limits: Limits | None) -> Ran:
        limits = limits or self._limits
        order = encode_message({"program": program, "stdin": stdin, "limits": asdict(limits)})
        for _ in range(2):
            await self.start(io)
            assert self._launched is not None
            try:
                ran = await self._exchange(io, self._launched, order, limits)
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

    async def close(self, io: SandboxIo) -> None:
        """End the sandbox and wait until all its processes have ended."""
        launched, self._launched = self._launched, None
        if launched is not None and self._owner == os.getpid():
            try:
                with contextlib.suppress(OSError):
                    launched.socket.shutdown(socket.SHUT_RDWR)  # it then ends
                with contextlib.suppress(TimeoutError):
                    await io.exited(launched.process, _STOP_S)
            finally:
                launched.end()

    def discard(self) -> None:
        """Kill the sandbox: the next job gets a new one."""
        launched, self._launched = self._launched, None
        if launched is not None:
            launched.end()

    async def _exchange(self, io: SandboxIo, launched: Launched, order: bytes, limits: Limits) -> Ran | None:
        """Run one job. None if the sandbox was dead before the job began."""
        seconds = limits.wall_s + _GRACE_S
        if await _ask(io, launched, order, seconds) is None:
            return None
        answer = await _message(io, launched, seconds, _ESCAPED * limits.output_bytes + (1 << 16))
        if answer is not None and "error" in answer:
            raise SandboxUnavailable(f"a program could not be started: {answer['error']}")
        ran = read_answer(answer) if answer is not None else None
        if ran is None or (answer or {}).get("clean") is not True:
            self.discard()
        return ran or Ran("", "the program ended its supervisor", Status.KILLED, -9, 0.0, 0.0, 0.0)


def read_answer(answer: dict[str, Any]) -> Ran | None:
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


async def _ask(io: SandboxIo, launched: Launched, frame: bytes, seconds: float) -> dict[str, Any] | None:
    """Send a frame and read the next one. None if the sandbox has ended."""
    try:
        await io.send(launched.socket, frame, seconds)
    except ConnectionError:
        return None
    return await _message(io, launched, seconds, 1 << 16)


async def _message(io: SandboxIo, launched: Launched, seconds: float, most: int) -> dict[str, Any] | None:
    """One frame, or None at the end of the stream and for invalid frames."""
    head = await _exactly(io, launched, 4, seconds)
    size = struct.unpack(">I", head)[0] if head is not None else most + 1
    body = await _exactly(io, launched, size, seconds) if size <= most else None
    try:
        message = json.loads(body) if body is not None else None
    except ValueError:
        return None
    return message if isinstance(message, dict) else None


async def _exactly(io: SandboxIo, launched: Launched, count: int, seconds: float) -> bytes | None:
    """`count` bytes, or None at the end of the stream."""
    parts = bytearray()
    deadline = time.monotonic() + seconds
    while len(parts) < count:
        try:
            part = await io.receive(launched.socket, count - len(parts), max(0.001, deadline - time.monotonic()))
        except ConnectionError:
            return None
        if not part:
            return None
        parts += part
    return bytes(parts)


def encode_message(message: dict[str, Any]) -> bytes:
    body = json.dumps(message).encode()
    return struct.pack(">I", len(body)) + body
