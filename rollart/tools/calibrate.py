"""Measured constants: of this machine for one model, or of the parts of a finished run.

A small cluster on one machine is bound by effects that no datasheet lists: an engine, a trainer, the controller and
function workers share two cores. `calibrate` measures the engine and the trainer alone, as local processes on synthetic
work (`probe`), and everything else in short real runs (`measure`). `rollart.tools.predict` computes predictions from
the result. The probes measure the CPU time of the part's own process: other load on the machine stretches
wall-clock time but not CPU time.

`fit_engines`, `fit_training` and `fit_publish` fit planning constants to a finished run: of its engines by device type,
of its trainer, and of its publishes.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, median, median_high
from typing import Any

import numpy as np

from placement.calibrate import FREE, FREE_EFFECTIVE, Fit, Row, fit
from placement.problem import DomainProfile, TrainingConstants
from placement.publish import PublishSpeeds
from placement.training import fit_training_constants
from placement.types import ROLLOUT_ROLES, Device, Role
from rollart.adapters.clusters.local import LocalRuntime
from rollart.adapters.engines.http import HttpEngine
from rollart.adapters.trainers.http import HttpTrainer
from rollart.errors import UsageError
from rollart.launch.launch import launch
from rollart.launch.layout import engine_actor, pool_nodes, trainer_actors
from rollart.launch.prepare import fetch_model, prepare_tokenizer, trainer_config
from rollart.ledger.events import ENGINE_DID
from rollart.ledger.intervals import ResourceState
from rollart.ledger.reader import LedgerReader
from rollart.model import EngineId, GenerateRequest, GroupId, Sampling, TrainSample, TrajectoryId
from rollart.ports import RunEvent
from rollart.report.profile import profiles_of
from rollart.report.rows import ENGINE_ROLES
from rollart.report.utilization import engine_rows
from rollart.settings.cluster import RuntimeSpec
from rollart.settings.planning import planning_problem, pools_of, publishing_of, run_shape
from rollart.settings.resolve import Resolved
from rollart.tools.recording import seconds_within
from rollart.tools.replay import CPU_ENGINE

SCHEMA = 1

WARMUP_STEPS = 3
"""Steps at the start of a run that its rate excludes: engines, workers and caches warm up, and the pipeline fills."""

CONTROLLER_PRIOR = (4e-4, 1.6e-4, 3e-6)
"""Controller seconds per trajectory, turn and sampled token, measured on an idle machine of two cores (games of 5 turns
alone: 1.2 ms, words of 20 tokens alone: 0.57 ms). Only the proportions are used."""

PRIOR_WEIGHT = 0.1
"""Weight of the prior relative to a measurement: a measurement is trusted to 7 %, the prior to a factor of two."""

PASSES = 3
"""Measurements of each load, of which the median counts. A pass takes about 5 s."""


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
        weights = (self.trajectory_s, self.turn_s, self.said_s)
        return sum(w * f for w, f in zip(weights, controller_features(domains), strict=True))


@dataclass(frozen=True, slots=True)
class TrainingMeasurement:
    """One training step: its inputs, and its CPU-seconds."""

    tokens: float
    actions: float
    epochs: int
    minibatches: int
    cpu_s: float

    @property
    def features(self) -> tuple[float, float, float]:
        """Features that the CPU-seconds of an epoch are linear in."""
        return self.minibatches, self.tokens, self.actions


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


def measure(resolved: Resolved) -> SteadyStateMeasurement:
    """Run to the end in a temporary directory, and measure the steady part: after the first `WARMUP_STEPS` steps and
    before the final ones, in which admission runs dry."""
    marks: list[tuple[float, dict[str, float]]] = []

    def watch(event: RunEvent) -> None:
        if event.kind == "step":
            marks.append((event.t, _cpu_by_part()))

    with tempfile.TemporaryDirectory(prefix="rollart-measure-") as directory:
        run_dir = Path(directory) / "run"
        launch(resolved, run_dir=run_dir, on_progress=watch)
        last = len(marks) - 1 - (resolved.run.staleness + 1)
        if last <= WARMUP_STEPS:
            raise UsageError(
                f"{len(marks)} steps are too few to measure (rule: more than {WARMUP_STEPS + 2} + staleness)"
            )
        with LedgerReader(run_dir) as reader:
            done = reader.events("step")
            cpu_s = {v.step: v.metrics.get("cpu_seconds", 0.0) for v in reader.versions()}
            trainer = [i for i in reader.intervals() if i.role == Role.TRAINER]
            calls = [c for c in reader.invocation_sums() if c.status == "ok"]
        profiles, training = profiles_of(run_dir), resolved.run.training
    window = done[WARMUP_STEPS + 1 : last + 1]
    (t0, before), (t1, after) = marks[WARMUP_STEPS], marks[last]
    batch = resolved.run.batch.trajectories
    trained = batch * len(window)
    own = fmean(cpu_s[step] for e in window if isinstance(step := e.fields["step"], int))
    span = (done[WARMUP_STEPS].t, done[last].t)
    spent = {
        state: seconds_within((i for i in trainer if i.state == state), *span) / len(window)
        for state in (ResourceState.BUSY, ResourceState.SYNC)
    }
    waits = {name: spec.batch.max_wait_ms / 1e3 for name, spec in resolved.functions.items()}
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
            epochs=training.passes,
            minibatches=training.minibatches,
            cpu_s=own,
        ),
        reward_latency_s=max([waits.get(c.function, 0.0) + c.billed_s / c.calls for c in calls], default=0.0),
        cpu={part: max(0.0, after[part] - before.get(part, 0.0)) / trained for part in after},
        profiles=profiles,
    )


def fit_machine(
    probed: Resolved, rows: Sequence[Row], steps: Sequence[TrainingMeasurement], runs: Sequence[SteadyStateMeasurement]
) -> Machine:
    """The machine that fits the measurements best. Deterministic."""
    problem = planning_problem(probed).problem
    devices = {pool.device.name: pool.device for pool in problem.pools}
    shape = run_shape(probed)
    engine = fit(
        rows,
        shape,
        devices,
        free=FREE_EFFECTIVE,
        start=CPU_ENGINE,
        engine="rollart.engine",
        source="probe of the local machine",
    )
    alone = _fit_weights([r.features for r in steps], [r.cpu_s / r.epochs for r in steps])
    # Beside an engine the same work takes longer: caches and memory are shared.
    slowdown = fmean(r.train.cpu_s / r.train.epochs / float(np.dot(alone, r.train.features)) for r in runs)
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
        function_s=fmean(r.cpu.get("functions", 0.0) for r in runs),
        publish_s=fmean(r.publish_s for r in runs),
        queue=fmean(r.handover_s / (r.batch * r.cpu["controller"]) for r in runs),
        reward_latency_s=fmean(r.reward_latency_s for r in runs),
        cores=os.cpu_count() or 1,
    )


def _cpu_by_part() -> dict[str, float]:
    """CPU-seconds so far of this process and all its descendants, by part."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (fields := _stat_fields(int(entry.name))):
            children.setdefault(int(fields[1]), []).append(int(entry.name))
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


