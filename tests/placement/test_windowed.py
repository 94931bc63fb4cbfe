"""Plans within their window: against every size of the trainer, against the window's own arithmetic, and in words."""

from __future__ import annotations

import dataclasses
from random import Random

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from placement.problem import (
    DomainProfile,
    EnvironmentCost,
    InFlightWindow,
    Problem,
    Quantity,
    Restriction,
    TrainingWork,
)
from placement.publish import Publishing, Transport
from placement.solve import solve
from placement.types import Device, Infeasible, Link, Objective, Placement, Pool, Role
from placement.window import domain_windows, longest_member_ratios, publish_interval
from tests.placement.fakes import FakePerformance

GPU = Device("big", 400, 80, 2.0, nvlink_gb_per_s=600, devices_per_host=8)
SLOW = Device("small", 150, 80, 3.0, nvlink_gb_per_s=600, devices_per_host=8)
LONG = DomainProfile("long", Quantity(1), Quantity(300), Quantity(4000, p90=9000))
AGENT = DomainProfile("agent", Quantity(10, p90=16), Quantity(400), Quantity(80), environment=EnvironmentCost(wait_s=2))


def publish(far_s: float, near_s: float = 5.0) -> Publishing:
    """Broadcasts that take so many seconds within a pool, and between the two."""
    links = (Link("a", "a", 1 / near_s), Link("b", "b", 1 / near_s), Link("a", "b", 1 / far_s))
    return Publishing(1.0, Transport.COLLECTIVE, links)


WINDOW = InFlightWindow({"long": 8, "agent": 8}, 32768.0, publish=publish(20.0))


def problem(*pools: Pool, batch: int = 64, **changes: object) -> Problem:
    base = Problem(
        pools or (Pool("a", GPU, 8, 2.0, rented=True),),
        (LONG,),
        FakePerformance(),
        tensor_parallel=(1,),
        train=TrainingWork(batch, seconds_per_token=2e-3),
        window=WINDOW,
    )
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]


def plan(asked: Problem) -> Placement:
    found = solve(asked)
    assert isinstance(found, Placement), found
    return found


def trainer(found: Placement) -> int:
    return sum(d.devices for d in found.deployments if d.role is Role.TRAINER)


def sustained(asked: Problem, found: Placement) -> float:
    assert asked.window is not None
    return min(h.rate for h in domain_windows(found, asked))


@pytest.mark.slow
@pytest.mark.parametrize("domains", [(LONG,), (LONG, AGENT)])
def test_no_size_of_the_trainer_given_beforehand_does_better(domains: tuple[DomainProfile, ...]) -> None:
    asked = problem(domains=domains)
    found = plan(asked)
    assert asked.train is not None
    rates = {}
    for devices in (2, 3, 4, 5):
        fixed = solve(dataclasses.replace(asked, train=dataclasses.replace(asked.train, devices=devices)))
        rates[devices] = fixed.rate if isinstance(fixed, Placement) else 0.0
    assert found.rate >= max(rates.values()) * (1 - 5e-3), rates
    assert found.bound >= max(rates.values()) * (1 - 5e-3)
    assert any("the window" in words for words in found.binds), found.binds
    assert sustained(asked, found) == pytest.approx(found.rate, rel=0.02)


def test_devices_move_from_training_to_rollout() -> None:
    blind, aware = plan(problem(window=None)), plan(problem())
    assert sustained(problem(), blind) < 0.95 * aware.rate
    assert aware.rate < blind.rate, "what is out of reach is not promised"
    assert {"the trainer", "publishing: 5 s"} < set(aware.binds), "places are held for as long as both take"
    assert any(note.startswith("training chosen with the window") for note in aware.notes)


def test_the_same_mix_on_one_pool_is_no_restriction() -> None:
    asked = problem(domains=(LONG, AGENT))
    rates = [
        plan(dataclasses.replace(asked, restriction=restriction)).rate
        for restriction in (Restriction.AGGREGATED, Restriction.NO_AFFINITY)
    ]
    assert rates[1] == pytest.approx(rates[0], rel=5e-3)


