"""Commands about specs that run nothing: `rollart validate` checks them, `rollart schema` describes them, and
`rollart infra` renders a cluster's deployment files from its spec."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import click

from rollart.cli.context import native_output_to_stderr, split_arguments
from rollart.errors import RollartError, SpecError
from rollart.infra.files import write
from rollart.launch.preflight import is_plan_only, launch_warnings, launchable, refuse_files, unchecked_remotes
from rollart.report.profile import measured_profiles
from rollart.settings.cluster import ClusterSpec
from rollart.settings.load import SpecSources, json_schema, load_file
from rollart.settings.resolve import read_specs
from rollart.settings.run import RunSpec
from rollart.tools.infra import NAMESPACE
from rollart.tools.infra import render as rendered

TARGETS = ("kuberay", "ray", "cfn", "sam", "modal", "terraform")


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


@click.group()
def infra() -> None:
    """Render the deployment files of a cluster from its spec."""


@infra.command()
@click.argument("arguments", nargs=-1, metavar="[RUN.yaml] [KEY=VALUE]...")
@click.option("--cluster", type=click.Path(path_type=Path), required=True, help="Cluster spec.")
@click.option("--target", type=click.Choice(TARGETS), required=True, help="Kind of deployment.")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    required=True,
    metavar="DIR",
    help="Where the files go; those of the same name are replaced.",
)
@click.option(
    "--image",
    multiple=True,
    metavar="[POOL=]IMAGE",
    help="Image of the pods or hosts, of one pool, or of `head`. Default: of infra/Dockerfile, rollart:VERSION, "
    "rollart-vllm:VERSION for vLLM, rollart-environments:VERSION for environments with an interpreter of their own.",
)
@click.option("--namespace", help="Kubernetes namespace. Default: default.")
def render(
    arguments: tuple[str, ...], cluster: Path, target: str, output: Path, image: tuple[str, ...], namespace: str | None
) -> None:
    """Write the files that deploy a cluster; nothing is deployed.

    kuberay: a RayCluster, with RUN.yaml also a RayJob. ray: a `ray start` per pool, and `ray up` where pools say their
    instance_type. cfn, sam, terraform: RUN.yaml's reward functions on AWS Lambda, a bucket, and their roles. modal: the
    functions as Modal apps. Same specs, same bytes.
    """
    run, overrides = split_arguments(arguments)
    with native_output_to_stderr():
        files = rendered(target, run, cluster, overrides, images=image, namespace=namespace or NAMESPACE)
    for path in write(files, output):
        click.echo(str(path))
    for step in files.steps:
        click.echo(f"next: {step}", err=True)
