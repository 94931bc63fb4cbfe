"""Serverless rewards (RA-6, RA-13): a judge with GPUs of its own, and as a function that three jobs share.

The judge is in the loop: a trajectory's reward is a call through the product's pipeline, to workers of which each is a
GPU, and a batch is complete when its last reward has come. Seconds of a reward follow from the judge's roofline: the
trajectory is prefilled, and a verdict decoded. Steps, waits and utilisation come out; none is given.

A null model stands beside: seconds of a rollout are inversely proportional to its GPUs, and the calls of three jobs on
the GPUs of one keep these busy in proportion.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.papers.models import shape
from benchmarks.papers.row import Claim, Figure, Found, Row
from benchmarks.papers.workloads import cap_answers
from benchmarks.papers.world import Bed, Played, Serving, Task, mean, played
from placement.hardware import device
from placement.roofline import Roofline, RooflinePerformance
from rollart.adapters.rewards.offload import OffloadRewarder
from rollart.settings.run import DomainSpec, RewardUse
from rollart.sim import loop as virtual
from rollart.sim.workload import PRESETS
from rollart.testing.functions import Meter
from serverless.deploy.package import build
from serverless.meter import WorkerState
from serverless.pipeline.offload import Offload
from serverless.providers.simulated import Profile, SimulatedBackend
from serverless.spec import FunctionBatchSpec, FunctionSpec

__all__ = ["PAPER", "ROWS", "Experiment", "Setting", "experiment", "judge_s", "null_model", "rollout_ends", "simulated"]

PAPER = {"rollout, 4 GPUs, s": 158.0, "rollout, 8 GPUs, s": 77.0, "dedicated used, %": 6.0, "functions used, %": 88.0}
"""RollArt §7 (RA-13); RA-6 has 7.4 % for a judge with 4 of 32 GPUs."""

JUDGES, JOBS = 4, 3
TEMPLATE = 400
"""Tokens of the judge's instructions. Assumed."""


@dataclass(frozen=True, slots=True)
class Setting:
    """`trajectories` of a batch; `verdict` tokens that the judge decodes (1: a reward model, which gives a score after
    one forward pass); `cold_s` of a judge's start, and an idle one is kept for as long (idling has then cost what a
    start does, the ski-rental rule); `apart`: jobs begin a third of these seconds after each other, 0: together."""

    trajectories: int = 84 * 8
    group: int = 8
    verdict: int = 1
    cold_s: float = 3.35
    """The middle of RollMux's 0.8 to 5.9 s for a warm start; a cold one took 25 to 82 s."""
    most: int = JOBS * JUDGES
    """Judges at a time as functions: as many as three jobs reserve."""
    apart: float = 120.0
    steps: int = 3
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Experiment:
    """Seconds of a rollout and of a step on 4 and on 8 GPUs; busy share of the judges' GPU-seconds, starts included;
    GPU-seconds of judges per step of a job; seconds of a reward."""

    dedicated_rollout_s: float
    functions_rollout_s: float
    dedicated_step_s: float
    functions_step_s: float
    dedicated_used: float
    functions_used: float
    dedicated_gpu_s: float
    functions_gpu_s: float
    cold_starts: int
    work_s: float


def experiment(setting: Setting) -> Experiment:
    """One job with judges of its own, and three jobs whose judges are one function with scale to zero."""
    meter, jobs = virtual.run(_jobs(setting, gpus=4, jobs=1, warm=JUDGES, most=JUDGES, keep_s=1e6))
    own = meter.usage["judge"]
    shared, three = virtual.run(_jobs(setting, gpus=8, jobs=JOBS, warm=0, most=setting.most, keep_s=setting.cold_s))
    pool = shared.usage["judge"]
    (one,) = jobs
    reserved = JUDGES * one.seconds
    return Experiment(
        dedicated_rollout_s=one.rollout_s(),
        functions_rollout_s=mean([job.rollout_s() for job in three]),
        dedicated_step_s=one.step_s(),
        functions_step_s=mean([job.step_s() for job in three]),
        dedicated_used=own.worker_s[WorkerState.BUSY] / reserved,
        functions_used=pool.worker_s[WorkerState.BUSY] / pool.total_worker_s,
        dedicated_gpu_s=reserved / setting.steps,
        functions_gpu_s=pool.total_worker_s / setting.steps / JOBS,
        cold_starts=pool.cold_starts,
        work_s=own.worker_s[WorkerState.BUSY] / own.items,
    )


def simulated(found: Experiment) -> dict[str, float]:
    """The figures of `PAPER`."""
    values = (found.dedicated_rollout_s, found.functions_rollout_s, found.dedicated_used, found.functions_used)
    return {name: value * (100 if "%" in name else 1) for name, value in zip(PAPER, values, strict=True)}


def null_model(found: Experiment) -> dict[str, float]:
    """The same figures without a mechanism, from the dedicated run alone."""
    rollout_s = found.dedicated_rollout_s / 2
    step_s = found.dedicated_step_s - rollout_s
    used = min(1.0, JOBS * found.dedicated_used * found.dedicated_step_s / step_s)
    values = (found.dedicated_rollout_s, rollout_s, 100 * found.dedicated_used, 100 * used)
    return dict(zip(PAPER, values, strict=True))


