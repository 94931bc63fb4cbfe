"""Prices of paths: linear, corrected by backlog, and at equilibrium those of the plan itself."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from placement.hardware import device
from placement.performance import InstanceModel
from placement.price import (
    IDLE_SHARE,
    DeploymentKey,
    ResourceUse,
    TurnPrices,
    TurnWork,
    aggregated_use,
    corrected_price,
    disaggregated_use,
)
from placement.problem import Problem
from placement.solve import solve
from placement.tableau import MODES, tableau
from placement.types import DualPrices, Placement, Role
from placement.workload import EnvironmentCost
from tests.placement.fleet import AGENTIC, MATH, PERFORMANCE, problem

Path = tuple[DeploymentKey, DeploymentKey | None, str]

HOME: DeploymentKey = ("h20", Role.DECODE, 4)
AWAY: DeploymentKey = ("h800", Role.PREFILL, 4)
PRICES = DualPrices(
    deployments={HOME: 2.0, AWAY: 5.0},
    kv={HOME: 1e-4},
    links={("h20", "h800"): 0.25},
    in_flight=0.01,
)

amounts = st.floats(0, 1e6)
uses = st.builds(
    ResourceUse,
    seconds=st.dictionaries(st.sampled_from([HOME, AWAY]), amounts),
    kv=st.dictionaries(st.sampled_from([HOME, AWAY]), amounts),
    links=st.dictionaries(st.just(("h20", "h800")), amounts),
    in_flight_s=amounts,
)


def test_a_path_costs_what_it_takes_of_each_resource() -> None:
    use = ResourceUse({HOME: 3.0, AWAY: 0.5}, {HOME: 2000.0}, {("h20", "h800"): 2.0}, 40.0)
    assert TurnPrices(PRICES).of(use) == pytest.approx(3 * 2 + 0.5 * 5 + 2000 * 1e-4 + 2 * 0.25 + 40 * 0.01)


@given(uses, uses, st.floats(0, 100), st.floats(0, 10))
def test_prices_are_linear(a: ResourceUse, b: ResourceUse, factor: float, backlog: float) -> None:
    """Turns add up to their trajectory, at any backlog."""
    prices = TurnPrices(PRICES, {HOME: backlog})
    assert prices.of(a + b) == pytest.approx(prices.of(a) + prices.of(b))
    assert prices.of(a.times(factor)) == pytest.approx(factor * prices.of(a))


def test_what_has_no_price_is_free() -> None:
    assert TurnPrices(DualPrices()).of(ResourceUse({HOME: 3.0}, {HOME: 1.0}, {("a", "b"): 1.0}, 9.0)) == 0


@given(st.floats(0, 1e3), st.floats(0, 1e3), st.floats(0, 1e3), st.floats(0, 10))
def test_a_backlog_only_ever_raises_a_price(price: float, low: float, more: float, floor: float) -> None:
    assert corrected_price(price, 0.0, floor=floor) == price
    assert corrected_price(price, low + more, floor=floor) >= corrected_price(price, low, floor=floor) >= price


def test_the_correction_is_one_plus_the_backlog_in_targets() -> None:
    prices = TurnPrices(PRICES).measured({HOME: 6.0}, target_s=2.0)
    assert prices.second(HOME) == pytest.approx(2.0 * (1 + 6.0 / 2.0))
    assert prices.second(AWAY) == 5.0


def test_a_queue_is_felt_where_the_plan_sees_no_scarcity() -> None:
    idle: DeploymentKey = ("h800", Role.ENGINE, 4)
    assert TurnPrices(PRICES).second(idle) == 0.0
    assert TurnPrices(PRICES, {idle: 4.0}).second(idle) == pytest.approx(4 * IDLE_SHARE * 5.0)


@pytest.mark.parametrize("wrong", [-1.0, math.nan, math.inf])
def test_nonsense_is_refused(wrong: float) -> None:
    with pytest.raises(ValueError, match="backlog of decode tp 4 on 'h20' is"):
        TurnPrices(PRICES, {HOME: wrong})
    with pytest.raises(ValueError, match="target_s is"):
        TurnPrices(PRICES).measured({}, target_s=wrong)


def priced_paths(asked: Problem, plan: Placement) -> dict[str, dict[Path, float]]:
    """By domain, the price of every path through the plan's instances; the cheapest of its batch sizes."""
    table = tableau(asked)
    pools, paths = asked.pools, table.paths
    token_gb = asked.performance.shape.kv_bytes(1.0) / 1e9
    keys: list[DeploymentKey] = [(pools[u.pool].name, u.role, u.tp) for u in table.units]
    there = {(d.pool, d.role, d.tp) for d in plan.deployments}
    prices = TurnPrices(plan.prices)
    found: dict[str, dict[Path, float]] = {d.name: {} for d in asked.domains}
    for k in range(len(paths)):
        last, first = keys[paths.unit[k]], keys[paths.first[k]] if paths.first[k] >= 0 else None
        if last not in there or (first is not None and first not in there):
            continue
        use = ResourceUse(
            seconds={last: paths.load[k]} | ({first: paths.first_load[k]} if first else {}),
            kv={last: paths.kv[k] / token_gb} | ({first: paths.first_kv[k] / token_gb} if first else {}),
            links={table.channels[paths.link[k]].pools: paths.link_gb[k]} if paths.link[k] >= 0 else {},
            in_flight_s=paths.seconds[k],
        )
        path = (last, first, str(MODES[paths.mode[k]]))
        mine = found[asked.domains[paths.domain[k]].name]
        mine[path] = min(prices.of(use), mine.get(path, math.inf))
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


