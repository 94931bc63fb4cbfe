"""`rollart status`: the state, parts, progress and cost of a run, from its ledger."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from rollart.cli.context import FOR_PEOPLE, colour, find_run, print_report
from rollart.cli.controller import live_controller
from rollart.cli.progress import strip_log_prefix
from rollart.errors import UsageError
from rollart.ledger.database import FILE as LEDGER
from rollart.ledger.events import PLAN_ADOPTED
from rollart.ledger.intervals import RESOURCE_CLOSED, RESOURCE_OPENED
from rollart.ledger.reader import LedgerReader
from rollart.money import dollars, dollars_between
from rollart.policy.budget import recorded_forecast
from rollart.ports import RunEvent
from rollart.report.compare.alarms import alarms_of, alarms_table
from rollart.report.cost import cost_lines
from rollart.report.curve import curve
from rollart.report.render import render
from rollart.report.rows import ENGINE_ROLES, RunRows, collect
from rollart.report.tables import Cell, Report, Table, as_number
from rollart.report.timeline import timeline, timeline_report

WATCH_S = 1.0
"""Seconds between two looks at a watched run; reading a large ledger takes longer."""

SHARE = 0.1
"""Largest share of a core that looking at a run takes."""

RECENT_S = 60.0
"""Length of the stretch that a watched run's devices, trajectories and calls are shown for."""

RECENT_BINS = 30

PIPE_WIDTH = 110
"""Columns of a view that is not drawn on a terminal."""


def status(run: str | None, watch: bool, output: str, runs_dir: Path) -> None:
    directory = find_run(run, runs_dir)
    if not watch:
        print_report(_read(directory, output)[0], output)
        return
    if output != "table":
        raise UsageError(f"--watch with -o {output} (rule: a table)", remedy=f"ask for -o {output} without --watch")
    _watch(directory)


def _watch(directory: Path) -> None:
    """Show the run until it ends. On a terminal the view is drawn over the one before it."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console, pause, running = Console(highlight=False), threading.Event(), True
    width = console.width if console.is_terminal else PIPE_WIDTH
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        while running:
            began = time.process_time()
            report, running = _read(directory, "table", recent=True)
            text = render(report, "table", width=width, colour=colour())
            if console.is_terminal:
                live.update(Text.from_ansi(text), refresh=True)
            else:
                click.echo(text)
            if running:
                pause.wait(max(WATCH_S, (time.process_time() - began) / SHARE))


def _read(directory: Path, output: str, *, recent: bool = False) -> tuple[Report, bool]:
    """The status of the run, and whether it is running. `recent`: with its success and alarms, and what its parts did
    in the last minute."""
    owner = live_controller(directory)
    if not (directory / LEDGER).is_file():
        why = "none yet" if owner else "none: it ended before it had one; --resume starts it"
        values: list[tuple[str, Cell]] = [
            ("state", "starting" if owner else "stopped"),
            ("process", owner.pid if owner else None),
            ("directory", str(directory)),
            ("ledger", why),
        ]
        return Report("status", directory.name, (_status(values),)), owner is not None
    with LedgerReader(directory) as reader:
        rows, config = collect(reader, directory.resolve().name), reader.config()
        every: tuple[Collection[str], ...] = (ENGINE_ROLES, ("environment",), ("reward",))
        engines, hosts, workers = (_parts(reader, roles) if owner else [] for roles in every)
        starting = _starting(reader, engines)
        plan = _plan(reader, engines, config)
        early = "" if owner else _stopped_early(reader)
        forecast = reader.last_event("step") if owner else None
        tables = [*_recent(reader, rows)] if recent else []
    steps = config.get("run", {}).get("steps")
    done = steps is not None and rows.facts.step is not None and rows.facts.step >= steps
    state = "running" if owner else "finished" if done else "stopped"
    values = [
        ("state", state),
        *([("stopped_early", early)] if early else []),
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
        ("usd", _usd(sum(line.usd for line in cost_lines(rows)), output)),
        *_at_end(forecast, output),
    ]
    if recent:
        values = [(what, value) for what, value in values if value is not None]
    return Report("status", rows.run, (_status(values), *tables)), owner is not None


def _status(values: Iterable[tuple[str, Cell]]) -> Table:
    return Table.of("status", "Status", ({"what": what, "value": as_number(value)} for what, value in values))


def _recent(reader: LedgerReader, rows: RunRows) -> Iterator[Table]:
    """Success and alarms of the run, and its last minute."""
    yield next(table for table in curve(rows).tables if table.name == "summary")
    ends = rows.facts.seconds
    during = (max(0.0, ends - RECENT_S), ends)
    for table in timeline_report(rows.run, timeline(reader, bins=RECENT_BINS, during=during)).tables:
        if table.people and table.rows:
            yield replace(table, title=f"{table.title}, last {ends - during[0]:.0f} s")
    yield alarms_table([*alarms_of(rows)])


def _usd(usd: float, output: str) -> Cell:
    return dollars(usd) if output in FOR_PEOPLE else usd


def _at_end(step: RunEvent | None, output: str) -> Iterator[tuple[str, Cell]]:
    """Dollars of a running run at its last step: a mean, and half of its 95 % interval."""
    forecast = None if step is None else recorded_forecast(step.fields)
    if forecast is None:
        return
    if output in FOR_PEOPLE:
        yield "usd_at_the_last_step", dollars_between(forecast.usd, forecast.half)
    else:
        yield from (("usd_at_the_last_step", forecast.usd), ("usd_at_the_last_step_half", forecast.half))


def external_trainer_status(directory: Path) -> str | None:
    """Status of an external trainer (`trainer.external`)."""
    try:
        note = json.loads((directory / "service.json").read_text())
        return f"{note['listen']}: {note['state']} since {note['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _stopped_early(reader: LedgerReader) -> str:
    """The condition of `stop_when` that ended the run's last life; '' for none."""
    lives = [e for kind in ("starting", "stopped_early") for e in reader.events(kind)]
    last = max(lives, key=lambda e: e.t, default=None)
    return str(last.fields["why"]) if last is not None and last.kind == "stopped_early" else ""


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
    for event in reader.events(PLAN_ADOPTED):
        seats |= {name: (pool, role, tp) for name, pool, role, tp in json.loads(str(event.fields["engines"]))}
    counts = Counter(seats[name] for name in engines if name in seats)
    pools: dict[str, list[str]] = {}
    for (pool, role, tp), count in sorted(counts.items()):
        pools.setdefault(pool, []).append(f"{count} x {role}" + (f" of {tp}" if tp > 1 else ""))
    return "; ".join(f"{pool}: {', '.join(parts)}" for pool, parts in pools.items())
