"""`rollart plan`: the placement of parts, its rate and cost, and the effect of changes; also the prediction for a
machine that was calibrated as a whole, and the figures of a simulation beside those of the plan."""

from __future__ import annotations

import asyncio
import json
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import click

from placement.problem import DomainProfile
from placement.types import ROLLOUT_ROLES, Placement, Plan, Role
from rollart.cli.commands import SEEDS, STEPS
from rollart.cli.context import native_output_to_stderr, print_report, split_arguments
from rollart.cli.plan_tables import comparison_report, plan_report
from rollart.errors import SpecError, UsageError
from rollart.report.money.planned import SimulatedCost
from rollart.report.profile import measured_profiles
from rollart.report.simulation import FIGURES, SimulationFigures, interval
from rollart.report.tables import Row, Table, as_number, as_text, table
from rollart.settings.planning import Specs, profiles_of
from rollart.settings.resolve import Resolved, forecast, read_specs
from rollart.settings.rules import quotas
from rollart.settings.variants import apply_changes
from rollart.tools.calibrate import Machine
from rollart.tools.predict import predict, profile_by_play
from rollart.tools.simulations import SimulationTask, simulate_all
from rollart.tools.window import publish_paths

COMPARED = ("step_s", "waited_s", "train_s", "publish_s", "trajectories_per_s", "usd_per_1k", "engine_busy")


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
    if not simulate and (seeds or steps):
        raise UsageError("--seeds and --steps are of --simulate", remedy="add --simulate, or drop them")
    if simulate and changes:
        raise UsageError("--simulate and --what-if", remedy="write the change into the spec, or drop one")
    run_file, overrides = split_arguments(arguments)
    with native_output_to_stderr():
        specs = read_specs(run_file, cluster, overrides, measure=measured_profiles)
        if play:
            specs = replace(specs, measured=played_profiles(specs))
        resolved, extra = _forecast(specs)
        if changes:
            report = comparison_report(resolved, _forecast(apply_changes(specs, changes))[0], changes)
        elif simulate:
            # First, so that it fails early.
            simulated, cost, notes = simulation_tables(resolved, seeds=seeds or SEEDS, steps=steps or STEPS)
            report = plan_report(resolved, fast=fast, extra=extra, simulated=cost)
            tables = (report.tables[0], simulated, *report.tables[1:])
            report = replace(report, tables=tables, notes=(*report.notes, *notes))
        else:
            report = plan_report(resolved, fast=fast, extra=extra)
    print_report(report, output)


def _forecast(specs: Specs) -> tuple[Resolved, Sequence[Table]]:
    """A plan with its rate; of a machine that was calibrated as a whole, with the CPU time that its parts share."""
    resolved = forecast(specs)
    machine = machine_of(specs)
    if machine is None:
        return resolved, ()
    profiles = profiles_of(specs.run, resolved.quotas, specs.measured, specs.base, specs.releases)
    # The machine's model includes functions and environments, so it takes the measured domains, not the given profiles.
    bare = specs.run.model_copy(update={"domains": [d.model_copy(update={"profile": None}) for d in specs.run.domains]})
    prediction = predict(replace(resolved, run=bare), profiles, machine)
    found = replace(prediction.placement, rate=prediction.rate, binds=(prediction.binds,))
    plan = replace(resolved.plan, placement=found, rates={"trajectories": prediction.rate})
    rows: list[Row] = [{"part": part, "cpu_s_per_trajectory": as_number(s)} for part, s in prediction.cpu.items()]
    table = Table.of("cpu", "CPU time of a trained trajectory", rows)
    notes = tuple(note for note in resolved.notes if not note.startswith("no prediction"))
    return replace(resolved, plan=plan, problem=None, notes=notes), (table,)


def machine_of(specs: Specs) -> Machine | None:
    """The machine among the cluster's calibration files, if one of them is of a whole machine."""
    for name in specs.cluster.calibration:
        path = Path(name)
        try:
            data = json.loads(path.read_text(encoding="utf-8")) if path.suffix == ".json" else {}
        except (OSError, ValueError):
            continue  # `settings.planning` reads it as well, and reports the error
        if isinstance(data, dict) and "update_s" in data:
            try:
                return Machine.from_dict(data)
            except ValueError as error:
                raise SpecError(
                    f"calibration '{name}': {error}", remedy="write it anew with `rollart calibrate`"
                ) from None
    return None