def controller_features(profiles: Sequence[DomainProfile]) -> tuple[float, float, float]:
    """Features that the controller's work is linear in, as means over the mix: one per trajectory, its turns, its
    sampled tokens."""
    turns = mix_mean(profiles, lambda p: p.turns.mean)
    return 1.0, turns, mix_mean(profiles, lambda p: p.turns.mean * p.output_tokens.mean)


def mix_mean(profiles: Sequence[DomainProfile], of: Callable[[DomainProfile], float]) -> float:
    """Weighted mean over the mix."""
    total = sum(p.weight for p in profiles)
    return float(sum(p.weight * of(p) for p in profiles) / total)


MIN_ROWS = 4
"""Minimum rows per device: with fewer, none could be held out."""


def fit_engines(resolved: Resolved, directory: Path) -> list[Fit]:
    """One fit per device type with enough intervals. UsageError if there is none."""
    pools = {pool.name: pool.device for pool in pools_of(resolved.cluster, resolved.prices)}
    placed = {
        a.name: (pools[a.pool].name, len(a.devices)) for a in resolved.plan.assignments if a.role in ROLLOUT_ROLES
    }
    devices: dict[str, Device] = {device.name: device for device in pools.values()}
    with LedgerReader(directory) as reader:
        rows = engine_rows(reader.events(ENGINE_DID), placed)
    by_device: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        by_device[row.device].append(row)
    enough = {name: own for name, own in by_device.items() if len(own) >= MIN_ROWS}
    if not enough:
        most = max(map(len, by_device.values()), default=0)
        raise UsageError(
            f"{directory}: {most} intervals with enough steps on one type of device (rule: {MIN_ROWS})",
            remedy="a longer run, or one whose engines do more",
        )
    engines = resolved.cluster.engines
    shape, kind = run_shape(resolved), engines.kind
    source = f"counters of run {directory.name}"
    fits = []
    for name, own in sorted(enough.items()):
        free, start = (FREE_EFFECTIVE, CPU_ENGINE) if devices[name].is_cpu else (FREE, None)
        fits.append(fit(own, shape, devices, free=free, start=start, engine=kind, source=source))
    return fits


