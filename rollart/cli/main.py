"""`rollart`: the command line. Errors become one line and an exit code here. A command is imported when it is invoked,
so that its module imports at its top what it needs, and `--help` and mistakes in a command's name need none of it."""

from __future__ import annotations

import atexit
import contextlib
import importlib
import os
import sys
import tempfile
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from rollart.cli.process import (
    INTERRUPTED,
    TERMINATED,
    crash_directory,
    own_process,
    standard_streams,
    terminable,
)
from rollart.errors import RollartError, UsageError

EXIT_S = 10.0
"""Longest time for the functions registered with `atexit`, in seconds."""

EPILOG = "Exit codes: 0 ok, 1 run failed, 2 usage or spec, 3 provider, 4 budget, 5 fault rate, 130 interrupted."


class LazyCommand(click.Command):
    """A command that is imported when it is invoked. `target` is "module:function", `help` the first sentence of its
    own help, which the group lists."""

    def __init__(self, name: str, target: str, help: str) -> None:
        super().__init__(name, help=help)
        self._target = target

    def load(self) -> click.Command:
        module, _, function = self._target.partition(":")
        command: click.Command = getattr(importlib.import_module(module), function)
        return command

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        return self.load().make_context(info_name, args, parent, **extra)


COMMANDS = (
    LazyCommand("launch", "rollart.cli.launch:launch", "Start a run; without RUN.yaml the built-in quickstart."),
    LazyCommand(
        "plan",
        "rollart.cli.plan:plan",
        "Show the placement of the run's parts, its rate and cost, and the reasons.",
    ),
    LazyCommand(
        "simulate",
        "rollart.cli.simulate:simulate",
        "Simulate a run on virtual time, at any scale, with the product's own scheduler.",
    ),
    LazyCommand(
        "calibrate",
        "rollart.cli.calibrate:calibrate",
        "Measure this machine with a run's model, and write the constants that plans need.",
    ),
    LazyCommand("rewards", "rollart.cli.rewards:rewards", "Write, test, deploy and operate reward functions."),
    LazyCommand(
        "proxy",
        "rollart.cli.servers:proxy",
        "Serve OpenAI's and Anthropic's APIs in front of engines until Ctrl-C, and capture every token.",
    ),
    LazyCommand(
        "service",
        "rollart.cli.servers:service",
        "Serve a table of samples until Ctrl-C: prompts in, experience in and out by columns, weights announced.",
    ),
    LazyCommand("prices", "rollart.cli.prices:prices", "Show prices, and renew them in a price file of your own."),
    LazyCommand("validate", "rollart.cli.specs:validate", "Check run, cluster, price and fault files."),
    LazyCommand("schema", "rollart.cli.specs:schema", "Print the JSON Schema of a spec, for editors."),
    LazyCommand("report", "rollart.cli.reports:report", "Show cost, utilization and learning of a run."),
    LazyCommand("status", "rollart.cli.status:status", "Show the status of a run."),
    LazyCommand("logs", "rollart.cli.runs:logs", "Show the logs of a run's parts."),
    LazyCommand("stop", "rollart.cli.runs:stop", "Stop a run and wait until it has ended."),
    LazyCommand("doctor", "rollart.cli.doctor:doctor", "Check this machine and the installed extras."),
    LazyCommand("infra", "rollart.cli.specs:infra", "Render the deployment files of a cluster from its spec."),
)


@click.group(
    commands=COMMANDS,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog=EPILOG,
)
@click.version_option(package_name="rollart", message="%(version)s")
def cli() -> None:
    """Train agents with reinforcement learning over mixed hardware, and see where every second and dollar went."""


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
        if "_ROLLART_COMPLETE" in os.environ:
            raise UsageError("tab completion is not supported", remedy="unset _ROLLART_COMPLETE in the shell")
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
        return _print_error(UsageError(error.format_message(), remedy=_usage_remedy(error)))
    except (click.Abort, KeyboardInterrupt):
        click.echo("rollart: interrupted", err=True)
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader closed our output: no error
        return 0
    except BaseException as error:
        if isinstance(error, SystemExit):
            if error.code == TERMINATED:
                click.echo("rollart: terminated", err=True)
                return TERMINATED
            raise
        return _failed(error)
    return 0


def _failed(error: BaseException) -> int:
    leaves = _leaf_errors(error)
    expected = [leaf for leaf in leaves if isinstance(leaf, RollartError)]
    if expected and len(expected) == len([leaf for leaf in leaves if not isinstance(leaf, KeyboardInterrupt)]):
        return _print_error(max(expected, key=lambda leaf: leaf.exit_code))
    if all(isinstance(leaf, KeyboardInterrupt) for leaf in leaves):
        click.echo("rollart: interrupted", err=True)
        return INTERRUPTED
    first = next(leaf for leaf in leaves if not isinstance(leaf, RollartError | KeyboardInterrupt))
    text = str(first).partition("\n")[0]
    click.echo(f"rollart: unexpected {type(first).__name__}{': ' + text if text else ''}", err=True)
    click.echo(f"  remedy: report it with {_save_traceback(error)}", err=True)
    return 1


def _leaf_errors(error: BaseException) -> list[BaseException]:
    """The errors inside task groups, in order."""
    if isinstance(error, BaseExceptionGroup):
        return [leaf for part in error.exceptions for leaf in _leaf_errors(part)]
    if isinstance(error, RuntimeError) and isinstance(error.__cause__, KeyboardInterrupt):
        return [error.__cause__]  # CPython 3.11 wraps an interrupt during `__set_name__` (class creation)
    return [error]


def _print_error(error: RollartError) -> int:
    lines = error.message.splitlines() or [type(error).__name__]
    click.echo("\n".join(f"rollart: {line}" for line in lines), err=True)
    if error.remedy:
        click.echo(f"  remedy: {error.remedy}", err=True)
    return error.exit_code


def _usage_remedy(error: click.ClickException) -> str:
    context = getattr(error, "ctx", None)
    return f"see `{context.command_path} --help`" if context is not None else "see `rollart --help`"


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
