"""Rows about which GPU does what: the command's plan of the papers' fleets (`benchmarks.papers.planned`), and prefill
and decode apart on modelled engines."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.papers import planned, tuned
from benchmarks.papers.row import Claim, Figure, Found, Row
from benchmarks.papers.world import Bed, Serving, Task, mean, play
from rollart.fleet import EngineRole

__all__ = ["ROWS"]


def _mix(seeds: int) -> Found:
    figures: list[Figure] = []
    claims: list[Claim] = []
    for model in ("Qwen3-8B", "Qwen3-32B"):
        over_h800, over_h20 = planned.mixed(model)[0]
        figures += [
            Figure(f"{model}: mix over 72 H800", 1.12, over_h800, most=1.37),
            Figure(f"{model}: mix over 208 H20", 1.30, over_h20, most=1.68),
        ]
        claims.append(Claim(f"{model}: the mix beats either type", min(over_h800, over_h20) > planned.SIGN))
    return Found(tuple(figures), tuple(claims))


def _rollout_s(model: str, p: int, seed: int, *, apart: bool) -> float:
    """Seconds of a rollout of 128 SWE trajectories on 8p H800 and 8 (4 - p) H20, prefill and decode apart or not."""
    roles = (EngineRole.PREFILL, EngineRole.DECODE) if apart else (EngineRole.ENGINE, EngineRole.ENGINE)
    fleet = (Serving("H800", 2 * p, 4, role=roles[0]), Serving("H20", 2 * (4 - p), 4, role=roles[1]))
    task = Task("swe", replace(tuned.SWE, reset_s=tuned.SWE_BODY), 128)
    link = planned.CROSS_GB_PER_S * min(p, 4 - p)
    return play(Bed(model, (task,), fleet, ("H800", 32), steps=1, seed=seed, kv_gb_per_s=link)).rollout_s()


def _divided(seeds: int) -> Found:
    published = {"Qwen3-32B": (1.03, 1.05), "Qwen3-30B-A3B": (1.11, 1.21)}
    figures: list[Figure] = []
    gain: dict[str, list[float]] = {}
    best = True
    for model in published:
        gain[model] = []
        for p in (1, 2, 3):
            some = range(seeds if p < 3 else 1)
            whole, split = (mean([_rollout_s(model, p, s, apart=apart) for s in some]) for apart in (False, True))
            gain[model].append(whole / split)
        names = zip(("1P3D", "2P2D"), published[model], gain[model], strict=False)
        figures += [Figure(f"{model} {name}", value, seen) for name, value, seen in names]
        best &= all(planned.splits_own(model, p) >= planned.split(model, p)[0] * (1 - 1e-3) for p in (1, 2, 3))
    dense, experts = gain["Qwen3-32B"], gain["Qwen3-30B-A3B"]
    claims = (
        Claim("3P1D is the worst", all(g[2] == min(g) for g in gain.values())),
        Claim("the planner's split is at least the best manual one", best),
        Claim(
            "a mixture of experts gains more than a dense model",
            all(a > b for a, b in zip(experts[:2], dense[:2], strict=True)),
        ),
        Claim("apart is faster", min(dense[0], experts[0]) > 1),
    )
    note = "1P3D, 2P2D, 3P1D: " + "; ".join(f"{m} " + ", ".join(f"{x:.2f}" for x in gain[m]) for m in gain)
    return Found(tuple(figures), claims, note)


ROWS = (
    Row(
        "RA-11",
        "the mix of types for the same money",
        "64 H800 + 24 H20 / 72 H800 / 208 H20 beside 32 H800 that "
        "train; all domains, batch 512, alpha 1; the command's plan",
        _mix,
        "the trainer and the time for which places are held limit the plan, and not the fleet: 32 H800 that train, "
        "batches of 512 and publishes at the measured speeds leave most of the devices without work on all three "
        "fleets; docs/placement.md names the term that would have to move, and how far",
    ),
    Row(
        "RA-18",
        "prefill and decode apart over both together",
        "xPyD of 8 H800 per P and 8 H20 per D, SWE, 128 "
        "trajectories; hand-offs one way, as in vLLM 0.8; the command's plan beside it",
        _divided,
        "a turn here shows 380 tokens and answers 400 (tuned to the generation of RA-1's step), and prefill is so "
        "small a part of it that a host which decodes no more costs more than it takes off the others; the tokens of "
        "a turn were not published. With 500 and 120 the dense model gains 0.97 and 1.25, the mixture 1.02 and 0.99; "
        "with 1,200 and 100 0.88, 1.78, 1.09 and 1.01. The time goes into decode, not into hand-offs: apart, the H20 "
        "are busy for 90 to 95 % of a rollout and the H800 that prefill for 9 to 26 %, and a link of 1,000 GB/s "
        "leaves the ratios within 0.04. The term is `H800.mbu` (0.88), the share of the memory bandwidth that an "
        "H800 reaches in decode: apart is faster (seed 0) with 0.6 for the dense 1P3D, 0.74 for 2P2D, 0.75 for the "
        "mixture's 1P3D and 0.55 for its 2P2D, for which the plan names the same term. With one host the dense "
        "model's prefill engines hold the KV of half of the contexts",
    ),
)