def played_profiles(specs: Specs) -> tuple[DomainProfile, ...]:
    """Profiles measured by playing the environments without a policy, for domains without a profile."""
    missing: Sequence[str] = [d.name for d in specs.run.domains if d.profile is None]
    known = {profile.name for profile in specs.measured}
    if all(name in known for name in missing):
        return specs.measured
    nowhere = Plan((), {}, 0.0, "")
    bare = Resolved(
        specs.run,
        specs.cluster,
        specs.prices,
        specs.base,
        plan=nowhere,
        quotas=quotas(specs.run),
        usd_per_device_hour={},
    )
    with tempfile.TemporaryDirectory(prefix="rollart-play-") as directory:
        found = asyncio.run(profile_by_play(bare, Path(directory)))
    return (*specs.measured, *(p for p in found if p.name not in known))


def simulation_tables(resolved: Resolved, *, seeds: int, steps: int) -> tuple[Table, SimulatedCost, list[str]]:
    """Simulate the run's own schedule; the table, dollars and notes. SpecError if the plan cannot be simulated."""
    found = resolved.plan.placement
    if found is not None and resolved.problem is None:
        raise SpecError(
            "a machine that was calibrated as a whole is predicted, not simulated (rule: GPUs of the catalogue)",
            remedy="leave out --simulate: the plan's rate is already of all that its parts share",
        )
    name, first = resolved.run.schedule, resolved.run.seed
    findings = simulate_all(
        [SimulationTask(resolved, name, seed, steps) for seed in range(first, first + seeds)],
        on_done=lambda one: click.echo(f"simulated seed {one.seed}: {one.seconds:,.0f} virtual seconds", err=True),
    )
    assert found is not None, "a plan without a placement cannot be simulated"
    publish_s = max((path.seconds for path in publish_paths(resolved).values()), default=None)
    one = findings[0]
    notes = [f"simulated: {name}, {one.steps} steps, {one.skipped} left out, seeds: {len(findings)}"]
    longest = next((cause for cause in one.waits if not cause.startswith("unused:")), None)
    notes += [] if longest is None else [f"longest wait there: {longest.replace('_', ' ')}"]
    usd, half = interval([one.usd_per_1k for one in findings])
    simulation = f"simulation of {one.steps} steps, their start included, of {len(findings)} seeds"
    cost = SimulatedCost(usd, half, simulation)
    return comparison_table(found, resolved.run.batch.trajectories, publish_s, findings), cost, notes


@table("simulated", "Beside a simulation")
def comparison_table(
    plan: Placement, batch: int, publish_s: float | None, findings: Sequence[SimulationFigures]
) -> Iterator[Row]:
    """Figure by figure: the plan's value, the simulation's mean with half of its 95 % interval, and the ratio of the
    mean to the plan's value. `publish_s`: the plan's, None where nothing is published. The plan assumes that
    trajectories finish as evenly as they are trained."""
    figures = {figure.key: figure for figure in FIGURES}
    planned = {**_planned(plan, batch), **({} if publish_s is None else {"publish_s": publish_s})}
    for key in COMPARED:
        figure = figures[key]
        mean, half = interval([figure.of(one) for one in findings])
        value = planned.get(key)
        yield {
            "figure": as_text(key, people=False),
            "what": figure.label,
            "unit": figure.unit,
            "plan": as_number(value),
            "simulated": as_number(mean),
            "±": as_number(half),
            "ratio": as_number(mean / value if value else None),
        }


def _planned(plan: Placement, batch: int) -> Mapping[str, float]:
    """The plan's figures under the simulation's keys."""
    if not plan.rate > 0:
        return {}
    step_s = batch / plan.rate
    found = {"step_s": step_s, "trajectories_per_s": plan.rate, "usd_per_1k": plan.usd_per_thousand_all}
    trainers = plan.of(Role.TRAINER)
    if trainers:
        train_s = step_s * max(d.utilisation for d in trainers)
        found |= {"train_s": train_s, "waited_s": step_s - train_s}
    serving = [d for d in plan.deployments if d.role in ROLLOUT_ROLES]
    devices = sum(d.devices for d in serving)
    if devices:
        found["engine_busy"] = math.fsum(d.devices * d.utilisation for d in serving) / devices
    return found
