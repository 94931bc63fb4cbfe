"""`rollart`: the command line. Errors become one line and an exit code here. A command is imported when it is invoked,
so that its module imports at its top what it needs, and `--help` and mistakes in a command's name need none of it."""

from __future__ import annotations

import atexit
import contextlib
import os
import pkgutil
import sys
import tempfile
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path

import click

from rollart.cli.commands import COMPLETE, cli
from rollart.cli.process import (
    INTERRUPTED,
    TERMINATED,
    crash_directory,
    drop_late_errors,
    is_interrupt,
    own_process,
    standard_streams,
    terminable,
)
from rollart.errors import RollartError, UsageError

EXIT_S = 10.0
"""Longest time for the functions registered with `atexit`, in seconds."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit with its code."""
    standard_streams()
    terminable()
    own_process.set(True)
    code = run(arguments)
    # `os._exit` instead of a return: a normal exit would join threads that users' code left behind, and CPython kills
    # itself with SIGINT after an interrupt during an import that was building a dataclass, caught or not.
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    # Process pools release their semaphores in exit functions; functions that an environment registered may hang.
    ending = threading.Thread(target=atexit._run_exitfuncs, daemon=True)
    ending.start()
    with contextlib.suppress(KeyboardInterrupt):
        ending.join(EXIT_S)
    os._exit(code)


def run(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code. Every error is reported on stderr in a line or two."""
    try:
        if (instruction := os.environ.get(COMPLETE)) is not None:
            return int(pkgutil.resolve_name("rollart.cli.completion:answer")(instruction))
        given = sys.argv[1:] if arguments is None else list(arguments)
        with cli.make_context("rollart", given) as context:  # not cli.main: it would exit for us on a closed pipe
            cli.invoke(context)
        sys.stdout.flush()
    except click.exceptions.Exit as done:
        return done.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return UsageError.exit_code
    except click.ClickException as error:
        at = getattr(error, "ctx", None)
        remedy = f"see `{'rollart' if at is None else at.command_path} --help`"
        return _print_error(UsageError(error.format_message(), remedy=remedy))
    except (click.Abort, KeyboardInterrupt):
        return _print_interrupted()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader closed our output: no error
        return 0
    except SystemExit as error:
        if error.code != TERMINATED:
            raise
        drop_late_errors()
        click.echo("rollart: terminated", err=True)
        return TERMINATED
    except BaseException as error:
        return _failed(error)
    return 0


def _failed(error: BaseException) -> int:
    leaves = _leaf_errors(error)
    expected = [leaf for leaf in leaves if isinstance(leaf, RollartError)]
    if expected and len(expected) == len([leaf for leaf in leaves if not isinstance(leaf, KeyboardInterrupt)]):
        return _print_error(max(expected, key=lambda leaf: leaf.exit_code))
    if all(isinstance(leaf, KeyboardInterrupt) for leaf in leaves):
        return _print_interrupted()
    first = next(leaf for leaf in leaves if not isinstance(leaf, RollartError | KeyboardInterrupt))
    text = str(first).partition("\n")[0]
    click.echo(f"rollart: unexpected {type(first).__name__}{': ' + text if text else ''}", err=True)
    click.echo(f"  remedy: report it with {_save_traceback(error)}", err=True)
    return 1


def _leaf_errors(error: BaseException) -> list[BaseException]:
    """The errors inside task groups, in order."""
    if isinstance(error, BaseExceptionGroup):
        return [leaf for part in error.exceptions for leaf in _leaf_errors(part)]
    return [KeyboardInterrupt() if is_interrupt(error) else error]


def _print_interrupted() -> int:
    drop_late_errors()
    click.echo("rollart: interrupted", err=True)
    return INTERRUPTED


def _print_error(error: RollartError) -> int:
    if error.exit_code == INTERRUPTED:
        drop_late_errors()
    lines = error.message.splitlines() or [type(error).__name__]
    click.echo("\n".join(f"rollart: {line}" for line in lines), err=True)
    if error.remedy:
        click.echo(f"  remedy: {error.remedy}", err=True)
    return error.exit_code


def _save_traceback(error: BaseException) -> Path:
    """Write the traceback into the run's directory, or a temporary one, and return the path."""
    text = "".join(traceback.format_exception(error))
    directory = crash_directory.get()
    if directory is not None and directory.is_dir():
        path = directory / "error.log"
        try:
            path.write_text(text)
        except OSError:
            pass
        else:
            return path
    with tempfile.NamedTemporaryFile("w", prefix="rollart-error-", suffix=".log", delete=False) as file:
        file.write(text)
    return Path(file.name)


if __name__ == "__main__":
    main()
