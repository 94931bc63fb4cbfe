"""Simulates a recorded run again: on its own hardware at the recorded speeds, or on other hardware.

On its own hardware the parts have their recorded timings: the trainer's seconds per step and token, a publish, and the
functions' calls. Engines follow the roofline, scaled by a pace at which a trajectory takes the recorded engine-seconds.
Competition for the same cores is included in these timings.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from placement.roofline import Calibration, Constants
from rollart.errors import SpecError, UsageError, did_you_mean
from rollart.ledger.reader import LedgerReader
from rollart.report.cost import cost_lines
from rollart.report.profile import profiles_of
from rollart.report.rows import collect
from rollart.report.simulation import SimulationCheck
from rollart.settings.planning import Specs, planning_problem
from rollart.settings.resolve import (
    Resolved,
    deployments_of,
    forecast,
    recorded_specs,
    resolve_saved,
    resolve_specs,
)
from rollart.tools.recording import RecordedRun, loop_figures, read_recording
from rollart.tools.simulate import ReplayPlan, simulate
from serverless.providers.simulated import Profile

RESOLVED_FILE = "resolved.yaml"
"""A run's resolved specs at its start."""

CPU_ENGINE = Constants(
    effective_tflops=0.05, effective_tb_per_s=0.01, step_s=5e-4, layer_s=0.0, row_s=2e-5, request_s=5e-5
)
"""Base constants of an engine on a CPU core, from which fits start: the order of magnitude of one server core under
PyTorch with a model of 0.2 M parameters."""

FIT_STEPS = 12
"""Steps of the simulations that determine the pace: enough for a mean, few enough for several simulations."""

FIT_ROUNDS = 6
PACE_TOLERANCE = 0.01
"""Relative distance to the recorded engine-seconds at which the search for the pace ends, at the latest after
`FIT_ROUNDS` rounds."""


@dataclass(frozen=True, slots=True)
class PreparedReplay:
    """A run, its replay, and a note about the speeds."""

    resolved: Resolved
    replay: ReplayPlan
    note: str


def prepare_from_run(
    directory: Path, cluster: Path | None = None, overrides: Sequence[str] = (), *, resample: bool = False
) -> PreparedReplay:
    """A recorded run again: unchanged, with overrides, or on another cluster. Errors as from reading a run and
    resolving a spec."""
    recording, recorded = read_recording(directory), resolve_saved(directory / RESOLVED_FILE)
    resolved = _with_overrides(directory, recorded, cluster, overrides)
    return _prepared(resolved, recorded, recording, directory, resample)


def with_changes(
    prepared: PreparedReplay, directory: Path, cluster: Path | None, overrides: Sequence[str]
) -> PreparedReplay:
    """What `prepare_from_run` prepared, with other overrides, at the same speeds. SpecError for overrides that break a
    rule, or that put engines or the trainer on devices whose speeds were not recorded."""
    recorded = resolve_saved(directory / RESOLVED_FILE)
    resolved = _with_overrides(directory, recorded, cluster, overrides)
    if prepared.replay.pace is None:
        return replace(prepared, resolved=resolved)
    if not _same_hardware(resolved, recorded):
        raise SpecError(
            f"{' '.join(overrides)}: engines or the trainer would be on other devices than the recorded ones"
        )
    return replace(prepared, resolved=_with_problem(resolved, directory))


def _with_overrides(directory: Path, recorded: Resolved, cluster: Path | None, overrides: Sequence[str]) -> Resolved:
    if cluster is None and not overrides:
        return recorded
    if cluster is None and recorded.cluster.engines.fixed:
        return resolve_specs(recorded_specs(directory / RESOLVED_FILE, None, overrides))
    measured = profiles_of(directory)
    return forecast(recorded_specs(directory / RESOLVED_FILE, cluster, overrides, measured=measured))


def prepare_from_spec(specs: Specs, directory: Path, *, resample: bool = False) -> PreparedReplay:
    """The recording in `directory`, under another spec."""
    recording, recorded = read_recording(directory), resolve_saved(directory / RESOLVED_FILE)
    if not specs.measured:
        specs = replace(specs, measured=profiles_of(directory))
    return _prepared(forecast(specs), recorded, recording, directory, resample)


def _prepared(
    resolved: Resolved, recorded: Resolved, recording: RecordedRun, directory: Path, resample: bool
) -> PreparedReplay:
    for domain in resolved.run.domains:
        if domain.name not in recording.scripts:
            raise UsageError(
                f"domain '{domain.name}' has no trajectory in {recording.name} (rule: a recorded domain"
                f"{did_you_mean(domain.name, list(recording.scripts))})",
                remedy="replay a run of the same domains",
            )
    if not _same_hardware(resolved, recorded):
        note = f"replays {recording.name} on other devices, at the speeds of the plan"
        return PreparedReplay(resolved, ReplayPlan(recording, resample), note)
    # Fitted on the recorded specs: a change of the engines' load must not be compensated by their pace.
    pace = _fitted_pace(_with_problem(recorded, directory), recording)
    resolved = _with_problem(resolved, directory)
    note = f"replays {recording.name} at its own speeds (engines at {pace:.2f} times the model's step times)"
    return PreparedReplay(resolved, ReplayPlan(recording, resample, pace), note)