def fit_training(resolved: Resolved, directory: Path) -> TrainingConstants | None:
    """The trainer's constants, from the duration of its steps and, on GPUs, its peak memory. None if no data sheet
    lists its device, or if it took no step."""
    problem = planning_problem(resolved).problem
    trainer = next((a for a in resolved.plan.assignments if a.role is Role.TRAINER), None)
    if trainer is None or problem.train is None:
        return None
    pool = next(p for p in problem.pools if p.name == trainer.pool)
    with LedgerReader(directory) as reader:
        busy = sum(i.t1 - i.t0 for i in reader.intervals() if i.role == Role.TRAINER and i.state == ResourceState.BUSY)
        steps = [v for v in reader.versions() if v.tokens]
    tokens = sum(v.tokens for v in steps)
    if pool.device.tflops_bf16 is None or not tokens or busy <= 0:
        return None
    peaks = [(m["peak_gb"], m["largest_microbatch"]) for v in steps if "peak_gb" in (m := v.metrics)]
    devices = len(trainer.devices)
    train = replace(problem.train, pool=pool.name, devices=devices, recompute=bool(problem.train.recompute), split=1)
    return fit_training_constants(
        problem, pool, train, seconds_per_token=busy * devices / tokens, peak=max(peaks, default=None)
    )


def fit_publish(resolved: Resolved, directory: Path) -> PublishSpeeds:
    """Medians over the versions of a run. A pull concurrent with its push is no faster than the push."""
    publishing = publishing_of(resolved.run, resolved.cluster, run_shape(resolved))
    gb, loaded = publishing.gb, publishing.load_gb or publishing.gb
    with LedgerReader(directory) as reader:
        events = {kind: reader.events(kind) for kind in ("weights_pushed", "weights_pulled", "weights_sent")}
        syncs = [i for i in reader.intervals() if i.state == ResourceState.SYNC]
        versions = len(reader.events("step"))
    loads: dict[str, float] = defaultdict(float)
    for interval in syncs:
        if interval.role in ENGINE_ROLES:
            loads[interval.resource] += interval.seconds
    written = math.fsum(i.seconds for i in syncs if i.role == "trainer")
    pushed, sent = _median(_speeds(events["weights_pushed"], "sent_bytes")), bool(events["weights_sent"])
    if pushed is None and not sent and gb * versions > 0 and written > 0:
        pushed = gb * versions / written
    return PublishSpeeds(
        pushed,
        _median(_speeds(events["weights_pulled"], "received_bytes")),
        None if sent else _median(loaded * versions / seconds for seconds in loads.values() if seconds > 0),
        _median(_speeds(events["weights_sent"], "bytes")),
    )


def _speeds(events: Iterable[RunEvent], field: str) -> Iterator[float]:
    for event in events:
        moved, seconds = event.fields.get(field, 0), event.fields.get("seconds", 0)
        if isinstance(moved, int | float) and isinstance(seconds, int | float) and moved > 0 and seconds > 0:
            yield moved / 1e9 / seconds


def _median(values: Iterable[float]) -> float | None:
    found = list(values)
    return median_high(found) if found else None


ACTIONS = (10, 11, 12, 13)
"""Token ids that one-token answers are restricted to, like an agent's legal actions."""

PROMPT_TOKEN_RANGE = (10, 60)
"""Token ids that prompts are drawn from: small enough for any vocabulary that is worth training."""


