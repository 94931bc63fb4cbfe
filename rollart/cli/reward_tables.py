"""Output of `rollart rewards`, for people and for machines."""

from __future__ import annotations

import json
from collections.abc import Sequence

import click

from rollart.cli.context import FOR_PEOPLE, colour, width
from rollart.compose.providers import DeploymentTrial
from rollart.report.render import render
from rollart.report.tables import Cell, Report, Table, TableColumn
from serverless.backends.base import DeployedFunction, DeploymentChange, LogLine
from serverless.rehearse import Rehearsal
from serverless.types import InfraFault, ModelFault, Scored

DIGEST = 12
"""Characters of a version for people: `rollback --to` takes any unambiguous prefix."""


def show_rehearsals(found: Sequence[Rehearsal], output: str) -> None:
    """Scores, times and costs of tested rewards."""
    if output == "json":
        click.echo(json.dumps({"schema_version": 1, "rewards": [one.to_json() for one in found]}, indent=2))
        return
    for one in found:
        cases = tuple(
            (r.case.item.id, "ok" if not r.problem else r.problem, _outcome(r.outcome), r.seconds * 1e3)
            for r in one.results
        )
        facts: tuple[tuple[Cell, ...], ...] = (
            ("one item", "ms", one.single_s * 1e3),
            (f"an item in a call of {one.batch}", "ms", one.batched_item_s and one.batched_item_s * 1e3),
            ("cold start", "ms", one.cold_start_s * 1e3),
            ("memory used", "MB", one.memory_mb),
            ("memory limit", "MB", one.memory_limit_mb),
        )
        costs = tuple((c.provider, c.usd_single, c.usd_batched, c.note) for c in one.costs)
        tables = (
            Table(
                "cases",
                "Cases",
                (TableColumn("case"), TableColumn("result"), TableColumn("outcome"), TableColumn("ms", "number")),
                cases,
            ),
            Table(
                "measured",
                "Measured here",
                (TableColumn("what"), TableColumn("unit"), TableColumn("value", "number")),
                facts,
            ),
            Table(
                "costs",
                "US dollars per million items",
                (
                    TableColumn("provider"),
                    TableColumn("one_by_one", "usd"),
                    TableColumn("in_batches", "usd"),
                    TableColumn("note"),
                ),
                costs,
            ),
        )
        notes = (*one.warnings, f"version {one.version[:DIGEST]}")
        _show(Report("test", one.function, tables, notes), output)


def show_changes(found: Sequence[DeploymentChange], output: str, notes: Sequence[str] = ()) -> None:
    nothing = ("nothing: this version is current",)
    rows = [(c.function, c.provider, line) for c in found for line in (c.lines or nothing)]
    table = Table(
        "changes",
        "Would change",
        (TableColumn("function"), TableColumn("provider"), TableColumn("change")),
        tuple(rows),
    )
    _show(Report("deploy", "functions", (table,), tuple(notes)), output)


def show_deployed(
    found: Sequence[DeployedFunction], output: str, notes: Sequence[str] = (), trials: Sequence[DeploymentTrial] = ()
) -> None:
    """Functions or versions. `notes` go to the foot; `trials` are the trial calls made while deploying them."""
    people = output in FOR_PEOPLE
    notes = (*notes, *(f"{d.function}: {note}" for d in found if (note := _deployment_note(d))))
    rows: tuple[tuple[Cell, ...], ...] = tuple(
        (
            d.function,
            d.provider,
            d.version[:DIGEST] if people else d.version,
            d.provider_version,
            "yes" if d.current else "",
            d.created[:19] if people else d.created,
            d.memory_mb,
            d.warm,
            d.concurrency,
            d.endpoint,
        )
        for d in found
    )
    columns: tuple[TableColumn, ...] = (
        TableColumn("function"),
        TableColumn("provider"),
        TableColumn("version"),
        TableColumn("number"),
        TableColumn("current"),
        TableColumn("created"),
        TableColumn("MB", "count"),
        TableColumn("warm", "count"),
        TableColumn("most", "count"),
        TableColumn("endpoint", people=False),
    )
    tables = [Table("functions", "Functions", columns, rows)]
    if people:
        notes = (*notes, *(f"{t.function}: {trial_line(t)}" for t in trials))
    elif trials:
        tables.append(_trials(trials))
    _show(Report("rewards", "functions", tuple(tables), tuple(notes)), output)


