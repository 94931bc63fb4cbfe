"""`rollart status`, `rollart logs` and `rollart stop`: existing runs, from any shell that sees their directory."""

from __future__ import annotations

import json
import os
import select
import signal
import threading
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from rollart.cli.context import find_run, output_option, print_report, run_argument, runs_option
from rollart.cli.controller import ControllerProcess, has_heartbeat, live_controller, recorded_controller, send_request
from rollart.cli.progress import strip_log_prefix
from rollart.errors import RunFailed, UsageError
from rollart.ledger.database import FILE as LEDGER
from rollart.ledger.intervals import RESOURCE_CLOSED, RESOURCE_OPENED
from rollart.ledger.reader import LedgerReader
from rollart.report.cost import cost_lines
from rollart.report.rows import ENGINE_ROLES, collect
from rollart.report.tables import Cell, Report, Table, TableColumn
from rollart.supervise.rebalance import ADOPTED

POLL_INTERVAL_S = 0.1
"""Seconds between two checks whether a controller on another machine has released its run."""

LAUNCH = "launch"
"""The log of a detached run's controller."""

FOLLOW_INTERVAL_S = 0.2
"""Seconds between two reads of the files while following."""


@click.command()
@run_argument
@output_option
@runs_option
def status(run: str | None, output: str, runs_dir: Path) -> None:
    """Show the status of a run.

    Its process, version, step, trajectories and cost so far. RUN is a name or directory; without it the latest run.
    """
    directory = find_run(run, runs_dir)
    owner = live_controller(directory)
    if not (directory / LEDGER).is_file():
        _print_status(
            directory.name,
            ("state", "starting" if owner else "stopped"),
            ("process", owner.pid if owner else None),
            ("directory", str(directory)),
            ("ledger", "none yet" if owner else "none: it ended before it had one; --resume starts it"),
            output=output,
        )
        return
    with LedgerReader(directory) as reader:
        rows, config = collect(reader, directory.resolve().name), reader.config()
        engines = _parts(reader, ENGINE_ROLES) if owner else []
        hosts = _parts(reader, ("environment",)) if owner else []
        workers = _parts(reader, ("reward",)) if owner else []
        starting = _starting(reader, engines)
        plan = _plan(reader, engines, config)
    steps = config.get("run", {}).get("steps")
    done = steps is not None and rows.facts.step is not None and rows.facts.step >= steps
    state = "running" if owner else "finished" if done else "stopped"
    _print_status(
        rows.run,
        ("state", state),
        ("process", owner.pid if owner else None),
        ("host", (owner.host or None) if owner else None),
        ("directory", str(directory)),
        ("engines", " ".join(engines) or None),
        ("plan", plan or None),
        ("outside_trainer", external_trainer_status(directory) if owner else None),
        ("starting", "; ".join(starting) or None),
        ("environment_hosts", " ".join(hosts) or None),
        ("function_hosts", " ".join(workers) or None),
        ("step", rows.facts.step),
        ("steps", steps),
        ("version", rows.facts.version),
        ("run_seconds", round(rows.facts.seconds, 3)),
        ("trained_trajectories", rows.facts.trained_samples),
        ("trained_tokens", rows.facts.trained_tokens),
        ("waiting_trajectories", rows.facts.live_samples),
        ("open_groups", rows.facts.live_groups),
        ("dropped_groups", rows.facts.dropped_groups),
        ("usd", sum(line.usd for line in cost_lines(rows))),
        output=output,
    )


def _print_status(run: str, *values: tuple[str, Cell], output: str) -> None:
    table = Table("status", "Status", (TableColumn("what"), TableColumn("value", "number")), values)
    print_report(Report("status", run, (table,)), output)


def external_trainer_status(directory: Path) -> str | None:
    """Status of an external trainer (`trainer.external`)."""
    try:
        note = json.loads((directory / "service.json").read_text())
        return f"{note['listen']}: {note['state']} since {note['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _parts(reader: LedgerReader, roles: Collection[str]) -> list[str]:
    """Current parts of these roles of a running run, in the order of their start."""
    closed = {event.subject: event.t for event in reader.events(RESOURCE_CLOSED)}
    opened = {e.subject: e.t for e in reader.events(RESOURCE_OPENED) if e.fields.get("role") in roles}
    return [name for name, t in opened.items() if t > closed.get(name, -1.0)]


