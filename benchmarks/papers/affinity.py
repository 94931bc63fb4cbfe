"""Rows about which GPU does what: the placer's plan of the papers' fleets against its restrictions (analytic).

Turns and tokens per domain were not published. FrozenLake's are tuned to RA-3 (see `tests/placement`), the others are
typical ones.
"""

from __future__ import annotations

from benchmarks.papers.models import USD, shape
from benchmarks.papers.row import Claim, Figure, Found, Row
from placement.hardware import device
from placement.problem import Problem, Restriction
from placement.roofline import RooflinePerformance
from placement.solve import solve
from placement.types import Deployment, Link, Placement, Pool, Role
from placement.workload import DomainProfile, Quantity

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


def _divided(seeds: int) -> Found:
    published = {"Qwen3-32B": (1.03, 1.05), "Qwen3-30B-A3B": (1.11, 1.21)}
    figures: list[Figure] = []
    gain: dict[str, list[float]] = {}
    own: dict[str, list[float]] = {}
    for model in published:
        gain[model], own[model] = [], []
        for p in (1, 2, 3):
            h800, h20 = 8 * p, 8 * (4 - p)
            split = (Deployment("h800", Role.PREFILL, 4, h800 // 4), Deployment("h20", Role.DECODE, 4, h20 // 4))
            wishes: dict[str, object] = {"in_flight": 128, "tensor_parallel": (4,)}
            whole = _rate(model, h800, h20, (SWE,), restriction=Restriction.AGGREGATED, **wishes)
            gain[model].append(_rate(model, h800, h20, (SWE,), fixed=split, **wishes) / whole)
            own[model].append(_rate(model, h800, h20, (SWE,), **wishes) / whole)
        names = zip(("1P3D", "2P2D"), published[model], gain[model], strict=False)
        figures += [Figure(f"{model} {name}", value, seen) for name, value, seen in names]
    dense, experts = gain["Qwen3-32B"], gain["Qwen3-30B-A3B"]
    claims = (
        Claim("3P1D is the worst", all(g[2] == min(g) for g in gain.values())),
        Claim("the planner's split is at least the best manual one",
              all(max(own[m]) >= max(gain[m]) * (1 - 1e-3) for m in gain)),
        Claim("a mixture of experts gains more than a dense model", max(experts) > max(dense)),
    )  # fmt: skip
    note = "own splits: " + "; ".join(f"{m} " + ", ".join(f"{x:.2f}" for x in own[m]) for m in own)
    return Found(tuple(figures), claims, note)


ROWS = (
    Row(
        "RA-11", "the mix of types for the same money", "64 H800 + 24 H20 / 72 H800 / 208 H20; two domains, 1,024 in "
        "flight; analytic", _mix,
        "half of the work is GEM-Math with 2,000 tokens a turn, which is assumed",
    ),
    Row(
        "RA-18", "prefill and decode apart over both together", "xPyD of 8 H800 per P and 8 H20 per D, SWE, 128 in "
        "flight; analytic", _divided,
        "a split takes prefill off H20, which is 36 % of a turn of the dense model and 14 % of the mixture's (a tenth "
        "of the arithmetic): the published order is that of a link that binds, or of an engine far below the roofline "
        "in prefilling experts (tests/placement/test_rollart_bands.py)",
    ),
)  # fmt: skip
