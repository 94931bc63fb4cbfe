"""The inside of the sandbox: a process that forks one job at a time from itself. A program, standard library only.

Entered by `main` with the descriptor of a socket as its argument (under bubblewrap), or from `confine`. Frames on
the socket are a 4-byte big-endian length and JSON:
  in   the configuration once; then {"program", "stdin", "limits": {...}} per job
  out  {"ready": true} or {"error": why} once; then {"started": true} and {"status", "exit_code", "wall_s", "cpu_s",
       "max_rss_mb", "stdout", "stderr", "clean"} per job, or {"error": why} instead
It ends when the socket closes. With a pid namespace it is process 1 of it: jobs cannot signal it, and its end is that
of every process inside. A job never meets another: all processes are killed and the scratch directory is emptied
before the answer; where that fails `clean` is false and the process ends, so that the caller starts a new one.
"""
# ruff: noqa: TID251 - a sandbox measures its own time; the loop's clock is in another process.

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import mmap
import os
import re
import resource
import signal
import socket
import struct
import sys
import threading
import time
from typing import Any, NoReturn

from . import scratch
from .job import SandboxJob, run

_PDEATHSIG, _SET_DUMPABLE, _SET_SECCOMP, _SUBREAPER, _NO_NEW_PRIVS = 1, 4, 22, 36, 38
_PID = 0x5049_4421
_CAPSET = {"x86_64": 126, "aarch64": 91}
_MEMORY_ERROR = re.compile(r"^(?:[\w.]*\.)?_?\w*MemoryError\b")
_LOOK_S = 0.05
_SLACK = 2**20
_NOFILE = 64
_MESSAGE_BYTES = 256 * 2**20

libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    channel = socket.socket(fileno=int(sys.argv[1]))
    config = receive(channel)
    if config is not None:
        start(channel, config)


def start(channel: socket.socket, config: dict[str, Any]) -> NoReturn:
    """Finish the confinement, import the preloads and serve. Never returns."""
    try:
        zygote = Zygote(channel, config)
    except BaseException as error:
        send(channel, {"error": f"{type(error).__name__}: {error}"[:2000]})
        os._exit(70)
    send(channel, {"ready": True})
    try:
        zygote.serve()
    finally:
        os._exit(0)


