"""The search for whole numbers: where the trainer goes is one of its cases, and nothing is printed meanwhile."""

from __future__ import annotations

import ctypes
import dataclasses
import random

import pytest

from placement.baselines import gain
from placement.hardware import device
from placement.problem import Problem
from placement.quiet import quiet
from placement.solve import solve
from placement.types import Placement, Pool
from placement.workload import DomainProfile, Quantity, Train
from tests.placement.fleet import PERFORMANCE


def several_that_can_train(seed: int) -> Problem:
    """More pools than are searched to the end, each of which might train."""
    r = random.Random(seed)
    names = r.sample(["H20", "H800", "A100-80", "H100", "B200"], 3)
    pools = tuple(Pool(n.lower(), device(n), r.choice([8, 16]), r.uniform(1, 6), rented=True) for n in names)
    work = DomainProfile("d", Quantity(1), Quantity(r.uniform(50, 1500)), Quantity(r.uniform(50, 800)))
    return Problem(pools, (work,), PERFORMANCE, train=Train(256))


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
    with quiet(), quiet():
        c.printf(b"lost\n")
        c.puts(b"lost too")
        print("heard")
    c.puts(b"heard from C")
    c.fflush(None)
    assert sorted(capfd.readouterr().out.split("\n")) == ["", "heard", "heard from C"]


@pytest.mark.slow  # a second each
@pytest.mark.parametrize(("seed", "usd_per_hour"), [(2, 141.0), (5, 139.7)])
def test_no_plan_of_many_instances_is_as_fast_for_much_less(seed: int, usd_per_hour: float) -> None:
    """Of more than 30 whole numbers, plans of this cost exist at the best rate, with other instances than the first
    stage's."""
    problem = dataclasses.replace(several_that_can_train(seed), gap=1e-3)
    found = solve(problem)
    assert isinstance(found, Placement), found
    assert found.first is not None
    assert found.rate >= found.first.rate * (1 - 1e-4)
    assert found.usd_per_hour <= usd_per_hour < found.first.usd_per_hour


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
