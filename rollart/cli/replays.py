"""Inputs of `rollart simulate` besides specs: recorded runs and fault plans."""

from __future__ import annotations

from pathlib import Path

import click

from rollart.cli.context import colour, find_run, native_output_to_stderr, width
from rollart.cli.profiles import measured_profiles
from rollart.compose.faults import fault_targets
from rollart.compose.replay import check_replay, prepare_from_run, prepare_from_spec
from rollart.compose.simulate import ReplayPlan
from rollart.compose.simulated_functions import function_behaviours
from rollart.errors import UsageError
from rollart.report.check import check_report
from rollart.report.render import render
from rollart.spec.faults import FaultPlanSpec
from rollart.spec.load import load_faults
from rollart.spec.resolve import Resolved, forecast, read_specs


def named_run(run: Path | None, runs: Path) -> Path | None:
    """The directory of a recorded run that was named in place of a spec."""
    if run is None or run.is_file():
        return None
    if run.is_dir() or (run == Path(run.name) and (runs / run).is_dir()):
        return find_run(str(run), runs)
    return None


def prepare_replay(
    recorded: Path | None,
    run: Path | None,
    cluster: Path | None,
    overrides: list[str],
    replay: Path | None,
    resample: bool,
) -> tuple[Resolved, ReplayPlan | None, str]:
    """The run, its replay if any, and a note for the report's foot."""
    if recorded is not None and replay is not None:
        raise UsageError(f"{recorded} and --replay {replay} are recorded runs (rule: one is replayed)")
    if resample and recorded is None and replay is None:
        raise UsageError("--resample without a recorded run (rule: there is something to draw from)")
    if recorded is not None:
        found = prepare_from_run(recorded, cluster, overrides, resample=resample)
        return found.resolved, found.replay, found.note
    specs = read_specs(run, cluster, overrides, measure=measured_profiles)
    if replay is not None:
        found = prepare_from_spec(specs, replay, resample=resample)
        return found.resolved, found.replay, found.note
    resolved = forecast(specs)
    return resolved, None, f"plan: {resolved.plan.binds}"


def read_faults(path: Path, resolved: Resolved, replay: ReplayPlan | None) -> FaultPlanSpec:
    """A fault plan whose names are parts and functions of this run."""
    if resolved.problem is None:
        functions = []  # the simulation fails with the reason
    else:
        functions = [b.spec.name for b in function_behaviours(resolved, None if replay is None else replay.recording)]
    return load_faults(path, list(fault_targets(resolved)), functions)


def check_run(recorded: Path, output: str) -> None:
    with native_output_to_stderr():
        found = prepare_from_run(recorded)
    report = check_report(recorded.name, check_replay(found), (found.note,))
    click.echo(render(report, output, width=width(), colour=colour()), nl=False)
