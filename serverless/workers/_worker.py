"""The program of one execution environment, in a process that the zygote forked. A program, not a library.

Frames on its socket are a 4-byte big-endian length and msgpack:

  in   [request id, event, time limit in ms]
  out  ["", "ready", init seconds, error or None] once, then [request id, "ok", run seconds, body] or
       [request id, "fault", run seconds, kind, detail, retryable, keep] per call. The names of processes that the
       call left behind follow, if there are any: the worker then ends

If the order has `variables`, the first frame in is the function's environment variables, and those that it lists are
secrets. Their values are in no command line and no `environ` of /proc, and this process's memory is closed to other
processes of its user. The output of a function with secrets goes to a pipe, from which the parent appends it to the log
(`logs.MaskedLog`).

A process that the function forks has no channel: it can neither take nor answer a call. Billing uses this process's own
clock. An order with `exec` executes that program instead, under the same limits, and keeps the socket open without
using it, so that the parent notices the program's end.
"""
# ruff: noqa: TID251 - a worker process measures its own time; the loop's clock is in another process.

from __future__ import annotations

import contextlib
import ctypes
import datetime
import importlib
import json
import os
import pathlib
import resource
import socket
import struct
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from typing import Any

import msgpack

from serverless.output import RUN

_SCRATCH_BYTES = 512 * 2**20
"""Size limit of a file that a function writes: Lambda's default /tmp."""

LOG_BYTES = 16 * 2**20
"""Size at which a log is truncated: a function that prints every sample must not fill the disk."""

VARIABLES_FD = "ROLLART_VARIABLES_FD"
"""Variable of an executed program: the descriptor of the file with the function's variables."""

_PR_SET_DUMPABLE = 4

_OPEN_FILES = 1024
"""Lambda's limit of file descriptors."""

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36

_LIBC = ctypes.CDLL(None, use_errno=True)
"""Loaded in the zygote, once for all workers."""


@dataclass(slots=True)  # not frozen: one is made per call, and freezing would double its cost
class WorkerContext:
    """Lambda's context object: the fields that handlers use."""

    function_name: str
    function_version: str
    memory_limit_in_mb: int
    aws_request_id: str
    log_group_name: str
    log_stream_name: str
    deadline: float

    @property
    def invoked_function_arn(self) -> str:
        return f"arn:aws:lambda:local:000000000000:function:{self.function_name}"

    def get_remaining_time_in_millis(self) -> int:
        return max(0, int((self.deadline - time.monotonic()) * 1000.0))


def run(channel: socket.socket, order: dict[str, Any], output: int | None = None) -> None:
    """Serve calls until the other end closes. Leaves by `SystemExit` or return; the caller ends the process."""
    if "exec" in order:  # another program, of which all memory is the function's
        _confine(order, 0, output)
        environment = {**os.environ, **order["environment"]}
        if "variables" in order:
            environment[VARIABLES_FD] = str(_stored(_Frames(channel).next() or b""))
        channel.set_inheritable(True)
        os.execve(order["exec"][0], order["exec"], environment)
    began = time.perf_counter()
    handler = error = None
    try:
        try:
            _confine(order, _data_bytes(), output)
            if "wall" in order:
                from serverless.sandbox import required

                required.enter(channel, order["package"], order["scratch"])  # continues in a child process
        finally:
            frames = _Frames(channel)
        if "variables" in order:
            os.environ.update(msgpack.unpackb(frames.next() or b"\x80"))
            if order["variables"]:
                prctl(_PR_SET_DUMPABLE, 0)
        module, _, name = str(order["handler"]).rpartition(".")
        handler = getattr(importlib.import_module(module), name)
    except BaseException as failure:
        traceback.print_exc()
        error = f"{type(failure).__name__}: {failure}"[:500]
    children = _Children()
    frames.send(["", "ready", time.perf_counter() - began, error])
    while handler is not None:
        frame = frames.next()
        if frame is None:
            return
        request, event, limit_ms = msgpack.unpackb(frame)
        answer = _call(handler, order, request, event, limit_ms)
        left = children.left()
        if left:
            answer.append(left)
        if not frames.send([request, *answer]) or left or (answer[0] == "fault" and not answer[5]):
            return


def prctl(option: int, value: int) -> None:
    _LIBC.prctl(option, int(value), 0, 0, 0)


def end_line(request: str) -> bytes:
    """The line after the output of a call in a log (`workers.logs`)."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
    return f"END RequestId: {request} Time: {now}\n".encode()


def _call(handler: Any, order: dict[str, Any], request: str, event: Any, limit_ms: float) -> list[Any]:
    began = time.monotonic()
    context = WorkerContext(
        function_name=order["name"],
        function_version=order["version"],
        memory_limit_in_mb=order["memory_mb"],
        aws_request_id=request,
        log_group_name=f"/rollart/{order['name']}",
        log_stream_name=order["log"],
        deadline=began + limit_ms / 1000.0,
    )
    try:
        body = handler(event, context)
    except MemoryError:
        limit = order["memory_mb"]
        return ["fault", time.monotonic() - began, "out_of_memory", f"more than {limit} MB (memory_mb)", True, False]
    except Exception as error:
        traceback.print_exc()
        detail = f"{type(error).__name__}: {error}"[:500]
        return ["fault", time.monotonic() - began, "crash", detail, False, True]
    finally:
        sys.stdout.flush()
        _end_log(order, request)
    return ["ok", time.monotonic() - began, body]


_logged = 0
"""Bytes in the log when the last call had ended."""


def _end_log(order: dict[str, Any], request: str) -> None:
    """Date the call's output, if there is any, and truncate a long log. A pipe has no size: its reader does this."""
    global _logged
    size = os.fstat(1).st_size
    if size == _logged:
        return
    os.write(1, end_line(request))
    if size > LOG_BYTES and "wall" in order:
        os.ftruncate(1, 0)  # its directory is not visible from inside the isolation
    elif size > LOG_BYTES:
        os.replace(order["log"], order["log"] + ".1")
        _open_log(order["log"], None)
    _logged = os.fstat(1).st_size


