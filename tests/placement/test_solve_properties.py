"""Laws of the solver: it equals enumeration, its prices are a dual solution, more is never worse, flows conserve."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from placement.paths import Tableau, tableau
from placement.problem import DomainProfile, EnvironmentCost, Problem, Quantity, Restriction
from placement.solve import solve
from placement.types import Device, KvMode, Link, Objective, Placement, Pool, Role
from tests.placement.fakes import FakePerformance, FakeShape

Q = Quantity


def small(seed: int, *, most: int = 3, **changes: object) -> Problem:
    """One to three pools of up to `most` devices, one to three domains."""
    r = random.Random(seed)
    pools, links = [], []
    for i in range(r.choice([1, 2, 2, 3])):
        device = Device(
            f"g{i}",
            r.uniform(50, 1000),
            r.choice([48.0, 80.0, 141.0]),
            r.uniform(0.3, 5.0),
            link_gb_per_s=r.choice([None, 2.0, 25.0]),
        )
        pools.append(Pool(f"p{i}", device, r.randint(1, most), r.uniform(0.5, 6.0), rented=True))
    for a, b in itertools.combinations(pools, 2):
        if r.random() < 0.7:
            links.append(Link(a.name, b.name, r.choice([0.5, 5.0, 50.0]), 1e-3))
    domains = []
    for j in range(r.randint(1, 3)):
        turns = r.choice([1.0, 1.0, 4.0, 7.5, 20.0])
        environment = EnvironmentCost(r.choice([0.0, 0.5, 5.0]), reset_s=1.0) if turns > 1 else EnvironmentCost()
        domains.append(
            DomainProfile(
                f"d{j}",
                Q(turns),
                Q(r.uniform(50, 1500)),
                Q(r.uniform(20, 4000 / turns)),
                weight=r.uniform(0.2, 3),
                first_tokens=Q(r.uniform(100, 3000)),
                shared_prefix=r.choice([0.0, 0.4]),
                environment=environment,
            )
        )
    problem = Problem(
        tuple(pools),
        tuple(domains),
        FakePerformance(FakeShape(kv=r.choice([5e4, 2e5]))),
        tuple(links),
        in_flight=r.choice([None, 8, 64, 400]),
        tensor_parallel=r.choice([(1,), (1, 2)]),
        gap=1e-9,
        max_batch=64,
    )
    return dataclasses.replace(problem, **changes)  # type: ignore[arg-type]


def plan(problem: Problem) -> Placement:
    found = solve(problem)
    assert isinstance(found, Placement), found
    return found


def rate(problem: Problem) -> float:
    """The plan's rate; 0 where there is none."""
    found = solve(problem)
    return found.rate if isinstance(found, Placement) else 0.0


Counts = tuple[int, ...]


def flow_rates(problem: Problem, table: Tableau, every: list[Counts]) -> list[float]:
    """The most that flows through each of these counts of instances: linear programs assembled here, row by row."""
    from scipy.optimize import linprog

    paths, n, rows, fixed = table.paths, len(table.paths), [], []
    for u, unit in enumerate(table.units):
        last, first = paths.unit == u, paths.first == u
        rows.append(np.append(last * paths.load + first * paths.first_load, 0.0))
        rows.append(np.append((last * paths.kv + first * paths.first_kv) / unit.kv_gb, 0.0))
    for i, channel in enumerate(table.channels):
        rows.append(np.append((paths.link == i) * paths.link_gb / channel.gb_per_s, 0.0))
        fixed.append(1.0)
    if math.isfinite(problem.trajectories_in_flight):
        rows.append(np.append(paths.seconds / problem.trajectories_in_flight, 0.0))
        fixed.append(1.0)
    shares = np.array([np.append(1.0 * (paths.domain == j), -w) for j, w in enumerate(table.weights)])
    goal, matrix = np.append(np.zeros(n), -1.0), np.array(rows)
    rates = []
    for counts in every:
        bounds = [x for c in counts for x in (problem.utilisation * c, float(c))] + fixed
        found = linprog(goal, A_ub=matrix, b_ub=bounds, A_eq=shares, b_eq=np.zeros(len(shares)))
        assert found.status == 0
        rates.append(float(-found.fun))
    return rates


