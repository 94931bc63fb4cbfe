"""`rollart simulate`: the same run on virtual time, from specs, recorded runs and fault plans."""

from __future__ import annotations

import shutil
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import click

from rollart.cli.commands import STEPS
from rollart.cli.context import (
    create_ledger_directory,
    create_output_file,
    find_run,
    native_output_to_stderr,
    print_report,
    split_arguments,
)
from rollart.errors import UsageError
from rollart.policy.schedules import SCHEDULES
from rollart.report.pages import simulation_page
from rollart.report.profile import measured_profiles
from rollart.report.simulation import SimulationFigures, check_report, simulation
from rollart.settings.faults import FaultPlanSpec
from rollart.settings.load import load_faults
from rollart.settings.resolve import Resolved, forecast, read_specs
from rollart.settings.variants import adapt_to_schedule
from rollart.tools.faults import fault_targets
from rollart.tools.replay import check_replay, prepare_from_run, prepare_from_spec
from rollart.tools.simulate import ReplayPlan, function_behaviours
from rollart.tools.simulations import SimulationTask, TaskProgress, simulate_all

LOG_INTERVAL_S = 10.0
"""Seconds between two progress lines in a log."""
REDRAWN_S = 0.2
"""Seconds between two updates of the progress line at a terminal."""


def simulate(
    arguments: tuple[str, ...],
    cluster: Path | None,
    policies: str | None,
    seeds: int,
    steps: int | None,
    workers: int | None,
    fuzz: int | None,
    keep: Path | None,
    html: Path | None,
    faults: Path | None,
    replay: str | None,
    resample: bool,
    check: bool,
    runs_dir: Path,
    output: str,
) -> None:
    run, overrides = split_arguments(arguments)
    recorded = None
    if run is not None and not run.is_file() and (run.is_dir() or (run.name == str(run) and (runs_dir / run).is_dir())):
        recorded = find_run(str(run), runs_dir)  # a recorded run, named in place of a spec
    if check:
        if recorded is None:
            raise UsageError(f"--check of {run or 'the quickstart'} (rule: of a recorded run, its name or directory)")
        more = cluster or policies or replay or keep or html or faults or steps is not None or fuzz is not None
        if overrides or more or resample or seeds > 1:
            raise UsageError("--check simulates a recorded run as it was", remedy="leave everything but RUN out")
        with native_output_to_stderr():
            found = prepare_from_run(recorded)
        print_report(check_report(recorded.name, check_replay(found), (found.note,)), output)
        return
    of = None if replay is None else find_run(replay, runs_dir)
    with native_output_to_stderr():
        resolved, replayed, note = prepare_replay(recorded, run, cluster, overrides, of, resample)
        plan = None if faults is None else read_faults(faults, resolved, replayed)
    if steps is None:
        asked = any(key.partition("=")[0] == "steps" for key in overrides)
        steps = resolved.run.steps if asked else STEPS if replayed is None else replayed.recording.totals.steps
    drawn = output == "html" or html is not None
    if html is not None:
        create_output_file(html)  # fail before the work, not after it
    tasks = [
        SimulationTask(
            resolved,
            name,
            seed,
            steps,
            None if keep is None else keep / f"{name}-{seed}",
            fuzz,
            timeline=drawn and seed == resolved.run.seed,
            replay=replayed,
            faults=plan,
        )
        for name in ([resolved.run.schedule] if policies is None else _names(policies))
        for seed in range(resolved.run.seed, resolved.run.seed + seeds)
    ]
    for task in tasks:
        if task.keep is not None:
            create_ledger_directory(task.keep)
    _play(tasks, note, workers=workers, html=html, output=output)


def _play(tasks: Sequence[SimulationTask], note: str, *, workers: int | None, html: Path | None, output: str) -> None:
    watching = SimulationProgress([f"{t.schedule}, seed {t.seed}" for t in tasks], tasks[0].steps or 0)
    quiet = output in ("json", "csv") and not sys.stderr.isatty()

    def done(one: SimulationFigures) -> None:
        watching.over(next(n for n, t in enumerate(tasks) if (t.schedule, t.seed) == (one.schedule, one.seed)))
        seconds = f"{one.seconds:,.0f}" if one.seconds >= 10 else f"{one.seconds:.2g}"  # of a tiny model
        click.echo(f"{one.schedule}, seed {one.seed}: {one.steps} steps in {seconds} virtual seconds", err=True)

    watch: Callable[[TaskProgress], None] = (lambda _: None) if quiet else watching
    try:
        found = simulate_all(tasks, workers=workers, on_done=done, on_progress=watch)
    finally:
        watching.over()
    left = {task.schedule: adapt_to_schedule(task.resolved.run, task.schedule)[1] for task in tasks}
    lacking = [f"{name}: without {', '.join(keys)}, which it does not have" for name, keys in left.items() if keys]
    report = simulation(tasks[0].resolved.run.name, found, (note, *lacking))
    timelines = [f.timeline for f in found if f.timeline is not None]
    page = simulation_page(report, timelines) if output == "html" or html is not None else ""
    if html is not None:
        html.write_text(page, encoding="utf-8")
        click.echo(f"page: {html}", err=True)
    print_report(report, output, lambda _: page)