def _open_log(path: str, output: int | None) -> None:
    log = output or os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


def _stored(variables: bytes) -> int:
    """The descriptor of an anonymous file with the variables of a frame as JSON, for a program to execute."""
    file = os.memfd_create("variables", 0)
    os.write(file, json.dumps(msgpack.unpackb(variables)).encode())
    os.lseek(file, 0, os.SEEK_SET)
    return file


def _confine(order: dict[str, Any], own_bytes: int, output: int | None) -> None:
    """Set up Lambda's execution environment: limits, environment, log and import path. `own_bytes` of private memory do
    not count as the function's."""
    global _logged
    package = order["package"]
    _open_log(order["log"], output)
    _logged = os.fstat(1).st_size
    scratch = pathlib.Path(order["scratch"])
    scratch.mkdir(parents=True, exist_ok=True)
    os.environ.update(
        AWS_LAMBDA_FUNCTION_NAME=order["name"],
        AWS_LAMBDA_FUNCTION_VERSION=order["version"],
        AWS_LAMBDA_FUNCTION_MEMORY_SIZE=str(order["memory_mb"]),
        _HANDLER=order["handler"],
        LAMBDA_TASK_ROOT=package,
        TMPDIR=str(scratch),
        HOME=str(scratch),
    )
    if order["run"]:
        os.environ[RUN] = order["run"]
    tempfile.tempdir = None
    os.chdir(package)
    sys.path.insert(0, package)
    # Private writable memory beyond the zygote's own: shared library code does not count as the function's.
    memory = own_bytes + int(order["memory_mb"]) * 2**20
    _lower_limit(resource.RLIMIT_DATA, memory)
    _lower_limit(resource.RLIMIT_CORE, 0)
    _lower_limit(resource.RLIMIT_FSIZE, _SCRATCH_BYTES)
    _lower_limit(resource.RLIMIT_NOFILE, _OPEN_FILES)


def _lower_limit(which: int, most: int) -> None:
    """Lower a limit. A hard limit that is already lower stays, since it cannot be raised."""
    hard = resource.getrlimit(which)[1]
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(which, (most, most))


def _data_bytes() -> int:
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) * 1024
    return 0


class _Children:
    """The child processes that may outlive a call: those that exist when the function is loaded, its sandboxes, and
    Python's own tracker of shared memory. Orphans of children become this process's children (subreaper)."""

    def __init__(self) -> None:
        prctl(PR_SET_CHILD_SUBREAPER, 1)
        self._loaded = self._running()

    def left(self) -> str:
        """Names and ids of the other children that still run; '' for none, in one system call without any child. Those
        that have ended, such as orphans of children, are reaped; the function itself reaps those it started to keep."""
        try:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return ""
        others = self._running() - self._loaded - _exempt()
        return ", ".join(f"{_command(pid)} ({pid})" for pid in sorted(others) if not _reaped(pid))

    def _running(self) -> set[int]:
        found: set[int] = set()
        with contextlib.suppress(OSError):
            for thread in os.listdir("/proc/self/task"):
                with contextlib.suppress(OSError), open(f"/proc/self/task/{thread}/children") as children:
                    found.update(map(int, children.read().split()))
        return found


def _reaped(pid: int) -> bool:
    """Reap a child if it has ended."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG) is not None
    except ChildProcessError:  # the function has just done so, in a thread
        return True


def _exempt() -> set[int | None]:
    box, tracker = (sys.modules.get(name) for name in ("serverless.sandbox.box", "multiprocessing.resource_tracker"))
    sandboxes = () if box is None else getattr(box.SandboxProcess, "alive", ())  # a package has its own copy
    found = {sandbox.pid for sandbox in sandboxes}
    return found if tracker is None else found | {getattr(tracker._resource_tracker, "_pid", None)}


def _command(pid: int) -> str:
    try:
        return pathlib.Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return "?"


class _Frames:
    """Sends and reads frames; a small frame, such as a call, takes one system call.

    Only this process uses the channel: it is closed in every child. A child unknown to Python (a fork by a C library)
    is recognised by its process id.
    """

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._buffer = bytearray()
        self._owner = os.getpid()
        os.register_at_fork(after_in_child=channel.close)

    def send(self, message: list[Any]) -> bool:
        """Send a message. False if the channel is closed."""
        try:
            body = msgpack.packb(message)
        except (TypeError, ValueError, OverflowError) as error:
            detail = f"the answer has no wire form: {error}"[:500]
            body = msgpack.packb([message[0], "fault", message[2], "bad_answer", detail, False, True])
        if os.getpid() != self._owner:
            return False
        try:
            self._channel.sendall(struct.pack(">I", len(body)) + body)
        except OSError:
            return False
        return True

    def next(self) -> bytes | None:
        """The next frame, or None when the other end has closed."""
        if not self._fill(4):
            return None
        (length,) = struct.unpack_from(">I", self._buffer)
        if not self._fill(4 + length):
            return None
        frame = bytes(self._buffer[4 : 4 + length])
        del self._buffer[: 4 + length]
        return frame

    def _fill(self, count: int) -> bool:
        while len(self._buffer) < count:
            if os.getpid() != self._owner:
                return False
            try:
                part = self._channel.recv(1 << 18)
            except OSError:
                return False
            if not part:
                return False
            self._buffer += part
        return True
