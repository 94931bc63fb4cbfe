"""How fast the simulation is: virtual clusters of 300 to 10,000 GPUs under the product's scheduler, ledger included.

    python -m benchmarks.simulation [--gpus 300,1000,3000,10000] [--trajectories N] [--json]
    python -m benchmarks.simulation --target

A cluster of G H800 trains on a third of them and serves Qwen3-32B with TP8 on the rest (of 3,000: 1,024 train, 247
engines serve). Trajectories have 8 turns: 8 generations, 8 environment steps, a reset and a reward, so about 25 waits.
One process per size; CPU seconds and peak memory are of that process, and include the ledger on SQLite (no fsync).

Target (`--target`): 3,000 GPUs with 100,000 trajectories in at most 30 CPU-seconds and 500 MB. Predicted before the
first run: 90 s and 300 MB, since the controller alone takes 100 us a turn on this machine; linear in trajectories, flat
in GPUs. The reference beside it is the number of `asyncio.sleep` per CPU-second of this host on the virtual loop
(10,000 tasks with 20 each): the speed of a shared host varies by the hour.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from placement import hardware
from placement.architecture import shape_of
from placement.roofline import Roofline, RooflinePerformance
from rollart.control.admission import SchedulerSettings
from rollart.control.control_plane import ControlSettings
from rollart.control.domain import Domain
from rollart.control.trajectory import WaitLimits
from rollart.fleet import EnginePlacement
from rollart.policy.schedules import resolve
from rollart.serving.engine_registry import GatewayLimits
from rollart.sim import loop as virtual
from rollart.sim.engine import EngineLimits, ModelledEngine
from rollart.sim.environments import SimulatedDomain
from rollart.sim.run import ModelledRun, TracedLedger
from rollart.sim.site import BilledDevices, PlacedEngine
from rollart.sim.steps import StepModel
from rollart.sim.trainers import ModelledTrainer, TrainerSpeed
from rollart.sim.workload import AnswerLengths, Constant, GeneratedWorkload, LogNormal, WorkloadShape, mass_of
from rollart.testing.parts import SimulatedRewarder

QWEN3_32B = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 5120,
    "intermediate_size": 25600,
    "num_hidden_layers": 64,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": False,
}
TURNS = 8
TP = 8
LIVE_PER_ENGINE = 33
"""Trajectories in flight: 8,192 over the 247 engines of 3,000 GPUs."""

TARGET_CPU_S, TARGET_MB = 30, 500
"""For 100,000 trajectories of 8 turns on 3,000 GPUs: a bare model on such a loop took 18 s."""

WORK = WorkloadShape(
    turns=Constant(TURNS),
    first=LogNormal(1_500, 0.4),
    observation=LogNormal(300, 0.5),
    answers=AnswerLengths(200, 0.6, cap=2_048),
    reset_s=LogNormal(5.0, 0.8),
    step_s=LogNormal(1.5, 1.0, high=120.0),
)


def measure(gpus: int, trajectories: int) -> dict[str, float | str]:
    training = round(gpus * 1024 / 3000)
    engines = max(1, (gpus - training) // TP)
    batch = max(8, engines * LIVE_PER_ENGINE // 2 // 8 * 8)
    steps = -(-trajectories // batch)
    shape, device = shape_of(QWEN3_32B), hardware.device("H800")
    roofline = RooflinePerformance(shape, {}).instance(device, TP)
    assert isinstance(roofline, Roofline)
    model = StepModel(roofline)
    world = SimulatedDomain(GeneratedWorkload(WORK, 0, name="agents"), name="agents")
    domain = Domain("agents", world.make, quota=batch, group_size=8, max_turns=TURNS, max_tokens=2_048)
    limits = GatewayLimits(generate_s=7200.0, engine_s=7200.0, slots=256)
    settings = ControlSettings(
        SchedulerSettings(seed=0, steps=steps, rules=resolve("rollart", 1)),
        waits=WaitLimits(600.0, 600.0, 5.0, 600.0, 65_536),
        gateway=limits,
        train_s=7200.0,
        publish_s=7200.0,
        measure=mass_of,
    )
    places = [
        PlacedEngine(
            ModelledEngine(f"engine-{n}", model, limits=EngineLimits(slots=256)),
            EnginePlacement("h800", "H800", tp=TP),
            BilledDevices("engine", f"engine-{n}", TP, 5.28),
        )
        for n in range(engines)
    ]
    trainer = ModelledTrainer(TrainerSpeed(shape, device, training))

    async def main(directory: str) -> tuple[float, str, int]:
        loop = asyncio.get_running_loop()
        with TracedLedger(Path(directory), clock=loop.time, config={}) as ledger:
            run = ModelledRun(
                [domain],
                places,
                trainer,
                BilledDevices("trainer", "trainer-0", training, 5.28),
                SimulatedRewarder(0, lambda rng: rng.lognormvariate(-1.0, 0.5)),
                settings,
                ledger,
            )
            await run.run()
            await ledger.flush()
            return run.ended, ledger.trace, sum(s.trajectories for s in run.steps)

    gc.freeze()
    gc.set_threshold(200_000, 50, 1000)
    with tempfile.TemporaryDirectory() as directory:
        began = time.process_time()
        seconds, trace, done = virtual.run(main(directory))
        cpu = time.process_time() - began
    return {
        "gpus": gpus,
        "engines": engines,
        "trajectories": done,
        "virtual_s": seconds,
        "cpu_s": cpu,
        "us_per_turn": 1e6 * cpu / (done * TURNS),
        "mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "trace": trace,
    }


def sleeps_per_cpu_s(tasks: int = 10_000, each: int = 20) -> float:
    async def sleeper(seconds: float) -> None:
        for _ in range(each):
            await asyncio.sleep(seconds)

    async def every() -> None:
        async with asyncio.TaskGroup() as group:
            for n in range(tasks):
                group.create_task(sleeper(1.0 + n / tasks))

    began = time.process_time()
    virtual.run(every())
    return tasks * each / (time.process_time() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", default="300,1000,3000,10000")
    parser.add_argument("--trajectories", type=int, default=20_000, help="at least so many, in whole steps")
    parser.add_argument("--target", action="store_true", help="100,000 trajectories on 3,000 GPUs, against the target")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if arguments.target:
        arguments.gpus, arguments.trajectories = "3000", 100_000
    sizes = [int(size) for size in arguments.gpus.split(",")]
    if arguments.one:
        print(json.dumps(measure(sizes[0], arguments.trajectories)))
        return
    found = []
    for size in sizes:
        command = [
            sys.executable,
            __file__,
            "--one",
            "--gpus",
            str(size),
            "--trajectories",
            str(arguments.trajectories),
        ]
        answer = subprocess.run(command, check=True, capture_output=True, text=True)
        found.append(json.loads(answer.stdout))
        if not arguments.json:
            row = found[-1]
            print(
                f"{row['gpus']:>6,} GPUs {row['engines']:>5} engines {row['trajectories']:>8,} trajectories "
                f"{row['virtual_s']:>8,.0f} virtual s  {row['cpu_s']:6.1f} CPU-s  {row['us_per_turn']:5.1f} us a turn  "
                f"{row['mb']:5.0f} MB  {row['trace']}",
                flush=True,
            )
    if arguments.target and not arguments.json:
        print(f"wanted: {TARGET_CPU_S} CPU-s, {TARGET_MB} MB; this host: {sleeps_per_cpu_s():,.0f} sleeps a CPU-second")
    if arguments.json:
        print(json.dumps({"load": os.getloadavg()[0], "sizes": found}, indent=2))


if __name__ == "__main__":
    main()
