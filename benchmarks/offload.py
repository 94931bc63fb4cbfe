"""Dedicated reward workers against functions: RollArt's experiment (RA-6, RA-13) in virtual time, and real workers.

    python benchmarks/offload.py [--steps 6] [--json] [--only simulated|real]

Neither part is given its outcome: steps wait for their rewards, and seconds, starts and utilisation are measured.

Simulated: jobs of Qwen3-8B under the product's scheduler and pipeline (`benchmarks/papers/offload.py`): a judge on four
GPUs of its own beside four that roll out, against eight that roll out and a judge as a function, shared by three jobs.
The published figures, the null model's and ours stand beside each other, with their mean relative deviation; then each
assumption is varied.

Real: the same three jobs on this machine. Rollouts are sleeps with the simulated trajectories' ends, shortened; each
trajectory's reward is a forward pass of a small transformer in a local worker (torch, one thread). The next step begins
when the last reward has come and training is over. Three deployments serve the rewards:

dedicated   four workers of its own for each job
shared      four workers for all jobs, always up: the effect of pooling
functions   one function for all jobs that starts workers as calls come and ends them as they idle

Utilisation is busy over all worker-seconds, starts included, as the backend metered them. Dollars: dedicated and shared
workers are cores by the hour, functions Lambda's GB-seconds and requests, at the dated prices of `configs/prices.yaml`.
Exit status 1 if functions are used less than dedicated workers, or lengthen a real step by more than a tenth.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.papers.offload import (
    JOBS,
    JUDGES,
    PAPER,
    Experiment,
    Setting,
    experiment,
    null_model,
    rollout_ends,
    simulated,
)
from rollart.settings.load import load_prices
from rollart.testing.functions import Meter
from serverless.deploy.package import build
from serverless.meter import WorkerState
from serverless.pipeline.offload import Offload
from serverless.spec import FunctionBatchSpec, FunctionSpec
from serverless.types import Item, Scored
from serverless.workers.local import LocalBackend

STEP_S, BATCH = 5.0, 84
"""Seconds of a real job's step without its rewards, and its rewards."""

KEEP_S = 0.02
"""An idle local worker is kept about as long as its start takes: a fork of a process that has imported torch."""

MEMORY_MB = 512

SOURCE = """
import functools

import torch


@functools.lru_cache
def model():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    layer = torch.nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True)
    return torch.nn.ModuleDict({
        "embed": torch.nn.Embedding(256, 128),
        "layers": torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
        "head": torch.nn.Linear(128, 1),
    }).eval()


def handler(item):
    parts = model()
    ids = torch.tensor([list(item.messages[-1]["content"].encode()[:256])])
    with torch.inference_mode():
        hidden = parts["layers"](parts["embed"](ids)).mean(dim=1)
        return float(torch.sigmoid(parts["head"](hidden)))
"""


@dataclass(frozen=True, slots=True)
class Served:
    """How the real calls were served: seconds of a step, its part after the last rollout (the exposed reward), metered
    worker-seconds and utilisation, cold starts, seconds of a call, dollars per 1,000 rewards."""

    workers: int
    step_s: float
    exposed_s: float
    worker_s: float
    utilisation: float
    cold_starts: int
    reward_ms: float
    usd_per_thousand: float
    rewards: int


