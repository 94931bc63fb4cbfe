"""The value of the placer: its plan beside the baselines on the same model, and the time to find it.

    python benchmarks/placement.py [--case command|mixes|budget|solve] [--json]

command  the problem of `rollart plan` for configs/runs/agentic-math-32b.yaml on 96 H800 + 32 H20, training, the window
         and publish time included, in three mixes of its domains. "over none" is against the null model: the same mix
         of work on every pool. mixes    without training: 64 H800 + 128 H20, Qwen3-32B in bf16, two domains in five
         mixes: agentic (20 turns of 1,500 tokens in and 150 out) and math (500 in, 8,000 out), with any number of
         trajectories in flight and with 1,024 (batch 512, α = 1). budget   the same work 1:1 for at most $338/h of H800
         and H20, rented. solve    CPU seconds to plan 18 pools × 16 domains, and how far from the best possible the
         plan may be.

Trajectories/s are the roofline's, with the priors of a datasheet: compare columns, do not bank on a figure. Prices and
links are RollArt's (H800 5.28 and H20 1.85 $/h; 400 Gb/s per host within a pool, 200 Gb/s between the two).
Exit status 1 if a plan is ever below one of its baselines by more than the gap that the solver is allowed.
"""

# ruff: noqa: E402
from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import replace

# This file has the name of the package it measures, and a script's own directory comes first on the path.
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_PATH = [ROOT, *sys.path]
sys.path[:] = [ROOT, *(p for p in sys.path if os.path.abspath(p) != os.path.dirname(os.path.abspath(__file__)))]
if __name__ == "placement":  # another benchmark meant the package and found this file first: step aside for it
    del sys.modules["placement"]
    importlib.import_module("placement")
    sys.path[:] = _PATH

from benchmarks.papers.models import shape
from placement.explain import baselines, gain
from placement.hardware import device
from placement.problem import DomainProfile, EnvironmentCost, Problem, Quantity
from placement.roofline import RooflinePerformance
from placement.solve import solve
from placement.types import Link, Placement, Pool

MIXES = {"agentic": (1, 0), "3:1": (3, 1), "1:1": (1, 1), "1:3": (1, 3), "math": (0, 1)}
"""Trajectories of agentic : math."""

BUDGET_USD_PER_HOUR = 338.0
"""64 H800."""

GAP = 1e-3
"""At which the solver may stop here, so that a plan may be that much below a baseline."""

HOST_GB_PER_S, CROSS_GB_PER_S = 50.0, 25.0
"""Of one host of 8 GPUs: within a pool (400 Gb/s), and between the two (200 Gb/s). RollArt §7.1."""


def domain(name: str, *, turns: float, new: float, output: float, weight: float, wait_s: float = 0.0) -> DomainProfile:
    return DomainProfile(
        name, Quantity(turns), Quantity(new), Quantity(output), weight, environment=EnvironmentCost(wait_s=wait_s)
    )


def work(agentic: float, math: float) -> tuple[DomainProfile, ...]:
    found = []
    if agentic:
        found.append(domain("agentic", turns=20, new=1500, output=150, weight=agentic))
    if math:
        found.append(domain("math", turns=1, new=500, output=8000, weight=math))
    return tuple(found)


def two_pools(h800: int, h20: int, domains: tuple[DomainProfile, ...], *, rented: bool = False) -> Problem:
    hosts_a, hosts_b = h800 / 8, h20 / 8
    return Problem(
        pools=(
            Pool("h800", device("H800"), h800, 5.28, rented=rented),
            Pool("h20", device("H20"), h20, 1.85, rented=rented),
        ),
        links=(
            # Within a pool half of the hosts send while the others receive.
            Link("h800", "h800", HOST_GB_PER_S * hosts_a / 2),
            Link("h20", "h20", HOST_GB_PER_S * hosts_b / 2),
            Link("h800", "h20", CROSS_GB_PER_S * min(hosts_a, hosts_b)),
        ),
        domains=domains,
        performance=RooflinePerformance(shape("Qwen3-32B")),
        gap=GAP,
    )


def compared(problem: Problem) -> dict[str, object]:
    """The plan and its baselines: trajectories/s, or None where there is no plan."""
    began = time.process_time()
    plan = solve(problem)
    seconds = time.process_time() - began
    others = baselines(problem)
    if not isinstance(plan, Placement):
        raise SystemExit(f"no plan: {plan.message}")
    plans = {name: other for name, other in others.items() if isinstance(other, Placement)}
    best, none = max(plans, key=lambda name: plans[name].worth), plans.get("no affinity")
    return {
        "rate": plan.rate,
        "usd_per_hour": plan.usd_per_hour,
        "baselines": {name: plans[name].rate if name in plans else None for name in others},
        "best": best,
        "over_best": gain(plan, plans[best]),
        "over_no_affinity": None if none is None else gain(plan, none),
        "cpu_s": seconds,
        "plan": [f"{d.replicas}×{d.pool} {d.role} tp{d.tp}" for d in plan.deployments],
    }


