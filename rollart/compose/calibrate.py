"""Measure this machine, save the result, and predict runs that were never run on it.

A small cluster on one machine is bound by effects that no datasheet lists: an engine, a trainer, the controller and
function workers share two cores. `calibrate` measures the engine and the trainer alone (`probe`) and everything else in
short real runs (`measure`). `rollart.compose.predict` computes predictions from the result.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from placement.calibrate import Fit, Row, fit
from placement.constants import Constants
from placement.types import Role
from placement.workload import DomainProfile
from rollart.compose.launch import launch
from rollart.compose.probe import PASSES, TrainingMeasurement, probe, process_cpu_s, reaped_children_cpu_s
from rollart.errors import UsageError
from rollart.ledger.intervals import ResourceState
from rollart.ledger.reader import LedgerReader
from rollart.ports import RunEvent
from rollart.report.profile import profiles_of
from rollart.spec.planning import problem_of, run_shape
from rollart.spec.resolve import Resolved

__all__ = ["Machine", "SteadyStateMeasurement", "calibrate", "fit_machine", "mix_mean", "measure"]

SCHEMA = 1

WARMUP_STEPS = 3
"""Steps at the start of a run that its rate excludes: engines, workers and caches warm up, and the pipeline fills."""

CONTROLLER_PRIOR = (4e-4, 1.6e-4, 3e-6)
"""Controller seconds per trajectory, turn and sampled token, measured on an idle machine of two cores (games of 5 turns
alone: 1.2 ms, words of 20 tokens alone: 0.57 ms). Only the proportions are used."""

PRIOR_WEIGHT = 0.1
"""Weight of the prior relative to a measurement: a measurement is trusted to 7 %, the prior to a factor of two."""

FITTED_CONSTANTS = ("effective_tflops", "effective_tb_per_s", "step_s", "row_s", "request_s")

INITIAL_CONSTANTS = Constants(
    effective_tflops=0.05, effective_tb_per_s=0.01, step_s=5e-4, layer_s=0.0, row_s=2e-5, request_s=5e-5
)
"""Initial values of the fit: the order of magnitude of one server core under PyTorch with a model of 0.2 M
parameters."""


@dataclass(frozen=True, slots=True)
class SteadyStateMeasurement:
    """A real run in its steady state. Rates are in trained trajectories/s, CPU in core-seconds per trained trajectory
    by part, the rest are means per training step.

    `publish_s` is the time of the trainer and the engines for a publish. `handover_s` is the time of training beyond
    the trainer's CPU time: sample transfer, and waiting for a core.
    """

    rate: float
    batch: int
    steps: int
    seconds: float
    publish_s: float
    handover_s: float
    train: TrainingMeasurement
    reward_latency_s: float
    cpu: Mapping[str, float]
    profiles: tuple[DomainProfile, ...]


@dataclass(frozen=True, slots=True)
class Machine:
    """The calibration of this machine for one model. Costs are in CPU-seconds, except `publish_s` and
    `reward_latency_s`, which are wall-clock seconds.

    Trainer: per epoch `update_s` per mini-batch, `token_s` per token and `action_s` in addition per sampled token.
    Controller: `trajectory_s`, `turn_s` per turn and `said_s` per sampled token. `queue`: duration of the hand-over of
    a batch to the trainer, as a share of the controller's time for a batch, since the controller's loop is busy with
    trajectories admitted by the last publish.
    """

    engine: Fit
    update_s: float
    token_s: float
    action_s: float
    trajectory_s: float
    turn_s: float
    said_s: float
    function_s: float
    publish_s: float
    queue: float
    reward_latency_s: float
    cores: int

    def to_dict(self) -> dict[str, object]:
        """JSON types only."""
        rest = {k: v for k, v in asdict(self).items() if k != "engine"}
        return {"schema_version": SCHEMA, "engine": self.engine.to_dict(), **rest}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Machine:
        """ValueError for data that `to_dict` would not write."""
        if data.get("schema_version") != SCHEMA:
            raise ValueError(f"machine: schema_version is {data.get('schema_version')!r} (rule: {SCHEMA})")
        values: dict[str, Any] = {k: v for k, v in data.items() if k not in ("schema_version", "engine")}
        for name, value in values.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
                raise ValueError(f"machine: {name} is {value!r} (rule: a finite number, at least 0)")
        try:
            return Machine(engine=Fit.from_dict(data["engine"]), **values)
        except (KeyError, TypeError) as error:
            raise ValueError(f"machine: fields are missing or unknown: {error}") from None

    def controller_s(self, domains: Sequence[DomainProfile]) -> float:
        """CPU-seconds of the controller per trajectory of the mix."""
        return sum(
            w * f
            for w, f in zip((self.trajectory_s, self.turn_s, self.said_s), controller_features(domains), strict=True)
        )


def calibrate(
    probed: Resolved, references: Sequence[Resolved], *, out: str | Path | None = None, passes: int = PASSES
) -> tuple[Machine, list[SteadyStateMeasurement]]:
    """Probe the parts of `probed`, run the `references`, fit, and write the machine to `out` as JSON.

    References are short runs of the same model with different turns and lengths, bound by their trainer; three are
    needed to separate the controller's costs. Takes about 30 s, and 12 s per reference. Errors are those of a run.
    """
    if len(references) < 3:
        raise UsageError("calibration needs three reference runs (rule: of different turns and output lengths)")
    with tempfile.TemporaryDirectory(prefix="rollart-calibrate-") as directory:
        rows, steps = asyncio.run(probe(probed, Path(directory), passes=passes))
    runs = [measure(run) for run in references]
    machine = fit_machine(probed, rows, steps, runs)
    if out is not None:
        Path(out).write_text(json.dumps(machine.to_dict(), indent=2) + "\n", encoding="utf-8")
    return machine, runs


def measure(resolved: Resolved, run_dir: str | Path | None = None) -> SteadyStateMeasurement:
    """Run to the end, in `run_dir` or a temporary directory, and measure the steady part."""
    if run_dir is None:
        with tempfile.TemporaryDirectory(prefix="rollart-measure-") as directory:
            return measure(resolved, Path(directory) / "run")
    marks: list[tuple[float, dict[str, float]]] = []

    def watch(event: RunEvent) -> None:
        if event.kind == "step":
            marks.append((event.t, _cpu_by_part()))

    launch(resolved, run_dir=run_dir, on_progress=watch)
    return _measure_steady_state(resolved, Path(run_dir), marks)


def fit_machine(
    probed: Resolved, rows: Sequence[Row], steps: Sequence[TrainingMeasurement], runs: Sequence[SteadyStateMeasurement]
) -> Machine:
    """The machine that fits the measurements best. Deterministic."""
    problem = problem_of(probed.run, probed.cluster, probed.prices, base=probed.base)
    devices = {pool.device.name: pool.device for pool in problem.pools}
    shape = run_shape(probed.run, probed.base, probed.cluster.engines.dtype)
    engine = fit(
        rows,
        shape,
        devices,
        free=FITTED_CONSTANTS,
        start=INITIAL_CONSTANTS,
        engine="rollart.engine",
        source="probe of the local machine",
    )
    alone = _fit_weights([(r.minibatches, r.tokens, r.actions) for r in steps], [r.cpu_s / r.epochs for r in steps])
    # Beside an engine the same work takes longer: caches and memory are shared.
    slowdown = _average([r.train.cpu_s / _predicted_cpu_s(alone, r.train) for r in runs])
    update, token, action = (slowdown * weight for weight in alone)
    trajectory, turn, sampled = _fit_weights(
        [controller_features(r.profiles) for r in runs], [r.cpu["controller"] for r in runs], prior=CONTROLLER_PRIOR
    )
    return Machine(
        engine=engine,
        update_s=update,
        token_s=token,
        action_s=action,
        trajectory_s=trajectory,
        turn_s=turn,
        said_s=sampled,
        function_s=_average([r.cpu.get("functions", 0.0) for r in runs]),
        publish_s=_average([r.publish_s for r in runs]),
        queue=_average([r.handover_s / (r.batch * r.cpu["controller"]) for r in runs]),
        reward_latency_s=_average([r.reward_latency_s for r in runs]),
        cores=os.cpu_count() or 1,
    )


def _measure_steady_state(
    resolved: Resolved, run_dir: Path, marks: Sequence[tuple[float, Mapping[str, float]]]
) -> SteadyStateMeasurement:
    """Measure a finished run after its first `WARMUP_STEPS` steps and before the final steps, in which admission runs
    dry."""
    last = len(marks) - 1 - (resolved.run.staleness + 1)
    if last <= WARMUP_STEPS:
        raise UsageError(f"{len(marks)} steps are too few to measure (rule: more than {WARMUP_STEPS + 2} + staleness)")
    with LedgerReader(run_dir) as reader:
        done = reader.events("step")
        cpu_s = {v.step: v.metrics.get("cpu_seconds", 0.0) for v in reader.versions()}
        trainer = [i for i in reader.intervals() if i.role == Role.TRAINER]
        calls = [c for c in reader.invocation_sums() if c.status == "ok"]
    window = done[WARMUP_STEPS + 1 : last + 1]
    (t0, before), (t1, after) = marks[WARMUP_STEPS], marks[last]
    batch = resolved.run.batch.trajectories
    trained = batch * len(window)
    own = _average([cpu_s[int(_number(e.fields["step"]))] for e in window])
    span = (done[WARMUP_STEPS].t, done[last].t)
    spent = {
        state: sum(max(0.0, min(i.t1, span[1]) - max(i.t0, span[0])) for i in trainer if i.state == state) / len(window)
        for state in (ResourceState.BUSY, ResourceState.SYNC)
    }
    waits = {name: spec.batch.max_wait_ms / 1e3 for name, spec in resolved.functions.items()}
    profiles, training = profiles_of(run_dir), resolved.run.training
    return SteadyStateMeasurement(
        rate=trained / (t1 - t0),
        batch=batch,
        steps=len(window),
        seconds=t1 - t0,
        publish_s=spent[ResourceState.SYNC],
        handover_s=max(0.0, spent[ResourceState.BUSY] - own),
        train=TrainingMeasurement(
            tokens=batch * mix_mean(profiles, lambda p: p.total_tokens),
            actions=batch * mix_mean(profiles, lambda p: p.turns.mean * p.output_tokens.mean),
            epochs=training.epochs,
            minibatches=training.minibatches,
            cpu_s=own,
        ),
        reward_latency_s=max([waits.get(c.function, 0.0) + c.billed_s / c.calls for c in calls], default=0.0),
        cpu={part: max(0.0, after[part] - before.get(part, 0.0)) / trained for part in after},
        profiles=profiles,
    )


def _cpu_by_part() -> dict[str, float]:
    """CPU-seconds so far of this process and all its descendants, by part."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            children.setdefault(parent, []).append(int(entry.name))
    spent = {"controller": process_cpu_s(os.getpid())}
    waiting = [os.getpid()]
    while waiting:
        for pid in children.get(waiting.pop(), []):
            waiting.append(pid)
            try:
                command = Path(f"/proc/{pid}/cmdline").read_bytes()
            except OSError:
                continue
            part = next((p for p, mark in COMMAND_MARKS.items() if mark in command), "functions")
            # Function workers come and go: the CPU time of ended workers is accounted to their zygote.
            own = process_cpu_s(pid) + (reaped_children_cpu_s(pid) if part == "functions" else 0.0)
            spent[part] = spent.get(part, 0.0) + own
    return spent


