"""`rollart trajectories`, `trajectory`, `why` and `verify`: what happened to each trajectory of a run."""

from __future__ import annotations

from pathlib import Path

import click

from rollart.cli.context import create_output_file, find_run, print_report
from rollart.errors import RunFailed, UsageError
from rollart.ledger.reader import LedgerReader
from rollart.report.trajectories import decisions, view
from rollart.report.trajectories.export import SUFFIXES, entries, write_entries
from rollart.report.trajectories.found import find_trajectory
from rollart.report.trajectories.listing import listing
from rollart.report.verification import verification
from rollart.report.verification import verify as verify_ledger


def trajectories(
    run: str | None,
    domain: str | None,
    outcome: str | None,
    sort: str,
    most: int,
    export: Path | None,
    output: str,
    runs_dir: Path,
) -> None:
    directory = find_run(run, runs_dir)
    with LedgerReader(directory) as reader:
        if export is None:
            report = listing(
                reader, directory.resolve().name, domain=domain, outcome=outcome, sort=sort, most=most or None
            )
            print_report(report, output)
            return
        if export.suffix not in SUFFIXES:
            raise UsageError(f"{export}: unknown kind of file (rule: {' or '.join(SUFFIXES)})", remedy="rename it")
        create_output_file(export)
        count = write_entries(export, entries(reader, domain=domain, outcome=outcome))
    click.echo(f"{count:,} kept trajectories in {export}: {export.stat().st_size / 1e6:,.1f} MB")


def trajectory(id_: str, run: str | None, output: str, runs_dir: Path) -> None:
    directory = find_run(run, runs_dir)
    with LedgerReader(directory) as reader:
        report = view.trajectory_report(directory.resolve().name, find_trajectory(reader, id_))
    print_report(report, output, page=view.trajectory_page)


def why(id_: str, run: str | None, output: str, runs_dir: Path) -> None:
    directory = find_run(run, runs_dir)
    with LedgerReader(directory) as reader:
        report = decisions.why(reader, directory.resolve().name, find_trajectory(reader, id_))
    print_report(report, output)


def verify(run: str | None, output: str, runs_dir: Path) -> None:
    directory = find_run(run, runs_dir)
    name = directory.resolve().name
    with LedgerReader(directory) as reader:
        audit = verify_ledger(reader)
    print_report(verification(name, audit), output)
    if not audit.sound:
        first = audit.violations[0]
        raise RunFailed(
            f"the ledger of run '{name}' breaks {len(audit.violations):,} rules; first {first.row}: {first.found} "
            f"(rule: {first.rule})",
            remedy="report it with the ledger: no run may leave one that does",
        )
