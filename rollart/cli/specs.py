"""`rollart plan`, `validate` and `schema`: specs without running them."""

from __future__ import annotations

import json
from pathlib import Path

import click

from rollart.cli.context import colour, output_option, width
from rollart.cli.launch import split_arguments
from rollart.errors import SpecError

__all__ = ["plan", "schema", "validate"]


@click.command()
@click.argument("arguments", nargs=-1, metavar="[RUN.yaml] [KEY=VALUE]...")
@click.option("--cluster", type=click.Path(path_type=Path), help="Cluster spec. Default: this machine.")
@output_option
def plan(arguments: tuple[str, ...], cluster: Path | None, output: str) -> None:
    """Show where each part would run.

    Also what an hour costs, and which resource is used up first.
    """
    from rollart.report.render import render
    from rollart.report.rows import Column, Report, Table
    from rollart.spec.resolve import resolve_files

    run_file, overrides = split_arguments(arguments)
    resolved = resolve_files(run_file, cluster, overrides)
    found = resolved.plan
    parts = tuple(
        (a.name, a.pool, len(a.devices), ",".join(map(str, a.devices)),
         len(a.devices) * resolved.usd_per_device_hour[a.pool])
        for a in found.assignments
    )  # fmt: skip
    pools = tuple(
        (p.name, p.device, p.count, p.count - found.idle[p.name], found.idle[p.name],
         p.count * resolved.usd_per_device_hour[p.name])
        for p in resolved.cluster.pools
    )  # fmt: skip
    part_columns = (Column("part"), Column("pool"), Column("devices", "count"), Column("which"),
                    Column("usd_per_hour", "usd"))  # fmt: skip
    pool_columns = (Column("pool"), Column("device"), Column("devices", "count"), Column("used", "count"),
                    Column("idle", "count"), Column("usd_per_hour", "usd"))  # fmt: skip
    batch_columns = (Column("domain"), Column("trajectories", "count"))
    tables = (
        Table("parts", "Parts", part_columns, parts),
        Table("pools", "Pools", pool_columns, pools),
        Table("batch", "Trajectories per step", batch_columns, tuple(resolved.quotas.items())),
    )
    notes = (f"total: ${found.usd_per_hour:.4f} per hour", f"binds: {found.binds}")
    report = Report("plan", resolved.run.name, tables, notes)
    click.echo(render(report, output, width=width(), colour=colour()), nl=False)


@click.command()
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
def validate(files: tuple[str, ...]) -> None:
    """Check run, cluster and price files.

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
@click.argument("kind", metavar="run|cluster|prices")
def schema(kind: str) -> None:
    """Print the JSON Schema of a spec, for editors."""
    from rollart.spec.schema import json_schema

    click.echo(json.dumps(json_schema(kind), indent=2))