def _deployment_note(one: DeployedFunction) -> str:
    if one.problem:
        return f"version {one.version[:DIGEST]} is current, but its scale could not be read: {one.problem}"
    return f"unchanged: version {one.version[:DIGEST]} was current already" if one.unchanged else ""


def _trials(trials: Sequence[DeploymentTrial]) -> Table:
    columns = (
        TableColumn("function"),
        TableColumn("provider"),
        TableColumn("status"),
        TableColumn("billed_s", "seconds"),
        TableColumn("MB", "count"),
        TableColumn("usd", "usd"),
    )
    rows = tuple((t.function, t.provider, t.status, t.billed_s, t.memory_mb, t.usd) for t in trials)
    return Table("trials", "Trial calls", columns, rows)


def trial_line(trial: DeploymentTrial) -> str:
    failed = "" if trial.status == "ok" else f" ({trial.status})"
    usd = f"${trial.usd:.7f}" if trial.billed else f"no bill here, ${trial.usd:.7f} elsewhere"
    return f"trial{failed} of {trial.billed_s:.3g} s at {trial.memory_mb} MB: {usd}"


def show_logs(function: str, lines: Sequence[LogLine], output: str) -> None:
    """Log lines as printed, or as rows."""
    if output == "json":
        rows = [{"t": line.t, "source": line.source, "text": line.text} for line in lines]
        click.echo(json.dumps({"schema_version": 1, "lines": rows}, indent=2, ensure_ascii=False))
    elif output in ("csv", "html"):
        columns = (TableColumn("t"), TableColumn("source"), TableColumn("text"))
        cells = tuple((line.t, line.source, line.text) for line in lines)
        _show(Report("logs", function, (Table("lines", "Lines", columns, cells),)), output)
    else:
        for line in lines:
            click.echo(" ".join(part for part in (line.t, line.source, line.text) if part))


def show_costs(found: Sequence[Rehearsal], items: int, runs: float, now: str | None, output: str) -> None:
    """Dollars per run and month of every provider, and the difference to the current one (`now`)."""
    rows: list[tuple[Cell, ...]] = []
    for one in found:
        base = next(
            (
                c.usd_batched * items / 1e6 + c.usd_idle
                for c in one.costs
                if c.provider == now and c.usd_batched is not None
            ),
            None,
        )
        for c in one.costs:
            run = None if c.usd_batched is None else c.usd_batched * items / 1e6 + c.usd_idle
            more = None if base is None or run is None else (run - base) * runs
            month = None if run is None else run * runs
            rows.append((one.function, c.provider, c.usd_batched, run, month, more, c.note))
    columns = (
        TableColumn("function"),
        TableColumn("provider"),
        TableColumn("usd_per_million", "usd"),
        TableColumn("usd_per_run", "usd"),
        TableColumn("usd_per_month", "usd"),
        TableColumn("month_against_now", "usd"),
        TableColumn("note"),
    )
    notes = [f"{items:,} items a run in full batches, {runs:g} runs a month, warm calls measured on this machine"]
    notes += [
        f"{name}: with one idle window of one container a run; each further container and pause adds one"
        for name in sorted({c.provider for one in found for c in one.costs if c.usd_idle})
    ]
    _show(Report("plan", "rewards", (Table("plan", "Cost by provider", columns, tuple(rows)),), tuple(notes)), output)


def _outcome(outcome: object) -> str:
    match outcome:
        case Scored():
            return f"{outcome.value:g}"
        case ModelFault():
            return f"{outcome.floor:g} (model fault: {outcome.reason})"
        case InfraFault():
            return f"fault: {outcome.kind}"
        case _:
            return str(outcome)


def _show(report: Report, output: str) -> None:
    click.echo(render(report, output, width=width(), colour=colour()), nl=False)