class Zygote:
    """Owns the jobs. Runs none of their code."""

    def __init__(self, channel: socket.socket, config: dict[str, Any]) -> None:
        self._channel = channel
        self._scratch = str(config["scratch"])
        self._filter = bytes.fromhex(config["job_filter"])
        self._mode = str(config["mode"])
        self._pid = os.getpid()
        self._others = 1 if self._mode == "namespaces" else int(config["others"])
        become(config["uid"])
        os.umask(0o022)
        # Jobs of the same user must not read its memory, and processes that they leave behind become its children.
        prctl(_SET_DUMPABLE, 0)
        prctl(_SUBREAPER, 1)
        # Set after the change of user, which clears it.
        prctl(_PDEATHSIG, signal.SIGKILL)
        null = os.open("/dev/null", os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(null, fd)
        if null > 2:
            os.close(null)
        self._wipe()
        sys.path[:] = [p for p in sys.path if p != config["inside"]] + config["paths"]
        sys.dont_write_bytecode = True
        for module in ("encodings.utf_8", "collections", "random", *config["preload"]):
            importlib.import_module(module)
        if config["sealed"]:
            with contextlib.suppress(OSError):
                socket.socket(socket.AF_UNIX).close()
                raise RuntimeError("the seccomp filter did not take: a socket could be made")
        if threading.active_count() > 1:
            raise RuntimeError("a preloaded module has started a thread, which no fork copies")
        self._woken, waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        gc.collect()
        gc.freeze()
        self._base = _address_space()
        # Keeps the collector's first full pass out of the wall time of a job.
        gc.set_threshold(10_000, 20, 20)

    def serve(self) -> None:
        while (order := receive(self._channel)) is not None:
            answer = self._job(order)
            if not send(self._channel, answer) or not answer.get("clean", True):
                return

    def _job(self, order: dict[str, Any]) -> dict[str, Any]:
        """Run one program and clean up after it."""
        limits = order["limits"]
        job = SandboxJob(order["stdin"].encode("utf-8", "surrogatepass"), limits["output_bytes"])
        # Sent before the fork: from here on, any end of this process is caused by the program.
        send(self._channel, {"started": True})
        began = time.monotonic()
        try:
            pid = os.fork()
        except OSError as error:
            return {"error": f"fork: {error}", "clean": False}
        if pid == 0:
            job.enter(lambda: self._confine(limits))
            run(order["program"])
        job.close_theirs()
        why, status, usage = self._watch(job, pid, began + limits["wall_s"], limits["files_mb"] * 2**20)
        wall = time.monotonic() - began
        if status is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            _, status, usage = os.wait4(pid, 0)
        cpu = usage.ru_utime + usage.ru_stime + self._sweep(pid)
        why = job.drain() or why
        clean = True
        try:
            self._wipe()
        except (scratch.Dirty, OSError):
            clean = False
        if job.failure():
            return {"error": job.failure(), "clean": clean}
        code = os.waitstatus_to_exitcode(status)
        stdout, stderr = job.text()
        return {
            "status": why or _verdict(code, cpu, limits["cpu_s"], stderr),
            "exit_code": code,
            "wall_s": wall,
            "cpu_s": cpu,
            "max_rss_mb": usage.ru_maxrss / 1024.0,
            "stdout": stdout,
            "stderr": stderr,
            "clean": clean,
        }

    def _watch(self, job: SandboxJob, pid: int, deadline: float, files: int) -> tuple[str, int | None, Any]:
        """Transfer data until the job ends, runs out of time or writes too much. Returns (reason to end it, status,
        usage)."""
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                return "time", None, None
            # With namespaces the scratch directory is a file system of limited size.
            look = self._mode != "namespaces"
            if look and scratch.size(self._scratch) > files + _SLACK:
                return "output", None, None
            if not job.move(self._woken, self._channel.fileno(), min(left, _LOOK_S) if look else left):
                self._sweep(pid)
                os._exit(0)
            with contextlib.suppress(BlockingIOError):
                os.read(self._woken, 4096)
            if job.overflown:
                return "output", None, None
            ended, status, usage = os.wait4(pid, os.WNOHANG)
            if ended:
                return "", status, usage

    def _confine(self, limits: dict[str, Any]) -> None:
        """Confine the job before its program."""
        # With a pid namespace it dies with process 1 anyway.
        prctl(_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != self._pid:
            os._exit(70)
        os.chdir(f"{self._scratch}/job")
        cpu = -int(-limits["cpu_s"] // 1)
        for which, soft, hard in (
            (resource.RLIMIT_CPU, cpu, cpu + 1),
            (resource.RLIMIT_AS, *[self._base + limits["memory_mb"] * 2**20] * 2),
            (resource.RLIMIT_FSIZE, *[limits["files_mb"] * 2**20] * 2),
            (resource.RLIMIT_NOFILE, _NOFILE, _NOFILE),
            (resource.RLIMIT_NPROC, *[limits["processes"] + self._others] * 2),
            (resource.RLIMIT_CORE, 0, 0),
            (resource.RLIMIT_MSGQUEUE, 0, 0),
            (resource.RLIMIT_MEMLOCK, 0, 0),
        ):
            ceiling = resource.getrlimit(which)[1]
            if ceiling != resource.RLIM_INFINITY:
                soft, hard = min(soft, ceiling), min(hard, ceiling)
            resource.setrlimit(which, (soft, hard))
        if self._filter:
            seccomp(self._filter.replace(struct.pack("<I", _PID), struct.pack("<I", os.getpid())))

    def _sweep(self, job: int) -> float:
        """Kill and reap every other process of the sandbox. Returns the CPU seconds that they used."""
        cpu = 0.0
        while True:
            try:
                for pid in self._strays(job):
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.kill(pid, signal.SIGKILL)
                usage = os.wait3(0)[2]
                cpu += usage.ru_utime + usage.ru_stime
            except ChildProcessError:
                return cpu

    def _strays(self, job: int) -> list[int]:
        """Process ids that may be left of a job. In a pid namespace -1 is every process but this one, which leaves a
        fork bomb no gap."""
        if self._mode == "namespaces":
            return [-1]
        if self._mode == "single":
            return [job]
        me = os.getpid()
        found = [-job]
        with contextlib.suppress(OSError), open(f"/proc/{me}/task/{me}/children") as children:
            found += map(int, children.read().split())
        return found

    def _wipe(self) -> None:
        scratch.empty(self._scratch, most=scratch.MOST_ENTRIES)
        for name in ("job", "shm"):
            os.mkdir(f"{self._scratch}/{name}", 0o700)


def _verdict(code: int, cpu: float, cpu_limit: float, stderr: str) -> str:
    if code == 0:
        return "ok"
    if code == -signal.SIGXCPU or (code == -signal.SIGKILL and cpu >= cpu_limit * 0.8):
        return "time"
    last = stderr.rstrip().rpartition("\n")[2]
    if code == 1 and _MEMORY_ERROR.match(last):
        return "memory"
    # The signal came from the kernel, out of memory, or from the program itself: no other process of the sandbox could
    # send it.
    return "signal" if code < 0 else "exit"


def _address_space() -> int:
    """Bytes mapped now, without /proc: the smallest limit under which one more page can be mapped."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    low, high = 0, 1 << 44
    try:
        while high - low > 4096:
            middle = (low + high) // 2 // 4096 * 4096
            if hard != resource.RLIM_INFINITY and middle > hard:
                high = middle
                continue
            resource.setrlimit(resource.RLIMIT_AS, (middle, hard))
            try:
                mmap.mmap(-1, 4096).close()
            except (OSError, MemoryError):
                low = middle
            else:
                high = middle
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    return high


def become(uid: int | None) -> None:
    if uid is not None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
        no_capabilities()  # the change of user keeps the inheritable ones


def no_capabilities() -> None:
    header = struct.pack("=Ii", 0x2008_0522, 0)
    check(libc.syscall(_CAPSET[os.uname().machine], header, bytes(24)), "capset")


def prctl(option: int, *arguments: Any) -> None:
    filled = [*arguments, 0, 0, 0, 0][:4]
    values = [ctypes.c_ulong(a) if isinstance(a, int) else a for a in filled]
    check(libc.prctl(option, *values), f"prctl({option})")


def check(result: int, what: str) -> int:
    """The result of a call of the C library. Raises its `OSError`."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return int(result)


def seccomp(code: bytes) -> None:
    """Load a filter (`struct sock_filter[]`) for this process and its children, permanently."""
    buffer = ctypes.create_string_buffer(code, len(code))

    class Program(ctypes.Structure):
        _fields_ = (("len", ctypes.c_ushort), ("filter", ctypes.c_void_p))

    prctl(_NO_NEW_PRIVS, 1)
    head = Program(len(code) // 8, ctypes.cast(buffer, ctypes.c_void_p))
    prctl(_SET_SECCOMP, 2, ctypes.byref(head))


def send(channel: socket.socket, message: dict[str, Any]) -> bool:
    body = json.dumps(message).encode()
    try:
        channel.sendall(struct.pack(">I", len(body)) + body)
    except OSError:
        return False
    return True


def receive(channel: socket.socket) -> dict[str, Any] | None:
    head = _exactly(channel, 4)
    size = struct.unpack(">I", head)[0] if head is not None else _MESSAGE_BYTES + 1
    body = _exactly(channel, size) if size <= _MESSAGE_BYTES else None
    return json.loads(body) if body is not None else None


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
