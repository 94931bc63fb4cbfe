"""Plans against a simulation of them: trajectories in a closed loop over engines that work step by step.

The program knows means, Little's law and nothing of queues; the simulation has queues, ragged batches, KV that must be
free before a trajectory starts, and outputs of half to one and a half times their mean. Both use the same roofline."""

from __future__ import annotations

import math

import pytest

from placement.architecture import shape_of
from placement.hardware import device
from placement.problem import DomainProfile, EnvironmentCost, Problem, Quantity
from placement.roofline import Roofline, RooflinePerformance
from placement.solve import solve
from placement.types import KvMode, Link, Placement, Pool, Role
from tests.placement.closed_loop import simulate
from tests.placement.fleet import PERFORMANCE
from tests.placement.test_rollart_bands import MODELS

Q = Quantity
WITHIN = 0.10
AGENT = DomainProfile(
    "agent",
    Q(6),
    Q(600),
    Q(150),
    first_tokens=Q(1200),
    shared_prefix=0.5,
    environment=EnvironmentCost(wait_s=0.5, reset_s=1.0),
)
MATH = DomainProfile("math", Q(1), Q(300), Q(2000))
LONG = DomainProfile("long", Q(20), Q(1500), Q(100), environment=EnvironmentCost(wait_s=1.0))
SLOW = DomainProfile("slow", Q(5), Q(300), Q(60), environment=EnvironmentCost(wait_s=20.0, reset_s=10.0))
OBSERVANT = DomainProfile("observant", Q(20), Q(700), Q(100))
EXPERTS = RooflinePerformance(shape_of(MODELS["30B-A3B"], name="Qwen3-30B-A3B"))
ENGINES, DIVIDED = frozenset({Role.ENGINE}), frozenset({Role.PREFILL, Role.DECODE})


def fleet(domains: tuple[DomainProfile, ...], h800: int, h20: int, *, cross: float = 25.0, **wishes: object) -> Problem:
    pools = tuple(Pool(k.lower(), device(k), n, 1.0) for k, n in (("H800", h800), ("H20", h20)) if n)
    links = [Link(p.name, p.name, 50.0) for p in pools]
    if len(pools) == 2:
        links.append(Link("h800", "h20", cross))
    given: dict[str, object] = {"performance": PERFORMANCE, "tensor_parallel": (1,)}
    return Problem(pools, domains, links=tuple(links), **(given | wishes))  # type: ignore[arg-type]


def plan(problem: Problem) -> Placement:
    found = solve(problem)
    assert isinstance(found, Placement), found
    return found


FAST = {
    "aggregated, 64 in flight": fleet((AGENT, MATH), 2, 0, roles=ENGINES, in_flight=64),
    "two types, 16 in flight": fleet((AGENT, MATH), 2, 2, roles=ENGINES, in_flight=16),
    "divided, 64 in flight": fleet((AGENT, MATH), 1, 2, roles=DIVIDED, in_flight=64),
    "divided, 16 in flight": fleet((AGENT,), 1, 1, roles=DIVIDED, in_flight=16),
    "divided, slow link": fleet((LONG,), 2, 2, roles=DIVIDED, cross=0.5),
    "environments wait": fleet((SLOW,), 2, 0, in_flight=100),
}
LARGE = {
    "aggregated, memory full": fleet((AGENT, MATH), 2, 0, roles=ENGINES),
    "divided, memory full": fleet((AGENT, MATH), 1, 2, roles=DIVIDED),
    "divided, long contexts": fleet((LONG,), 2, 2, roles=DIVIDED),
    "all kinds of path": fleet((LONG, MATH), 4, 8, in_flight=512),
    "KV dropped in waits": fleet((SLOW, MATH), 1, 1),
    # Short prompts of a mixture of experts: the fixed cost of a step dominates.
    "experts, aggregated": fleet(
        (OBSERVANT,), 8, 8, roles=ENGINES, in_flight=64, performance=EXPERTS, tensor_parallel=(4,)
    ),
    "experts, divided": fleet(
        (OBSERVANT,), 8, 8, roles=DIVIDED, in_flight=64, performance=EXPERTS, tensor_parallel=(4,)
    ),
}


