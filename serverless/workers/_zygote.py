"""The zygote: a single-threaded process with the functions' imports loaded, which forks workers.

`python -m serverless.workers._zygote CONTROL_FD PARENT_PID CLEANUP_DIR`, started by `workers.processes`. Control
messages are msgpack datagrams (SOCK_SEQPACKET):

  in   ["preload", [modules]]; ["fork", key, order] with the worker's end of a socket pair and, for a function with
       secrets, the pipe for its output (SCM_RIGHTS)
  out  ["forked", key, pid] with a pidfd, or ["failed", key, error]; ["exit", key, wait status];
       ["preloaded", [[module, error] for each failed import]]

It ends when the control socket closes or on SIGTERM, which the kernel sends when the parent dies, after killing every
worker's process group. Workers get SIGKILL from the kernel when the zygote dies. If the parent ended or closed, the
zygote then removes CLEANUP_DIR ('' for none), so that not even a killed parent leaves files. Processes that functions
started and left behind become its children (subreaper), and are killed when their worker ends.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import select
import shutil
import signal
import socket
import sys
import traceback
from typing import Any

import msgpack

from serverless.workers import _worker

_MESSAGE_BYTES = 1 << 17


def main() -> None:
    control_fd, parent, cleanup = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    zygote = _Zygote(socket.socket(fileno=control_fd), parent, cleanup)
    _worker.prctl(_worker.PR_SET_PDEATHSIG, signal.SIGTERM)
    _worker.prctl(_worker.PR_SET_CHILD_SUBREAPER, 1)
    if zygote.orphaned:
        zygote.stop()
        return
    zygote.serve()


class _Zygote:
    """Owns the children. Runs no user code: only preloads are imported."""

    def __init__(self, control: socket.socket, parent: int, cleanup: str) -> None:
        self._control = control
        self._parent = parent
        self._closed = False
        self._cleanup = cleanup
        self._children: dict[int, int] = {}
        self._stopping = False
        self._woken, self._waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(self._waker, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, self._terminate)
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    @property
    def orphaned(self) -> bool:
        return os.getppid() != self._parent

    def serve(self) -> None:
        while not self._stopping:
            ready, _, _ = select.select([self._control.fileno(), self._woken], [], [])
            if self._woken in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._woken, 4096)
                self._reap()
            if self._control.fileno() in ready and not self._one_message():
                break
        self.stop()

    def stop(self) -> None:
        for pid in self._children:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in self._children:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
        self._children.clear()
        self._kill_strays()
        if self._cleanup and (self._closed or self.orphaned):
            shutil.rmtree(self._cleanup, ignore_errors=True)

    def _terminate(self, *_: Any) -> None:
        self._stopping = True

    def _one_message(self) -> bool:
        data, fds, _, _ = socket.recv_fds(self._control, _MESSAGE_BYTES, 4)
        if not data:
            self._closed = True
            return False
        message = msgpack.unpackb(data)
        if message[0] == "preload":
            failed = []
            for module in message[1]:
                try:
                    importlib.import_module(module)
                except Exception as failure:
                    failed.append([module, f"{type(failure).__name__}: {failure}"])
            # Workers share these pages: a garbage collection in one of them must not write to all.
            gc.collect()
            gc.freeze()
            self._send(["preloaded", failed])
        else:
            self._fork(message[1], message[2], fds)
        return True

    def _fork(self, key: int, order: dict[str, Any], fds: list[int]) -> None:
        parent = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            _close(fds)
            self._send(["failed", key, str(error)])
            return
        if pid == 0:
            self._become_worker(parent, order, *fds)
        _close(fds)
        self._children[pid] = key
        pidfd = os.pidfd_open(pid)
        self._send(["forked", key, pid], [pidfd])
        os.close(pidfd)

    def _become_worker(self, zygote: int, order: dict[str, Any], channel: int, output: int | None = None) -> None:
        """In the child. Never returns."""
        code = 70
        try:
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_DFL)
            os.setpgid(0, 0)
            _worker.prctl(_worker.PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != zygote:
                os._exit(0)
            self._control.close()
            os.close(self._woken)
            os.close(self._waker)
            os.set_inheritable(channel, False)
            _worker.run(socket.socket(fileno=channel), order, output)
            code = 0
        except SystemExit as leave:
            code = leave.code if isinstance(leave.code, int) else 1
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(BaseException):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    def _reap(self) -> None:
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None:
                return
            # Kill the function's own processes before the pid can be reused.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(ended.si_pid, signal.SIGKILL)
            _, status = os.waitpid(ended.si_pid, 0)
            key = self._children.pop(ended.si_pid, None)
            if key is not None:
                self._send(["exit", key, status])
                self._kill_strays()

    def _kill_strays(self) -> None:
        """Kill processes that a function started in their own session, outside its worker's group, and left behind."""
        me = os.getpid()
        with contextlib.suppress(OSError), open(f"/proc/{me}/task/{me}/children") as children:
            for pid in set(map(int, children.read().split())) - set(self._children):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def _send(self, message: list[Any], fds: list[int] | None = None) -> None:
        try:
            socket.send_fds(self._control, [msgpack.packb(message)], fds or [])
        except OSError:
            self._stopping = True


def _close(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


if __name__ == "__main__":
    main()