async def serve(
    steps: int,
    ends: Sequence[Sequence[float]],
    directory: Path,
    *,
    names: Sequence[str],
    warm: int,
    most: int,
    keep_s: float,
) -> Served:
    """Three jobs on the local backend; `ends` has the ends of each step's rollouts, `names` each job's function."""
    (directory / "judge.py").write_text(SOURCE)
    meter, loop = Meter(), asyncio.get_running_loop()
    packages = [
        build(
            FunctionSpec(
                name=name,
                source="judge.py",
                memory_mb=MEMORY_MB,
                warm=warm,
                concurrency=most,
                keep_alive_s=keep_s,
                init_timeout_s=60.0,
                timeout_s=60.0,
                batch=FunctionBatchSpec(max_items=1, max_wait_ms=0),
                deterministic=False,
                preload=("torch",),
            ),
            base=directory,
        )
        for name in sorted(set(names))
    ]
    exposed: list[float] = []
    stepped: list[float] = []

    async def reward(name: str, number: str, end_s: float) -> None:
        await asyncio.sleep(end_s)
        message = {"role": "assistant", "content": (number * 64)[:256]}
        outcome = await offload.submit(name, Item(number, (message,)), 120.0)
        assert isinstance(outcome, Scored), outcome

    async def job(number: int) -> None:
        await asyncio.sleep(number * STEP_S / JOBS)
        for step in range(steps):
            began, own = loop.time(), ends[(number * steps + step) % len(ends)]
            async with asyncio.TaskGroup() as group:
                for n, end_s in enumerate(own):
                    group.create_task(reward(names[number], f"{number}.{step}.{n}", end_s))
            exposed.append(loop.time() - began - max(own))
            await asyncio.sleep(STEP_S - max(own))  # training, for which a step has this much time left
            stepped.append(loop.time() - began)

    async with LocalBackend(meter=meter) as backend, Offload(packages, backend) as offload:
        # The process that workers are forked from imports torch once, at the first start.
        first = Item("first", ({"role": "assistant", "content": "x"},))
        await asyncio.gather(*(offload.submit(name, first, 120.0) for name in set(names)))
        if warm:
            while sum(backend.load(name).ready for name in set(names)) < warm * len(packages):
                await asyncio.sleep(0.01)
        else:
            while any(backend.load(name).workers for name in set(names)):
                await asyncio.sleep(0.01)
        before = {name: (dict(u.worker_s), u.cold_starts, u.gb_s, u.invocations) for name, u in meter.usage.items()}
        since = loop.time()
        async with asyncio.TaskGroup() as group:
            for number in range(JOBS):
                group.create_task(job(number))
        span = loop.time() - since
    usage = meter.usage
    seconds = {
        state: sum(u.worker_s[state] - before[name][0][state] for name, u in usage.items()) for state in WorkerState
    }
    worker_s = span * warm * len(packages) if warm else sum(seconds.values())
    rewards = JOBS * steps * BATCH
    gb_s = sum(u.gb_s - before[name][2] for name, u in usage.items())
    calls = sum(u.invocations - before[name][3] for name, u in usage.items())
    return Served(
        workers=warm * len(packages) if warm else most,
        step_s=statistics.fmean(stepped),
        exposed_s=statistics.fmean(exposed),
        worker_s=worker_s,
        utilisation=seconds[WorkerState.BUSY] / worker_s,
        cold_starts=sum(u.cold_starts - before[name][1] for name, u in usage.items()),
        reward_ms=1e3 * seconds[WorkerState.BUSY] / rewards,
        usd_per_thousand=1000.0 * (_hourly(worker_s) if warm else _by_use(gb_s, calls)) / rewards,
        rewards=rewards,
    )


PRICES = load_prices(Path(__file__).parents[1] / "configs" / "prices.yaml")


def _price(name: str, unit: str) -> float:
    return next(p.usd for p in PRICES.prices if (p.name, p.unit) == (name, unit))


def _hourly(worker_s: float) -> float:
    return worker_s / 3600.0 * _price("cpu", "device-hour")


def _by_use(gb_s: float, calls: int) -> float:
    return gb_s * _price("aws_lambda", "GB-second") + calls / 1e6 * _price("aws_lambda", "million-requests")


def real(steps: int) -> dict[str, Served]:
    """All three deployments with the same trajectories: those of the simulated job on eight GPUs."""
    ends = [_shortened(own) for own in rollout_ends(Setting())]
    own, shared = [f"judge-{n}" for n in range(JOBS)], ["judge"] * JOBS
    found = {}
    with tempfile.TemporaryDirectory() as name:
        here = Path(name)
        for label, names, warm, most, keep_s in (
            ("dedicated", own, JUDGES, JUDGES, 3600.0),
            ("shared", shared, JUDGES, JUDGES, 3600.0),
            ("functions", shared, 0, JOBS * JUDGES, KEEP_S),
        ):
            found[label] = asyncio.run(serve(steps, ends, here, names=names, warm=warm, most=most, keep_s=keep_s))
    return found


