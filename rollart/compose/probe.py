"""Measures the engine and the trainer of a run as local processes on synthetic work, one after the other.

The CPU time of the part's own process is measured: other load on the machine stretches wall-clock time but not CPU
time.
"""

from __future__ import annotations

import asyncio
import os
import random
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from placement.calibrate import Row
from placement.types import Role
from rollart.adapters.clusters.local import LocalRuntime
from rollart.adapters.engines.http import HttpEngine
from rollart.adapters.trainers.http import HttpTrainer
from rollart.compose.actors import engine_actor, pool_nodes, trainer_actor
from rollart.compose.prepare import prepare_tokenizer, trainer_config
from rollart.model import EngineId, GenerateRequest, GroupId, Sampling, TrainSample, TrajectoryId
from rollart.ports import Handle
from rollart.spec.resolve import Resolved
from rollart.spec.runtime import RuntimeSpec

__all__ = [
    "PASSES",
    "ENGINE_LOADS",
    "TRAINING_LOADS",
    "EngineProbeLoad",
    "TrainerProbeLoad",
    "TrainingMeasurement",
    "process_cpu_s",
    "reaped_children_cpu_s",
    "probe",
]

ACTIONS = (10, 11, 12, 13)
"""Token ids that one-token answers are restricted to, like an agent's legal actions."""

PROMPT_TOKEN_RANGE = (10, 60)
"""Token ids that prompts are drawn from: small enough for any vocabulary that is worth training."""


PASSES = 3
"""Measurements of each load, of which the median counts. A pass takes about 5 s."""


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


@dataclass(frozen=True, slots=True)
class TrainingMeasurement:
    """One training step: its inputs, and its CPU-seconds."""

    tokens: float
    actions: float
    epochs: int
    minibatches: int
    cpu_s: float


async def probe(
    resolved: Resolved, directory: Path, *, device: str = "cpu", passes: int = PASSES
) -> tuple[list[Row], list[TrainingMeasurement]]:
    """Start both parts on this machine, under `directory`, and measure them. Both are stopped at return.

    Engine rows are of kind `turn`, for `placement.calibrate.fit`, and refer to `device`.
    """
    resolved = replace(resolved, cluster=resolved.cluster.model_copy(update={"runtime": RuntimeSpec()}))
    tokenizer = prepare_tokenizer(resolved, directory)
    config = trainer_config(resolved, directory, tokenizer)
    runtime = LocalRuntime(pool_nodes(resolved))
    await runtime.start()
    try:
        program = await runtime.spawn(trainer_actor(resolved, directory, config))
        trainer = HttpTrainer(await program.call("start", []))
        try:
            weights = await trainer.publish(0)
            steps = await _measure_trainer(trainer, resolved)
        finally:
            await trainer.aclose()
            await program.kill()
        part = await runtime.spawn(engine_actor(resolved, directory, resolved.plan.of(Role.ENGINE)[0]))
        address = await part.call("start", ["--model", weights.path, "--weight-version", "0"])
        engine = HttpEngine(EngineId("probed"), address)
        try:
            rows = await _measure_engine(engine, part, resolved, device, passes)
        finally:
            await engine.close()
    finally:
        await runtime.close()
    return rows, steps


def process_cpu_s(pid: int) -> float:
    """CPU-seconds so far of all threads of a process; 0 if it has ended."""
    try:
        threads = [(task / "schedstat").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
        return sum(int(text.split()[0]) for text in threads) / 1e9
    except OSError:
        pass  # a kernel without scheduler statistics: ticks of 10 ms suffice
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def reaped_children_cpu_s(pid: int) -> float:
    """CPU-seconds of the children that a process has reaped, in steps of 10 ms; 0 if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[13]) + int(fields[14])) / os.sysconf("SC_CLK_TCK")


async def _measure_engine(engine: HttpEngine, part: Handle, resolved: Resolved, device: str, passes: int) -> list[Row]:
    pid = int(await part.call("pid"))
    context = resolved.run.model.context
    fitting = [r for r in ENGINE_LOADS if r.first + r.turns * (r.new + r.output) <= context]
    await _measure_load(engine, pid, fitting[0], device)  # the first steps of a process are slower than later ones
    # Repeat the whole sequence, not each load: a disturbance of a second then affects different loads.
    seen = [[await _measure_load(engine, pid, rung, device) for rung in fitting] for _ in range(passes)]
    return [sorted(same, key=lambda row: row.seconds)[passes // 2] for same in zip(*seen, strict=True)]


async def _measure_load(engine: HttpEngine, pid: int, rung: EngineProbeLoad, device: str) -> Row:
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
    return Row(
        "turn",
        max(spent, 1e-6) / len(seen),
        device,
        new=prompt - cached,
        cached=cached,
        batch=float(rung.clients),
        output=output,
    )


async def _measure_trainer(trainer: HttpTrainer, resolved: Resolved) -> list[TrainingMeasurement]:
    run = resolved.run
    rows = []
    domain = run.domains[0].name
    for shape in (TRAINING_LOADS[0], *TRAINING_LOADS):
        samples = [_sample(shape, domain, i) for i in range(shape.samples)]
        reports = [await trainer.train(samples, 0) for _ in range(3)]
        spent = median(report.metrics["cpu_seconds"] for report in reports)
        tokens, actions = sum(len(s.token_ids) for s in samples), sum(sum(s.loss_mask) for s in samples)
        rows.append(TrainingMeasurement(tokens, actions, run.training.epochs, run.training.minibatches, spent))
    return rows[1:]  # the first is the warm-up


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