def test_a_window_that_binds_nothing_changes_nothing() -> None:
    wide = problem(train=TrainingWork(100_000, seconds_per_token=2e-3, staleness=8))
    blind = plan(dataclasses.replace(wide, window=None))
    found = plan(wide)
    assert [(d.role, d.tp, d.replicas) for d in found.deployments] == [
        (d.role, d.tp, d.replicas) for d in blind.deployments
    ]
    assert found.rate == pytest.approx(blind.rate, rel=1e-3)


@pytest.mark.slow
def test_engines_beside_the_trainer_where_weights_have_a_long_way() -> None:
    pools = (Pool("a", GPU, 8), Pool("b", SLOW, 8))
    far = plan(problem(*pools, window=dataclasses.replace(WINDOW, publish=publish(2000.0))))
    assert len({d.pool for d in far.deployments}) == 1
    close = plan(problem(*pools, window=dataclasses.replace(WINDOW, publish=publish(5.0))))
    assert len({d.pool for d in close.deployments}) == 2
    assert close.rate > far.rate


@pytest.mark.slow
def test_the_least_cost_of_a_rate_within_the_window_and_why_not_beyond() -> None:
    most = plan(problem())
    asked = problem(objective=Objective.MIN_COST, rate=0.7 * most.rate)
    found = plan(asked)
    assert sustained(asked, found) >= 0.98 * found.rate
    assert found.usd_per_hour <= most.usd_per_hour
    refused = solve(dataclasses.replace(asked, rate=1.2 * most.rate))
    assert isinstance(refused, Infeasible)
    assert "the window: 128 places for long" in refused.message


@pytest.mark.slow
def test_rate_per_dollar_is_within_the_window_too() -> None:
    asked = problem(objective=Objective.MAX_THROUGHPUT_PER_DOLLAR)
    found = plan(asked)
    assert sustained(asked, found) >= 0.98 * found.rate
    assert found.rate / found.usd_per_hour >= 0.99 * plan(problem()).rate / plan(problem()).usd_per_hour


def small(seed: int) -> Problem:
    """One of which every size of the trainer can be tried."""
    r = Random(seed)
    pools = [
        Pool("a", GPU, r.choice([4, 6, 8]), 2.0, rented=r.random() < 0.7),
        Pool("b", SLOW, r.choice([2, 4]), 1.0, rented=r.random() < 0.7),
    ]
    return problem(
        *pools[: r.choice([1, 1, 2])],
        domains=r.choice([(LONG,), (LONG, AGENT)]),
        gap=1e-3,
        window=dataclasses.replace(WINDOW, aborts=r.random() < 0.5, publish=publish(r.choice([5.0, 20.0, 60.0]))),
        train=TrainingWork(
            r.choice([32, 64, 128]), seconds_per_token=r.choice([5e-4, 2e-3, 4e-3]), staleness=r.choice([1, 2])
        ),
    )


def tried(asked: Problem) -> list[Placement]:
    """The best plan with each number of devices that train."""
    assert asked.train is not None
    trains = [dataclasses.replace(asked.train, devices=n) for n in range(1, max(p.count for p in asked.pools))]
    found = [solve(dataclasses.replace(asked, train=train)) for train in trains]
    return [one for one in found if isinstance(one, Placement)]


def as_good_as_tried(asked: Problem, share: float) -> None:
    most = max([plan(asked), *tried(asked)], key=lambda each: each.rate)
    found = plan(asked)
    assert found.rate >= most.rate * (1 - 0.01)
    assert found.bound >= most.rate * (1 - 1e-3)
    cheap = dataclasses.replace(asked, objective=Objective.MIN_COST, rate=share * most.rate)
    costs = [one.usd_per_hour for one in tried(cheap)]
    least = plan(cheap)
    assert all(least.usd_per_hour <= cost * 1.1 for cost in costs), "at most one device of ten more"