def _shortened(ends: Sequence[float]) -> list[float]:
    """Every eighth end of a step's rollouts, and its last, on the scale of `STEP_S`: the rollout keeps its share of the
    step."""
    ordered = sorted(ends)
    kept = [*ordered[:: len(ordered) // BATCH][: BATCH - 1], ordered[-1]]
    return [end / ordered[-1] * STEP_S * ROLLOUT_SHARE for end in kept]


ROLLOUT_SHARE = 0.61
"""Of a step, as simulated: 111 of 183 s."""


def settings() -> dict[str, Setting]:
    """The assumptions, one changed at a time."""
    base = Setting()
    return {
        "as assumed": base,
        "verdict of 16 tokens": replace(base, verdict=16),
        "verdict of 64 tokens": replace(base, verdict=64),
        "start 0.8 s": replace(base, cold_s=0.8),
        "start 25 s": replace(base, cold_s=25.0),
        "steps begin together": replace(base, apart=0.0),
        "steps evenly apart": replace(base, apart=183.0),
        "4 judges at most": replace(base, most=4),
        "1 judge at most": replace(base, most=1),
        "84 trajectories a batch": replace(base, trajectories=84, group=4),
    }


def score(figures: dict[str, float]) -> float:
    """Mean relative deviation from the published figures."""
    return statistics.fmean(abs(figures[name] / PAPER[name] - 1.0) for name in PAPER)


def show_simulated(found: dict[str, Experiment]) -> None:
    base = found["as assumed"]
    ours, null = simulated(base), null_model(base)
    print(f"{'RA-13':<24}{'published':>10}{'null model':>12}{'simulated':>11}")
    for name, published in PAPER.items():
        print(f"{name:<24}{published:>10.0f}{null[name]:>12.1f}{ours[name]:>11.1f}")
    print(f"{'mean deviation':<24}{'':>10}{score(null):>12.0%}{score(ours):>11.0%}")
    print(
        f"\n{'assumption':<26}{'reward s':>9}{'rollout 4, 8 GPUs':>19}{'step s':>16}{'used':>14}"
        f"{'judges GPU-s/step':>19}{'starts':>8}"
    )
    for name, e in found.items():
        print(
            f"{name:<26}{e.work_s:>9.3f}{e.dedicated_rollout_s:>11.1f}{e.functions_rollout_s:>8.1f}"
            f"{e.dedicated_step_s:>9.1f}{e.functions_step_s:>7.1f}{e.dedicated_used:>8.1%}{e.functions_used:>6.0%}"
            f"{e.dedicated_gpu_s:>12.0f}{e.functions_gpu_s:>7.0f}{e.cold_starts:>8}"
        )
    print(
        "\nThe published rollout halves with twice the GPUs. Here its longest answers of 16k tokens do not: the null "
        "model is nearer.\nDedicated judges are used as published if a reward is one forward pass. Functions are not, "
        "unless few judges at a time or long verdicts keep them busy."
    )


def show_real(found: dict[str, Served]) -> None:
    print(
        f"\n{'real workers':<12}{'workers':>8}{'step s':>8}{'exposed s':>10}{'worker-s':>10}{'used':>8}{'cold':>6}"
        f"{'reward ms':>11}{'$ / 1k':>10}"
    )
    for name, one in found.items():
        print(
            f"{name:<12}{one.workers:>8}{one.step_s:>8.2f}{one.exposed_s:>10.3f}{one.worker_s:>10.1f}{one.utilisation:>8.1%}"
            f"{one.cold_starts:>6}{one.reward_ms:>11.1f}{one.usd_per_thousand:>10.5f}"
        )
    pooled = found["dedicated"].worker_s / found["shared"].worker_s
    elastic = found["shared"].worker_s / found["functions"].worker_s
    print(f"worker-seconds: pooling ÷ {pooled:.2f}, elasticity ÷ {elastic:.2f}, both ÷ {pooled * elastic:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4, help="real steps of each job")
    parser.add_argument("--only", choices=("simulated", "real"))
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    load = os.getloadavg()[0]
    modelled = {} if arguments.only == "real" else {name: experiment(one) for name, one in settings().items()}
    served = {} if arguments.only == "simulated" else real(arguments.steps)
    if arguments.json:
        base = modelled.get("as assumed")
        shown = {
            "load": load,
            "published": PAPER,
            "null_model": base and null_model(base),
            "simulated": {name: asdict(one) for name, one in modelled.items()},
            "real": {name: asdict(one) for name, one in served.items()},
        }
        print(json.dumps(shown, indent=2))
    else:
        print(f"load average {load:.1f}")
        if modelled:
            show_simulated(modelled)
        if served:
            show_real(served)
    good = all(one.functions_used > one.dedicated_used for one in modelled.values())
    if served:
        good &= served["functions"].utilisation > served["dedicated"].utilisation
        good &= served["functions"].step_s < 1.1 * served["dedicated"].step_s
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
