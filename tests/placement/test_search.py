"""The search for whole numbers: where the trainer goes is one of its cases, and nothing is printed meanwhile."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import random

import numpy as np
import pytest

from placement.explain import gain
from placement.hardware import device
from placement.milp import suppress_c_stdout
from placement.problem import DomainProfile, Problem, Quantity, TrainingWork
from placement.solve import solve
from placement.training import TrainingLayout, training_layout
from placement.types import Device, Placement, Pool, Role
from tests.placement.fakes import FakePerformance
from tests.placement.fleet import PERFORMANCE


def several_that_can_train(seed: int) -> Problem:
    """More pools than are searched to the end, each of which might train."""
    r = random.Random(seed)
    names = r.sample(["H20", "H800", "A100-80", "H100", "B200"], 3)
    pools = tuple(Pool(n.lower(), device(n), r.choice([8, 16]), r.uniform(1, 6), rented=True) for n in names)
    work = DomainProfile("d", Quantity(1), Quantity(r.uniform(50, 1500)), Quantity(r.uniform(50, 800)))
    return Problem(pools, (work,), PERFORMANCE, train=TrainingWork(256))


@pytest.mark.slow  # a dozen solves
@pytest.mark.parametrize("seed", range(4))
def test_free_to_choose_the_trainers_pool_is_the_best_of_all_choices(seed: int) -> None:
    problem = several_that_can_train(seed)
    free = solve(problem)
    assert isinstance(free, Placement), free
    assert problem.train is not None
    rates = []
    for pool in problem.pools:
        fixed = solve(dataclasses.replace(problem, train=dataclasses.replace(problem.train, pool=pool.name)))
        if isinstance(fixed, Placement):
            assert fixed.rate <= free.bound * (1 + 1e-6)
            rates.append(fixed.rate)
    assert free.rate == pytest.approx(max(rates), rel=2e-3)
    assert free.gap < 0.01


def test_c_code_is_silent_and_python_is_not(capfd: pytest.CaptureFixture[str]) -> None:
    c = ctypes.CDLL(None)
    with suppress_c_stdout(), suppress_c_stdout():
        c.printf(b"lost\n")
        c.puts(b"lost too")
        print("heard")
    c.puts(b"heard from C")
    c.fflush(None)
    assert sorted(capfd.readouterr().out.split("\n")) == ["", "heard", "heard from C"]


Frontier = tuple[np.ndarray, np.ndarray]
"""Dollars per hour of plans, rising, and their rates: no plan is at least as good as another in both."""


def alike_at_several_prices(seed: int) -> Problem:
    """Six pools of three device types: more than 30 whole numbers, and as much of everything for less elsewhere."""
    r = random.Random(seed)
    kinds = [Device(f"g{i}", r.uniform(100, 1000), r.choice([48.0, 80.0]), r.uniform(1, 5)) for i in range(3)]
    pools = tuple(
        Pool(f"p{i}", kinds[i % 3], r.choice([4, 8, 12]), round(r.uniform(0.5, 6), 1), rented=True) for i in range(6)
    )
    work = DomainProfile("d", Quantity(1), Quantity(r.uniform(50, 1500)), Quantity(r.uniform(50, 800)))
    rollout = Problem(
        pools,
        (work,),
        FakePerformance(),
        roles=frozenset({Role.ENGINE}),
        in_flight=10**9,
        gap=1e-3,
        rate_tolerance=0.01,
    )
    whole = solve(rollout)
    assert isinstance(whole, Placement)
    seconds = r.uniform(2, 12) / (whole.rate * work.total_tokens)  # training needs as many devices as rollout
    roles = frozenset({Role.ENGINE, Role.TRAINER})
    return dataclasses.replace(rollout, train=TrainingWork(256, seconds_per_token=seconds), roles=roles)


def frontier(usd: np.ndarray, rate: np.ndarray) -> Frontier:
    order = np.lexsort((-rate, usd))
    usd, rate = usd[order], rate[order]
    better = np.append(True, rate[1:] > np.maximum.accumulate(rate)[:-1])
    return usd[better], rate[better]


def all_plans(problem: Problem) -> Frontier:
    """Every plan of one domain's engines beside every trainer. Rates of engines add up, so that of the plans of a few
    pools only those on the frontier matter (Nemhauser and Ullmann, 1969)."""

    @functools.cache
    def engine(device: Device, tp: int) -> float:
        one = Pool("one", device, tp)
        found = solve(dataclasses.replace(problem, pools=(one,), train=None, tensor_parallel=(tp,)))
        return found.rate if isinstance(found, Placement) else 0.0

    def of_pool(pool: Pool, count: int) -> Frontier:
        most = np.zeros(count + 1)
        for devices in range(1, count + 1):
            sizes = [tp for tp in problem.tensor_parallel if tp <= devices]
            most[devices] = max(most[devices - 1], *(most[devices - tp] + engine(pool.device, tp) for tp in sizes))
        return frontier(np.arange(count + 1) * pool.usd_per_device_hour, most)

    def together(a: Frontier, b: Frontier) -> Frontier:
        return frontier(np.add.outer(a[0], b[0]).ravel(), np.add.outer(a[1], b[1]).ravel())

    plans, train = [], problem.train
    assert train is not None
    for pool in problem.pools:
        found = training_layout(problem, pool, train)
        assert isinstance(found, TrainingLayout)
        rest = functools.reduce(together, (of_pool(q, q.count) for q in problem.pools if q is not pool))
        for devices in range(found.least, min(found.most, pool.count) + 1):
            usd, rate = together(rest, of_pool(pool, pool.count - devices))
            plans.append((usd + devices * pool.usd_per_device_hour, np.minimum(rate, devices / found.work)))
    return frontier(np.concatenate([p[0] for p in plans]), np.concatenate([p[1] for p in plans]))


@pytest.mark.slow  # a second each
@pytest.mark.parametrize("seed", range(4))
def test_of_all_plans_near_the_best_rate_none_costs_less(seed: int) -> None:
    """Of more than 30 whole numbers, against every plan there is."""
    problem = alike_at_several_prices(seed)
    found = solve(problem)
    assert isinstance(found, Placement), found
    usd, rate = all_plans(problem)
    assert found.best_rate == pytest.approx(rate.max(), rel=problem.gap)
    assert found.rate >= (1 - problem.rate_tolerance) * found.best_rate * (1 - 1e-6)
    least = usd[rate >= (1 - problem.rate_tolerance) * found.best_rate].min()
    assert found.usd_per_hour <= least * (1 + 5e-3), "2e-3 is the gap of the second stage"
    assert found.rate >= rate[usd <= found.usd_per_hour * (1 - 5e-3)].max(initial=0.0), "and none is faster for less"


@pytest.mark.slow  # two plans
def test_plans_are_compared_by_the_rate_before_any_was_given_up() -> None:
    problem = dataclasses.replace(several_that_can_train(2), gap=1e-3, rate_tolerance=0.05)
    found = solve(problem)
    exact = solve(dataclasses.replace(problem, rate_tolerance=0.0))
    assert isinstance(found, Placement)
    assert isinstance(exact, Placement)
    assert found.usd_per_hour < exact.usd_per_hour
    assert found.rate < exact.rate
    assert gain(found, exact) == pytest.approx(1.0, rel=1e-3)
    assert found.gap == pytest.approx(exact.gap, abs=1e-3)
