"""The phases of `gpu.py` with processes: training and publish, and a short run."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

from benchmarks.gpu_engine import Bench, prompt, save, say
from rollart.adapters.clusters.program import Program
from rollart.adapters.engines.http import HttpEngine
from rollart.adapters.trainers.http import HttpTrainer
from rollart.model import EngineId, GenerateRequest, GroupId, Sampling, TrainSample, TrajectoryId, WeightsRef

ROOT = Path(__file__).resolve().parent.parent

Make: TypeAlias = Callable[[str, str, list[str]], Program]


def sample(
    number: int, group: str, asked: tuple[int, ...], said: tuple[int, ...], logprobs: tuple[float, ...], version: int
) -> TrainSample:
    """A trajectory of one turn that is paid by its share of even tokens."""
    n, m = len(asked), len(said)
    score = sum(token % 2 == 0 for token in said) / m
    zeros = (0.0,) * n
    return TrainSample(
        id=TrajectoryId(f"{number}"),
        group=GroupId(group),
        domain="even",
        v0=version,
        token_ids=asked + said,
        loss_mask=(False,) * n + (True,) * m,
        logprobs=zeros + logprobs,
        versions=(-1,) * n + (version,) * m,
        turn=(-1,) * n + (0,) * m,
        rewards=zeros + (0.0,) * (m - 1) + (score,),
        score=score,
        success=None,
    )


def maker(bench: Bench) -> Make:
    """Makes programs of this repository in this interpreter; their logs are in the scratch directory."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))

    # One host: nothing has to be found on a network, which there may be none of.
    env = {"PYTHONPATH": path, "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}

    def make(name: str, module: str, arguments: list[str]) -> Program:
        return Program(name, module, arguments, str(bench.scratch / f"{name}.log"), env)

    return make


def trainer_arguments(bench: Bench) -> list[str]:
    _, _, tokens = bench.size.train
    threads = max(1, (os.cpu_count() or 1) // 2)
    config = {
        "model": {"init": bench.config},
        "weights_root": str(bench.scratch / "weights"),
        "durable": False,
        "domains": {"even": {"advantage": {"level": "trajectory", "baseline": "group"}}},
        "lr": 1e-5,
        "max_tokens_per_microbatch": tokens,
        "threads": threads,
        "device": bench.device.type,
        "parallel": {"ranks": 1, "dtype": bench.dtype},
    }
    path = bench.scratch / "trainer.json"
    path.write_text(json.dumps(config))
    return ["--config", str(path)]


async def learning(bench: Bench) -> dict[str, Any]:
    """Training and publish of the trainer's process, then the short run with it. The start-up time is reported."""
    found = bench.report["phases"]
    make = maker(bench)
    program = make("trainer", "rollart.train", trainer_arguments(bench))
    try:
        began = time.perf_counter()
        trainer = HttpTrainer(await program.start([]))
        found["training"] = {"start_s": time.perf_counter() - began}
        try:
            more, weights = await training(bench, trainer)
            found["training"] |= more
            save(bench)
            return await run(bench, trainer, weights, make)
        finally:
            await trainer.aclose()
    finally:
        await program.aclose()


async def training(bench: Bench, trainer: HttpTrainer) -> tuple[dict[str, Any], WeightsRef]:
    count, length, _ = bench.size.train
    texts = [prompt(bench, i, length) for i in range(count)]
    behaviour = (-5.0,) * (length - 8)
    samples = [sample(i, f"g{i // 4}", text[:8], text[8:], behaviour, 0) for i, text in enumerate(texts)]
    taken = []
    for _ in range(4):
        report = await trainer.train(samples, 0)
        taken.append(report.seconds)
    peak = bench.known.tflops_bf16 or bench.report["phases"].get("ceilings", {}).get("matmul_tflops")
    seconds = statistics.median(taken[1:])  # the first allocates
    flops = count * bench.shape.train_flops(length, length / 2)
    began = time.perf_counter()
    weights = await trainer.publish(0)
    found = {
        "seconds": seconds,
        "first_s": taken[0],
        "tokens": count * length,
        "tokens_per_s": count * length / seconds,
        "mfu": flops / seconds / 1e12 / peak if peak else None,
        "publish_s": time.perf_counter() - began,
        "published_gb": weights.bytes / 1e9,
    }
    say(f"  {count} x {length} tokens: {seconds:.3f} s, {found['tokens_per_s']:,.0f} tok/s", found["mfu"])
    say(f"  publish of {found['published_gb']:.2f} GB: {found['publish_s']:.2f} s")
    return found, weights


async def run(bench: Bench, trainer: HttpTrainer, weights: WeightsRef, make: Make) -> dict[str, Any]:
    """Groups of answers, a step, a publish, the engine loads it: twice. The gap between the engine's log-probabilities
    and the trainer's under the same weights shows whether both compute the same model."""
    groups, answers, asked, said = bench.size.play
    arguments = ["--model", weights.path, "--weight-version", "0", "--device", bench.device.type]
    arguments += ["--dtype", bench.dtype, "--max-slots", str(groups * answers), "--max-context", str(asked + said)]
    began = time.perf_counter()
    program = make("engine", "rollart.engine", arguments)
    try:
        engine = HttpEngine(EngineId("engine"), await program.start([]), version=0)
        steps: list[dict[str, float]] = []
        started = time.perf_counter() - began
        try:
            for version in (0, 1):

                async def one(i: int, version: int = version) -> TrainSample:
                    tokens = prompt(bench, i // answers, asked)
                    sampling = Sampling(max_tokens=said, seed=1000 * version + i)
                    request = GenerateRequest(f"{version}-{i}", f"{version}-{i}", tokens, sampling)
                    done = await engine.generate(request)
                    return sample(i, f"g{i // answers}", tokens, done.token_ids, done.logprobs, version)

                marks = [time.perf_counter()]
                async with asyncio.TaskGroup() as tasks:
                    made = [tasks.create_task(one(i)) for i in range(groups * answers)]
                samples = [task.result() for task in made]
                marks.append(time.perf_counter())
                report = await trainer.train(samples, version)
                marks.append(time.perf_counter())
                old, weights = weights, await trainer.publish(version + 1)
                marks.append(time.perf_counter())
                await engine.update_weights(weights)
                marks.append(time.perf_counter())
                shutil.rmtree(old.path)  # with Adam's state a version takes 12 bytes a parameter
                parts = zip(("rollout_s", "train_s", "publish_s", "load_s"), marks, marks[1:], strict=False)
                steps.append(
                    {name: b - a for name, a, b in parts}
                    | {
                        "behaviour_gap": report.metrics["behaviour_gap"],
                        "loss": report.metrics["loss"],
                        "tokens_per_s": groups * answers * said / (marks[1] - marks[0]),
                    }
                )
                say("  " + ", ".join(f"{name} {value:.4g}" for name, value in steps[-1].items()))
        finally:
            await engine.close()
    finally:
        await program.aclose()
    return {"engine_start_s": started, "steps": steps}