COMMAND_MARKS = {"engine": b"rollart.engine", "trainer": b"rollart.train"}


def _fit_weights(
    features: Sequence[Sequence[float]], seconds: Sequence[float], *, prior: Sequence[float] | None = None
) -> tuple[float, ...]:
    """Non-negative weights of the features that fit the seconds best, by relative error. A `prior`, of which only the
    proportions count, determines directions that the rows leave open."""
    from scipy.optimize import nnls

    target = np.asarray(seconds, dtype=np.float64)
    rows = np.asarray(features, dtype=np.float64) / target[:, None]
    wanted = np.ones(len(target))
    if prior is not None:
        expected = np.asarray(prior) / float(np.mean(rows @ np.asarray(prior)))
        rows = np.vstack([rows, np.diag(PRIOR_WEIGHT / expected)])
        wanted = np.concatenate([wanted, np.full(len(expected), PRIOR_WEIGHT)])
    weights, _ = nnls(rows, wanted)
    return tuple(float(w) for w in weights)


def _predicted_cpu_s(weights: Sequence[float], row: TrainingMeasurement) -> float:
    update, token, action = weights
    return row.epochs * (row.minibatches * update + row.tokens * token + row.actions * action)


def controller_features(profiles: Sequence[DomainProfile]) -> tuple[float, float, float]:
    """Features that the controller's work is linear in, as means over the mix: one per trajectory, its turns, its
    sampled tokens."""
    turns = mix_mean(profiles, lambda p: p.turns.mean)
    return 1.0, turns, mix_mean(profiles, lambda p: p.turns.mean * p.output_tokens.mean)


def mix_mean(profiles: Sequence[DomainProfile], of: Callable[[DomainProfile], float]) -> float:
    """Weighted mean over the mix."""
    total = sum(p.weight for p in profiles)
    return float(sum(p.weight * of(p) for p in profiles) / total)


def _average(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _number(value: object) -> float:
    assert isinstance(value, int | float)
    return float(value)