@dataclass(frozen=True, slots=True)
class EngineProbeLoad:
    """`clients` in a closed loop with `rounds` trajectories each: `turns` turns, `first` prompt tokens, then `new`
    tokens per turn, with `output` generated tokens in each."""

    clients: int
    turns: int
    first: int
    new: int
    output: int
    rounds: int


ENGINE_LOADS = (
    EngineProbeLoad(4, 1, 8, 0, 24, 15),
    EngineProbeLoad(16, 1, 8, 0, 24, 10),
    EngineProbeLoad(64, 1, 8, 0, 24, 8),
    EngineProbeLoad(128, 1, 8, 0, 24, 5),
    EngineProbeLoad(32, 1, 8, 0, 8, 20),
    EngineProbeLoad(96, 1, 10, 0, 48, 4),
    EngineProbeLoad(8, 5, 24, 7, 1, 25),
    EngineProbeLoad(32, 5, 24, 7, 1, 16),
    EngineProbeLoad(64, 5, 24, 7, 1, 10),
    EngineProbeLoad(128, 5, 24, 7, 1, 6),
    EngineProbeLoad(16, 1, 120, 0, 1, 20),
    EngineProbeLoad(48, 1, 64, 0, 8, 8),
    EngineProbeLoad(32, 6, 10, 10, 4, 6),
    EngineProbeLoad(16, 4, 24, 7, 8, 10),
)
"""Prefill lengths, decode batches and mixed turns, about half a CPU-second each."""


@dataclass(frozen=True, slots=True)
class TrainerProbeLoad:
    """`samples` trajectories of `turns` turns: `first` tokens, then per turn `action` sampled and `new` observed
    tokens."""

    samples: int
    first: int
    turns: int
    new: int
    action: int


TRAINING_LOADS = (
    TrainerProbeLoad(128, 7, 1, 0, 20),
    TrainerProbeLoad(64, 24, 5, 7, 1),
    TrainerProbeLoad(256, 7, 1, 0, 20),
    TrainerProbeLoad(48, 100, 1, 0, 60),
    TrainerProbeLoad(192, 24, 5, 7, 1),
    TrainerProbeLoad(32, 7, 1, 0, 20),
    TrainerProbeLoad(96, 10, 1, 0, 36),
    TrainerProbeLoad(64, 24, 8, 7, 1),
)


