"""Explanations are short lines whose numbers come from the plan and the model, whatever the hardware is called."""

from __future__ import annotations

from dataclasses import replace

import pytest

from placement.explain import Affinity, affinities, explain, gain, marginals
from placement.problem import Problem, TrainingWork
from placement.solve import solve
from placement.types import Device, Objective, Placement, Pool, Role
from tests.placement.fleet import AGENTIC, MATH, problem
from tests.placement.test_windowed import GPU, SLOW
from tests.placement.test_windowed import problem as windowed
from tests.placement.test_windowed import small as small_window

SMALL = problem(2, 4, tensor_parallel=(1,))


def plan_of(asked: Problem) -> Placement:
    plan = solve(asked)
    assert isinstance(plan, Placement)
    return plan


@pytest.fixture(scope="module")
def small() -> Placement:
    """The plan of SMALL."""
    return plan_of(SMALL)


def by_phase(found: tuple[Affinity, ...]) -> dict[tuple[str, str], Affinity]:
    return {(a.domain, a.phase): a for a in found}


def test_the_lines_of_a_plan(small: Placement) -> None:
    """Short, with binding constraints, marginals and preferences."""
    why = explain(SMALL, small)
    lines = [*why.binds, *(m.words for m in why.marginals), *(a.words for a in why.affinities)]
    assert why.binds
    assert all(line and "\n" not in line and len(line) < 140 for line in lines)
    for start in ("one more H20: +", "one more H800: +", "agentic prefills ", "math decodes "):
        assert any(line.startswith(start) for line in lines), start


def test_devices_at_the_margin_are_worth_their_dual_price(small: Placement) -> None:
    found = {m.what: m for m in marginals(SMALL, small, resolve=False) if m.amount == 1}
    assert set(found) == {"h800", "h20"}
    for pool, marginal in found.items():
        assert not marginal.solved
        assert marginal.gain == pytest.approx(small.prices.pools[pool] / small.rate)
        assert marginal.words.endswith("(at the margin)")


@pytest.mark.slow  # solves five plans
def test_solved_again_is_what_the_larger_problem_yields(small: Placement) -> None:
    found = [m for m in marginals(SMALL, small) if m.solved]
    assert {m.what for m in found} == {"h800", "h20"}
    for marginal in found:
        more = {"h800": 2, "h20": 4, marginal.what: {"h800": 3, "h20": 5}[marginal.what]}
        larger = plan_of(problem(more["h800"], more["h20"], tensor_parallel=(1,)))
        assert marginal.gain == pytest.approx(gain(larger, small) - 1, rel=1e-3)
        assert f"{100 * marginal.gain:+.0f} %" in marginal.words
        assert marginal.words.endswith("(solved again)")


@pytest.mark.slow  # solves two plans
def test_trajectories_in_flight_and_thin_links_have_a_worth_too() -> None:
    few = problem(2, 4, tensor_parallel=(1,), in_flight=30)
    plan = plan_of(few)
    flight = next(m for m in marginals(few, plan, resolve=False) if m.what == "in flight")
    assert flight.words.startswith("3 more trajectories in flight: +")
    assert 0 < flight.gain <= 0.1
    thin = problem(2, 4, cross_gb_per_s=0.5, roles=frozenset({Role.PREFILL, Role.DECODE}))
    plan = plan_of(thin)
    link = next(m for m in marginals(thin, plan, resolve=False) if m.what == "h20–h800")
    assert link.words.startswith("0.05 GB/s more on h20–h800: +")


@pytest.mark.slow  # solves four plans
def test_what_an_affinity_costs(small: Placement) -> None:
    """An affinity map that sends each domain to the wrong hardware: its marginal is the gain of a solution without
    it."""
    wrong = problem(2, 4, tensor_parallel=(1,), affinity={"agentic": ("h20",), "math": ("h800",)})
    plan = plan_of(wrong)
    found = next(m for m in marginals(wrong, plan) if m.what == "affinity")
    assert found.gain == pytest.approx(gain(small, plan) - 1, rel=1e-3)
    assert found.gain > 0.1
    assert found.words.startswith("without the affinities given: +")


def test_preferences_are_of_the_model_and_the_prices(small: Placement) -> None:
    found = by_phase(affinities(SMALL, small))
    assert found["agentic", "prefill"].best == "H800"
    assert found["math", "decode"].best == "H20"
    prefill = found["agentic", "prefill"]
    unpriced = replace(SMALL, pools=tuple(replace(p, usd_per_device_hour=0.0) for p in SMALL.pools))
    per_device = by_phase(affinities(unpriced, small))["agentic", "prefill"].factor
    assert prefill.factor == pytest.approx(per_device * 1.85 / 5.28)
    assert prefill.words == f"agentic prefills {prefill.factor:.1f}x cheaper on H800 than on H20 per dollar"


