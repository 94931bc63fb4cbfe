"""Rows about which GPU does what: the placer's plan of the papers' fleets against its restrictions (analytic), and
prefill and decode apart on modelled engines.

Turns and tokens per domain were not published. FrozenLake's are tuned to RA-3 (see `tests/placement`), the others are
typical ones.
"""

from __future__ import annotations

from dataclasses import replace

from benchmarks.papers import tuned
from benchmarks.papers.models import USD, shape
from benchmarks.papers.row import Claim, Figure, Found, Row
from benchmarks.papers.world import Bed, Serving, Task, mean, play
from placement.hardware import device
from placement.problem import Problem, Restriction
from placement.roofline import RooflinePerformance
from placement.solve import solve
from placement.types import Deployment, Link, Placement, Pool, Role
from placement.workload import DomainProfile, Quantity
from rollart.fleet import EngineRole

__all__ = ["ROWS"]

HOST_GB_PER_S, CROSS_GB_PER_S = 50.0, 25.0
"""Of one host of 8 GPUs: within a cluster (400 Gb/s), and between the two (200 Gb/s). RollArt §7.1."""


def _domain(name: str, turns: float, new: float, output: float) -> DomainProfile:
    return DomainProfile(name, Quantity(turns), Quantity(new), Quantity(output))


FROZEN_LAKE, GEM_MATH, SWE = (
    _domain("frozen_lake", 40, 1500, 10), _domain("gem_math", 3, 500, 2000), _domain("swe", 40, 500, 300),
)  # fmt: skip


def _rate(model: str, h800: int, h20: int, domains: tuple[DomainProfile, ...], **wishes: object) -> float:
    """Trajectories/s of the best plan under the wishes."""
    counts = {"H800": h800, "H20": h20}
    pools = tuple(Pool(k.lower(), device(k), n, USD[k]) for k, n in counts.items() if n)
    links = [Link(k.lower(), k.lower(), HOST_GB_PER_S * n / 16) for k, n in counts.items() if n]
    if h800 and h20:
        links.append(Link("h800", "h20", CROSS_GB_PER_S * min(h800, h20) / 8))
    performance = RooflinePerformance(shape(model))
    found = solve(Problem(pools, domains, performance, tuple(links), gap=1e-3, **wishes))  # type: ignore[arg-type]
    if not isinstance(found, Placement):
        raise ValueError(f"no plan for {counts}: {found}")
    return found.rate


def _mix(seeds: int) -> Found:
    figures: list[Figure] = []
    claims: list[Claim] = []
    for model in ("Qwen3-8B", "Qwen3-32B"):
        mixed, h800, h20 = (
            _rate(model, a, b, (FROZEN_LAKE, GEM_MATH), in_flight=1024, restriction=Restriction.AGGREGATED,
                  tensor_parallel=(1, 2, 4))
            for a, b in ((64, 24), (72, 0), (0, 208))
        )  # fmt: skip
        figures += [Figure(f"{model}: mix over 72 H800", 1.12, mixed / h800, most=1.37),
                    Figure(f"{model}: mix over 208 H20", 1.30, mixed / h20, most=1.68)]  # fmt: skip
        claims.append(Claim(f"{model}: the mix beats either type", mixed > max(h800, h20)))
    return Found(tuple(figures), tuple(claims))


def _rollout_s(model: str, p: int, seed: int, *, apart: bool) -> float:
    """Seconds of a rollout of 128 SWE trajectories on 8p H800 and 8 (4 - p) H20, prefill and decode apart or not."""
    roles = (EngineRole.PREFILL, EngineRole.DECODE) if apart else (EngineRole.ENGINE, EngineRole.ENGINE)
    fleet = (Serving("H800", 2 * p, 4, role=roles[0]), Serving("H20", 2 * (4 - p), 4, role=roles[1]))
    task = Task("swe", replace(tuned.SWE, reset_s=tuned.SWE_BODY), 128)
    link = CROSS_GB_PER_S * min(p, 4 - p)
    return play(Bed(model, (task,), fleet, ("H800", 32), steps=1, seed=seed, kv_gb_per_s=link)).rollout_s()


def _divided(seeds: int) -> Found:
    published = {"Qwen3-32B": (1.03, 1.05), "Qwen3-30B-A3B": (1.11, 1.21)}
    figures: list[Figure] = []
    gain: dict[str, list[float]] = {}
    planned = True
    for model in published:
        gain[model] = []
        for p in (1, 2, 3):
            some = range(seeds if p < 3 else 1)
            whole, split = (mean([_rollout_s(model, p, s, apart=apart) for s in some]) for apart in (False, True))
            gain[model].append(whole / split)
        names = zip(("1P3D", "2P2D"), published[model], gain[model], strict=False)
        figures += [Figure(f"{model} {name}", value, seen) for name, value, seen in names]
        manual = (Deployment("h800", Role.PREFILL, 4, 2), Deployment("h20", Role.DECODE, 4, 6))
        own, fixed = (
            _rate(model, 8, 24, (SWE,), in_flight=128, tensor_parallel=(4,), **wishes)
            for wishes in ({}, {"fixed": manual})
        )
        planned &= own >= fixed * (1 - 1e-3)
    dense, experts = gain["Qwen3-32B"], gain["Qwen3-30B-A3B"]
    claims = (
        Claim("3P1D is the worst", all(g[2] == min(g) for g in gain.values())),
        Claim("the planner's split is at least the best manual one", planned),
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
        "RA-11", "the mix of types for the same money", "64 H800 + 24 H20 / 72 H800 / 208 H20; two domains, 1,024 in "
        "flight; analytic", _mix,
        "half of the work is GEM-Math with 2,000 tokens a turn, which is assumed",
    ),
    Row(
        "RA-18", "prefill and decode apart over both together", "xPyD of 8 H800 per P and 8 H20 per D, SWE, 128 "
        "trajectories; hand-offs one way, as in vLLM 0.8; the planner's part analytic", _divided,
        "a turn here shows 380 tokens and answers 400 (tuned to the generation of RA-1's step), and prefill is so "
        "small a part of it that a host which decodes no more costs more than it takes off the others; the tokens of a "
        "turn were not published. With 500 and 120 the dense model gains 0.97 and 1.25, the mixture 1.02 and 0.99; "
        "with 1,200 and 100 0.88, 1.78, 1.09 and 1.01. With one host the dense model's prefill engines hold the KV of "
        "half of the contexts",
    ),
)  # fmt: skip