async def probe(resolved: Resolved, directory: Path, *, passes: int) -> tuple[list[Row], list[TrainingMeasurement]]:
    """Start both parts on this machine, under `directory`, and measure them. Both are stopped at return.

    Engine rows are of kind `turn`, for `placement.calibrate.fit`, and refer to device `cpu`.
    """
    resolved = replace(resolved, cluster=resolved.cluster.model_copy(update={"runtime": RuntimeSpec()}))
    await fetch_model(resolved, directory, lambda event: None)
    tokenizer = prepare_tokenizer(resolved, directory)
    config = trainer_config(resolved, directory, tokenizer)
    runtime = LocalRuntime(pool_nodes(resolved))
    await runtime.start()
    try:
        program = await runtime.spawn(trainer_actors(resolved, directory, config)[0])
        trainer = HttpTrainer(await program.call("start", []))
        try:
            weights = await trainer.publish(0)
            run, steps = resolved.run, []
            for shape in (TRAINING_LOADS[0], *TRAINING_LOADS):
                samples = [_sample(shape, run.domains[0].name, i) for i in range(shape.samples)]
                reports = [await trainer.train(samples, 0) for _ in range(3)]
                spent = median(report.metrics["cpu_seconds"] for report in reports)
                tokens, actions = sum(len(s.token_ids) for s in samples), sum(sum(s.loss_mask) for s in samples)
                steps.append(TrainingMeasurement(tokens, actions, run.training.passes, run.training.minibatches, spent))
        finally:
            await trainer.aclose()
            await program.kill()
        part = await runtime.spawn(engine_actor(resolved, directory, resolved.plan.of(Role.ENGINE)[0]))
        address = await part.call("start", ["--model", weights.path, "--weight-version", "0"])
        engine = HttpEngine(EngineId("probed"), address)
        try:
            pid = int(await part.call("pid"))
            fitting = [r for r in ENGINE_LOADS if r.first + r.turns * (r.new + r.output) <= run.model.context]
            await _measure_load(engine, pid, fitting[0])  # the first steps of a process are slower than later ones
            # Repeat the whole sequence, not each load: a disturbance of a second then affects different loads.
            seen = [[await _measure_load(engine, pid, rung) for rung in fitting] for _ in range(passes)]
        finally:
            await engine.close()
    finally:
        await runtime.close()
    rows = [sorted(same, key=lambda row: row.seconds)[passes // 2] for same in zip(*seen, strict=True)]
    return rows, steps[1:]  # the first step is the warm-up


def process_cpu_s(pid: int) -> float:
    """CPU-seconds so far of all threads of a process; 0 if it has ended."""
    try:
        threads = [(task / "schedstat").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
        return sum(int(text.split()[0]) for text in threads) / 1e9
    except OSError:
        pass  # a kernel without scheduler statistics: ticks of 10 ms suffice
    return _ticks_s(_stat_fields(pid)[11:13])


def reaped_children_cpu_s(pid: int) -> float:
    """CPU-seconds of the children that a process has reaped, in steps of 10 ms; 0 if it has ended."""
    return _ticks_s(_stat_fields(pid)[13:15])


def _stat_fields(pid: int) -> list[str]:
    """The fields of `/proc/PID/stat` after the name of the command; none if the process has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _ticks_s(ticks: Sequence[str]) -> float:
    return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")


async def _measure_load(engine: HttpEngine, pid: int, rung: EngineProbeLoad) -> Row:
    """Measure one load: engine CPU-seconds per turn, and the average turn."""
    seen: list[tuple[int, int, int]] = []

    async def client(index: int) -> None:
        rng = random.Random(index)
        for again in range(rung.rounds):
            session = f"{id(seen)}-{index}-{again}"
            tokens = [rng.randrange(*PROMPT_TOKEN_RANGE) for _ in range(rung.first)]
            for turn in range(rung.turns):
                tokens += [rng.randrange(*PROMPT_TOKEN_RANGE) for _ in range(rung.new if turn else 0)]
                allowed = ACTIONS if rung.output == 1 else None
                sampling = Sampling(rung.output, seed=rng.randrange(2**31), allowed_token_ids=allowed)
                done = await engine.generate(GenerateRequest(f"{session}-{turn}", session, tuple(tokens), sampling))
                tokens += done.token_ids
                seen.append((len(tokens) - len(done.token_ids), done.cached_tokens, len(done.token_ids)))
            await engine.release(session)

    began = process_cpu_s(pid)
    async with asyncio.TaskGroup() as tasks:
        for index in range(rung.clients):
            tasks.create_task(client(index))
    spent = process_cpu_s(pid) - began
    prompt, cached, output = (sum(column) / len(seen) for column in zip(*seen, strict=True))
    seconds, clients = max(spent, 1e-6) / len(seen), float(rung.clients)
    return Row("turn", seconds, "cpu", new=prompt - cached, cached=cached, batch=clients, output=output)


def _sample(shape: TrainerProbeLoad, domain: str, index: int) -> TrainSample:
    """A trajectory of roughly the given lengths: real lengths vary, and padding depends on that."""
    rng = random.Random(index)
    kinds: list[tuple[int, int]] = [(shape.first, -1)]
    for turn in range(max(1, round(shape.turns * rng.uniform(0.6, 1.4)))):
        kinds += [(max(1, round(shape.action * rng.uniform(0.8, 1.2))), turn), (shape.new, -1)]
    turns = tuple(turn for length, turn in kinds[:-1] for _ in range(length))
    acts = tuple(turn >= 0 for turn in turns)
    legal = shape.action == 1
    return TrainSample(
        id=TrajectoryId(f"probe-{index}"),
        group=GroupId(f"probe-{index}"),
        domain=domain,
        v0=0,
        token_ids=tuple(rng.choice(ACTIONS) if a and legal else rng.randrange(*PROMPT_TOKEN_RANGE) for a in acts),
        loss_mask=acts,
        logprobs=tuple(-1.0 if a else 0.0 for a in acts),
        versions=tuple(0 if a else -1 for a in acts),
        turn=turns,
        rewards=tuple(rng.random() if a else 0.0 for a in acts),
        score=rng.random(),
        success=None,
        allowed=tuple(ACTIONS if a else None for a in acts) if legal else (),
    )
