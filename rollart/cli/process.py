"""The process of the command: its standard streams, signals and exit codes, and where an unexpected traceback goes.

Imports the standard library alone: signals must end the command with one line and their exit code even during the other
imports, which take longer than some commands.
"""

from __future__ import annotations

import os
import signal
import sys
from contextvars import ContextVar
from pathlib import Path
from types import FrameType

INTERRUPTED = 130
"""Exit code after Ctrl-C, by the convention of shells."""
TERMINATED = 143
"""Exit code after SIGTERM, by the convention of shells."""

crash_directory: ContextVar[Path | None] = ContextVar("crash_directory", default=None)
"""Directory of the current run: an unexpected error leaves its traceback there."""

own_process: ContextVar[bool] = ContextVar("own_process", default=False)
"""True if this process runs only the command, and ends with it."""


def standard_streams() -> None:
    """Open standard streams that the command was started without (`>&-`, some daemons) on /dev/null. Otherwise a file
    opened later would get their number, and receive their output."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "r" if number == 0 else "w", closefd=False))  # noqa: SIM115


def terminable() -> None:
    """Turn SIGTERM into SystemExit, unless it has a handler already."""
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _terminate)


def drop_late_errors() -> None:
    """Print nothing about finalizers that fail from now on. For a command that was interrupted: what the interrupt cut
    short while it was being closed, such as an event loop, fails again when it is collected."""
    if own_process.get():
        sys.unraisablehook = lambda _: None


def is_interrupt(error: BaseException) -> bool:
    """True for Ctrl-C, also if an import turned it into another error. CPython 3.11 wraps it in a RuntimeError during
    `__set_name__`, that is, during class creation; pydantic-core, as it builds a model, keeps only its text."""
    if isinstance(error, KeyboardInterrupt):
        return True
    if type(error).__name__ == "SchemaError" and type(error).__module__.startswith("pydantic_core"):
        return "\n  KeyboardInterrupt:" in str(error)
    return isinstance(error, RuntimeError) and isinstance(error.__cause__, KeyboardInterrupt)


def _terminate(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)  # once: a second signal must not interrupt the clean-up
    sys.exit(TERMINATED)