def check(problem: Problem) -> None:
    found = plan(problem)
    seen = simulate(problem, found)
    assert seen.finished > 50
    assert seen.rate == pytest.approx(found.rate, rel=WITHIN)
    pools = {p.name: p for p in problem.pools}
    for d in found.deployments:
        model = problem.performance.instance(pools[d.pool].device, d.tp)
        assert not isinstance(model, str)
        assert seen.kv_gb[d.pool, d.role, d.tp] <= 1.05 * model.kv_capacity_bytes / 1e9


@pytest.mark.parametrize("name", FAST)
def test_the_plan_does_what_it_says(name: str) -> None:
    check(FAST[name])


@pytest.mark.slow  # thousands of trajectories
@pytest.mark.parametrize("name", LARGE)
def test_a_large_plan_does_what_it_says(name: str) -> None:
    check(LARGE[name])


@pytest.mark.parametrize("name", ["aggregated, 64 in flight", "divided, 64 in flight", "environments wait"])
def test_seconds_and_kv_where_nothing_is_full(name: str) -> None:
    problem = FAST[name]
    found = plan(problem)
    seen = simulate(problem, found, lengths=8)
    mean = sum(f.rate * f.seconds for f in found.flows) / found.rate
    assert seen.seconds == pytest.approx(mean, rel=WITHIN)
    for d in found.deployments:
        model = PERFORMANCE.instance(next(p.device for p in problem.pools if p.name == d.pool), d.tp)
        assert isinstance(model, Roofline)
        used = seen.kv_gb[d.pool, d.role, d.tp] * 1e9 / model.kv_capacity_bytes
        assert used == pytest.approx(d.kv_utilisation, rel=0.2)


@pytest.mark.slow  # thousands of trajectories
def test_prefills_that_overlap_only_make_it_faster() -> None:
    """The plan counts a turn's prefill and decode one after the other, as measured engines come out."""
    problem = LARGE["aggregated, memory full"]
    found = plan(problem)
    apart, beside = (simulate(problem, found, overlap=x).rate for x in (False, True))
    assert beside > apart
    assert beside > found.rate


@pytest.mark.slow  # a dozen solves
def test_the_paths_are_those_that_are_meant() -> None:
    seen = {(f.kv, f.prefill_pool is not None) for p in (*FAST.values(), *LARGE.values()) for f in plan(p).flows}
    assert seen == {(KvMode.KEEP, False), (KvMode.KEEP, True), (KvMode.PULL, True), (KvMode.RECOMPUTE, False)}
    assert "trajectories in flight" in plan(FAST["environments wait"]).binds[0]


def test_one_trajectory_alone_by_hand() -> None:
    """The simulation itself: nothing waits for anything, so that the seconds of a trajectory add up."""
    problem = fleet(
        (DomainProfile("d", Q(2), Q(100), Q(1), environment=EnvironmentCost(wait_s=3.0)),),
        1,
        0,
        roles=ENGINES,
        in_flight=1,
    )
    found = plan(problem)
    model = PERFORMANCE.instance(problem.pools[0].device, 1)
    assert isinstance(model, Roofline)
    seconds = model.prefill_s(100, 0) + model.prefill_s(100, 101) + 2 * 3.0
    seen = simulate(problem, found, lengths=20)
    assert seen.seconds == pytest.approx(seconds, rel=0.01)
    assert seen.rate == pytest.approx(1 / seconds, rel=0.06)  # whole trajectories in a window of 20
    assert math.isclose(seen.utilisation["h800", Role.ENGINE, 1], 1 - 6.0 / seconds, rel_tol=0.1)