def rollout_ends(setting: Setting) -> list[list[float]]:
    """Seconds from each step's begin to the ends of its trajectories, of a job on eight GPUs with instant rewards."""
    one = virtual.run(played(_job(8, setting, setting.seed)))
    begins = [one.since, *(step.ended for step in one.passed)]
    found = []
    for began, step in zip(begins, one.passed, strict=False):
        found.append([charge.t1 - began for charge in one.charges if began <= charge.t0 and charge.t1 <= step.began])
    return found


@functools.cache
def _judge() -> Roofline:
    performance = RooflinePerformance(shape("Qwen2.5-7B"))
    found = performance.instance(device("H800"), 1)
    assert isinstance(found, Roofline)
    return found


def judge_s(tokens: float, verdict: int) -> float:
    """GPU-seconds of one verdict about a trajectory of so many tokens, one at a time."""
    length = tokens + TEMPLATE
    return _judge().prefill_s(length, 0.0) + verdict * _judge().decode_step_s(1.0, length + verdict / 2)


def _job(gpus: int, setting: Setting, seed: int) -> Bed:
    task = Task("math", cap_answers(PRESETS["math_14b"], 16_384), setting.trajectories, group=setting.group)
    serving = (Serving("H800", gpus),)
    return Bed("Qwen3-8B", (task,), serving, ("H800", 8), "sync_plus", steps=setting.steps, seed=seed)


async def _jobs(
    setting: Setting, *, gpus: int, jobs: int, warm: int, most: int, keep_s: float
) -> tuple[Meter, Sequence[Played]]:
    meter = Meter()
    async with _judges(setting, meter, warm=warm, most=most, keep_s=keep_s) as rewarder:

        async def job(number: int) -> Played:
            await asyncio.sleep(number * setting.apart / JOBS)
            bed = replace(_job(gpus, setting, setting.seed + 100 * number), rewarder=rewarder)
            return await played(bed)

        async with asyncio.TaskGroup() as group:
            running = [group.create_task(job(number)) for number in range(jobs)]
    return meter, [one.result() for one in running]


@asynccontextmanager
async def _judges(
    setting: Setting, meter: Meter, *, warm: int, most: int, keep_s: float
) -> AsyncIterator[OffloadRewarder]:
    async def judge(sample: Any) -> float:
        tokens = sum(int(mass) for message in sample.messages for mass in message["content"].split())
        await asyncio.sleep(judge_s(tokens, setting.verdict))
        return 1.0

    spec = FunctionSpec(
        name="judge",
        source="rollart.sim.scoring:score",
        takes="samples",
        gpu="H800",
        warm=warm,
        concurrency=most,
        queue=1_000_000,
        keep_alive_s=keep_s,
        timeout_s=900.0,
        init_timeout_s=600.0,
        deterministic=False,
        batch=FunctionBatchSpec(max_items=1),
    )
    profile = Profile(setting.cold_s, call_s=0.0, item_s=0.0)
    domain = DomainSpec(name="math", environment="benchmarks:none", rewards=[RewardUse(function="judge")])
    backend = SimulatedBackend({"judge": judge}, meter=meter, profiles={"judge": profile}, seed=setting.seed)
    async with backend, Offload([build(spec)], backend, meter=meter, seed=setting.seed) as offload:
        yield OffloadRewarder(offload, [domain])


def _rewards(seeds: int) -> Found:
    found = [experiment(Setting(seed=seed)) for seed in range(seeds)]
    capped = [experiment(Setting(seed=seed, most=1)) for seed in range(seeds)]
    ours = {name: mean([simulated(one)[name] for one in found]) for name in PAPER}
    ratio = ours["rollout, 4 GPUs, s"] / ours["rollout, 8 GPUs, s"]
    figures = (
        *(Figure(name, PAPER[name], ours[name]) for name in ("rollout, 4 GPUs, s", "rollout, 8 GPUs, s")),
        Figure("their ratio", 2.05, ratio),
        Figure("judges used, dedicated, %", 6.0, ours["dedicated used, %"], most=7.4),
        Figure("judges used, functions, %", 88.0, ours["functions used, %"]),
        Figure("judges used, one at a time, %", 88.0, mean([simulated(one)["functions used, %"] for one in capped])),
    )
    saved, saved_capped = (
        mean([one.dedicated_gpu_s / one.functions_gpu_s for one in runs]) for runs in (found, capped)
    )
    longer_s = mean([c.functions_step_s - f.functions_step_s for c, f in zip(capped, found, strict=True)])
    used, reserved = figures[4].simulated, figures[3].simulated
    claims = (
        Claim("the judge's GPUs shorten the rollout", ratio > 1.0),
        Claim("functions are used above 10 %, dedicated judges below 10 %", used > 10.0 > reserved),
    )
    note = (
        f"dedicated judges hold {saved:.1f} times the GPU-seconds of functions, and {saved_capped:.1f} times those of "
        f"one function worker, which makes a step {longer_s:.1f} s longer"
    )
    return Found(figures, claims, note)


ROWS = (
    Row(
        "RA-13",
        "rewards that leave for functions",
        "16 H800: 8 train, 4 + 4 judges or 8 roll out; 8B/16k, 84 x 8",
        _rewards,
        "rollout here ends with run-away answers of 16k tokens, which more GPUs do not shorten; the published one "
        "halves with twice the GPUs, so its lengths had no such tail. A start of 3.35 s is 70 times a reward of 45 ms: "
        "functions idle and start for most of their time; longer verdicts or fewer judges at a time raise the use",
    ),
)
