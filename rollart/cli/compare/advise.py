"""`rollart advise`: changes that a simulation of a run, or of a plan, shows to help."""

from __future__ import annotations

from pathlib import Path

import click

from rollart.cli.context import find_run, native_output_to_stderr, print_report, split_arguments
from rollart.errors import UsageError
from rollart.tools.advise import AdviceSubject, observe
from rollart.tools.advise import advise as advised


def advise(
    arguments: tuple[str, ...],
    cluster: Path | None,
    fast: bool,
    seeds: int,
    steps: int | None,
    workers: int | None,
    runs_dir: Path,
    output: str,
) -> None:
    given, overrides = split_arguments(arguments)
    spec = given if given is not None and given.is_file() else None
    recorded = None if spec is not None else find_run(None if given is None else str(given), runs_dir)
    if fast:
        if recorded is None or overrides or cluster is not None:
            raise UsageError("--fast of other specs (rule: of a recorded run as it was)", remedy="name a run alone")
        print_report(observe(recorded, recorded.resolve().name), output)
        return
    with native_output_to_stderr():
        subject = AdviceSubject(recorded, spec, cluster, overrides)
        report = advised(
            subject,
            subject.resolved.run.name if recorded is None else recorded.resolve().name,
            seeds=seeds,
            steps=steps,
            workers=workers,
            on_trial=lambda change: click.echo(f"simulating: {change}", err=True),
        )
    print_report(report, output)
