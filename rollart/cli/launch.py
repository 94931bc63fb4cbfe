"""`rollart launch`: from files to a running run."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from types import FrameType

import click

from rollart.cli.context import (
    RESOLVED,
    colour,
    find_run,
    native_output_to_stderr,
    print_report,
    print_stderr,
    split_arguments,
)
from rollart.cli.controller import age_s, hold_run, live_controller
from rollart.cli.process import crash_directory, own_process
from rollart.cli.progress import ProgressLines
from rollart.cli.runs import LAUNCH
from rollart.errors import RunFailed, SpecError, StoppedEarly, StorageFailed, UsageError
from rollart.launch.launch import launch as start
from rollart.launch.preflight import dry_run_lines, launch_warnings, launchable, unchecked_remotes
from rollart.launch.resume import refuse_changed
from rollart.launch.rewards import draw_releases
from rollart.ledger.database import FILE
from rollart.ledger.reader import LedgerReader
from rollart.report.checkpoints import LATEST, choose_version, kept_versions
from rollart.report.cost import cost
from rollart.report.curve import curve
from rollart.report.money.planned import forecast_lines, planned_cost
from rollart.report.profile import measured_profiles
from rollart.report.rows import collect
from rollart.report.utilization import utilization
from rollart.settings.load import SpecSources
from rollart.settings.planning import Specs
from rollart.settings.resolve import Resolved, read_specs, resolve_saved
from rollart.settings.run import ForkSpec, RunSpec


def launch(
    arguments: tuple[str, ...],
    cluster: Path | None,
    dry_run: bool,
    resume: str | None,
    source: str | None,
    optimizer: bool,
    name: str | None,
    detach: bool,
    runs_dir: Path,
) -> None:
    run_file, overrides = split_arguments(arguments)
    if name is not None and (not name or name != Path(name).name or name in (".", "..")):
        raise UsageError(f"--name '{name}' (rule: one directory name)")
    if resume is not None and any(given is not None for given in (run_file, cluster, name, source)):
        raise UsageError(
            "--resume continues a run as it was started",
            remedy="leave RUN.yaml, --cluster, --name and --from out; KEY=VALUE may change keys",
        )
    if optimizer and source is None:
        raise UsageError(
            "--optimizer without --from (rule: of the run that is forked)", remedy="add --from RUN@VERSION"
        )
    specs: Specs
    with native_output_to_stderr():
        if resume is not None:
            directory = find_run(resume, runs_dir)
            where = SpecSources.saved(directory / RESOLVED)
            specs = resolve_saved(directory / RESOLVED, overrides, measure=measured_profiles)
            for change in refuse_changed(specs, directory):
                click.echo(f"this resume changes {change}", err=True)
        else:
            _refuse_directory(runs_dir, name)
            specs = read_specs(run_file, cluster, overrides, measure=measured_profiles)
            if source is not None:
                specs = replace(specs, run=_fork(specs.run, source, optimizer, runs_dir))
            where = SpecSources.files(run_file, cluster, overrides)
        resolved = launchable(specs, where, others=not dry_run, begun=resume is not None and _begun(directory))
    if dry_run:
        _show(resolved)
        return
    for line in launch_warnings(resolved):
        click.echo(f"warning: {line}", err=True)
    for line in forecast_lines(resolved.to_dict()) if resume is None else ():
        click.echo(line, err=True)
    if resume is None:
        directory = _new_directory(runs_dir, name, resolved)
    if detach:
        _detach(resolved, directory, overrides if resume is not None else [])
        return
    _run(resolved, directory, resume=resume is not None)


def _begun(directory: Path) -> bool:
    """True for a run with a version of its own, which no longer needs the one that it forked."""
    with contextlib.suppress(UsageError), LedgerReader(directory) as reader:
        return bool(reader.versions())
    return False


def _fork(run: RunSpec, source: str, optimizer: bool, runs: Path) -> RunSpec:
    """The run that starts from `RUN@VERSION`. UsageError if there is no such version."""
    name, at, version = source.rpartition("@")
    if not at or "/" in version:  # a directory may have an @ in its name
        name, version = source, ""
    directory = find_run(name, runs)
    with LedgerReader(directory) as reader:
        chosen = choose_version(kept_versions(directory, reader), version or LATEST, directory.name)
    fork = ForkSpec(run=str(directory.resolve()), version=chosen.version, optimizer=optimizer)
    return run.model_copy(update={"fork": fork})


def _show(resolved: Resolved) -> None:
    """Print the dry run: specs and plan as YAML, commands and warnings as comments."""
    click.echo(resolved.to_yaml(), nl=False)
    for line in dry_run_lines(resolved):
        click.echo(f"# {line}")
    for line in launch_warnings(resolved):
        click.echo(f"# warning: {line}")
    for line in (
        *forecast_lines(resolved.to_dict()),
        *(f"not checked: {line}" for line in unchecked_remotes(resolved)),
    ):
        click.echo(f"# {line}")


def _detach(resolved: Resolved, directory: Path, overrides: list[str]) -> None:
    """Start the run in a new session, and return once it holds its directory. The controller starts with --resume,
    which begins a run that has not begun."""
    _refuse_running(directory)
    if not (directory / RESOLVED).exists():
        (directory / RESOLVED).write_text(resolved.to_yaml())
    log = directory / "logs" / f"{LAUNCH}.log"
    log.parent.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "rollart.cli.main", "launch", "--resume", str(directory), *overrides]
    with log.open("ab") as out:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True)
    while live_controller(directory) is None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.1)
            lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
            raise RunFailed(lines[-1] if lines else "it ended at once", remedy=f"see {log}")
    click.echo(f"run {directory.name} in {directory}, process {process.pid}", err=True)


def _refuse_running(directory: Path) -> None:
    other = live_controller(directory)
    if other is not None:
        where = "" if other.here else f" on {other.host}"
        raise UsageError(
            f"run '{directory.name}' is running (process {other.pid}{where})", remedy="`rollart stop` it first"
        )


def _run(resolved: Resolved, directory: Path, *, resume: bool) -> None:
    _refuse_running(directory)
    crash_directory.set(directory)

    previous = signal.signal(signal.SIGTERM, _terminate)
    try:
        resolved = asyncio.run(draw_releases(resolved, directory))
        fresh = directory / f"{RESOLVED}.new"
        fresh.write_text(resolved.to_yaml())
        fresh.replace(directory / RESOLVED)
        print_stderr(f"run {directory.name} in {directory}")
        with contextlib.chdir("."), hold_run(directory.absolute()):  # where an environment goes, no path changes
            since_s = age_s() if own_process.get() else 0.0
            lines = ProgressLines(colour=colour(stream=sys.stderr))
            stopped: StoppedEarly | None = None
            try:
                start(resolved, run_dir=directory, resume=resume, on_progress=lines, since_s=since_s)
            except StoppedEarly as error:  # a whole run, only a shorter one
                stopped = error
    except (SpecError, UsageError):
        if not resume and not (directory / FILE).exists():  # it never began, so there is nothing to resume
            shutil.rmtree(directory, ignore_errors=True)
        raise
    except OSError as error:
        raise StorageFailed(
            f"{error.filename or directory}: {error.strerror or error}",
            remedy="mend the disk or the directory's permissions, then continue with --resume",
        ) from None
    finally:
        signal.signal(signal.SIGTERM, previous)
    with LedgerReader(directory) as reader:
        rows = collect(reader, directory.resolve().name)
    curves = curve(rows)
    curves = replace(curves, tables=curves.tables[:1], notes=("every point: rollart report curve",))
    for report in (curves, cost(rows, planned=planned_cost(resolved.to_dict())), utilization(rows)):
        click.echo()
        print_report(report, "table")
    click.echo(f"\nrun directory: {directory}")
    if stopped is not None:
        raise stopped


def _refuse_directory(runs: Path, name: str | None) -> None:
    """StorageFailed or UsageError if the directory of a new run cannot be created. Leaves no files behind."""
    if name is not None and (runs / name).exists():
        raise UsageError(
            f"run '{name}' exists in {runs}", remedy=f"continue it with --resume {name}, or choose another name"
        )
    there = next(path for path in (runs.absolute(), *runs.absolute().parents) if path.exists())
    try:
        with tempfile.TemporaryDirectory(dir=there, prefix=".new-"):
            pass
    except OSError as error:
        raise _unwritable(runs, error) from None


def _unwritable(runs: Path, error: OSError) -> StorageFailed:
    return StorageFailed(f"{runs}: cannot be written: {error.strerror}", remedy="choose another place with --runs-dir")


def _new_directory(runs: Path, name: str | None, resolved: Resolved) -> Path:
    """Create the run's directory, which must be new. It appears atomically with its specs in it."""
    made = runs / f".new-{os.getpid()}"
    try:
        runs.mkdir(parents=True, exist_ok=True)
        made.mkdir(exist_ok=True)
        (made / RESOLVED).write_text(resolved.to_yaml())
        n = 1
        while True:
            directory = runs / (name or f"{resolved.run.name}-{n}")
            with contextlib.suppress(FileExistsError, NotADirectoryError):
                if not directory.exists():  # rename would replace an empty one
                    made.rename(directory)
                    return directory
            if name is not None:  # another process took it at this moment
                shutil.rmtree(made)
                _refuse_directory(runs, name)
            n += 1
    except OSError as error:
        if error.errno == errno.ENOTEMPTY:  # another process took the name at this moment
            return _new_directory(runs, name, resolved)
        raise _unwritable(runs, error) from None


def _terminate(number: int, frame: FrameType | None) -> None:
    """SIGTERM ends a run like Ctrl-C: asyncio cancels its main task on SIGINT, and everything is closed in order."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a script's background job
        raise KeyboardInterrupt
    signal.raise_signal(signal.SIGINT)
