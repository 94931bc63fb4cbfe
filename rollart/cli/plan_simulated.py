"""`rollart plan --simulate`: figures of a simulation beside those of the plan."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import click

from placement.types import Placement, Role
from rollart.compose.simulations import SimulationTask, simulate_all
from rollart.compose.window import publish_paths
from rollart.errors import SpecError
from rollart.report.simulation import FIGURES, SimulationFigures, interval
from rollart.report.tables import Cell, Table, TableColumn
from rollart.spec.resolve import Resolved

COMPARED = ("step_s", "waited_s", "train_s", "publish_s", "trajectories_per_s", "usd_per_1k", "engine_busy")
SERVING = (Role.ENGINE, Role.PREFILL, Role.DECODE)


def simulation_tables(resolved: Resolved, *, seeds: int, steps: int) -> tuple[Table, tuple[str, ...]]:
    """Simulate the run's own schedule; the table and its notes. SpecError if the plan cannot be simulated."""
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
    return comparison_table(found, resolved.run.batch.trajectories, publish_s, findings), _notes(findings, name)


def comparison_table(
    plan: Placement, batch: int, publish_s: float | None, findings: Sequence[SimulationFigures]
) -> Table:
    """Figure by figure: the plan's value, the simulation's mean with half of its 95 % interval, and the ratio of the
    mean to the plan's value. `publish_s`: the plan's, None where nothing is published. The plan assumes that
    trajectories finish as evenly as they are trained."""
    columns = (
        TableColumn("figure", people=False),
        TableColumn("what"),
        TableColumn("unit"),
        TableColumn("plan", "number"),
        TableColumn("simulated", "number"),
        TableColumn("±", "number"),
        TableColumn("ratio", "number"),
    )
    figures = {figure.key: figure for figure in FIGURES}
    planned = {**_planned(plan, batch), **({} if publish_s is None else {"publish_s": publish_s})}
    rows: list[tuple[Cell, ...]] = []
    for key in COMPARED:
        figure = figures[key]
        mean, half = interval([figure.of(one) for one in findings])
        value = planned.get(key)
        rows.append((key, figure.label, figure.unit, value, mean, half, mean / value if value else None))
    return Table("simulated", "Beside a simulation", columns, tuple(rows))


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
    serving = [d for d in plan.deployments if d.role in SERVING]
    devices = sum(d.devices for d in serving)
    if devices:
        found["engine_busy"] = math.fsum(d.devices * d.utilisation for d in serving) / devices
    return found


def _notes(findings: Sequence[SimulationFigures], schedule: str) -> tuple[str, ...]:
    one = findings[0]
    summary = f"simulated: {schedule}, {one.steps} steps, {one.skipped} left out, seeds: {len(findings)}"
    longest = next((cause for cause in one.waits if not cause.startswith("unused:")), None)
    return (summary,) if longest is None else (summary, f"longest wait there: {longest.replace('_', ' ')}")
