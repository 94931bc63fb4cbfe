"""Shares keep their bounds always and their weights in the long run."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.policy.fairness import Apportionment, DomainShare, DriftQuota, bounded_shares

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
        assert abs(total[name] - share * sum(steps)) <= len(mix), "what rounding took comes back"


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
    quota = DriftQuota(mix, memory=4, max_step=0.05)
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
    assert shares[-1] == pytest.approx(0.8), "what does not move any more falls to its floor and no lower"
    assert max(abs(a - b) for a, b in itertools.pairwise(shares)) <= 0.05 + 1e-9


@settings(max_examples=40, deadline=None)
@given(domains(), st.lists(st.tuples(st.integers(0, 4), st.floats(1e-3, 1e3), st.floats(0, 1e3)), max_size=40))
def test_drifting_shares_keep_every_bound(mix: tuple[DomainShare, ...], seen: list[tuple[int, float, float]]) -> None:
    quota = DriftQuota(mix, memory=3)
    plan = Apportionment(mix)
    for index, cost, drift in seen:
        quota.observe(mix[index % len(mix)].domain, cost=cost, drift=drift)
        shares = quota.step()
        assert sum(shares.values()) == pytest.approx(1.0)
        assert all(d.floor - 1e-9 <= shares[d.domain] <= d.cap + 1e-9 for d in mix)
        assert sum(plan.step(17, shares).values()) == 17
        assert all(abs(v) <= len(mix) for v in plan.debt.values()), "debts stay bounded while shares move"


def test_figures_that_mean_nothing_are_refused() -> None:
    quota = DriftQuota((DomainShare("a", 1.0),))
    with pytest.raises(ValueError, match="domain b has no share"):
        quota.observe("b", cost=1.0, drift=1.0)
    with pytest.raises(ValueError, match="cost 0"):
        quota.observe("a", cost=0.0, drift=1.0)
    with pytest.raises(ValueError, match="max_step 0"):
        DriftQuota((DomainShare("a", 1.0),), max_step=0)
