"""Rows about rules and bounds: exact, without a simulated run."""

from __future__ import annotations

import itertools
import random
import statistics
from dataclasses import replace

from benchmarks.papers.bounds import lpt, makespan, makespan_bound, sample_bound
from benchmarks.papers.models import USD
from benchmarks.papers.pipelining import Pipeline, PipelineStage, adapted_quotas, planned, replayed
from benchmarks.papers.row import Claim, Figure, Found, Row
from benchmarks.papers.world import Bed, Serving, Task, play
from rollart.sim.workload import PRESETS, GeneratedWorkload, LogNormal, entity_generator

__all__ = ["ROWS"]

INSTANCES = 10_000


def _adaptra(seeds: int) -> Found:
    ten_ms = Pipeline((PipelineStage(0.010, 0.010, 0.010),) * 4, (0.0, 0.0, 0.0), 12)
    order = planned(ten_ms, (7, 5, 3, 1))

    def late(seconds: float) -> float:
        return replayed(replace(ten_ms, delays_s=(seconds, 0.0, 0.0)), order.orders).makespan_s * 1e3

    slow = replace(ten_ms, delays_s=(0.010, 0.0, 0.0))
    adapted = planned(slow, adapted_quotas(slow)).makespan_s * 1e3
    found = (order.makespan_s * 1e3, late(0.010), late(0.020))
    figures = [
        Figure(n, p, s) for n, p, s in zip(("0 ms", "10 ms", "20 ms"), (390.0, 400.0, 440.0), found, strict=True)
    ]
    exact = all(abs(f.published - f.simulated) < 1e-6 for f in figures)
    return Found(tuple(figures), (Claim("exact", exact),), f"adapted to 10 ms: {adapted:.0f} ms")


def _flash(seeds: int) -> Found:
    """The bound of generation, per sample, on random instances of list scheduling."""
    broken, tightest = 0, 0.0
    for n in range(INSTANCES):
        rng = entity_generator("bound", n)
        workers, samples, alpha = rng.randint(1, 64), rng.randint(1, 128), rng.randint(0, 4)
        sigma = rng.uniform(0.0, 2.0)
        times = [rng.lognormvariate(0.0, sigma) for _ in range(samples * (alpha + 1))]
        mean, most = statistics.fmean(times), max(times)
        took = makespan(times, workers)
        per_sample = sample_bound(mean, most, workers=workers, samples=samples, alpha=alpha)
        whole = makespan_bound(mean, most, workers=workers, samples=len(times))
        broken += took > whole * (1 + 1e-9) or took / len(times) > per_sample * (1 + 1e-9)
        tightest = max(tightest, took / whole)
    claims = (Claim("never broken", broken == 0), Claim("tight: some instance above 0.9 of it", tightest > 0.9))
    return Found((Figure("instances above the bound", 0.0, float(broken)),), claims, f"closest {tightest:.3f}")


def _lpt(seeds: int) -> Found:
    worst = 0.0
    for n in range(300):
        rng = entity_generator("lpt", n)
        workers = rng.randint(2, 3)
        lengths = [rng.uniform(1.0, 10.0) for _ in range(rng.randint(workers, 7))]
        took = max(sum(lengths[i] for i in one) for one in lpt(lengths, workers))
        best = min(
            max(sum(x for x, w in zip(lengths, to, strict=True) if w == k) for k in range(workers))
            for to in itertools.product(range(workers), repeat=len(lengths))
        )
        worst = max(worst, took / best / (4 / 3 - 1 / (3 * workers)))
    random_, sorted_ = [], []
    for n in range(100):
        rng = entity_generator("order", n)
        lengths = [rng.lognormvariate(6.0, 1.0) for _ in range(128)]
        shuffled = random.Random(n).sample(lengths, len(lengths))
        random_.append(makespan(shuffled, 16))
        sorted_.append(makespan(sorted(lengths, reverse=True), 16))
    gain = sum(random_) / sum(sorted_)
    figures = (Figure("LPT over its bound, worst of 300", 0.0, worst, most=1.0),)
    return Found(
        figures,
        (Claim("LPT within 4/3", worst <= 1.0), Claim("LPT beats random order", gain > 1.0)),
        f"random/LPT {gain:.2f} on log-normal lengths",
    )


