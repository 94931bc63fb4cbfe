"""The inside of one execution environment: a process that the zygote forked. A program, not a library.

Frames on its socket are a 4-byte big-endian length and msgpack:
  in   [request id, event, time limit in ms]
  out  ["ready", init seconds, error or None] once, then ["ok", run seconds, body] or
       ["fault", run seconds, kind, detail, retryable, keep] per call
The clock here is the process's own: this is what is billed.
"""
# ruff: noqa: TID251 - a worker process measures its own time; the loop's clock is in another process.

from __future__ import annotations

import importlib
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

__all__ = ["run"]

_SCRATCH_BYTES = 512 * 2**20
"""Largest file that a function may write: Lambda's default /tmp."""

_LOG_BYTES = 16 * 2**20
"""A log that has grown past this starts anew: a function that prints every sample must not fill the disk."""

_OPEN_FILES = 1024
"""Lambda's limit of file descriptors."""


@dataclass(frozen=True)
class Context:
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


def run(channel: socket.socket, order: dict[str, Any]) -> None:
    """Serve calls until the other end closes. Leaves by `SystemExit` or return; the caller ends the process."""
    began = time.perf_counter()
    error = None
    handler = None
    try:
        _confine(order)
        module, _, name = str(order["handler"]).rpartition(".")
        handler = getattr(importlib.import_module(module), name)
    except BaseException as failure:
        traceback.print_exc()
        error = f"{type(failure).__name__}: {failure}"[:500]
    _send(channel, ["ready", time.perf_counter() - began, error])
    while handler is not None:
        frame = _receive(channel)
        if frame is None:
            return
        answer = _call(handler, order, *msgpack.unpackb(frame))
        if not _send(channel, answer) or (answer[0] == "fault" and not answer[5]):
            return


def _call(handler: Any, order: dict[str, Any], request: str, event: Any, limit_ms: float) -> list[Any]:
    began = time.monotonic()
    context = Context(
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
        if os.fstat(1).st_size > _LOG_BYTES:
            os.ftruncate(1, 0)
    return ["ok", time.monotonic() - began, body]


def _confine(order: dict[str, Any]) -> None:
    """Limits, environment, log and import path: what Lambda calls the execution environment."""
    package = order["package"]
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
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
    tempfile.tempdir = None
    os.chdir(package)
    sys.path.insert(0, package)
    # Private writable memory beyond what the zygote already had: shared library code is not the function's.
    memory = _data_bytes() + int(order["memory_mb"]) * 2**20
    resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (_SCRATCH_BYTES, _SCRATCH_BYTES))
    files = min(_OPEN_FILES, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))


def _data_bytes() -> int:
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) * 1024
    return 0


def _send(channel: socket.socket, message: list[Any]) -> bool:
    try:
        body = msgpack.packb(message)
    except (TypeError, ValueError, OverflowError) as error:
        detail = f"the answer has no wire form: {error}"[:500]
        body = msgpack.packb(["fault", message[1], "bad_answer", detail, False, True])
    try:
        channel.sendall(struct.pack(">I", len(body)) + body)
    except OSError:
        return False
    return True


def _receive(channel: socket.socket) -> bytes | None:
    head = _exactly(channel, 4)
    return _exactly(channel, struct.unpack(">I", head)[0]) if head is not None else None


def _exactly(channel: socket.socket, count: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < count:
        try:
            part = channel.recv(min(count - len(parts), 1 << 20))
        except OSError:
            return None
        if not part:
            return None
        parts += part
    return bytes(parts)
