"""Entry point of the command: from here on signals end it with one line and their exit code, even while the rest of it
is imported."""

from __future__ import annotations

import os

from rollart.cli.process import INTERRUPTED, TERMINATED, is_interrupt, standard_streams, terminable


def main() -> None:
    """Run the command line and exit with its code."""
    try:
        standard_streams()
        terminable()
        from rollart.cli.main import main as command

        command()
    except SystemExit as error:
        if error.code != TERMINATED:
            raise
        _end("terminated", TERMINATED)
    except BaseException as error:
        if not is_interrupt(error):
            raise
        _end("interrupted", INTERRUPTED)


def _end(word: str, code: int) -> None:
    """Exit without clean-up, since an interrupted import leaves objects half made."""
    os.write(2, f"rollart: {word}\n".encode())
    os._exit(code)


if __name__ == "__main__":
    main()