def _starting(reader: LedgerReader, engines: Collection[str]) -> list[str]:
    """Engines that are still starting, with their seconds of start-up and last log line."""
    last = {event.subject: event for event in reader.events("engine_starting")}
    over = {e.subject: e.t for kind in ("engine_started", "engine_lost") for e in reader.events(kind)}
    return [
        f"{name} {last[name].fields['seconds']:.0f} s: {strip_log_prefix(str(last[name].fields['said']))}"
        for name in engines
        if name in last and last[name].t > over.get(name, -1.0)
    ]


def _plan(reader: LedgerReader, engines: list[str], config: Mapping[str, Any]) -> str:
    """The plan in force, by pool: `h20: 2 x decode of 4, 1 x prefill`."""
    seats = {}
    for part in config.get("plan", {}).get("assignments", ()):
        seats[part["part"]] = (part["pool"], part["role"], len(part["devices"]))
    for event in reader.events(ADOPTED):
        seats |= {name: (pool, role, tp) for name, pool, role, tp in json.loads(str(event.fields["engines"]))}
    counts = Counter(seats[name] for name in engines if name in seats)
    pools: dict[str, list[str]] = {}
    for (pool, role, tp), count in sorted(counts.items()):
        pools.setdefault(pool, []).append(f"{count} x {role}" + (f" of {tp}" if tp > 1 else ""))
    return "; ".join(f"{pool}: {', '.join(parts)}" for pool, parts in pools.items())


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
            for line in new_lines(path, seen):
                _print_line(path, line)
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


def _print_line(path: Path, line: str) -> None:
    click.echo(f"{path.stem}: {line}")


@click.command()
@run_argument
@runs_option
@click.option("--wait", "wait_s", type=click.FloatRange(0), default=60.0, show_default=True, help="Seconds to wait.")
@click.option("--kill", is_flag=True, help="Kill it if it has not stopped by then; --resume still continues it.")
def stop(run: str | None, runs_dir: Path, wait_s: float, kill: bool) -> None:
    """Stop a run and wait until it has ended.

    It can be continued with `launch --resume`. RUN is a name or directory; without it the latest run. Works from any
    machine that sees the directory.
    """
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
    controller = f"process {owner.pid} on {owner.host}"
    try:
        answered = has_heartbeat(directory, owner.life) and send_request(directory, owner.life, "stop")
        if not answered and _is_held(directory, owner):
            raise RunFailed(
                f"run '{directory.name}' is of {controller}, which gives no sign of life: it is dead, or does not "
                f"reach {directory}",
                remedy=f"`rollart stop` on {owner.host}; if that machine is gone, `rollart launch --resume` continues",
            )
        if _wait_until_released(directory, owner, wait_s):
            click.echo(f"run {directory.name} stopped on {owner.host}", err=True)
        elif kill:
            if not send_request(directory, owner.life, "kill"):
                raise RunFailed(f"{controller} no longer answers", remedy=f"`rollart stop --kill` on {owner.host}")
            click.echo(f"run {directory.name} killed on {owner.host}", err=True)
        else:
            raise RunFailed(
                f"run '{directory.name}' ({controller}) was asked to stop, and has not within {wait_s:g} s",
                remedy="wait longer with --wait, or `rollart stop --kill`",
            )
    except OSError as error:
        raise RunFailed(
            f"{controller} cannot be asked to stop: {error.filename or directory}: {error.strerror}",
            remedy=f"`rollart stop` on {owner.host}",
        ) from None


def _is_held(directory: Path, owner: ControllerProcess) -> bool:
    noted = recorded_controller(directory)
    return noted is not None and noted.life == owner.life


def _wait_until_released(directory: Path, owner: ControllerProcess, wait_s: float) -> bool:
    """True if the controller releases the run in time."""
    checks = max(1, round(wait_s / POLL_INTERVAL_S))
    return any(not _is_held(directory, owner) or threading.Event().wait(POLL_INTERVAL_S) for _ in range(checks))


def _wait_for_exit(process: int, wait_s: float) -> bool:
    """True if the process of this pidfd ends in time."""
    poll = select.poll()
    poll.register(process, select.POLLIN)
    return bool(poll.poll(wait_s * 1000))