def instance(name: str, tp: int = 1) -> InstanceModel:
    found = PERFORMANCE.instance(device(name), tp)
    assert not isinstance(found, str)
    return found


def test_a_turn_on_one_instance() -> None:
    """Seconds of the instance, and as many in flight as share it."""
    turn = TurnWork(new=600, cached=5000, output=50)
    use = aggregated_use(HOME, instance("H20"), PERFORMANCE.shape, turn, batch=8)
    assert use.in_flight_s == pytest.approx(8 * use.seconds[HOME])
    assert use.kv[HOME] == pytest.approx(use.in_flight_s * 5625)
    assert (
        aggregated_use(HOME, instance("H20"), PERFORMANCE.shape, TurnWork(5600, 0, 50), batch=8).seconds[HOME]
        > (use.seconds[HOME])
    )


def test_a_turn_on_two_instances() -> None:
    """Prefill there, decode here, and the KV of the new tokens on the link between, after the returned KV."""
    turn, shape = TurnWork(new=600, cached=5000, output=50), PERFORMANCE.shape
    prefill, decode = (AWAY, instance("H800")), (HOME, instance("H20"))
    use = disaggregated_use(prefill, decode, shape, turn, batch=8, gb_per_s=3.0, latency_s=0.01)
    gb = 600 * shape.kv_bytes(1.0) / 1e9
    assert use.links == {("h20", "h800"): pytest.approx(gb)}
    assert use.seconds[AWAY] == instance("H800").prefill_s(600, 5000)
    assert use.in_flight_s == pytest.approx(use.seconds[AWAY] + 8 * use.seconds[HOME] + gb / 3 + 0.01)
    again = disaggregated_use(prefill, decode, shape, turn, batch=8, gb_per_s=3.0, latency_s=0.01, returned=5000)
    assert again.links[("h20", "h800")] == pytest.approx(gb * 5600 / 600)


def test_the_longer_the_new_text_the_more_a_far_prefill_is_worth() -> None:
    """With equal prices per device-second, H800 prefills for H20 from some length on: a threshold that follows from
    prices, and moves with a backlog."""
    shape = PERFORMANCE.shape
    home, away = instance("H20"), instance("H800")

    def local_over_far(new: float, prices: TurnPrices) -> float:
        turn = TurnWork(new, 2000, 100)
        near = prices.of(aggregated_use(("h20", Role.DECODE, 4), home, shape, turn, batch=8))
        return near / prices.of(disaggregated_use((AWAY, away), (HOME, home), shape, turn, batch=8, gb_per_s=3.0))

    plan = TurnPrices(DualPrices(deployments={HOME: 1.0, AWAY: 2.85}, links={("h20", "h800"): 0.01}))
    ratios = [local_over_far(new, plan) for new in (16, 64, 256, 1024, 4096)]
    assert ratios == sorted(ratios)
    assert ratios[0] < 1 < ratios[-1]
    busy = TurnPrices(plan.prices, {AWAY: 5.0})
    assert local_over_far(1024, busy) < local_over_far(1024, plan)