def mixes() -> dict[str, object]:
    found: dict[str, object] = {}
    for name, shares in MIXES.items():
        free = two_pools(64, 128, work(*shares))
        found[name] = compared(free)
        found[f"{name}, 1,024 in flight"] = compared(replace(free, in_flight=1024))
    return found


RUN, CLUSTER = "configs/runs/agentic-math-32b.yaml", "configs/clusters/rollart-96h800-32h20.yaml"


def command() -> dict[str, object]:
    from rollart.settings.planning import planning_problem
    from rollart.settings.resolve import read_specs

    found: dict[str, object] = {}
    for name in ("3:1", "1:1", "1:3"):
        agentic, math = MIXES[name]
        overrides = [f"domains.0.weight={agentic}", f"domains.1.weight={math}"]
        specs = read_specs(os.path.join(ROOT, RUN), os.path.join(ROOT, CLUSTER), overrides)
        asked = planning_problem(specs).problem
        found[f"{name}, trained"] = compared(replace(asked, gap=GAP))
    return found


def budget() -> dict[str, object]:
    problem = two_pools(64, 184, work(1, 1), rented=True)
    return {"1:1 for $338/h": compared(replace(problem, budget_usd_per_hour=BUDGET_USD_PER_HOUR))}


TYPES = ("H20", "H100", "H200", "H800", "A100-80", "B200", "L40S", "MI300X", "A100-40")


def large() -> Problem:
    """Two zones of nine device types, all connected; sixteen domains from one turn to forty."""
    prices = dict(zip(TYPES, (1.85, 2.69, 3.59, 5.28, 1.39, 5.98, 1.95, 1.99, 1.48), strict=True))
    pools = tuple(
        Pool(f"{name.lower()}-{zone}", device(name), 32 + 16 * (i % 3), prices[name])
        for zone in "ab"
        for i, name in enumerate(TYPES)
    )
    names = [p.name for p in pools]
    links = [Link(a, b, 100.0 if a[-1] == b[-1] else 25.0) for i, a in enumerate(names) for b in names[i:]]
    domains = tuple(
        domain(
            f"d{i}",
            turns=(1, 3, 10, 40)[i % 4],
            new=200 + 150 * i,
            output=(4000, 900, 200, 80)[i % 4] + 20 * i,
            weight=1 + i % 3,
            wait_s=0.5 * (i % 4),
        )
        for i in range(16)
    )
    performance = RooflinePerformance(shape("Qwen3-32B"))
    return Problem(pools=pools, links=tuple(links), domains=domains, performance=performance, in_flight=8192, gap=GAP)


def solving() -> dict[str, object]:
    problem = large()
    began, wall = time.process_time(), time.perf_counter()
    plan = solve(problem)
    cpu, wall = time.process_time() - began, time.perf_counter() - wall
    if not isinstance(plan, Placement):
        raise SystemExit(f"no plan: {plan.message}")
    return {
        "pools": len(problem.pools),
        "domains": len(problem.domains),
        "cpu_s": cpu,
        "wall_s": wall,
        "rate": plan.rate,
        "bound": plan.bound,
        "gap": plan.gap,
        "deployments": len(plan.deployments),
    }


CASES = {"command": command, "mixes": mixes, "budget": budget, "solve": solving}


SHORT = {"strict domain→pool": "strict", "no affinity": "none", "domain LP": "LP", "P/D only": "P/D"}


def table(rows: Mapping[str, object]) -> None:
    names: list[str] = []
    for row in rows.values():
        assert isinstance(row, dict)
        names += [n for n in row["baselines"] if n not in names]
    titles = [*(SHORT.get(n, n) for n in names), "full", "over best", "over none", "CPU s"]
    print(f"{'trajectories/s':<26}" + "".join(f"{t:>11}" for t in titles))
    for name, row in rows.items():
        assert isinstance(row, dict)
        rates = [row["baselines"].get(n) for n in names]
        cells = ["-" if r is None else f"{r:.3f}" for r in [*rates, row["rate"]]]
        cells += ["-" if r is None else f"{r:.3f}x" for r in (row["over_best"], row["over_no_affinity"])]
        print(f"{name:<26}" + "".join(f"{c:>11}" for c in [*cells, f"{row['cpu_s']:.2f}"]))
    for name, row in rows.items():
        assert isinstance(row, dict)
        print(f"{name}: ${row['usd_per_hour']:,.0f}/h  " + "  ".join(row["plan"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=sorted(CASES))
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    load = os.getloadavg()[0]
    results = {name: case() for name, case in CASES.items() if arguments.case in (None, name)}
    if arguments.json:
        print(json.dumps({"load": load, **results}, indent=2))
    else:
        print(f"load average {load:.1f}")
        for name, rows in results.items():
            if name == "solve":
                print("solve", "  ".join(f"{k}={v:.4g}" for k, v in rows.items() if isinstance(v, int | float)))
            else:
                table(rows)
    compared_rows = [row for name in ("command", "mixes", "budget") for row in results.get(name, {}).values()]
    below = [row for row in compared_rows if isinstance(row, dict) and row["over_best"] < 1 - GAP]
    sys.exit(1 if below else 0)


if __name__ == "__main__":
    main()
