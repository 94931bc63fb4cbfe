"""`rollart simulate`: the same run on virtual time."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from rollart.cli.context import colour, native_output_to_stderr, output_option, width, writable
from rollart.cli.launch import split_arguments
from rollart.cli.profiles import measure
from rollart.errors import UsageError

if TYPE_CHECKING:
    from rollart.report.simulation import Finding

__all__ = ["simulate"]

STEPS = 10
"""Enough to fill the pipeline and to see a mean; a run has hundreds."""


@click.command()
@click.argument("arguments", nargs=-1, metavar="[RUN.yaml] [KEY=VALUE]...")
@click.option("--cluster", type=click.Path(path_type=Path), help="Cluster spec. Default: this machine.")
@click.option("--policies", metavar="A,B,...", help="Schedules beside each other. Default: the run's own.")
@click.option("--seeds", type=click.IntRange(1, 1000), default=1, show_default=True, help="Simulations of each.")
@click.option("--steps", type=click.IntRange(1), default=STEPS, show_default=True, help="Training steps.")
@click.option("--workers", type=click.IntRange(1), help="Processes at a time. Default: one per core.")
@click.option("--fuzz", type=click.IntRange(0), metavar="SEED", help="Shuffle what happens at the same instant.")
@click.option("--keep", type=click.Path(path_type=Path), metavar="DIR", help="Keep ledgers there, for rollart report.")
@click.option("--html", type=click.Path(path_type=Path), metavar="FILE", help="Also write a page with charts there.")
@output_option
def simulate(
    arguments: tuple[str, ...],
    cluster: Path | None,
    policies: str | None,
    seeds: int,
    steps: int,
    workers: int | None,
    fuzz: int | None,
    keep: Path | None,
    html: Path | None,
    output: str,
) -> None:
    """Play a run on virtual time, at any scale, with the product's own scheduler.

    Engines, environments, training and links are modelled from the plan; what decides is what ships. Same spec and
    seed, same trace. Shows step time and its parts, cost, staleness, waste and waits; as html also charts and, for the
    first seed of each schedule, who was busy when.
    """
    from rollart.compose.simulations import Task, simulate_all
    from rollart.report.render import render
    from rollart.report.simulation import simulation
    from rollart.report.simulation_page import simulation_page
    from rollart.spec.resolve import forecast, read_specs

    run_file, overrides = split_arguments(arguments)
    with native_output_to_stderr():
        resolved = forecast(read_specs(run_file, cluster, overrides, measure=measure))
    names = [resolved.run.schedule] if policies is None else _names(policies)
    drawn = output == "html" or html is not None
    if html is not None:
        writable(html)  # told now, and not after the work
    tasks = [
        Task(
            resolved,
            name,
            seed,
            steps,
            None if keep is None else keep / f"{name}-{seed}",
            fuzz,
            timeline=drawn and seed == resolved.run.seed,
        )
        for name in names
        for seed in range(resolved.run.seed, resolved.run.seed + seeds)
    ]

    def done(one: Finding) -> None:
        click.echo(
            f"{one.schedule}, seed {one.seed}: {one.steps} steps in {one.seconds:,.0f} virtual seconds", err=True
        )

    found = simulate_all(tasks, workers=workers, on_done=done)
    report = simulation(resolved.run.name, found, (f"plan: {resolved.plan.binds}",))
    page = simulation_page(report, [f.timeline for f in found if f.timeline is not None]) if drawn else ""
    if html is not None:
        html.write_text(page, encoding="utf-8")
    click.echo(page if output == "html" else render(report, output, width=width(), colour=colour()), nl=False)


def _names(policies: str) -> list[str]:
    from rollart.policy.schedules import SCHEDULES

    names = [name.strip() for name in policies.split(",") if name.strip()]
    for name in names:
        if name not in SCHEDULES and name != "async":
            raise UsageError(f"no schedule '{name}'", remedy=f"choose from {', '.join(SCHEDULES)}")
    if not names:
        raise UsageError("--policies names none", remedy="write it like sync,one_off,rollart")
    return names
