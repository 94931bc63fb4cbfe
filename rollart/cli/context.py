"""Shared by the commands: reading arguments, locating runs, and output."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import click

from rollart.errors import UsageError, did_you_mean
from rollart.report.render import render
from rollart.report.tables import Report

if TYPE_CHECKING:
    from rollart.settings.cluster import ClusterFunctions

RESOLVED = "resolved.yaml"
"""A run's specs as it was started; a directory with this file is a run."""

FOR_PEOPLE = ("table", "html")
"""Formats in which numbers are rounded and names are cut."""


def print_stderr(line: str) -> None:
    """Print a line on stderr. If its reader has closed it (`2>&1 | head`, a closed terminal), this and all later lines
    are discarded, so that the run does not end because of it."""
    try:
        click.echo(line, err=True)
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 2)
        os.close(nowhere)


@contextmanager
def native_output_to_stderr() -> Iterator[None]:
    """Redirect output of compiled libraries to stderr, since standard output is for reports. HiGHS occasionally prints
    a line that its own options do not silence."""
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        os.dup2(2, 1)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def cluster_functions(cluster: Path | None) -> ClusterFunctions:
    """The `functions` section of a cluster spec; the defaults without a spec."""
    # Here, so that commands that read no spec, such as `logs` and `stop`, need not import the schema.
    from rollart.settings.cluster import ClusterFunctions
    from rollart.settings.load import load_cluster

    return ClusterFunctions() if cluster is None else load_cluster(cluster).functions


def split_arguments(arguments: tuple[str, ...]) -> tuple[Path | None, list[str]]:
    """The run file, if there is one, and the overrides. UsageError for a second file."""
    overrides = [a for a in arguments if "=" in a]
    files = [a for a in arguments if "=" not in a]
    if len(files) > 1:
        raise UsageError(
            f"'{files[1]}' is neither the run file nor key=value",
            remedy="give one RUN.yaml, and overrides as key=value",
        )
    return (Path(files[0]) if files else None), overrides


def find_run(run: str | None, runs: Path) -> Path:
    """A run's directory from its name or path; the latest one if neither is given. UsageError if there is none."""
    known: list[Path] = []
    with suppress(OSError):  # there is no such directory
        known = [path for path in sorted(runs.iterdir()) if (path / RESOLVED).is_file()]
    known.sort(key=lambda path: -(path / RESOLVED).stat().st_mtime_ns)  # ties: by name
    if run is None:
        if not known:
            raise UsageError(f"no runs in {runs}", remedy="start one with `rollart launch`, or give --runs-dir")
        return known[0]
    for candidate in (runs / run, Path(run)):
        if (candidate / RESOLVED).is_file():
            return candidate

    hint = did_you_mean(run, [path.name for path in known])
    raise UsageError(f"no run '{run}' in {runs}{hint}", remedy="give a run's name or directory")


def colour(stream: TextIO | None = None) -> bool:
    """True if a stream (standard output) may be coloured: a terminal, and NO_COLOR is not set (no-color.org)."""
    return (stream or sys.stdout).isatty() and not os.environ.get("NO_COLOR")


def print_report(
    report: Report, output: str, page: Callable[[Report], str] | None = None, into: Path | None = None
) -> None:
    """Print a report in one of the formats of `-o`, or write it into a file. `page` renders the HTML of reports that
    have more than tables."""
    if output == "html" and page is not None:
        print_text(page(report), into)
        return
    screen = into is None and sys.stdout.isatty()
    width = os.get_terminal_size(sys.stdout.fileno()).columns if screen else 110
    print_text(render(report, output, width=width, colour=screen and colour()), into)


def print_text(text: str | Iterable[str], into: Path | None) -> None:
    """Print a text, or its pieces, that ends in a newline, or write it into a file."""
    pieces = [text] if isinstance(text, str) else text
    if into is None:
        for piece in pieces:
            click.echo(piece, nl=False)
        return
    create_output_file(into)
    with into.open("w", encoding="utf-8") as file:
        file.writelines(pieces)


def create_output_file(path: Path) -> None:
    """Create a file that will be written, with its directory. UsageError if that is not possible."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "it is a directory")
        path.touch()
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}", remedy="name a file that you may write") from None


def create_ledger_directory(directory: Path) -> None:
    """Create the directory of a ledger that will be written. UsageError if that is not possible, or if the directory is
    not empty: a ledger holds one run."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{directory}: {error.strerror or error}", remedy="name a directory of your own") from None
    if any(directory.iterdir()):
        raise UsageError(f"{directory} holds something already (rule: one run each)", remedy="name another directory")
