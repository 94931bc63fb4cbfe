"""One program inside the sandbox: its pipes and its execution. Standard library only; see `zygote.py`."""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
import linecache
import os
import resource
import select
import signal
import sys
import threading
import traceback
from typing import Any, NoReturn


class SandboxJob:
    """The pipes of one job, with both ends."""

    def __init__(self, stdin: bytes, most: int) -> None:
        self._in_r, self._in_w = os.pipe()
        self._out_r, self._out_w = os.pipe()
        self._err_r, self._err_w = os.pipe()
        self._error_r, self._error_w = os.pipe()
        self._stdin = memoryview(stdin)
        self._most = most
        self._got: dict[int, bytearray] = {self._out_r: bytearray(), self._err_r: bytearray()}
        self._error = b""
        self.overflown = False
        self._poll = select.poll()

    def enter(self, confine: Any) -> None:
        """In the child: become the program's process."""
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.setsid()
            for source, target in ((self._in_r, 0), (self._out_w, 1), (self._err_w, 2), (self._error_w, 3)):
                os.dup2(source, target)
            os.closerange(4, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
            confine()
            os.close(3)
        except BaseException as error:
            os.write(3, f"{type(error).__name__}: {error}".encode()[:1000])
            os._exit(70)

    def close_theirs(self) -> None:
        for fd in (self._in_r, self._out_w, self._err_w, self._error_w):
            os.close(fd)
        for fd in (*self._got, self._in_w):
            os.set_blocking(fd, False)
        for fd in self._got:
            self._poll.register(fd, select.POLLIN)
        if self._stdin:
            self._poll.register(self._in_w, select.POLLOUT)
        else:
            self._close_stdin()

    def move(self, woken: int, channel: int, seconds: float) -> bool:
        """Write and read once, or wait until a pipe is ready. False if the caller has gone."""
        self._poll.register(woken, select.POLLIN)
        self._poll.register(channel, 0)
        for fd, _ in self._poll.poll(seconds * 1000.0 + 1.0):
            if fd == channel:
                return False
            if fd == self._in_w:
                self._feed()
            elif fd in self._got:
                self._take(fd)
        return True

    def drain(self) -> str:
        """Read the rest of the pipes of an ended job and close them; 'output' if that exceeds the limit."""
        for fd in self._got:
            while not self.overflown and self._take(fd):
                pass
            os.close(fd)
        self._close_stdin()
        self._error = os.read(self._error_r, 1000)
        os.close(self._error_r)
        return "output" if self.overflown else ""

    def failure(self) -> str:
        """The error that prevented the program's start, '' if it started."""
        return self._error.decode(errors="replace")

    def text(self) -> tuple[str, str]:
        out, err = (bytes(part).decode("utf-8", "replace") for part in self._got.values())
        return out, err

    def _feed(self) -> None:
        try:
            self._stdin = self._stdin[os.write(self._in_w, self._stdin[:65536]) :]
        except BlockingIOError:
            return
        except BrokenPipeError:
            self._stdin = self._stdin[:0]
        if not self._stdin:
            self._close_stdin()

    def _take(self, fd: int) -> bool:
        try:
            part = os.read(fd, 65536)
        except BlockingIOError:
            return False
        if not part:
            with contextlib.suppress(KeyError):
                self._poll.unregister(fd)
            return False
        room = self._most - sum(map(len, self._got.values()))
        self._got[fd] += part[:room]
        self.overflown = self.overflown or len(part) > room
        return True

    def _close_stdin(self) -> None:
        if self._in_w >= 0:
            with contextlib.suppress(KeyError):
                self._poll.unregister(self._in_w)
            os.close(self._in_w)
            self._in_w = -1


def run(program: str) -> NoReturn:
    """Run the program as `__main__`, and end as the interpreter ends."""
    code = 1
    try:
        _open_streams()
        main_module = type(sys)("__main__")
        main_module.__dict__["__builtins__"] = __builtins__
        main_module.__dict__["__file__"] = "main.py"
        sys.modules["__main__"] = main_module
        sys.argv[:] = ["main.py"]
        sys.path.insert(0, os.getcwd())
        linecache.cache["main.py"] = (len(program), None, program.splitlines(True), "main.py")
        gc.enable()
        code = _executed(program, main_module.__dict__)
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    except BaseException:
        code = code or 1
    finally:
        os._exit(code)


def _open_streams() -> None:
    """Open new standard streams: the interpreter's own, made before the fork, lead nowhere. They stay open for the life
    of the process."""
    streams = {
        "stdin": io.TextIOWrapper(
            io.BufferedReader(io.FileIO(0, "rb", closefd=False)), encoding="utf-8", errors="replace"
        ),
        "stdout": _writer(1),
        "stderr": _writer(2, line_buffering=True),
    }
    vars(sys).update(streams, **{f"__{name}__": stream for name, stream in streams.items()})


def _writer(fd: int, *, line_buffering: bool = False) -> io.TextIOWrapper:
    raw = io.BufferedWriter(io.FileIO(fd, "wb", closefd=False))
    return io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", line_buffering=line_buffering)


def _executed(program: str, names: dict[str, Any]) -> int:
    try:
        exec(compile(program, "main.py", "exec", dont_inherit=True), names)
    except SystemExit as leave:
        if leave.code is None or isinstance(leave.code, int):
            return (leave.code or 0) & 0xFF
        print(leave.code, file=sys.stderr)
        return 1
    except BaseException as error:
        # The frame of this function is not the program's.
        error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
        try:
            traceback.print_exception(error, limit=-50)
        except BaseException as another:
            os.write(2, f"{type(error).__name__} (and {type(another).__name__} while it was printed)\n".encode())
        return 1
    return 0