class SimulationProgress:
    """Steps, virtual time and seconds of waiting of the running simulations. At a terminal one line that is
    overwritten; elsewhere a line every `LOG_INTERVAL_S` seconds. Any thread may call; call `over` before printing
    anything else."""

    def __init__(self, names: Sequence[str], steps: int) -> None:
        self._names, self._steps = names, steps
        self._latest: dict[int, TaskProgress] = {}
        self._began = self._printed = _now()
        self._terminal = sys.stderr.isatty()
        self._drawn = 0
        self._lock = threading.RLock()

    def __call__(self, progress: TaskProgress) -> None:
        with self._lock:
            self._latest[progress.task] = progress
            now = _now()
            if now - self._printed < (REDRAWN_S if self._terminal else LOG_INTERVAL_S):
                return
            self._printed = now
            line = f"{'; '.join(map(self._of, sorted(self._latest)))} ({now - self._began:,.0f} s)"
            if not self._terminal:
                click.echo(line, err=True)
                return
            line = line[: shutil.get_terminal_size().columns - 1]
            click.echo("\r" + line.ljust(self._drawn), nl=False, err=True)
            self._drawn = len(line)

    def over(self, task: int | None = None) -> None:
        """Erase the line after one simulation has ended, or all have."""
        with self._lock:
            if task is not None:
                self._latest.pop(task, None)
            if self._drawn:
                click.echo("\r" + " " * self._drawn + "\r", nl=False, err=True)
                self._drawn = 0

    def _of(self, task: int) -> str:
        progress = self._latest[task]
        seconds = f"{progress.seconds:,.0f}" if progress.seconds >= 10 else f"{progress.seconds:.2g}"
        return f"{self._names[task]}: step {progress.steps} of {self._steps}, {seconds} virtual seconds"


def _now() -> float:
    return time.monotonic()  # noqa: TID251 - people wait in their own time, not in virtual time


def _names(policies: str) -> list[str]:
    names = [name.strip() for name in policies.split(",") if name.strip()]
    for name in names:
        if name not in SCHEDULES and name != "async":
            raise UsageError(f"no schedule '{name}'", remedy=f"choose from {', '.join(SCHEDULES)}")
    if not names:
        raise UsageError("--policies names none", remedy="write it like sync,one_off,rollart")
    return names


def prepare_replay(
    recorded: Path | None,
    run: Path | None,
    cluster: Path | None,
    overrides: list[str],
    replay: Path | None,
    resample: bool,
) -> tuple[Resolved, ReplayPlan | None, str]:
    """The run, its replay if any, and a note for the report's foot."""
    if recorded is not None and replay is not None:
        raise UsageError(f"{recorded} and --replay {replay} are recorded runs (rule: one is replayed)")
    if resample and recorded is None and replay is None:
        raise UsageError("--resample without a recorded run (rule: there is something to draw from)")
    if recorded is not None:
        found = prepare_from_run(recorded, cluster, overrides, resample=resample)
        return found.resolved, found.replay, found.note
    specs = read_specs(run, cluster, overrides, measure=measured_profiles)
    if replay is not None:
        found = prepare_from_spec(specs, replay, resample=resample)
        return found.resolved, found.replay, found.note
    resolved = forecast(specs)
    return resolved, None, f"plan: {resolved.plan.binds}"


def read_faults(path: Path, resolved: Resolved, replay: ReplayPlan | None) -> FaultPlanSpec:
    """A fault plan whose names are parts and functions of this run."""
    if resolved.problem is None:
        functions = []  # the simulation fails with the reason
    else:
        functions = [b.spec.name for b in function_behaviours(resolved, None if replay is None else replay.recording)]
    return load_faults(path, list(fault_targets(resolved)), functions)
