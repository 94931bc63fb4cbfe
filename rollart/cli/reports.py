"""`rollart report`: cost, utilization and learning of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import click

from rollart.cli.context import find_run, output_option, print_report, run_argument, runs_option
from rollart.ledger.reader import LedgerReader
from rollart.report import bias as biases
from rollart.report import cost as costs
from rollart.report import curve as curves
from rollart.report import offload as offloads
from rollart.report import timeline as timelines
from rollart.report import utilization as utilizations
from rollart.report.pages import cost_page, timeline_page
from rollart.report.rows import RunRows, collect
from rollart.report.tables import Report

T = TypeVar("T")


@click.group()
def report() -> None:
    """Show cost, utilization and learning of a run. RUN is a name or directory; without it the latest run."""


def report_command(function: Callable[..., None]) -> click.Command:
    """A command of the group, about one run and with the formats of all reports."""
    command: click.Command = report.command()(run_argument(output_option(runs_option(function))))
    return command


@report_command
def cost(run: str | None, output: str, runs_dir: Path) -> None:
    """Show dollars: in all, by role and resource, per trajectory and token, and waste by cause."""
    print_report(costs.cost(_collect(find_run(run, runs_dir))), output, page=cost_page)


@report_command
def utilization(run: str | None, output: str, runs_dir: Path) -> None:
    """Show time: each resource's states, rates, and the domains' trajectories."""
    directory = find_run(run, runs_dir)
    found = utilizations.utilization(_collect(directory))
    print_report(found, output, page=lambda report: timeline_page(report, _read(directory, timelines.timeline)))


@report_command
def timeline(run: str | None, output: str, runs_dir: Path) -> None:
    """Show busy, waiting and syncing time over the run: devices by role and pool, trajectories, and function calls."""
    directory = find_run(run, runs_dir)
    found = _read(directory, timelines.timeline)
    shown = timelines.timeline_report(directory.resolve().name, found)
    print_report(shown, output, page=lambda report: timeline_page(report, found))


@report_command
@click.option("--png", type=click.Path(path_type=Path), help="Also draw the curves into this file.")
def curve(run: str | None, output: str, runs_dir: Path, png: Path | None) -> None:
    """Show success by policy version, per domain."""
    rows = _collect(find_run(run, runs_dir))
    print_report(curves.curve(rows), output)
    if png is not None:
        curves.write_png(rows, png)


@report_command
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
    directory = find_run(run, runs_dir)
    rows, trace = _collect(directory), _read(directory, offloads.read_trace)
    print_report(offloads.offload(rows, trace, wait_s=wait_s), output)


@report_command
def bias(run: str | None, output: str, runs_dir: Path) -> None:
    """Show whether the trained trajectories are distributed as the drawn ones, and how the lost ones differ by reason:
    length, turns, difficulty and reward per domain, each with a two-sample test. Of a real run, or of a simulation kept
    by `simulate --keep`."""
    directory = find_run(run, runs_dir)
    attempts, prompts = _read(directory, biases.read_attempts)
    print_report(biases.bias(directory.resolve().name, attempts, prompts), output)


def show_reports(directory: Path, summaries: Sequence[Callable[[RunRows], Report]]) -> None:
    """Print several reports of one run as tables."""
    rows = _collect(directory)
    for summary in summaries:
        click.echo()
        print_report(summary(rows), "table")


def _read(directory: Path, read: Callable[[LedgerReader], T]) -> T:
    with LedgerReader(directory) as reader:
        return read(reader)


def _collect(directory: Path) -> RunRows:
    return _read(directory, lambda reader: collect(reader, directory.resolve().name))
