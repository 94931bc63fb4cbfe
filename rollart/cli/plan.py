"""`rollart plan`: the placement of parts, its rate and cost, and the effect of changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import click

from rollart.cli.context import colour, native_output_to_stderr, output_option, split_arguments, width
from rollart.cli.machine import machine_of, played_profiles, predict_on_machine
from rollart.cli.plan_simulated import simulation_tables
from rollart.cli.plan_tables import comparison_report, plan_report
from rollart.cli.profiles import measured_profiles
from rollart.errors import UsageError
from rollart.report.render import render
from rollart.report.tables import Report, Table
from rollart.spec.resolve import Resolved, Specs, forecast, read_specs
from rollart.spec.whatif import apply_changes

WHAT_IF = "--what-if"

SEEDS, STEPS = 1, 10
"""Defaults of `--simulate`, the same as those of `rollart simulate`."""


class _Plan(click.Command):
    """A command whose `--what-if` takes all changes that follow it: `--what-if h20=+32 price.h800=4.10`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, _spread(args))


def _spread(arguments: Sequence[str]) -> list[str]:
    """Give every change its own `--what-if`; the changes end at an option or an argument that is not key=value.
    UsageError for `--what-if` without a change."""
    spread: list[str] = []
    inside = False
    for argument in arguments:
        if argument == WHAT_IF or argument.startswith(f"{WHAT_IF}="):
            _require_change(spread, inside)
            inside = True
            spread.append(WHAT_IF)
            changes = argument.removeprefix(WHAT_IF).removeprefix("=").split()
        elif inside and "=" in argument and not argument.startswith("-"):
            changes = argument.split()
        else:
            _require_change(spread, inside)
            inside, changes = False, []
            spread.append(argument)
        for change in changes:
            spread += [change] if spread[-1] == WHAT_IF else [WHAT_IF, change]
    _require_change(spread, inside)
    return spread


def _require_change(spread: Sequence[str], inside: bool) -> None:
    if inside and spread[-1] == WHAT_IF:
        raise UsageError("--what-if names no change", remedy="write it like h20=+32, price.h800=4.10 or in_flight=512")


@click.command(cls=_Plan)
@click.argument("arguments", nargs=-1, metavar="[RUN.yaml] [KEY=VALUE]...")
@click.option("--cluster", type=click.Path(path_type=Path), help="Cluster spec. Default: this machine.")
@click.option(
    WHAT_IF,
    "changes",
    multiple=True,
    metavar="CHANGE...",
    help="Show the plan before and after changes: h20=+32 price.h800=4.10 link.h800-h20=25 model=DIR in_flight=512.",
)
@click.option("--fast", is_flag=True, help="Leave out the parts that need further solutions of the problem.")
@click.option("--play", is_flag=True, help="Play the environments to learn the work of domains without a profile.")
@click.option("--simulate", is_flag=True, help="Also simulate the plan, and show its figures beside the plan's.")
@click.option("--seeds", type=click.IntRange(1, 1000), help=f"Simulations of --simulate. Default: {SEEDS}.")
@click.option("--steps", type=click.IntRange(1), help=f"Training steps of each. Default: {STEPS}.")
@output_option
def plan(
    arguments: tuple[str, ...],
    cluster: Path | None,
    changes: tuple[str, ...],
    fast: bool,
    play: bool,
    simulate: bool,
    seeds: int | None,
    steps: int | None,
    output: str,
) -> None:
    """Show the placement of the run's parts, its rate and cost, and the reasons.

    Also the bottleneck, the value of one more device, and the rates of simpler plans. Without engine counts in the
    cluster spec the plan is computed; with them, its rate is predicted where possible.
    """
    if not simulate and (seeds or steps):
        raise UsageError("--seeds and --steps are of --simulate", remedy="add --simulate, or drop them")
    if simulate and changes:
        raise UsageError("--simulate and --what-if", remedy="write the change into the spec, or drop one")
    run_file, overrides = split_arguments(arguments)
    with native_output_to_stderr():
        specs = read(run_file, cluster, overrides, play=play)
        if simulate:
            report = _simulated(specs, fast=fast, seeds=seeds or SEEDS, steps=steps or STEPS)
        else:
            report = _report(specs, changes, fast=fast)
    click.echo(render(report, output, width=width(), colour=colour()), nl=False)


def read(run_file: Path | None, cluster: Path | None, overrides: Sequence[str], *, play: bool) -> Specs:
    """The specs, with measured or played work."""
    specs = read_specs(run_file, cluster, overrides, measure=measured_profiles)
    if not play:
        return specs

    return replace(specs, measured=played_profiles(specs))


def _report(specs: Specs, changes: Sequence[str], *, fast: bool) -> Report:
    before, extra = _forecast(specs)
    if not changes:
        return plan_report(before, fast=fast, extra=extra)

    after, _ = _forecast(apply_changes(specs, changes))
    return comparison_report(before, after, changes)


def _simulated(specs: Specs, *, fast: bool, seeds: int, steps: int) -> Report:
    resolved, extra = _forecast(specs)
    table, notes = simulation_tables(resolved, seeds=seeds, steps=steps)  # first, so that it fails early
    report = plan_report(resolved, fast=fast, extra=extra)
    return replace(report, tables=(report.tables[0], table, *report.tables[1:]), notes=(*report.notes, *notes))


def _forecast(specs: Specs) -> tuple[Resolved, Sequence[Table]]:
    """A plan with its rate; of a machine that was calibrated as a whole, with the CPU time that its parts share."""
    resolved = forecast(specs)
    machine = machine_of(specs) if specs.cluster.calibration else None
    if machine is None:
        return resolved, ()
    resolved, table = predict_on_machine(resolved, specs, machine)
    return resolved, (table,)
