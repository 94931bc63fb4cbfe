"""Entry point of the command: from here on signals end it with one line and their exit code, even during the other
imports, which take longer than some commands. Imports no other module of rollart at the top."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

__all__ = ["INTERRUPTED", "TERMINATED", "main", "standard_streams", "terminable"]

INTERRUPTED = 130
"""Exit code after Ctrl-C, by the convention of shells."""
TERMINATED = 143
"""Exit code after SIGTERM, by the convention of shells."""


def main() -> None:
    """Run the command line and exit with its code."""
    try:
        standard_streams()
        terminable()
        from rollart.cli.main import main as command

        command()
    except KeyboardInterrupt:
        _end("interrupted", INTERRUPTED)
    except RuntimeError as error:
        # CPython 3.11 wraps an interrupt during `__set_name__`, that is, during class creation.
        if not isinstance(error.__cause__, KeyboardInterrupt):
            raise
        _end("interrupted", INTERRUPTED)
    except SystemExit as error:
        if error.code != TERMINATED:
            raise
        _end("terminated", TERMINATED)


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


def _terminate(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)  # once: a second signal must not interrupt the clean-up
    sys.exit(TERMINATED)


def _end(word: str, code: int) -> None:
    """Exit without clean-up, since an interrupted import leaves objects half made."""
    os.write(2, f"rollart: {word}\n".encode())
    os._exit(code)


if __name__ == "__main__":
    main()
