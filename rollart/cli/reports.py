"""`rollart report`: cost, utilization and learning of a run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from rollart.cli.context import (
    RESOLVED,
    create_output_file,
    find_run,
    native_output_to_stderr,
    print_report,
    print_text,
)
from rollart.errors import RollartError, UsageError
from rollart.ledger.database import FILE as LEDGER
from rollart.ledger.reader import LedgerReader
from rollart.report import bias as biases
from rollart.report import cost as costs
from rollart.report import curve as curves
from rollart.report import focus, perfetto
from rollart.report import offload as offloads
from rollart.report import timeline as timelines
from rollart.report import utilization as utilizations
from rollart.report.money.planned import planned_cost
from rollart.report.money.spend import FleetSums, RunCharge, spend_sums
from rollart.report.money.spend import fleet as fleet_report
from rollart.report.pages import cost_page, timeline_page
from rollart.report.rows import RunRows, collect
from rollart.tools.recording import SIMULATED_KEY

T = TypeVar("T")


def cost(run: str | None, output: str, runs_dir: Path, into: Path | None) -> None:
    directory = find_run(run, runs_dir)
    if output != "focus":
        with LedgerReader(directory) as reader:
            found = costs.cost(
                collect(reader, directory.resolve().name),
                planned=planned_cost(reader.config()),
                spend=spend_sums(focus.focus_charges(reader)),
            )
        print_report(found, output, page=cost_page, into=into)
        return
    rows = _read(directory, lambda reader: list(focus.focus_rows(reader, directory.resolve().name)))
    if into is not None and into.suffix == ".parquet":
        create_output_file(into)
        focus.write_parquet(rows, into)
    else:
        print_text(focus.focus_csv(rows), into)


def fleet(runs_dir: Path, by: str, output: str, into: Path | None) -> None:
    """Charges of every run below a directory, added up. Simulations cost nothing, and are left out."""
    sums, notes = FleetSums([key.strip() for key in by.split(",") if key.strip()]), list[str]()
    if not sums.by:
        raise UsageError(f"--by is '{by}' (rule: keys with commas between them)", remedy="--by team,month")
    directories = sorted(path.parent for path in runs_dir.rglob(LEDGER) if (path.parent / RESOLVED).is_file())
    if not directories:
        raise UsageError(f"no runs in {runs_dir}", remedy="give the directory of runs with --runs-dir")
    for directory in directories:
        name = str(directory.relative_to(runs_dir))
        try:
            with LedgerReader(directory) as reader:
                config = reader.config()
                charges = [] if SIMULATED_KEY in config else list(focus.focus_charges(reader))
        except RollartError as error:
            notes.append(f"left out: {name}: {error}")
            continue
        if SIMULATED_KEY in config:
            notes.append(f"left out: {name}: a simulation")
        for charge in charges:
            sums.add(RunCharge(name, str(config.get("cluster", {}).get("name", "")), charge))
    print_report(fleet_report(runs_dir.resolve().name, sums, notes), output, into=into)


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
