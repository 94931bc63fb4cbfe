"""The dual prices of a plan: at equilibrium, a domain's used paths cost the same and no other path is cheaper."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from placement.paths import MODES, tableau
from placement.problem import EnvironmentCost, Problem
from placement.solve import solve
from placement.types import Placement, Role
from tests.placement.fleet import AGENTIC, MATH, problem

DeploymentKey = tuple[str, Role, int]
Path = tuple[DeploymentKey, DeploymentKey | None, str]


def priced_paths(asked: Problem, plan: Placement) -> dict[str, dict[Path, float]]:
    """By domain, the price (Σ λ × use, in trajectories) of every path through the plan's instances; the cheapest of its
    batch sizes."""
    table = tableau(asked)
    pools, paths, prices = asked.pools, table.paths, plan.prices
    token_gb = asked.performance.shape.kv_bytes(1.0) / 1e9
    keys: list[DeploymentKey] = [(pools[u.pool].name, u.role, u.tp) for u in table.units]
    there = {(d.pool, d.role, d.tp) for d in plan.deployments}
    found: dict[str, dict[Path, float]] = {d.name: {} for d in asked.domains}
    for k in range(len(paths)):
        last, first = keys[paths.unit[k]], keys[paths.first[k]] if paths.first[k] >= 0 else None
        if last not in there or (first is not None and first not in there):
            continue
        price = prices.deployments[last] * paths.load[k] + prices.kv[last] * paths.kv[k] / token_gb
        if first is not None:
            price += prices.deployments[first] * paths.first_load[k] + prices.kv[first] * paths.first_kv[k] / token_gb
        if paths.link[k] >= 0:
            price += prices.links[table.channels[paths.link[k]].pools] * paths.link_gb[k]
        price += prices.in_flight * paths.seconds[k]
        path = (last, first, str(MODES[paths.mode[k]]))
        mine = found[asked.domains[paths.domain[k]].name]
        mine[path] = min(price, mine.get(path, math.inf))
    return found


@pytest.mark.parametrize(
    ("asked", "scarce"),
    [
        (problem(2, 4), "deployments"),
        (problem(2, 4, in_flight=30), "in_flight"),
        (problem(2, 4, cross_gb_per_s=0.5, roles=frozenset({Role.PREFILL, Role.DECODE})), "links"),
        (problem(2, 4, domains=(replace(AGENTIC, environment=EnvironmentCost(wait_s=20.0)), MATH)), "kv"),
    ],
    ids=["free", "few in flight", "thin link", "KV held while waiting"],
)
def test_at_equilibrium_used_paths_cost_the_same_and_no_other_is_cheaper(asked: Problem, scarce: str) -> None:
    """Complementary slackness of the flow problem at the plan's instances: the router, which takes the cheapest path,
    follows the plan. And the prices add up: one trajectory of the mix is worth one trajectory."""
    plan = solve(asked)
    assert isinstance(plan, Placement)
    price = getattr(plan.prices, scarce)
    assert (max(price.values()) if isinstance(price, dict) else price) > 0
    paths = priced_paths(asked, plan)
    least = {domain: min(prices.values()) for domain, prices in paths.items()}
    for flow in plan.flows:
        role, first = Role.ENGINE, None
        if flow.prefill_pool is not None:
            role, first = Role.DECODE, (flow.prefill_pool, Role.PREFILL, flow.prefill_tp)
        used = paths[flow.domain][(flow.pool, role, flow.tp), first, str(flow.kv)]  # type: ignore[index]
        if flow.rate > 1e-6 * plan.rate:
            assert used == pytest.approx(least[flow.domain], rel=1e-4)
    weights = {d.name: d.weight / sum(e.weight for e in asked.domains) for d in asked.domains}
    assert sum(weights[name] * least[name] for name in weights) == pytest.approx(1.0, rel=1e-4)