def all_counts(problem: Problem, table: Tableau) -> list[Counts]:
    """All integer instance counts except non-maximal ones, which are never better than with one more instance."""
    by_pool = []
    for g, pool in enumerate(problem.pools):
        size = [unit.tp for unit in table.units if unit.pool == g]
        every = itertools.product(*(range(pool.count // tp + 1) for tp in size))
        used = [(c, sum(n * tp for n, tp in zip(c, size, strict=True))) for c in every]
        by_pool.append([c for c, n in used if n <= pool.count < n + min(size, default=pool.count + 1)])
    return [tuple(itertools.chain(*counts)) for counts in itertools.product(*by_pool)]


def enumerated(problem: Problem) -> float:
    table = tableau(problem)
    return max(flow_rates(problem, table, all_counts(problem, table)), default=0.0)


@pytest.mark.parametrize("seed", range(20))
def test_equals_enumeration(seed: int) -> None:
    problem = small(seed, most=2, tensor_parallel=(1,))
    if len(problem.pools) > 2:
        problem = dataclasses.replace(
            problem, pools=problem.pools[:2], links=tuple(x for x in problem.links if "p2" not in (x.a, x.b))
        )
    assert rate(problem) == pytest.approx(enumerated(problem), rel=1e-6)


@pytest.mark.slow  # 120 instances with up to 120 linear programs each
def test_120_instances_equal_enumeration() -> None:
    wrong, count = [], 0
    for seed in itertools.count(100):
        problem = small(seed)
        if not 2 <= len(all_counts(problem, tableau(problem))) <= 120:
            continue
        found, best = rate(problem), enumerated(problem)
        if found != pytest.approx(best, rel=1e-6):
            wrong.append((seed, found, best))
        count += 1
        if count == 120:
            break
    assert not wrong


@pytest.mark.parametrize("seed", range(12))
def test_prices_are_a_dual_solution(seed: int) -> None:
    """Strong duality: the prices of all resources sum to the rate. Complementary slackness: resources with a price are
    used up. Dual feasibility: no path is worth more than its resources."""
    problem = small(seed)
    found = solve(problem)
    if not isinstance(found, Placement):
        pytest.skip("this one has no plan")
    table, prices = tableau(problem), found.prices
    shape, names = problem.performance.shape, [p.name for p in problem.pools]
    total = prices.in_flight * problem.trajectories_in_flight if prices.in_flight else 0.0
    kv_tokens = {(names[u.pool], u.role, u.tp): u.kv_gb * 1e9 / shape.kv_bytes(1.0) for u in table.units}
    for d in found.deployments:
        key = (d.pool, d.role, d.tp)
        total += d.replicas * (prices.deployments[key] * problem.utilisation + prices.kv[key] * kv_tokens[key])
        if prices.deployments[key] > 1e-6 * found.rate:
            assert d.utilisation == pytest.approx(problem.utilisation, rel=1e-4)
        if prices.kv[key] * kv_tokens[key] > 1e-6 * found.rate:
            assert d.kv_utilisation == pytest.approx(1.0, rel=1e-4)
    speeds = {c.pools: c.gb_per_s for c in table.channels}
    total += sum(price * speeds[key] for key, price in prices.links.items())
    assert total == pytest.approx(found.rate, rel=1e-6)
    if prices.in_flight * problem.trajectories_in_flight > 1e-6 * found.rate:
        assert sum(f.rate * f.seconds for f in found.flows) == pytest.approx(problem.trajectories_in_flight, rel=1e-4)


def _check(problem: Problem, found: Placement) -> None:
    """Conservation and capacity, from the placement alone."""
    total = sum(d.weight for d in problem.domains)
    for domain in problem.domains:
        mine = sum(f.rate for f in found.flows if f.domain == domain.name)
        assert mine == pytest.approx(found.rate * domain.weight / total, rel=1e-6)
    assert sum(f.rate * f.seconds for f in found.flows) <= problem.trajectories_in_flight * (1 + 1e-6)
    there = {(d.pool, d.role, d.tp) for d in found.deployments}
    for flow in found.flows:
        assert flow.rate > 0
        if flow.prefill_pool is None:
            assert (flow.pool, Role.ENGINE, flow.tp) in there
            assert flow.kv is not KvMode.PULL
        else:
            assert (flow.pool, Role.DECODE, flow.tp) in there
            assert (flow.prefill_pool, Role.PREFILL, flow.prefill_tp) in there
    for pool in problem.pools:
        assert sum(d.devices for d in found.deployments if d.pool == pool.name) <= pool.count
    for d in found.deployments:
        assert 0 <= d.utilisation <= problem.utilisation + 1e-6
        assert 0 <= d.kv_utilisation <= 1
        assert 1 <= d.batch <= problem.max_batch
    assert found.rate <= found.bound * (1 + 1e-9)
    assert math.isfinite(found.usd_per_hour)
    assert found.usd_per_hour <= found.usd_per_hour_all


@pytest.mark.parametrize("seed", range(15))
def test_flows_conserve_and_fit(seed: int) -> None:
    problem = small(seed)
    found = solve(problem)
    if isinstance(found, Placement):
        _check(problem, found)


@pytest.mark.slow  # some dozen solves
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10_000), where=st.integers(0, 2), more=st.integers(1, 3))
def test_more_is_never_worse(seed: int, where: int, more: int) -> None:
    problem = small(seed)
    base = rate(problem) * (1 - 1e-6)
    i = where % len(problem.pools)
    pools = list(problem.pools)
    pools[i] = dataclasses.replace(pools[i], count=pools[i].count + more)
    assert rate(dataclasses.replace(problem, pools=tuple(pools))) >= base
    links = tuple(dataclasses.replace(x, gb_per_s=x.gb_per_s * (1 + more)) for x in problem.links)
    assert rate(dataclasses.replace(problem, links=links)) >= base
    if problem.in_flight is not None:
        assert rate(dataclasses.replace(problem, in_flight=problem.in_flight * (1 + more))) >= base
    assert rate(dataclasses.replace(problem, tensor_parallel=(1, 2, 4))) >= base
    assert rate(dataclasses.replace(problem, max_batch=128)) >= base


@pytest.mark.slow  # some dozen solves
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10_000), share=st.floats(0.1, 0.9), cheaper=st.floats(0.1, 0.99))
def test_lower_prices_are_never_worse(seed: int, share: float, cheaper: float) -> None:
    problem = small(seed)
    base = solve(problem)
    if not isinstance(base, Placement):
        return
    asked = dataclasses.replace(problem, objective=Objective.MIN_COST, rate=share * base.rate)
    pools = (dataclasses.replace(problem.pools[0], usd_per_device_hour=0.4 * cheaper), *problem.pools[1:])
    dear, cheap = plan(asked), plan(dataclasses.replace(asked, pools=pools))
    assert cheap.usd_per_hour <= dear.usd_per_hour * (1 + 1e-6)
    assert dear.rate == pytest.approx(share * base.rate)
    assert dear.usd_per_hour <= base.usd_per_hour * (1 + 1e-6)
    less = plan(dataclasses.replace(asked, rate=0.5 * share * base.rate))
    assert less.usd_per_hour <= dear.usd_per_hour * (1 + 1e-6)
    per_dollar = plan(dataclasses.replace(problem, objective=Objective.MAX_THROUGHPUT_PER_DOLLAR))
    for other in (base, dear, less):
        assert per_dollar.rate / per_dollar.usd_per_hour >= other.rate / other.usd_per_hour * (1 - 1e-6)


