"""Shares keep their bounds always and their weights in the long run."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.settings.rollout import FollowSpec
from rollart.shares import DomainShare, bounded_shares
from rollart.strategies.fairness import Apportionment, DriftQuota, FairBatches

NAMES = "abcde"


@st.composite
def domains(draw: st.DrawFn) -> tuple[DomainShare, ...]:
    count = draw(st.integers(1, 5))
    weights = draw(st.lists(st.floats(0.01, 100), min_size=count, max_size=count))
    floors = [draw(st.floats(0, 1 / count)) for _ in range(count)]
    caps = [draw(st.floats(max(1 / count, f), 1)) for f in floors]
    return tuple(DomainShare(NAMES[i], weights[i], floors[i], caps[i]) for i in range(count))


@settings(max_examples=40, deadline=None)
@given(domains())
def test_shares_sum_to_one_within_bounds_and_in_proportion(mix: tuple[DomainShare, ...]) -> None:
    shares = bounded_shares(mix)
    assert sum(shares.values()) == pytest.approx(1.0)
    rates = []
    for d in mix:
        assert d.floor - 1e-9 <= shares[d.domain] <= d.cap + 1e-9
        if d.floor + 1e-9 < shares[d.domain] < d.cap - 1e-9:
            rates.append(shares[d.domain] / d.weight)
    # One lambda: where nothing binds the rate is the same; at a floor it is at least that, at a cap at most.
    for rate in rates:
        assert rate == pytest.approx(rates[0])
        for d in mix:
            if shares[d.domain] <= d.floor + 1e-9 < d.cap:
                assert shares[d.domain] / d.weight >= rate * (1 - 1e-6)
            elif shares[d.domain] >= d.cap - 1e-9 > d.floor:
                assert shares[d.domain] / d.weight <= rate * (1 + 1e-6)


@settings(max_examples=40, deadline=None)
@given(domains(), st.lists(st.integers(0, 50), min_size=1, max_size=40))
def test_apportionment_sums_exactly_keeps_bounds_and_converges(mix: tuple[DomainShare, ...], steps: list[int]) -> None:
    plan = Apportionment(mix)
    shares = bounded_shares(mix)
    total = dict.fromkeys(shares, 0)
    for units in steps:
        given_ = plan.step(units)
        assert sum(given_.values()) == units
        for d in mix:
            assert int(d.floor * units + 1e-9) <= given_[d.domain] <= -int(-d.cap * units // 1)
            assert given_[d.domain] >= 0
            total[d.domain] += given_[d.domain]
    for name, share in shares.items():
        assert abs(total[name] - share * sum(steps)) <= len(mix), "rounding errors are repaid"


def test_the_debt_is_all_there_is_to_resume() -> None:
    mix = (DomainShare("a", 1.0), DomainShare("b", 2.0), DomainShare("c", 4.0))
    whole = Apportionment(mix)
    counts = [whole.step(5) for _ in range(9)]
    first = Apportionment(mix)
    again = [first.step(5) for _ in range(4)]
    second = Apportionment(mix, dict(first.debt))
    assert [*again, *(second.step(5) for _ in range(5))] == counts
    assert Apportionment(mix).step(7) == {"a": 1, "b": 2, "c": 4}


def test_ties_go_to_the_earlier_domain() -> None:
    plan = Apportionment((DomainShare("a", 1.0), DomainShare("b", 1.0)))
    assert [plan.step(1) for _ in range(3)] == [{"a": 1, "b": 0}, {"a": 0, "b": 1}, {"a": 1, "b": 0}]


def test_bounds_that_nothing_can_hold_are_refused() -> None:
    with pytest.raises(ValueError, match=r"floors sum to 1.2"):
        bounded_shares([DomainShare("a", 1, floor=0.6), DomainShare("b", 1, floor=0.6)])
    with pytest.raises(ValueError, match=r"caps to 0.8"):
        bounded_shares([DomainShare("a", 1, cap=0.4), DomainShare("b", 1, cap=0.4)])
    with pytest.raises(ValueError, match=r"floor 0.5 <= cap 0.4"):
        DomainShare("a", 1, floor=0.5, cap=0.4)
    with pytest.raises(ValueError, match="weight 0"):
        DomainShare("a", 0)


def test_quota_follows_injected_drift_and_comes_back() -> None:
    mix = (DomainShare("math", 1.0, floor=0.2), DomainShare("web", 1.0, floor=0.2))
    quota = DriftQuota(mix, FollowSpec(memory=4, max_step=0.05))
    for _ in range(5):
        for name in ("math", "web"):
            quota.observe(name, cost=1.0, drift=0.5)
        assert quota.step() == {"math": 0.5, "web": 0.5}, "alike domains keep their weights"
    shares = []
    for _ in range(60):
        quota.observe("math", cost=1.0, drift=0.5)
        quota.observe("web", cost=3.0, drift=0.5)
        shares.append(quota.step()["web"])
    assert shares == sorted(shares, reverse=True)
    assert shares[0] > 0.45 - 1e-9, "no jump"
    assert shares[-1] == pytest.approx(0.25, abs=1e-3), "a third as much learning per cost: 1 : 3"
    for _ in range(60):
        quota.observe("math", cost=1.0, drift=0.0)
        quota.observe("web", cost=1.0, drift=1.0)
        shares.append(quota.step()["web"])
    assert shares[-1] == pytest.approx(0.8), "a domain without drift falls to its floor and no lower"
    assert max(abs(a - b) for a, b in itertools.pairwise(shares)) <= 0.05 + 1e-9


@settings(max_examples=40, deadline=None)
@given(domains(), st.lists(st.tuples(st.integers(0, 4), st.floats(1e-3, 1e3), st.floats(0, 1e3)), max_size=40))
def test_drifting_shares_keep_every_bound(mix: tuple[DomainShare, ...], seen: list[tuple[int, float, float]]) -> None:
    quota = DriftQuota(mix, FollowSpec(memory=3))
    plan = Apportionment(mix)
    for index, cost, drift in seen:
        quota.observe(mix[index % len(mix)].domain, cost=cost, drift=drift)
        shares = quota.step()
        assert sum(shares.values()) == pytest.approx(1.0)
        assert all(d.floor - 1e-9 <= shares[d.domain] <= d.cap + 1e-9 for d in mix)
        assert sum(plan.step(17, shares).values()) == 17
        assert all(abs(v) <= len(mix) for v in plan.debt.values()), "debts stay bounded while shares move"


@st.composite
def fair(draw: st.DrawFn) -> FairBatches:
    return FairBatches(draw(domains()), draw(st.integers(1, 12)), draw(st.integers(0, 4)))


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(fair(), st.data())
def test_batches_of_what_is_ready_follow_the_weights_within_floors_and_caps(plan: FairBatches, data: Any) -> None:
    """Domains that are ready at any pace: after every batch, served counts are near the shares', bounds hold."""
    names = [d.domain for d in plan.domains]
    bound = (plan.slack + 1) * len(names)
    ready = dict.fromkeys(names, 0)
    for batch in range(1, 25):
        while (counts := plan.choose(ready)) is None:
            slow = data.draw(st.sampled_from(names))
            fast = data.draw(st.sampled_from(names))
            for name in (slow, *(n for n in names if n != slow or n == fast)):
                ready[name] += 1
        assert sum(counts.values()) == plan.units
        plan.take(counts)
        for d in plan.domains:
            assert 0 <= counts[d.domain] <= ready[d.domain]
            assert counts[d.domain] >= int(d.floor * plan.units + 1e-9), "its floor, in every batch"
            assert counts[d.domain] <= -int(-(d.cap * plan.units - 1e-9) // 1), "its cap, in every batch"
            assert abs(plan.served[d.domain] - plan.shares[d.domain] * plan.units * batch) <= bound
            ready[d.domain] -= counts[d.domain]


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(fair(), st.data())
def test_a_batch_that_grows_is_one_that_could_have_been_chosen(plan: FairBatches, data: Any) -> None:
    names = [d.domain for d in plan.domains]
    for _ in range(6):
        bounds = plan.bounds()
        taken = dict.fromkeys(names, 0)
        for _ in range(200):
            if sum(taken.values()) == plan.units:
                break
            ready = {n: data.draw(st.integers(0, 2)) for n in names}
            for name, count in plan.grow(ready, taken).items():
                assert 0 <= count <= ready[name]
                taken[name] += count
        else:
            more = plan.grow(dict.fromkeys(names, plan.units), taken)
            taken = {n: taken[n] + more[n] for n in names}
        assert sum(taken.values()) == plan.units
        assert all(low <= taken[n] <= high for n, (low, high) in bounds.items())
        plan.take(taken)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(fair(), st.integers(1, 4), st.integers(1, 12), st.data())
def test_admission_never_wedges_and_never_exceeds_the_window(
    plan: FairBatches, window: int, steps: int, data: Any
) -> None:
    """Whatever ends in whatever order, fails, or is begun again: once nothing more may start and all has ended, a batch
    can be formed."""
    names = [d.domain for d in plan.domains]
    extra = {n: data.draw(st.integers(0, 2)) for n in names}
    ready, running = dict.fromkeys(names, 0), dict.fromkeys(names, 0)
    taken = training = 0
    while taken < steps:
        held = {n: ready[n] + running[n] for n in names}
        left = {"window": window - training, "batches": steps - taken}
        name = plan.next_domain(held, **left, extra=extra, idle=not training)
        assert sum(held.values()) + training * plan.units <= window * plan.units + sum(extra.values())
        live = [n for n in names if running[n]]
        counts = plan.choose(ready)
        moves = [
            m
            for m, can in (("end", live), ("lose", live), ("start", name), ("take", counts), ("train", training))
            if can
        ]
        assert moves, "wedged"
        match data.draw(st.sampled_from([m for m in moves if m != "lose"] * 4 + moves)):
            case "start":
                assert name is not None
                running[name] += 1
            case "end":
                one = data.draw(st.sampled_from(live))
                running[one], ready[one] = running[one] - 1, ready[one] + 1
            case "lose" if live:
                running[data.draw(st.sampled_from(live))] -= 1
            case "train":
                training -= 1
            case "take" if counts is not None:
                plan.take(counts)
                taken, training = taken + 1, training + 1
                ready = {n: ready[n] - counts[n] for n in names}


def test_what_is_given_back_is_as_if_it_had_not_been_taken() -> None:
    plan = FairBatches((DomainShare("a", 1.0), DomainShare("b", 2.0)), 5, 1)
    plan.take({"a": 2, "b": 3})
    before = plan.debt()
    shares = dict(plan.shares)
    plan.take({"a": 3, "b": 2})
    plan.shares = {"a": 0.5, "b": 0.5}
    plan.untake({"a": 3, "b": 2}, shares)
    assert plan.debt() == pytest.approx(before)
    assert plan.shares == {"a": 0.5, "b": 0.5}


def test_nothing_starts_beside_what_the_next_batch_can_be_formed_of() -> None:
    """Within the slack a batch is there without its exact part: another group would be of no batch."""
    fair = FairBatches((DomainShare("a", 3.0), DomainShare("b", 1.0)), 5, slack=2)
    assert fair.planned() == {"a": 4, "b": 1}
    assert fair.next_domain({"a": 3, "b": 2}, window=1, batches=5, idle=True) is None
    assert fair.next_domain({"a": 1, "b": 4}, window=1, batches=5, idle=True) == "a", "b is no part of it beyond 3"
