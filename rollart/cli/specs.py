"""`rollart validate` and `schema`: specs without running them."""

from __future__ import annotations

import contextlib
import json

import click

from rollart.cli.context import native_output_to_stderr
from rollart.cli.profiles import measured_profiles
from rollart.compose.cautions import launch_warnings
from rollart.compose.preflight import is_plan_only, launchable, refuse_files, unchecked_remotes
from rollart.errors import RollartError, SpecError
from rollart.spec.cluster import ClusterSpec
from rollart.spec.load import load_file
from rollart.spec.resolve import read_specs
from rollart.spec.run import RunSpec
from rollart.spec.schema import json_schema
from rollart.spec.where import SpecSources


@click.command()
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
def validate(files: tuple[str, ...]) -> None:
    """Check run, cluster, price and fault files.

    Every problem comes with its file, line and column. A run is checked as `rollart launch` checks it before it starts
    anything, on the cluster file beside it or on this machine: the model's files are read, the tokenizer is loaded, the
    reward functions are packed, each environment is made once where it would live, and the parts are placed. Checks
    that need other machines are listed and not made.
    """
    errors: list[RollartError] = []
    clusters = _clusters(files)
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


def _clusters(files: tuple[str, ...]) -> list[str]:
    """The files that are valid cluster specs."""
    found = []
    for path in files:
        with contextlib.suppress(SpecError):
            if isinstance(load_file(path), ClusterSpec):
                found.append(path)
    return found


def _check_run(run: str, clusters: list[str]) -> None:
    """`RollartError` for problems that would make a launch of the run fail."""
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


@click.command()
@click.argument("kind", metavar="run|cluster|prices|faults")
def schema(kind: str) -> None:
    """Print the JSON Schema of a spec, for editors."""
    click.echo(json.dumps(json_schema(kind), indent=2))
