"""`rollart diff`: two runs beside each other."""

from __future__ import annotations

from pathlib import Path

from rollart.cli.context import find_run, print_report
from rollart.ledger.reader import LedgerReader
from rollart.report.compare import diff as diffs


def diff(run_a: str, run_b: str, output: str, runs_dir: Path) -> None:
    print_report(diffs.diff(_read(find_run(run_a, runs_dir)), _read(find_run(run_b, runs_dir))), output)


def _read(directory: Path) -> diffs.ComparedRun:
    with LedgerReader(directory) as reader:
        return diffs.read_compared(reader, directory.resolve().name)
