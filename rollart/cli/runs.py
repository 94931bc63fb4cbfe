"""`rollart demo-data`, `export`, `logs` and `stop`: existing runs, from any shell that sees their directory."""

from __future__ import annotations

import json
import os
import select
import shlex
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import click

from rollart.cli import controller
from rollart.cli.context import find_run
from rollart.cli.controller import ControllerProcess, has_heartbeat, live_controller, recorded_controller, send_request
from rollart.errors import RunFailed, UsageError

LAUNCH = "launch"
"""The log of a detached run's controller."""

DEMO_COMMANDS = (
    "report cost demo-data",
    "report utilization demo-data",
    "report curve demo-data --png curve.png",
    "trajectories demo-data --domain spell_backward --sort reward",
    "advise demo-data",
    "dashboard demo-data",
)
"""What `demo-data` proposes."""

FOLLOW_INTERVAL_S = 0.2
"""Seconds between two reads of the files while following."""


def demo_data(runs_dir: Path) -> None:
    from rollart.tools.demo_data import NAME, unpack

    unpack(runs_dir)
    where = "" if runs_dir == Path("runs") else f" --runs-dir {shlex.quote(str(runs_dir))}"
    click.echo(f"{runs_dir / NAME}: a recorded quickstart. Look at it by")
    for command in DEMO_COMMANDS:
        click.echo(f"  rollart {command.replace(NAME, NAME + where)}")


def export(
    run: str | None, version: str, adapter: str | None, out: Path, force: bool, as_json: bool, runs_dir: Path
) -> None:
    # Here, so that `logs` and `stop` need not import the reports.
    from rollart.tools.export import export_version

    done = export_version(find_run(run, runs_dir), version, out, force=force, adapter=adapter)
    if as_json:
        shown = {
            "schema_version": 1,
            "version": done.kept.version,
            "step": done.kept.step,
            "success": {domain: one.rate for domain, one in done.kept.success.items()},
            "directory": str(done.directory),
            "files": list(done.files),
            "bytes": done.bytes,
        }
        click.echo(json.dumps(shown, indent=2))
        return
    click.echo(f"v{done.kept.version} in {done.directory}: {len(done.files)} files, {done.bytes / 1e6:,.1f} MB")


def logs(run: str | None, role: str | None, lines: int, follow: bool, runs_dir: Path) -> None:
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
            click.echo(f"{path.stem}: {line}")
    while follow:
        ended = live_controller(directory) is None
        for path in _files(directory, role):
            for line in new_lines(path, seen):
                click.echo(f"{path.stem}: {line}")
        if ended:
            return
        threading.Event().wait(FOLLOW_INTERVAL_S)


def _files(directory: Path, role: str | None) -> list[Path]:
    """Logs by name: `role` is a part's name, or its name without the number."""
    found = sorted((directory / "logs").glob("*.log"))
    return [path for path in found if role is None or role in (path.stem, path.stem.rpartition("-")[0])]


def new_lines(path: Path, seen: dict[Path, int]) -> Iterator[str]:
    """Lines completed since the last call. `seen`: bytes printed, by file."""
    with path.open("rb") as file:
        file.seek(seen.get(path, 0))
        content = file.read()
    whole = content[: content.rfind(b"\n") + 1]
    seen[path] = seen.get(path, 0) + len(whole)
    yield from whole.decode(errors="replace").splitlines()


def stop(run: str | None, runs_dir: Path, wait_s: float, kill: bool) -> None:
    directory = find_run(run, runs_dir)
    owner = recorded_controller(directory)
    if owner is None or (owner.here and not owner.alive):
        raise UsageError(f"run '{directory.name}' is not running")
    if not owner.here:
        _stop_elsewhere(directory, owner, wait_s, kill)
        return
    try:
        process = os.pidfd_open(owner.pid)
    except ProcessLookupError:
        return
    try:
        if recorded_controller(directory) != owner or not owner.alive:  # the id was recycled before it was pinned
            return
        signal.pidfd_send_signal(process, signal.SIGTERM)
        if _wait_for_exit(process, wait_s):
            click.echo(f"run {directory.name} stopped", err=True)
        elif kill:
            signal.pidfd_send_signal(process, signal.SIGKILL)
            _wait_for_exit(process, wait_s)
            click.echo(f"run {directory.name} killed", err=True)
        else:
            raise RunFailed(
                f"run '{directory.name}' (process {owner.pid}) has not stopped within {wait_s:g} s",
                remedy="wait longer with --wait, or `rollart stop --kill`",
            )
    except ProcessLookupError:
        click.echo(f"run {directory.name} stopped", err=True)
    finally:
        os.close(process)


def _stop_elsewhere(directory: Path, owner: ControllerProcess, wait_s: float, kill: bool) -> None:
    """Stop a run whose controller is on another machine, by a request through the run's directory."""
    process = f"process {owner.pid} on {owner.host}"
    try:
        answered = has_heartbeat(directory, owner.life) and send_request(directory, owner.life, "stop")
        if not answered and _is_held(directory, owner):
            raise RunFailed(
                f"run '{directory.name}' is of {process}, which gives no sign of life: it is dead, or does not "
                f"reach {directory}",
                remedy=f"`rollart stop` on {owner.host}; if that machine is gone, `rollart launch --resume` continues",
            )
        if any(not _is_held(directory, owner) for _ in controller.poll_ticks(wait_s)):
            click.echo(f"run {directory.name} stopped on {owner.host}", err=True)
        elif kill:
            if not send_request(directory, owner.life, "kill"):
                raise RunFailed(f"{process} no longer answers", remedy=f"`rollart stop --kill` on {owner.host}")
            click.echo(f"run {directory.name} killed on {owner.host}", err=True)
        else:
            raise RunFailed(
                f"run '{directory.name}' ({process}) was asked to stop, and has not within {wait_s:g} s",
                remedy="wait longer with --wait, or `rollart stop --kill`",
            )
    except OSError as error:
        raise RunFailed(
            f"{process} cannot be asked to stop: {error.filename or directory}: {error.strerror}",
            remedy=f"`rollart stop` on {owner.host}",
        ) from None


def _is_held(directory: Path, owner: ControllerProcess) -> bool:
    noted = recorded_controller(directory)
    return noted is not None and noted.life == owner.life


def _wait_for_exit(process: int, wait_s: float) -> bool:
    """True if the process of this pidfd ends in time."""
    poll = select.poll()
    poll.register(process, select.POLLIN)
    return bool(poll.poll(wait_s * 1000))
