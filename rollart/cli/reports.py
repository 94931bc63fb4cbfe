"""`rollart report`: cost, utilization and learning of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rollart.cli.context import colour, find_run, output_option, run_argument, runs_option, width

if TYPE_CHECKING:
    from rollart.report.rows import Report, RunRows

__all__ = ["report", "show_reports"]


@click.group()
def report() -> None:
    """Show cost, utilization and learning of a run. RUN is a name or directory; without it the latest run."""


@report.command()
@run_argument
@output_option
@runs_option
def cost(run: str | None, output: str, runs_dir: Path) -> None:
    """Show dollars: in all, by role and resource, per trajectory and token, and waste by cause."""
    from rollart.report.run_page import cost_page
    from rollart.report.summarize import cost as summarize

    _print(summarize(_rows(run, runs_dir)), output, page=cost_page)


@report.command()
@run_argument
@output_option
@runs_option
def utilization(run: str | None, output: str, runs_dir: Path) -> None:
    """Show time: each resource's states, rates, and the domains' trajectories."""
    from rollart.report.utilization import utilization as summarize

    directory = find_run(run, runs_dir)
    _print(summarize(_collect(directory)), output, page=lambda report: _with_timeline(report, directory))


@report.command()
@run_argument
@output_option
@runs_option
def timeline(run: str | None, output: str, runs_dir: Path) -> None:
    """Show busy, waiting and syncing time over the run: devices by role and pool, trajectories, and function calls."""
    from rollart.ledger.reader import LedgerReader
    from rollart.report.run_page import timeline_page
    from rollart.report.timeline import timeline as found_in
    from rollart.report.timeline import timeline_report

    directory = find_run(run, runs_dir)
    with LedgerReader(directory) as reader:
        found = found_in(reader)
    _print(timeline_report(directory.resolve().name, found), output, page=lambda report: timeline_page(report, found))


@report.command()
@run_argument
@output_option
@runs_option
@click.option("--png", type=click.Path(path_type=Path), help="Also draw the curves into this file.")
def curve(run: str | None, output: str, runs_dir: Path, png: Path | None) -> None:
    """Show success by policy version, per domain."""
    from rollart.report.curve import curve as summarize
    from rollart.report.curve import write_png

    rows = _rows(run, runs_dir)
    _print(summarize(rows), output)
    if png is not None:
        write_png(rows, png)


@report.command()
@run_argument
@output_option
@runs_option
@click.option(
    "--wait",
    "wait_s",
    type=click.FloatRange(min=0),
    default=0.25,
    show_default=True,
    help="Seconds that the p99 of a call may wait for a dedicated worker.",
)
def offload(run: str | None, output: str, runs_dir: Path, wait_s: float) -> None:
    """Show the cost of the run's function calls on dedicated workers, and on functions with other scaling."""
    from rollart.ledger.reader import LedgerReader
    from rollart.report.offload import offload as replay
    from rollart.report.offload import read_trace

    directory = find_run(run, runs_dir)
    rows = _collect(directory)
    with LedgerReader(directory) as reader:
        found = read_trace(reader)
    _print(replay(rows, found, wait_s=wait_s), output)


@report.command()
@run_argument
@output_option
@runs_option
def bias(run: str | None, output: str, runs_dir: Path) -> None:
    """Show whether the trained trajectories are distributed as the drawn ones, and how the lost ones differ by reason:
    length, turns, difficulty and reward per domain, each with a two-sample test. Of a real run, or of a simulation kept
    by `simulate --keep`."""
    from rollart.ledger.reader import LedgerReader
    from rollart.report.bias import bias as summarize
    from rollart.report.bias import read_attempts

    directory = find_run(run, runs_dir)
    with LedgerReader(directory) as reader:
        found, prompts = read_attempts(reader)
    _print(summarize(directory.resolve().name, found, prompts), output)


def show_reports(directory: Path, summaries: Sequence[Callable[[RunRows], Report]]) -> None:
    """Print several reports of one run as tables."""
    rows = _collect(directory)
    for summarize in summaries:
        click.echo()
        _print(summarize(rows), "table")


def _rows(run: str | None, runs: Path) -> RunRows:
    return _collect(find_run(run, runs))


def _collect(directory: Path) -> RunRows:
    from rollart.ledger.reader import LedgerReader
    from rollart.report.rows import collect

    with LedgerReader(directory) as reader:
        return collect(reader, directory.resolve().name)


def _with_timeline(report: Report, directory: Path) -> str:
    from rollart.ledger.reader import LedgerReader
    from rollart.report.run_page import timeline_page
    from rollart.report.timeline import timeline as found_in

    with LedgerReader(directory) as reader:
        return timeline_page(report, found_in(reader))


def _print(report: Report, output: str, page: Callable[[Report], str] | None = None) -> None:
    """Print a report. `page` renders the HTML of reports that have more than tables."""
    from rollart.report.render import render

    if output == "html" and page is not None:
        click.echo(page(report), nl=False)
    else:
        click.echo(render(report, output, width=width(), colour=colour()), nl=False)