def _lag(seeds: int) -> Found:
    task = Task("math", replace(PRESETS["gem_math"], step_s=LogNormal(0.3, 0.8)), 32)
    bed = Bed("Qwen3-8B", (task,), (Serving("H800", 4),), ("H800", 4), steps=5)
    lags = {name: play(bed.under(name)).passed for name in ("sync_plus", "one_off")}
    most = {name: max(lag for p in passed for lag in p.lags) for name, passed in lags.items()}
    last = min(lag for p in lags["one_off"][1:] for lag in p.lags)
    figures = (Figure("largest lag, queue of 1", 1.0, float(most["one_off"])),)
    return Found(
        figures,
        (
            Claim("lag exactly 1 after the first step", last == 1 == most["one_off"]),
            Claim("synchronous: lag 0", most["sync_plus"] == 0),
        ),
    )


def _lengths(seeds: int) -> Found:
    drawn = GeneratedWorkload(PRESETS["math_14b"], 0, name="math")
    lengths = sorted(drawn.script(p, m).answers[0] for p in range(1_000) for m in range(8))
    usual = sorted(
        GeneratedWorkload(
            replace(PRESETS["math_14b"], answers=replace(PRESETS["math_14b"].answers, runaways=0.0)), 0, name="m"
        )
        .script(p, m)
        .answers[0]
        for p in range(1_000)
        for m in range(8)
    )
    median, third = usual[len(usual) // 2], usual[3 * len(usual) // 4]
    figures = (
        Figure("median", 540.0, median, tuned=True),
        Figure("third quartile", 755.0, third, most=1100.0, tuned=True),
        Figure("longest / median", 25.0, lengths[-1] / lengths[len(lengths) // 2], most=32.0),
    )
    return Found(figures, (Claim("heavy tail", lengths[-1] > 20 * median),))


def _cost(seeds: int) -> Found:
    """One job, four ways; dollars per step from GPU-hours at the paper's prices."""
    task = Task("math", PRESETS["math_14b"], 512)
    bed = Bed("Qwen2.5-14B", (task,), (Serving("H800", 32),), ("H800", 32), steps=3)
    apart = replace(bed, rollout=(Serving("H20", 32),), apart=True)
    h800, h20 = 32 * USD["H800"] / 3600, 32 * USD["H20"] / 3600
    usd = {
        "disaggregated, one after the other": play(apart.under("sync_plus")).step_s() * (h800 + h20),
        "colocated": play(bed.under("sync_plus")).step_s() * h800,
        "disaggregated, overlapped": play(replace(apart, overlap=True).under("rollart")).step_s(1) * (h800 + h20),
    }
    naive, colocation, ours = usd.values()
    figures = (Figure("naive / colocated", 940 / 710, naive / colocation),)
    claims = (
        Claim("naive disaggregation costs more than colocated", naive > colocation),
        Claim("overlap costs less than naive", ours < naive),
    )
    return Found(figures, claims, ", ".join(f"{k} ${v:.2f}" for k, v in usd.items()) + " a step")


ROWS = (
    Row("AD", "a late link under a fixed pipeline order, ms", "4 stages, 12 micro-batches, 10 ms each", _adaptra),
    Row("RF", "ROLL Flash's bound of generation", f"{INSTANCES:,} random instances", _flash),
    Row("SR", "LPT inside an instance against the best order", "300 instances by brute force", _lpt),
    Row("AR", "lag of a queue of one", "8B, 5 steps under the control plane", _lag),
    Row("RP-1", "lengths of answers", "14B, 16k; 8,000 answers drawn", _lengths),
    Row(
        "RM",
        "dollars per step, one job",
        "14B/16k, 512 trajectories, 32 H800 to train, 32 H800 or H20 to roll out",
        _cost,
        "one job of one size; the paper's ratio is of 200 jobs over two weeks on 328 + 328 GPUs",
    ),
)
