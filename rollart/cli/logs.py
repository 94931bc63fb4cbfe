"""`rollart logs`: the logs of a run's parts, from any shell that sees its directory."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import click

from rollart.cli.context import find_run, run_argument, runs_option
from rollart.cli.pidfile import live_controller
from rollart.errors import UsageError

LAUNCH = "launch"
"""The log of a detached run's controller."""

POLL_INTERVAL_S = 0.2
"""Seconds between two reads of the files while following."""


@click.command()
@run_argument
@click.option(
    "--role",
    help="Only parts of this role (engine, prefill, decode, trainer, environment, reward, launch) or this name.",
)
@click.option("-n", "--lines", type=click.IntRange(0), default=20, show_default=True, help="Last lines of each part.")
@click.option("-f", "--follow", is_flag=True, help="Keep printing new lines until the run ends.")
@runs_option
def logs(run: str | None, role: str | None, lines: int, follow: bool, runs_dir: Path) -> None:
    """Show the logs of a run's parts.

    RUN is a name or directory; without it the latest run.
    """
    directory = find_run(run, runs_dir)
    found = _files(directory, role)
    if not found and not (follow and live_controller(directory)):
        known = ", ".join(sorted({path.stem for path in _files(directory, None)})) or "none yet"
        raise UsageError(
            f"run '{directory.name}' has no log of '{role}'" if role else f"run '{directory.name}' has no logs",
            remedy=f"there are: {known}",
        )
    seen: dict[Path, int] = {}
    for path in found:
        content = path.read_bytes()
        seen[path] = content.rfind(b"\n") + 1
        written = content.decode(errors="replace").splitlines()
        if 0 < lines < len(written):
            click.echo(f"{path.stem}: last {lines:,} of {len(written):,} lines (all: -n {len(written)})", err=True)
        for line in written[-lines:] if lines else ():
            _print_line(path, line)
    while follow:
        ended = live_controller(directory) is None
        for path in _files(directory, role):
            for line in _new_lines(path, seen):
                _print_line(path, line)
        if ended:
            return
        threading.Event().wait(POLL_INTERVAL_S)


def _files(directory: Path, role: str | None) -> list[Path]:
    """Logs by name: `role` is a part's name, or its name without the number."""
    found = sorted((directory / "logs").glob("*.log"))
    return [path for path in found if role is None or role in (path.stem, path.stem.rpartition("-")[0])]


def _new_lines(path: Path, seen: dict[Path, int]) -> Iterator[str]:
    """Lines completed since the last call. `seen`: bytes printed, by file."""
    with path.open("rb") as file:
        file.seek(seen.get(path, 0))
        content = file.read()
    whole = content[: content.rfind(b"\n") + 1]
    seen[path] = seen.get(path, 0) + len(whole)
    yield from whole.decode(errors="replace").splitlines()


def _print_line(path: Path, line: str) -> None:
    click.echo(f"{path.stem}: {line}")
