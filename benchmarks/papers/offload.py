"""Serverless rewards (RA-13): rollout on the judge's GPUs, and a pool of judges that several jobs share."""

from __future__ import annotations

import math

from benchmarks.papers.row import Claim, Figure, Found, Row
from benchmarks.papers.workloads import cap_answers
from benchmarks.papers.world import Bed, Played, Serving, Task, mean, play
from rollart.sim.workload import PRESETS
from serverless.scaling.replay import ReplayedCall, replay_dedicated, replay_elastic

__all__ = ["ROWS"]

PROMPTS, GROUP, JUDGES, JOBS = 84, 8, 4, 3
BATCH = PROMPTS * GROUP
JUDGE_S = JUDGES * 0.06 * 158.0 / BATCH
"""GPU-seconds of one reward: 6 % of four GPUs during a rollout of 158 s, over its trajectories."""
JUDGE_COLD_S = 0.8
"""The quickest warm start that RollMux measured (0.8 to 5.9 s). An idle judge is kept for as long as that: then idling
has cost what a start does (ski rental)."""


def _job(gpus: int, seed: int) -> Bed:
    task = Task("math", cap_answers(PRESETS["math_14b"], 16_384), BATCH, group=GROUP)
    return Bed("Qwen3-8B", (task,), (Serving("H800", gpus),), ("H800", 8), "sync_plus", steps=3, seed=seed)


def _calls(played: Played, job: int) -> list[ReplayedCall]:
    """A reward for each trajectory as it ends; jobs' steps do not begin together."""
    shift = job * played.step_s() / JOBS
    return [ReplayedCall(c.t1 + shift, JUDGE_S, c.t0 + shift, "math", f"job-{job}") for c in played.charges]


def _rewards(seeds: int) -> Found:
    local = [play(_job(4, s)) for s in range(seeds)]
    freed = [play(_job(8, s)) for s in range(seeds)]
    before, after = (mean([p.rollout_s() for p in runs]) for runs in (local, freed))
    own = replay_dedicated(_calls(local[0], 0), JUDGES)
    used = own.busy_s / (JUDGES * local[0].seconds)
    calls = [c for job in range(JOBS) for c in _calls(play(_job(8, 100 + job)), job)]
    span = max(c.t for c in calls) - min(c.since or c.t for c in calls)
    few = math.ceil(sum(c.seconds for c in calls) / span)
    pool = replay_elastic(calls, cold_s=JUDGE_COLD_S, keep_s=JUDGE_COLD_S, most=few)
    figures = (
        Figure("rollout, 4 GPUs, s", 158.0, before),
        Figure("rollout, 8 GPUs, s", 77.0, after),
        Figure("their ratio", 2.05, before / after),
        Figure("judges used, dedicated, %", 6.0, 100 * used, tuned=True),
        Figure("judges used, functions, %", 88.0, 100 * pool.utilisation),
    )
    claims = (
        Claim("the judge's GPUs shorten the rollout", after < before),
        Claim("functions are used above 80 %, dedicated judges below 10 %", pool.utilisation > 0.8 > 0.1 > used),
    )
    note = (
        f"{pool.peak} judge at most for {JOBS} jobs, 99 % of rewards wait up to {pool.wait(0.99):.0f} s; the first "
        "three figures are more rollout GPUs, not elasticity"
    )
    return Found(figures, claims, note)


ROWS = (
    Row(
        "RA-13",
        "rewards that leave for functions",
        "16 H800: 8 train, 4 + 4 judges or 8 roll out; 8B/16k, 84 x 8",
        _rewards,
        "rollout here ends with run-away answers of 16k tokens, which more GPUs do not shorten; the published one "
        "halves with twice the GPUs, so its lengths had no such tail",
    ),
)