def _same_hardware(resolved: Resolved, recorded: Resolved) -> bool:
    """True if both runs have the same model, and engines and a trainer on the same devices."""

    def parts(of: Resolved) -> list[tuple[str, str, int]]:
        devices = {pool.name: pool.device for pool in of.cluster.pools}
        return sorted({(str(a.role), devices[a.pool], len(a.devices)) for a in of.plan.assignments})

    return resolved.run.model == recorded.run.model and parts(resolved) == parts(recorded)


def check_replay(prepared: PreparedReplay) -> SimulationCheck:
    """Simulate a recorded run unchanged, and compare the figures. UsageError for a resumed run."""
    resolved, replay = prepared.resolved, prepared.replay
    recording = _never_resumed(replay.recording)
    with tempfile.TemporaryDirectory(prefix="rollart-check-") as scratch:
        steps = recording.totals.steps
        done = simulate(resolved, Path(scratch), seed=resolved.run.seed, steps=steps, replay=replay)
        with LedgerReader(done.directory) as reader:
            intervals = reader.intervals()
            usd = sum(line.usd for line in cost_lines(collect(reader, done.directory.name)))
    figures = loop_figures(
        intervals,
        0.0,
        done.steps[-1].ended,
        steps=len(done.steps),
        waited_s=sum(s.waited_s for s in done.steps),
        wall_s=done.seconds,
        usd=usd,
    )
    return SimulationCheck(recording.totals, figures)


def seconds_saved_without(prepared: PreparedReplay, functions: Sequence[str]) -> dict[str, float]:
    """By function the virtual seconds that the replayed run is shorter if this function takes no time; others are as
    recorded. UsageError for a resumed run."""
    resolved, recording = prepared.resolved, _never_resumed(prepared.replay.recording)

    def seconds(recording: RecordedRun) -> float:
        replay = replace(prepared.replay, recording=recording)
        with tempfile.TemporaryDirectory(prefix="rollart-without-") as scratch:
            return simulate(
                resolved, Path(scratch), seed=resolved.run.seed, steps=recording.totals.steps, replay=replay
            ).seconds

    as_recorded, instant = seconds(recording), Profile(0.0, call_s=0.0, item_s=0.0)
    return {
        name: as_recorded - seconds(replace(recording, functions={**recording.functions, name: instant}))
        for name in functions
        if name in recording.functions
    }


def _never_resumed(recording: RecordedRun) -> RecordedRun:
    if recording.starts > 1:
        raise UsageError(
            f"{recording.name} was started {recording.starts} times (rule: --check of a run that was never resumed, as "
            "its wall time has gaps)",
            remedy="leave --check out",
        )
    return recording


def _with_problem(resolved: Resolved, directory: Path) -> Resolved:
    """The run with a problem, even if no datasheet has the devices' speeds: the roofline then has the right shape, and
    the pace comes from the recording."""
    problem = resolved.problem
    if problem is None:
        measured = replace(resolved, measured=profiles_of(directory))
        problem = planning_problem(measured, deployments_of(resolved.plan)).problem
    performance = problem.performance
    cpu = {
        pool.device.name: Calibration(CPU_ENGINE, pool.device.name, "cpu", performance.precision, "", 0.5)
        for pool in problem.pools
        if pool.device.is_cpu and pool.device.name not in performance.constants
    }
    performance = replace(performance, constants={**cpu, **performance.constants})
    return replace(resolved, problem=replace(problem, performance=performance))


def _fitted_pace(resolved: Resolved, recording: RecordedRun) -> float:
    """The pace at which simulated trajectories take the recorded engine-seconds, from up to `FIT_ROUNDS` short
    simulations. Engine time is roughly proportional to the pace, so each round multiplies the pace by the missing
    factor."""
    wanted, pace = recording.timings.engine_s, 1.0
    steps = min(FIT_STEPS, recording.totals.steps)
    best = (float("inf"), pace)
    for _ in range(FIT_ROUNDS):
        with tempfile.TemporaryDirectory(prefix="rollart-replay-") as scratch:
            replay = ReplayPlan(recording, pace=pace)
            done = simulate(resolved, Path(scratch), seed=resolved.run.seed, steps=steps, replay=replay)
            with LedgerReader(done.directory) as reader:
                found = fmean(row.engine_seconds for row in reader.finished())
        missing = wanted / found if found > 0 and wanted > 0 else 1.0
        best = min(best, (abs(missing - 1.0), pace))
        if best[0] < PACE_TOLERANCE:
            break
        pace *= missing
    return best[1]
