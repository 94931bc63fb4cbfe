"""`rollart report`: cost, utilization and learning of a run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from rollart.cli.context import (
    create_output_file,
    find_run,
    native_output_to_stderr,
    print_report,
    print_text,
)
from rollart.ledger.reader import LedgerReader
from rollart.report import bias as biases
from rollart.report import cost as costs
from rollart.report import curve as curves
from rollart.report import focus, perfetto
from rollart.report import offload as offloads
from rollart.report import timeline as timelines
from rollart.report import utilization as utilizations
from rollart.report.money.planned import planned_cost
from rollart.report.pages import cost_page, timeline_page
from rollart.report.rows import RunRows, collect

T = TypeVar("T")


def cost(run: str | None, output: str, runs_dir: Path, into: Path | None) -> None:
    directory = find_run(run, runs_dir)
    if output != "focus":
        with LedgerReader(directory) as reader:
            rows, planned = collect(reader, directory.resolve().name), planned_cost(reader.config())
        print_report(costs.cost(rows, planned=planned), output, page=cost_page, into=into)
        return
    charged = _read(directory, lambda reader: list(focus.focus_rows(reader, directory.resolve().name)))
    if into is not None and into.suffix == ".parquet":
        create_output_file(into)
        focus.write_parquet(charged, into)
    else:
        print_text(focus.focus_csv(charged), into)


def utilization(run: str | None, output: str, runs_dir: Path) -> None:
    directory = find_run(run, runs_dir)
    found = utilizations.utilization(_collect(directory))
    print_report(found, output, page=lambda report: timeline_page(report, _read(directory, timelines.timeline)))


def timeline(run: str | None, output: str, runs_dir: Path, into: Path | None) -> None:
    directory = find_run(run, runs_dir)
    if output == "perfetto":
        with LedgerReader(directory) as reader:
            print_text(perfetto.chrome_trace(reader, directory.resolve().name), into)
        return
    found = _read(directory, timelines.timeline)
    shown = timelines.timeline_report(directory.resolve().name, found)
    print_report(shown, output, page=lambda report: timeline_page(report, found), into=into)


def curve(run: str | None, output: str, runs_dir: Path, png: Path | None) -> None:
    rows = _collect(find_run(run, runs_dir))
    print_report(curves.curve(rows), output)
    if png is not None:
        curves.write_png(rows, png)


def offload(run: str | None, output: str, runs_dir: Path, wait_s: float, check: bool) -> None:
    directory = find_run(run, runs_dir)
    rows, trace = _collect(directory), _read(directory, offloads.read_trace)
    simulated = None
    if check:
        # Here, so that the other reports need not import the simulator.
        from rollart.tools.replay import prepare_from_run, seconds_saved_without

        with native_output_to_stderr():
            simulated = seconds_saved_without(prepare_from_run(directory), list(trace.domains))
    print_report(offloads.offload(rows, trace, wait_s=wait_s, counterfactual_s=simulated), output)


def bias(run: str | None, output: str, runs_dir: Path) -> None:
    directory = find_run(run, runs_dir)
    attempts, prompts = _read(directory, biases.read_attempts)
    print_report(biases.bias(directory.resolve().name, attempts, prompts), output)


def _read(directory: Path, read: Callable[[LedgerReader], T]) -> T:
    with LedgerReader(directory) as reader:
        return read(reader)


def _collect(directory: Path) -> RunRows:
    return _read(directory, lambda reader: collect(reader, directory.resolve().name))