@pytest.mark.slow  # some dozen solves
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_a_restriction_is_never_better(seed: int) -> None:
    problem = small(seed)
    full = rate(problem) * (1 + 1e-6)
    rates = {r: rate(dataclasses.replace(problem, restriction=r)) for r in Restriction}
    assert all(r <= full for r in rates.values())
    assert rates[Restriction.STRICT] <= rates[Restriction.AGGREGATED] * (1 + 1e-6)
    assert rates[Restriction.NO_AFFINITY] <= rates[Restriction.AGGREGATED] * (1 + 1e-6)
    single = dataclasses.replace(problem, device_types=frozenset({problem.pools[0].device.name}))
    assert rate(single) <= full


def test_the_same_problem_has_the_same_answer() -> None:
    assert solve(small(5)) == solve(small(5))


def melange(problem: Problem) -> float:
    """The cover of Mélange (Griggs et al., 2024), enumerated: slices × GPU types, load ≤ instances, least cost."""
    from scipy.optimize import linprog

    total = sum(d.weight for d in problem.domains)
    load = np.zeros((len(problem.pools), len(problem.domains)))
    for g, pool in enumerate(problem.pools):
        model = problem.performance.instance(pool.device, 1)
        assert not isinstance(model, str)
        for j, d in enumerate(problem.domains):
            kv = problem.performance.shape.kv_bytes(d.prompt.mean + d.output_tokens.mean / 2)
            most = min(model.kv_capacity_bytes / kv, problem.max_batch)
            seconds = model.turn_s(most, d.prompt.mean, 0.0, d.output_tokens.mean)
            load[g, j] = seconds * (problem.rate or 0.0) * d.weight / total
    types, slices = load.shape
    best = math.inf
    for counts in itertools.product(*(range(p.count + 1) for p in problem.pools)):
        cost = sum(n * p.usd_per_device_hour for n, p in zip(counts, problem.pools, strict=True))
        if cost >= best:
            continue
        capacity = np.zeros((types, types * slices))
        whole = np.zeros((slices, types * slices))
        for g, j in itertools.product(range(types), range(slices)):
            capacity[g, g * slices + j] = load[g, j]
            whole[j, g * slices + j] = 1.0
        bound = problem.utilisation * np.array(counts)
        found = linprog(np.zeros(types * slices), A_ub=capacity, b_ub=bound, A_eq=whole, b_eq=np.ones(slices))
        best = cost if found.status == 0 else best
    return best


@pytest.mark.parametrize("seed", range(5))
def test_aggregated_at_least_cost_is_melanges_cover(seed: int) -> None:
    r = random.Random(seed)
    devices = [Device(f"g{i}", r.uniform(50, 900), 80.0, r.uniform(0.5, 4)) for i in range(2)]
    pools = tuple(Pool(d.name, d, 4, r.uniform(0.5, 5), rented=True) for d in devices)
    domains = tuple(
        DomainProfile(f"d{j}", Q(1), Q(r.uniform(50, 4000)), Q(r.uniform(20, 2000)), weight=r.uniform(0.3, 3))
        for j in range(3)
    )
    problem = Problem(pools, domains, FakePerformance(), roles=frozenset({Role.ENGINE}), tensor_parallel=(1,), gap=1e-9)
    asked = dataclasses.replace(problem, objective=Objective.MIN_COST, rate=0.6 * rate(problem))
    assert plan(asked).usd_per_hour == pytest.approx(melange(asked), rel=1e-6)