def test_a_price_turns_a_preference_around() -> None:
    """H800 at a quarter of its price decodes cheaper, too; at twenty times, it does not even prefill cheaper."""
    for usd, domain, phase, expected in ((1.2, "math", "decode", "H800"), (100.0, "agentic", "prefill", "H20")):
        pools = tuple(replace(p, usd_per_device_hour=usd) if p.name == "h800" else p for p in SMALL.pools)
        assert by_phase(affinities(replace(SMALL, pools=pools)))[domain, phase].best == expected


def test_no_preference_hangs_on_a_name() -> None:
    """The same figures under exchanged names: the preference goes with the figures."""
    swapped = {"H800": "H20", "H20": "H800"}
    pools = tuple(
        Pool(p.name, replace(p.device, name=swapped[p.device.name]), p.count, p.usd_per_device_hour)
        for p in SMALL.pools
    )
    before, after = by_phase(affinities(SMALL)), by_phase(affinities(replace(SMALL, pools=pools)))
    for key, was in before.items():
        assert after[key].best == (None if was.best is None else swapped[was.best])
        assert after[key].factor == pytest.approx(was.factor)


def test_equal_devices_are_called_equal_and_missing_prices_are_not_invented() -> None:
    base = SMALL.pools[1].device
    twin = Device("twin", **{f: getattr(base, f) for f in Device.__slots__ if f not in ("name", "source")})
    pools = (Pool("a", base, 4, 1.85), Pool("b", twin, 4, 1.85))
    alike = replace(SMALL, pools=pools, links=(), domains=(MATH,))
    assert {a.words for a in affinities(alike)} == {
        "math prefills as cheaply on H20 as on twin per dollar",
        "math decodes as cheaply on H20 as on twin per dollar",
    }
    free = replace(SMALL, pools=tuple(replace(p, usd_per_device_hour=0.0) for p in SMALL.pools), domains=(AGENTIC,))
    prefill = by_phase(affinities(free))["agentic", "prefill"]
    assert prefill.best == "H800"
    assert prefill.words.endswith("per device")


def test_a_device_that_cannot_hold_the_model_has_no_preference_to_offer() -> None:
    small = Pool("l4", Device("L4", 121, 10, 0.3, generation="ada"), 4, 0.8)
    found = affinities(replace(SMALL, pools=(SMALL.pools[1], small), links=(), domains=(MATH,)))
    assert [a.words for a in found] == ["math prefills on H20 only", "math decodes on H20 only"]


@pytest.mark.slow  # solves three plans
def test_cost_is_explained_as_cost() -> None:
    asked = problem(2, 4, tensor_parallel=(1,), objective=Objective.MIN_COST, rate=0.3)
    told = explain(asked, plan_of(asked))
    assert all(m.solved for m in told.marginals)
    assert all("nothing" in m.words or "% cost" in m.words for m in told.marginals)


@pytest.mark.slow  # a dozen small plans
@pytest.mark.parametrize(
    ("pools", "trained_on", "tp", "what", "more"), [((3, 8), "a", 1, "a", 1), ((4, 9), "b", 4, "b", 4)]
)
def test_a_device_that_binds_is_solved_again_where_its_dual_price_is_0(
    pools: tuple[int, int], trained_on: str, tp: int, what: str, more: int
) -> None:
    """The seconds of training are fixed where duals are taken; one device alone is no instance of four."""
    asked = windowed(
        Pool("a", GPU, pools[0], 2.0),
        Pool("b", SLOW, pools[1], 1.0),
        device_types=frozenset({"small"}),
        gap=1e-3,
        tensor_parallel=(tp,),
        train=TrainingWork(64, pool=trained_on, seconds_per_token=8e-3),
    )
    plan = plan_of(asked)
    assert plan.prices.pools[what] / plan.rate < 5e-4
    found = {m.what: m for m in marginals(asked, plan) if m.pool}
    assert found[what].solved
    assert found[what].amount == more
    assert found[what].gain > 0.2
    assert not [m for m in marginals(asked, plan, resolve=False) if m.pool and m.gain < 5e-4], (
        "a price of 0 says nothing"
    )


@pytest.mark.slow  # a dozen small plans
@pytest.mark.parametrize("asked", [small_window(0), small_window(13), problem(2, 4, tensor_parallel=(1,), in_flight=1)])
def test_devices_bind_where_more_of_them_buys_something_and_only_there(asked: Problem) -> None:
    plan = plan_of(asked)
    why = explain(asked, plan)
    assert len([m for m in why.marginals if m.pool]) == len(asked.pools), "one row for each pool"
    for pool in asked.pools:
        more = replace(asked, pools=tuple(replace(p, count=p.count + 16) if p is pool else p for p in asked.pools))
        buys = gain(plan_of(more), plan) - 1
        assert not 1e-3 < buys < 1e-2, "another seed: too close to nothing"
        assert (buys > 1e-2) == any(f"{pool.device.name} devices" in words for words in why.binds), (pool, why.binds)
        assert (buys > 1e-2) == (next(m.gain for m in why.marginals if m.pool == pool.name) > 0)
