"""The baselines are the same problem with less allowed, and so never better than the plan."""

from __future__ import annotations

import pytest

from placement.explain import baselines, gain
from placement.problem import Problem, Restriction
from placement.solve import solve
from placement.types import Infeasible, Objective, Placement, Role
from tests.placement.fleet import AGENTIC, MATH, problem

RESTRICTED = ["domain LP", "strict domain→pool", "no affinity", "P/D only"]


SMALL = problem(2, 4, tensor_parallel=(1,))


def plan_of(asked: Problem) -> Placement:
    plan = solve(asked)
    assert isinstance(plan, Placement)
    return plan


@pytest.mark.slow  # solves seven plans
@pytest.mark.parametrize(
    "asked",
    [
        problem(2, 4),
        problem(2, 4, in_flight=40),
        problem(2, 4, cross_gb_per_s=0.2),
        problem(2, 4, domains=(AGENTIC,)),
        problem(2, 4, budget_usd_per_hour=18.0),
        problem(2, 4, affinity={"math": ("h20",)}),
        problem(2, 4, objective=Objective.MIN_COST, rate=0.5),
        problem(2, 4, objective=Objective.MAX_THROUGHPUT_PER_DOLLAR),
    ],
    ids=["plain", "in flight", "thin link", "one domain", "budget", "affinity", "cost", "per dollar"],
)
def test_the_full_plan_is_never_below_a_baseline(asked: Problem) -> None:
    plan = plan_of(asked)
    found = baselines(asked)
    assert list(found) == ["only H20", "only H800", *RESTRICTED]
    for name, other in found.items():
        if isinstance(other, Placement):
            assert gain(plan, other) >= 1 - 2 * asked.gap, name


def test_each_baseline_keeps_to_what_it_says() -> None:
    plans = {name: plan for name, plan in baselines(SMALL).items() if isinstance(plan, Placement)}
    assert set(plans) == {"only H20", "only H800", *RESTRICTED}
    assert {d.pool for d in plans["only H20"].deployments} == {"h20"}
    assert {d.pool for d in plans["only H800"].deployments} == {"h800"}
    for name in ("domain LP", "strict domain→pool", "no affinity"):
        assert {d.role for d in plans[name].deployments} == {Role.ENGINE}
    strict = plans["strict domain→pool"].flows
    assert all(len({f.pool for f in strict if f.domain == name}) == 1 for name in ("agentic", "math"))
    assert all(f.prefill_pool is not None for f in plans["P/D only"].flows)
    mixed = plans["no affinity"]
    for pool in {f.pool for f in mixed.flows}:
        rates = {
            name: sum(f.rate for f in mixed.flows if (f.domain, f.pool) == (name, pool)) for name in ("agentic", "math")
        }
        assert rates["agentic"] == pytest.approx(2 * rates["math"])


@pytest.mark.slow  # solves eleven plans
def test_affinity_pays_where_the_work_differs_and_not_where_it_is_the_same() -> None:
    two = baselines(SMALL)["no affinity"]
    assert isinstance(two, Placement)
    assert gain(plan_of(SMALL), two) > 1.1
    alike = problem(0, 4, domains=(MATH,), tensor_parallel=(1,))
    none = baselines(alike)["no affinity"]
    assert isinstance(none, Placement)
    assert gain(plan_of(alike), none) == pytest.approx(1.0, abs=0.02)


def test_a_baseline_that_cannot_be_says_so() -> None:
    asked = problem(0, 4, roles=frozenset({Role.ENGINE}), tensor_parallel=(1,))
    pd = baselines(asked)[Restriction.PD_ONLY]
    assert isinstance(pd, Infeasible)
    assert pd.message


def test_there_is_no_single_type_baseline_with_one_type() -> None:
    asked = problem(0, 4, tensor_parallel=(1,))
    assert list(baselines(asked)) == RESTRICTED
