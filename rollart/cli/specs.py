"""`rollart validate` and `schema`: specs without running them."""

from __future__ import annotations

import json

import click

from rollart.errors import SpecError

__all__ = ["schema", "validate"]


@click.command()
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
def validate(files: tuple[str, ...]) -> None:
    """Check run, cluster, price and fault files.

    Every problem comes with its file, line and column.
    """
    from rollart.spec.load import load_file

    problems: list[str] = []
    for path in files:
        try:
            spec = load_file(path)
        except SpecError as error:
            problems.append(error.message)
        else:
            click.echo(f"{path}: ok ({type(spec).__name__})")
    if problems:
        raise SpecError("\n".join(problems))


@click.command()
@click.argument("kind", metavar="run|cluster|prices|faults")
def schema(kind: str) -> None:
    """Print the JSON Schema of a spec, for editors."""
    from rollart.spec.schema import json_schema

    click.echo(json.dumps(json_schema(kind), indent=2))
