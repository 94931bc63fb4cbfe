"""Commands about specs that run nothing: `rollart validate` checks them, `rollart schema` describes them, and
`rollart infra` renders a cluster's deployment files from its spec. What the checks of a run and the files need is
imported in their functions, so that a mistake in a file's name is reported at once."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import click

from rollart.cli.context import native_output_to_stderr, split_arguments
from rollart.errors import RollartError, SpecError, UsageError, did_you_mean
from rollart.report.schemas import REPORTS, report_schema
from rollart.settings.cluster import ClusterSpec
from rollart.settings.load import SpecSources, json_schema, load_file
from rollart.settings.run import RunSpec


def validate(files: tuple[str, ...]) -> None:
    errors: list[RollartError] = []
    clusters = []
    for path in files:
        with contextlib.suppress(SpecError):
            if isinstance(load_file(path), ClusterSpec):
                clusters.append(path)
    for path in files:
        try:
            spec = load_file(path)
            if isinstance(spec, RunSpec):
                _check_run(path, clusters)
        except RollartError as error:
            errors.append(error)
        else:
            click.echo(f"{path}: ok ({type(spec).__name__})")
    if len(errors) == 1:
        raise errors[0]
    if errors:
        worst = max(errors, key=lambda error: error.exit_code)
        raise type(worst)("\n".join(map(str, errors)))


def _check_run(run: str, clusters: list[str]) -> None:
    """`RollartError` for problems that would make a launch of the run fail."""
    from rollart.launch.preflight import is_plan_only, launch_warnings, launchable, refuse_files, unchecked_remotes
    from rollart.report.profile import measured_profiles
    from rollart.settings.resolve import read_specs

    every: list[str | None] = [*clusters] or [None]
    for cluster in every:
        with native_output_to_stderr():
            specs = read_specs(run, cluster, measure=measured_profiles)
            where = SpecSources.files(run, cluster)
            if is_plan_only(specs) or len(every) > 1:
                refuse_files(specs, where)
                notes = ["what a launch would start"]
                notes[0] += ": the model has no weights" if is_plan_only(specs) else ": give one cluster file"
            else:
                notes = list(unchecked_remotes(launchable(specs, where, others=False)))
        for line in (*(f"warning: {one}" for one in launch_warnings(specs)), *(f"not checked: {one}" for one in notes)):
            click.echo(f"{run}: {line}", err=True)


def schema(kind: str) -> None:
    report = kind.removeprefix("report.")
    if report == kind:
        found = json_schema(kind)
    elif report in REPORTS:
        found = report_schema(report)
    else:
        raise UsageError(
            f"no report '{report}'{did_you_mean(report, REPORTS)}", remedy=f"ask for report.{', report.'.join(REPORTS)}"
        )
    click.echo(json.dumps(found, indent=2))


def render(
    arguments: tuple[str, ...], cluster: Path, target: str, output: Path, image: tuple[str, ...], namespace: str | None
) -> None:
    from rollart.infra.files import write
    from rollart.tools.infra import NAMESPACE
    from rollart.tools.infra import render as rendered

    run, overrides = split_arguments(arguments)
    with native_output_to_stderr():
        files = rendered(target, run, cluster, overrides, images=image, namespace=namespace or NAMESPACE)
    for path in write(files, output):
        click.echo(str(path))
    for step in files.steps:
        click.echo(f"next: {step}", err=True)
