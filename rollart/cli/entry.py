"""Where the command begins: signals end it in one line and with their code from here on, also while the rest is being
imported, which takes longer than some commands do. Imports nothing of the rest by itself."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

__all__ = ["INTERRUPTED", "TERMINATED", "main", "standard_streams", "terminable"]

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it."""
TERMINATED = 143
"""Exit code after SIGTERM, as shells have it."""


def main() -> None:
    """Run the command line and exit with its code."""
    try:
        standard_streams()
        terminable()
        from rollart.cli.main import main as command

        command()
    except KeyboardInterrupt:
        _end("interrupted", INTERRUPTED)
    except (
        RuntimeError
    ) as error:  # CPython 3.11 wraps an interrupt that meets `__set_name__`, so while classes are made
        if not isinstance(error.__cause__, KeyboardInterrupt):
            raise
        _end("interrupted", INTERRUPTED)
    except SystemExit as error:
        if error.code != TERMINATED:
            raise
        _end("terminated", TERMINATED)


def standard_streams() -> None:
    """Streams that the command was started without (`>&-`, some daemons) go nowhere from here on. A file that is opened
    later would have their number otherwise, and be written to."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "r" if number == 0 else "w", closefd=False))  # noqa: SIM115


def terminable() -> None:
    """SIGTERM is a SystemExit from here on, unless somebody answers it already."""
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _terminate)


def _terminate(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)  # once: what is closed now is not interrupted again
    sys.exit(TERMINATED)


def _end(word: str, code: int) -> None:
    """Nothing else runs: what an interrupted import has left half made cannot be closed."""
    os.write(2, f"rollart: {word}\n".encode())
    os._exit(code)


if __name__ == "__main__":
    main()
