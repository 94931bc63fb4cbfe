"""The solver on problems whose answer can be worked out: causes of infeasibility, rewards, training, changes."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys

import numpy as np
import pytest

from placement import paths
from placement.paths import tableau
from placement.problem import (
    DomainProfile,
    EnvironmentCost,
    FunctionPrice,
    Problem,
    Quantity,
    Restriction,
    RewardCost,
    RunningPlan,
    TrainingConstants,
    TrainingWork,
)
from placement.solve import solve
from placement.types import Deployment, Device, Infeasible, KvMode, Link, Objective, Placement, Pool, Role
from tests.placement.fakes import FakeInstance, FakePerformance, FakeShape

Q = Quantity
GPU = Device("big", 400, 80, 2.0, nvlink_gb_per_s=600, devices_per_host=8)
SMALL = Device("small", 121, 24, 0.3)
CPU = Device("cpu")
MATH = DomainProfile("math", Q(1), Q(300), Q(1000))
AGENT = DomainProfile("agent", Q(20), Q(800), Q(100), environment=EnvironmentCost(wait_s=3.0, reset_s=5.0))


def problem(*pools: Pool, **changes: object) -> Problem:
    base = Problem(pools or (Pool("a", GPU, 8, 2.0, rented=True),), (MATH,), FakePerformance())
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]


def plan(asked: Problem) -> Placement:
    found = solve(asked)
    assert isinstance(found, Placement), found
    return found


def refusal(asked: Problem) -> Infeasible:
    found = solve(asked)
    assert isinstance(found, Infeasible), found
    assert "\n" not in found.message
    return found


# Infeasible: each names its cause with the numbers.

BIG_MODEL = FakePerformance(FakeShape(weight_bytes=140e9))


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (
            problem(Pool("l", SMALL, 2), performance=BIG_MODEL),
            ["no pool can serve math", "the model needs 140 GB for its weights, 1 small has 24 GB", "2 small have 48"],
        ),
        (problem(tensor_parallel=(3,)), ["heads is 8, which 3 does not divide"]),
        (
            problem(performance=FakePerformance(FakeShape(kv=1e8)), tensor_parallel=(1,)),
            ["a, 1 per instance: a trajectory of math needs 130 GB of KV, 56 GB are left after the weights"],
        ),
        (
            problem(train=TrainingWork(64, devices=8), tensor_parallel=(1,)),
            ["the plan needs 9 devices of a, which has 8"],
        ),
        (
            problem(Pool("a", GPU, 1), train=TrainingWork(64)),
            ["training needs 2 devices of a to hold its state, which has 1"],
        ),
        (problem(train=TrainingWork(64, pool="a", devices=9)), ["it is given 9 devices", "the pool has 8"]),
        (problem(Pool("a", GPU, 8, 2.0), budget_usd_per_hour=10), ["the plan needs $16/h, the budget is $10/h"]),
        (problem(budget_usd_per_hour=1), ["the plan needs $2/h, the budget is $1/h"]),
        (
            problem(objective=Objective.MIN_COST, rate=500),
            ["trajectories/s are possible, 500 are asked for; what limits it: big devices of a: 8 of 8"],
        ),
        (
            problem(objective=Objective.MIN_COST, rate=30, budget_usd_per_hour=5),
            ["the budget of $5/h allows", "trajectories/s, 30 are asked for"],
        ),
        (
            problem(Pool("a", GPU, 8), Pool("l", SMALL, 2), performance=BIG_MODEL, affinity={"math": ("l",)}),
            ["no pool can serve math: its affinity allows only l:", "the model needs 140 GB"],
        ),
        (
            problem(Pool("l", SMALL, 4), restriction=Restriction.PD_ONLY),
            ["no link is known over which prefill could hand KV to decode"],
        ),
        (
            problem(fixed=(Deployment("a", Role.ENGINE, 1, 9),)),
            ["the plan needs 9 devices of a, which has 8"],
        ),
        (
            problem(fixed=(Deployment("elsewhere", Role.ENGINE, 1, 1),)),
            ["the given engine with 1 devices each cannot run on elsewhere"],
        ),
        (
            problem(domains=(dataclasses.replace(MATH, reward=RewardCost(3.0, latency_s=2.0)),)),
            ["the reward of math takes 3 s, more than its bound of 2 s"],
        ),
        (
            problem(
                running=RunningPlan((Deployment("a", Role.ENGINE, 1, 8),), max_changed_devices=1),
                train=TrainingWork(64, devices=4),
                tensor_parallel=(1,),
            ),
            ["the plan changes 4 devices, 1 may change"],
        ),
    ],
)
def test_a_refusal_names_its_cause(asked: Problem, words: list[str]) -> None:
    found = refusal(asked)
    for word in words:
        assert word in found.message
    assert found.conflicts


# Check of the figures.


def test_one_pool_by_hand() -> None:
    """One domain on one type: the batch is 512, a replica yields utilisation / turn_s."""
    found = plan(problem(tensor_parallel=(1,)))
    model = FakePerformance().instance(GPU, 1)
    assert isinstance(model, FakeInstance)
    assert found.rate == pytest.approx(8 * 0.95 / model.turn_s(512, 300, 0, 1000), rel=1e-6)
    assert found.binds == ("big devices of a: 8 of 8",)
    (engine,) = found.deployments
    assert (engine.role, engine.replicas, engine.batch) == (Role.ENGINE, 8, pytest.approx(512))
    assert found.usd_per_hour == 16.0
    assert found.gap <= 1e-4


@pytest.mark.parametrize("turns", [1.0, 2.5, 8.0, 9.0, 20.0, 61.5, 400.0])
@pytest.mark.parametrize("compute_bound", [False, True])
def test_sums_over_turns_are_within_a_per_cent(turns: float, compute_bound: bool) -> None:
    """The quadrature against the sum term by term, also where decode turns memory-bound on the way."""

    class Kinked(FakeInstance):
        def decode_step_s(self, batch: float, context: float) -> float:
            half = 800 + turns / 2 * 900
            return self.step + batch * self.read * (max(context, half) if compute_bound else context)

    domain = dataclasses.replace(AGENT, turns=Q(turns), first_tokens=Q(1000), shared_prefix=0.5)
    model = Kinked(1e12, 1e-4, 1e-9, 1e-3, 0, 1e-6)
    sums = paths.representative_turns(domain, FakeShape())
    exact, kv = 0.0, 0.0
    for t in range(1, math.ceil(turns) + 1):
        share = min(1.0, turns - (t - 1))
        cached, new = (500.0, 500.0) if t == 1 else (1100.0 + (t - 2) * 900, 800.0)
        seconds = model.turn_s(16, new, cached, 100)
        exact += share * seconds
        kv += share * 16 * seconds * (cached + new + 50) * 1e5 / 1e9
    cost = paths.aggregated_cost(model, sums, np.array([16.0]), recompute=False)
    assert sums.count == pytest.approx(turns)
    assert cost.load[0] == pytest.approx(exact, rel=0.01)
    assert cost.kv_seconds[0] == pytest.approx(kv, rel=0.01)


def test_few_in_flight_lower_the_batch_and_bind() -> None:
    found = plan(problem(in_flight=16))
    assert found.rate < 0.3 * plan(problem()).rate
    assert "trajectories in flight: 16 of 16" in found.binds
    assert sum(f.rate * f.seconds for f in found.flows) == pytest.approx(16, rel=1e-6)
    assert found.prices.in_flight > 0


def test_fixed_instances_leave_only_flows() -> None:
    given = (Deployment("a", Role.ENGINE, 2, 2), Deployment("a", Role.ENGINE, 1, 1))
    found = plan(problem(fixed=given))
    assert {(d.tp, d.replicas) for d in found.deployments} == {(2, 2), (1, 1)}


def test_long_waits_drop_the_kv_where_memory_is_short() -> None:
    waits = dataclasses.replace(AGENT, environment=EnvironmentCost(wait_s=600.0))
    modes = {f.kv for f in plan(problem(domains=(waits,), roles=frozenset({Role.ENGINE}))).flows}
    assert KvMode.RECOMPUTE in modes
    brief = dataclasses.replace(AGENT, environment=EnvironmentCost(wait_s=0.01))
    assert {f.kv for f in plan(problem(domains=(brief,), roles=frozenset({Role.ENGINE}))).flows} == {KvMode.KEEP}


def test_prefill_and_decode_part_between_types() -> None:
    """Compute here, bandwidth there: dividing the phases beats every mapping of whole trajectories."""
    compute, memory = Device("compute", 1000, 80, 1.0), Device("memory", 100, 96, 4.0)
    pools = (Pool("c", compute, 4), Pool("m", memory, 8))
    asked = problem(*pools, domains=(AGENT, MATH), links=(Link("c", "m", 100.0),), tensor_parallel=(1,))
    found = plan(asked)
    assert {(f.prefill_pool, f.pool) for f in found.flows if f.prefill_pool} == {("c", "m")}
    assert found.rate > 1.2 * plan(dataclasses.replace(asked, restriction=Restriction.AGGREGATED)).rate
    without = dataclasses.replace(asked, links=())
    assert all(f.prefill_pool is None for f in plan(without).flows)


@pytest.mark.slow
def test_affinity_is_kept() -> None:
    pools = (Pool("a", GPU, 4), Pool("b", dataclasses.replace(GPU, name="other"), 4))
    asked = problem(*pools, domains=(MATH, AGENT), links=(Link("a", "b", 50.0),), affinity={"math": ("b",)})
    assert {f.pool for f in plan(asked).flows if f.domain == "math"} == {"b"}


def test_only_what_the_trainer_eats_is_bought() -> None:
    train = TrainingWork(64, devices=2, pool="a", constants=TrainingConstants(overlap=1.0))
    free = plan(problem(train=train))
    (trainer,) = free.of(Role.TRAINER)
    assert (trainer.tp, trainer.utilisation) == (2, pytest.approx(1.0))
    assert free.binds[0] == "the trainer"
    assert sum(d.devices for d in free.deployments) < 8
    flops = 6 * 8e9 * MATH.total_tokens
    assert free.rate == pytest.approx(2 * 400e12 * 0.40 / flops, rel=1e-5)
    slower = plan(problem(train=dataclasses.replace(train, seconds_per_step=10.0)))
    assert slower.rate == pytest.approx(1 / (1 / free.rate + 10 / 64), rel=1e-5)


def test_the_trainer_takes_as_many_devices_as_balance() -> None:
    found = plan(problem(train=TrainingWork(640), tensor_parallel=(1,)))
    by_size = {n: plan(problem(train=TrainingWork(640, devices=n), tensor_parallel=(1,))).rate for n in range(2, 8)}
    assert found.rate == pytest.approx(max(by_size.values()), rel=1e-4)


# Rewards and environments.


def _scored(reward: RewardCost, **changes: object) -> Problem:
    """One trajectory/s, scored; a core of pool c costs 0.36 $/h: 1e-4 $/s."""
    pools = (Pool("a", GPU, 8, 2.0), Pool("c", CPU, 4, 0.36, rented=True))
    domain = dataclasses.replace(MATH, reward=reward)
    asked = problem(*pools, domains=(domain,), objective=Objective.MIN_COST, rate=1.0, utilisation=1.0)
    return dataclasses.replace(asked, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(("seconds", "where"), [(0.45, "functions"), (0.55, "c")])
def test_functions_or_a_core_by_break_even(seconds: float, where: str) -> None:
    """Functions at 2e-4 $ per core-second: a dedicated core is cheaper above half of its time."""
    price = FunctionPrice("f", usd_per_core_s=2e-4)
    (choice,) = plan(_scored(RewardCost(seconds), functions=price)).rewards
    assert choice.where == where
    assert choice.break_even_utilisation == pytest.approx(0.5)
    assert choice.dedicated_utilisation == pytest.approx(seconds)
    assert choice.usd_per_thousand == pytest.approx(1000 * seconds * (2e-4 if where == "functions" else 1e-4))


def test_state_and_latency_keep_rewards_off_functions() -> None:
    price = FunctionPrice("f", usd_per_core_s=1e-9, overhead_s=0.5)
    assert plan(_scored(RewardCost(0.2), functions=price)).rewards[0].where == "functions"
    assert plan(_scored(RewardCost(0.2, stateless=False), functions=price)).rewards[0].where == "c"
    assert plan(_scored(RewardCost(0.2, latency_s=0.5), functions=price)).rewards[0].where == "c"


def test_a_reward_without_a_place_is_noted() -> None:
    found = plan(problem(domains=(dataclasses.replace(MATH, reward=RewardCost(0.5)),)))
    assert found.rewards == ()
    assert found.notes == ("the reward of math is not placed: no functions are priced and no CPU pool fits it",)


def test_a_reward_model_takes_a_gpu() -> None:
    asked = _scored(RewardCost(0.5, memory_gb=40, on_gpu=True))
    (reward,) = plan(asked).of(Role.REWARD)
    assert (reward.pool, reward.tp, reward.replicas) == ("a", 1, 1)
    assert reward.utilisation == pytest.approx(0.5)


def test_environments_take_cores() -> None:
    asked = _scored(
        RewardCost(0.1), domains=(dataclasses.replace(AGENT, environment=EnvironmentCost(0.1, core_s=0.1)),)
    )
    (cores,) = plan(asked).of(Role.ENVIRONMENT)
    assert (cores.pool, cores.replicas, cores.utilisation) == ("c", 2, pytest.approx(1.0))


# Objectives and changes.


def test_rate_per_dollar() -> None:
    cheap = Device("cheap", 300, 80, 1.5)
    pools = (Pool("a", GPU, 4, 4.0, rented=True), Pool("b", cheap, 4, 1.0, rented=True))
    found = plan(problem(*pools, objective=Objective.MAX_THROUGHPUT_PER_DOLLAR))
    assert {d.pool for d in found.deployments} == {"b"}
    assert found.bound == pytest.approx(found.rate / found.usd_per_hour, rel=1e-3)
    with pytest.raises(ValueError, match="some pool has a price"):
        solve(problem(Pool("a", GPU, 4), objective=Objective.MAX_THROUGHPUT_PER_DOLLAR))


def test_owned_devices_are_paid_used_or_not() -> None:
    pools = (Pool("owned", GPU, 8, 2.0), Pool("more", GPU, 8, 2.0, rented=True))
    found = plan(problem(*pools, objective=Objective.MIN_COST, rate=5.0))
    assert found.usd_per_hour == 2.0
    assert found.usd_per_hour_all >= 16.0
    assert found.rate == 5.0


def test_a_running_plan_changes_only_so_far() -> None:
    pools = (Pool("a", GPU, 8), Pool("b", dataclasses.replace(GPU, name="other"), 8))
    running = RunningPlan((Deployment("a", Role.ENGINE, 1, 4),), max_changed_devices=3)
    found = plan(problem(*pools, running=running, tensor_parallel=(1,)))
    assert sum(d.devices for d in found.deployments) == 7
    free = dataclasses.replace(running, max_changed_devices=None)
    assert sum(d.devices for d in plan(problem(*pools, running=free, tensor_parallel=(1,))).deployments) == 16


def test_a_change_that_does_not_pay_is_not_made() -> None:
    """TP 4 runs; TP 1 would be a little faster, but restarting costs more than the horizon returns."""
    running = RunningPlan((Deployment("a", Role.ENGINE, 4, 2),), restart_s=600, horizon_s=650)
    found = plan(problem(running=running, roles=frozenset({Role.ENGINE})))
    assert [(d.tp, d.replicas) for d in found.deployments] == [(4, 2)]
    cheap = dataclasses.replace(running, restart_s=1.0, horizon_s=86_400)
    assert [(d.tp, d.replicas) for d in plan(problem(running=cheap, roles=frozenset({Role.ENGINE}))).deployments] == [
        (1, 8)
    ]


def test_role_flips_are_no_change() -> None:
    given = (Deployment("a", Role.PREFILL, 1, 4), Deployment("a", Role.DECODE, 1, 4))
    running = RunningPlan(given, max_changed_devices=0)
    found = plan(problem(running=running, roles=frozenset({Role.ENGINE}), tensor_parallel=(1,)))
    assert [(d.role, d.replicas) for d in found.deployments] == [(Role.ENGINE, 8)]


def test_assumed_profiles_are_noted() -> None:
    found = plan(problem(domains=(dataclasses.replace(MATH, source="assumed"),)))
    assert "the profile of math is assumed, not measured" in found.notes


def test_paths_need_a_link_that_somebody_states() -> None:
    pools = (Pool("a", GPU, 4), Pool("b", GPU, 4))
    keys = [c.pools for c in tableau(problem(*pools)).channels]
    assert keys == [("a", "a"), ("b", "b")]  # NVLink within a host; nothing between them


@pytest.mark.slow  # a fresh interpreter
def test_scipy_is_loaded_only_to_solve() -> None:
    code = "import sys, placement.solve; sys.exit(any(m.split('.')[0] == 'scipy' for m in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_domain_of_no_weight_changes_nothing() -> None:
    with_it = problem(domains=(MATH, dataclasses.replace(AGENT, weight=0.0)), affinity={AGENT.name: ("a",)})
    assert plan(with_it).rate == plan(problem(domains=(MATH,))).rate
    with pytest.raises(ValueError, match="at least one has a share"):
        problem(domains=(dataclasses.replace(MATH, weight=0.0),))
