"""`rollart infra`: deployment files of a cluster, rendered from its spec."""

from __future__ import annotations

from pathlib import Path

import click

from rollart.cli.context import native_output_to_stderr, split_arguments
from rollart.compose.infra import NAMESPACE
from rollart.compose.infra import render as rendered
from rollart.infra.files import write

TARGETS = ("kuberay", "ray", "cfn", "sam", "modal", "terraform")


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
