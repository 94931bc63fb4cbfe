"""`rollart validate` and `schema`: specs without running them."""

from __future__ import annotations

import contextlib
import json

import click

from rollart.cli.context import native_output_to_stderr
from rollart.errors import SpecError

__all__ = ["schema", "validate"]


@click.command()
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
def validate(files: tuple[str, ...]) -> None:
    """Check run, cluster, price and fault files.

    Every problem comes with its file, line and column. Of a run, the model's directory and configuration are read, the
    reward functions are packed, and each environment is made once where it would live: in this process, or by the
    hosts' interpreter of a cluster file beside it.
    """
    from rollart.spec.load import load_file
    from rollart.spec.run import RunSpec

    problems: list[str] = []
    clusters: list[str | None] = [*_clusters(files)]
    for path in files:
        try:
            spec = load_file(path)
            if isinstance(spec, RunSpec):
                for cluster in clusters or [None]:
                    _look(path, cluster)
        except SpecError as error:
            problems.append(str(error))
        else:
            click.echo(f"{path}: ok ({type(spec).__name__})")
    if problems:
        raise SpecError("\n".join(problems))


def _clusters(files: tuple[str, ...]) -> list[str]:
    """Those that are cluster specs without a problem."""
    from rollart.spec.cluster import ClusterSpec
    from rollart.spec.load import load_file

    found = []
    for path in files:
        with contextlib.suppress(SpecError):
            if isinstance(load_file(path), ClusterSpec):
                found.append(path)
    return found


def _look(run: str, cluster: str | None) -> None:
    """Whether a launch would refuse the run."""
    from rollart.compose.cautions import cautions
    from rollart.compose.preflight import refuse_unlaunchable
    from rollart.spec.resolve import read_specs
    from rollart.spec.where import Where

    with native_output_to_stderr():
        specs = read_specs(run, cluster)
        refuse_unlaunchable(specs, Where.files(run, cluster), plan=True)
        for line in cautions(specs):
            click.echo(f"{run}: warning: {line}", err=True)


@click.command()
@click.argument("kind", metavar="run|cluster|prices|faults")
def schema(kind: str) -> None:
    """Print the JSON Schema of a spec, for editors."""
    from rollart.spec.schema import json_schema

    click.echo(json.dumps(json_schema(kind), indent=2))