@pytest.mark.slow  # up to fifteen plans
@pytest.mark.parametrize(("seed", "share"), [(4, 0.999), (6, 0.9)])
def test_what_a_search_by_the_slopes_of_another_place_missed(seed: int, share: float) -> None:
    as_good_as_tried(small(seed), share)


@pytest.mark.slow  # up to fifteen plans for each example
@settings(max_examples=6)
@given(st.integers(0, 10**6), st.floats(0.5, 0.98))
def test_no_plan_is_missed_that_a_given_size_of_the_trainer_finds(seed: int, share: float) -> None:
    as_good_as_tried(small(seed), share)


@pytest.mark.slow
@settings(max_examples=4)
@given(st.integers(0, 10**6))
def test_a_simpler_plan_is_never_better(seed: int) -> None:
    r = Random(seed)
    pools = [Pool("a", GPU, r.choice([4, 8, 12])), Pool("b", SLOW, r.choice([4, 8]))]
    asked = problem(
        *pools[: r.choice([1, 2])],
        batch=r.choice([32, 128]),
        domains=r.choice([(LONG,), (LONG, AGENT)]),
        window=dataclasses.replace(WINDOW, aborts=r.random() < 0.5),
        gap=1e-3,
    )
    less = r.choice([Restriction.AGGREGATED, Restriction.NO_AFFINITY, Restriction.STRICT])
    found, simpler = solve(asked), solve(dataclasses.replace(asked, restriction=less))
    assume(isinstance(simpler, Placement))
    assert isinstance(found, Placement)
    assert isinstance(simpler, Placement)
    # Slopes of the window are taken where each of them came out: the comparison is as good as these.
    assert found.rate >= simpler.rate * (1 - 0.02)
    assert found.rate <= found.bound * (1 + 1e-9)
    for one in (found, simpler):
        assert sustained(asked, one) >= one.rate * (1 - 0.03)


@given(st.floats(0.0, 5.0), st.integers(1, 4))
def test_groups_that_are_all_alike_are_trained_as_fast_as_places_allow(rest: float, staleness: int) -> None:
    for aborts in (True, False):
        between, started = publish_interval(
            (1.0,), rest, staleness=staleness, places=staleness + 1.0, aborts=aborts, groups=1e9
        )
        # One publish after another: groups that began at one are complete in time, or training takes the longest.
        assert between == pytest.approx(max(rest, (1.0 + rest) / (staleness + 1)), rel=1e-3, abs=1e-3)
        assert started == pytest.approx(1.0)


@given(st.integers(0, 4), st.floats(0.0, 3.0))
def test_batches_that_wait_leave_their_longest_groups_the_time_that_they_take(staleness: int, rest: float) -> None:
    """A group that starts at a publish has alpha + 1 steps, less training and publish."""
    lengths = longest_member_ratios(LONG, 8, 32768.0)
    free, waiting = (
        publish_interval(
            lengths, rest, staleness=staleness, places=staleness + 1.0, aborts=False, waits=waits, groups=32.0
        )[0]
        for waits in (False, True)
    )
    assert waiting >= free - 1e-5
    tail = lengths[int(0.99 * len(lengths))]
    assert (staleness + 1) * waiting - rest == pytest.approx(tail, rel=0.02) or waiting == pytest.approx(free, rel=1e-3)
    assert (staleness + 1) * waiting - rest >= tail * 0.98


@given(st.integers(1, 3), st.floats(0.1, 3.0), st.booleans())
def test_longer_training_never_gives_more_batches(staleness: int, rest: float, aborts: bool) -> None:
    lengths = longest_member_ratios(LONG, 8, 32768.0)

    def between(rest_s: float) -> float:
        return publish_interval(
            lengths, rest_s, staleness=staleness, places=staleness + 1.0, aborts=aborts, groups=32.0
        )[0]

    assert rest <= between(rest) <= between(rest * 1.1) + 1e-5
    assert between(rest * 1.1) <= 1.1 * between(rest) + 1e-5
