"""Bounds and tie-breaks of the pure policies."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollart.control.groups import GroupState
from rollart.leases import Expiry, Leases
from rollart.model import AbortReason
from rollart.policy.admission import AdmissionWindow, DomainQuota
from rollart.policy.batching import ReadyGroup, select_batch
from rollart.policy.collapse import CollapseAlarm, StalenessAlarm
from rollart.policy.release import SlotLedger
from rollart.policy.routing import EngineView, choose_engine
from rollart.policy.staleness import StalenessBound
from rollart.sim import loop
from rollart.testing.ledger import MemoryRecorder


@st.composite
def quotas(draw: st.DrawFn) -> tuple[DomainQuota, ...]:
    shapes = draw(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 4)), min_size=1, max_size=3))
    return tuple(DomainQuota(f"d{i}", groups * size, size) for i, (groups, size) in enumerate(shapes))


@given(quotas(), st.integers(0, 4))
def test_admission_fills_every_window_and_never_overfills(domains: tuple[DomainQuota, ...], alpha: int) -> None:
    window = AdmissionWindow(domains, alpha)
    slots = SlotLedger()
    for i in range(10_000):
        domain = window.next_domain(slots.outstanding)
        if domain is None:
            break
        size = next(q.group_size for q in domains if q.domain == domain)
        slots.admit(f"g{i}", domain, size)
        assert slots.outstanding[domain] <= (alpha + 1) * next(q.quota for q in domains if q.domain == domain)
    for quota in domains:
        assert slots.outstanding[quota.domain] == (alpha + 1) * quota.quota


@given(quotas(), st.integers(0, 4), st.integers(0, 30))
def test_admission_never_starts_more_than_remains(domains: tuple[DomainQuota, ...], alpha: int, left: int) -> None:
    window = AdmissionWindow(domains, alpha)
    remaining = {q.domain: left for q in domains}
    used: dict[str, int] = {}
    while (domain := window.next_domain(used, {d: remaining[d] - used.get(d, 0) for d in remaining})) is not None:
        used[domain] = used.get(domain, 0) + next(q.group_size for q in domains if q.domain == domain)
    assert all(n <= left for n in used.values())


def test_admission_prefers_the_emptier_window_then_the_order_of_the_spec() -> None:
    window = AdmissionWindow((DomainQuota("a", 4, 2), DomainQuota("b", 4, 2)), 0)
    assert window.next_domain({}) == "a"
    assert window.next_domain({"a": 2}) == "b"
    assert window.next_domain({"a": 2, "b": 2}) == "a"


def test_a_quota_must_hold_whole_groups() -> None:
    with pytest.raises(ValueError, match="quota 5 must be a positive multiple of group size 2"):
        DomainQuota("a", 5, 2)


ready_groups = st.lists(
    st.tuples(st.sampled_from(["a", "b"]), st.integers(0, 6), st.integers(1, 500)), max_size=30
).map(lambda xs: [ReadyGroup(f"g{i}", d, v, 2, t, i) for i, (d, v, t) in enumerate(xs)])


@given(ready_groups, st.integers(0, 6), st.integers(0, 3), st.none() | st.integers(1, 2000))
def test_batches_are_fresh_whole_and_oldest_first(
    ready: list[ReadyGroup], version: int, alpha: int, budget: int | None
) -> None:
    bound = StalenessBound(alpha)
    quota = {"a": 4, "b": 6}
    chosen = select_batch(ready, quota, version=version, bound=bound, token_budget=budget)
    if chosen is None:
        if budget is None:
            fresh = [g for g in ready if not bound.stale(g.v0, version)]
            assert any(sum(2 for g in fresh if g.domain == d) < q for d, q in quota.items())
        return
    assert len({g.id for g in chosen}) == len(chosen)
    assert not any(bound.stale(g.v0, version) for g in chosen)
    for domain, wanted in quota.items():
        mine = [g for g in chosen if g.domain == domain]
        assert 0 < sum(g.samples for g in mine) <= wanted
        if budget is None:
            assert sum(g.samples for g in mine) == wanted
        elif len(mine) > 1:
            assert sum(g.tokens for g in mine) <= budget * wanted / sum(quota.values())
        left = [g for g in ready if g.domain == domain and g not in mine and not bound.stale(g.v0, version)]
        assert all((x.v0, x.order) < (y.v0, y.order) for x in mine for y in left)


@given(st.integers(0, 20), st.integers(0, 20), st.integers(0, 5))
def test_stale_is_exactly_past_the_bound(v0: int, version: int, alpha: int) -> None:
    assert StalenessBound(alpha).stale(v0, version) == (version - v0 > alpha)
    assert not StalenessBound(alpha).stale(None, version)


def test_a_group_is_given_up_after_its_attempts_and_not_for_staleness() -> None:
    state = GroupState(size=2, max_attempts=2)
    assert state.fail(AbortReason.STALE)
    assert state.fail(AbortReason.INFRA_FAULT)
    assert not state.fail(AbortReason.INFRA_FAULT)


views = st.lists(
    st.builds(
        EngineView,
        id=st.sampled_from([f"e{i}" for i in range(5)]),
        running=st.integers(0, 5),
        sessions=st.integers(0, 5),
        healthy=st.booleans(),
        version=st.integers(0, 2),
        fill=st.sampled_from([0.0, 0.25, 0.5]),
    ),
    max_size=5,
    unique_by=lambda v: v.id,
)


@given(views, st.integers(0, 2))
def test_routing_is_fenced_and_least_loaded(engines: list[EngineView], version: int) -> None:
    chosen = choose_engine(engines, version=version)
    eligible = {e.id: e for e in engines if e.healthy and e.version == version}
    if chosen is None:
        assert not eligible
    else:
        assert chosen in eligible
        first = min((e.fill, e.running) for e in eligible.values())
        assert (eligible[chosen].fill, eligible[chosen].running) == first
    assert chosen == choose_engine(list(reversed(engines)), version=version)


def test_slots_are_released_once() -> None:
    slots = SlotLedger()
    slots.admit("g", "a", 4)
    with pytest.raises(ValueError, match="already holds"):
        slots.admit("g", "a", 4)
    assert slots.release("g") == 4
    with pytest.raises(KeyError):
        slots.release("g")


def test_the_longest_waits_are_described_first() -> None:
    async def waits() -> None:
        leases = Leases(MemoryRecorder())
        with leases.note("a", "its reward"):
            await asyncio.sleep(1.0)
            with leases.hold("b", "an engine", 5.0, Expiry.GAP_FILL):
                await asyncio.sleep(2.0)
                first, second = leases.describe()
                assert first == "a waits 3.0 s for its reward (no deadline)"
                assert second == "b waits 2.0 s for an engine (deadline in 3.0 s)"
        assert leases.describe() == []

    loop.run(waits())


def test_an_incident_counts_once_however_many_members_of_a_group_it_took() -> None:
    group = GroupState(8, max_attempts=3)
    for incident in ("environment-0 of life 1", "environment-1 of life 4"):
        for _ in range(8):
            assert group.fail(AbortReason.INFRA_FAULT, incident)
    assert group.attempts == 2
    assert not group.fail(AbortReason.INFRA_FAULT, "environment-0 of life 2")


def test_a_policy_that_no_longer_learns_is_an_alarm_once() -> None:
    alarm = CollapseAlarm()
    norms = [0.3, 0.0, 0.0, 0.2, 0.0, 0.0, 0.0, 0.0, 0.1, 0.0, 0.0, 0.0]
    told = [alarm.step({"grad_norm": norm, "entropy": 0.5}) for norm in norms]
    assert [n for n, why in enumerate(told) if why] == [6, 11]
    assert "gradient was exactly 0" in told[6]
    assert [bool(alarm.step({"grad_norm": 1.0, "entropy": 0.0})) for _ in range(4)] == [False, False, True, False]
    assert not any(CollapseAlarm().step({}) for _ in range(5)), "a trainer that reports neither"


@pytest.mark.parametrize("rewarded", [True, False])
def test_rewards_that_are_alike_are_an_alarm_where_they_are_learned_from(rewarded: bool) -> None:
    """The bonus for entropy still has a gradient, and makes such a policy uniform."""
    alarm = CollapseAlarm(rewarded=rewarded)
    metrics = {"grad_norm": 0.3, "entropy": 5.0}
    told = [alarm.step({**metrics, "advantage_abs": size}) for size in (0.0, 0.0, 0.1, 0.0, 0.0, 0.0, 0.0)]
    assert [n for n, why in enumerate(told) if why] == ([5] if rewarded else [])


def test_samples_that_are_too_stale_are_warned_of_once() -> None:
    alarm = StalenessAlarm()
    shares = [0.95, 0.1] * 5 + [0.7] * 12 + [0.9] * 10 + [0.5] * 10
    found = [alarm.step({"effective_share": share}) for share in shares]
    assert {n: median for n, median in enumerate(found) if median is not None} == {9: 0.525, 36: pytest.approx(0.7)}
    assert all(StalenessAlarm().step({}) is None for _ in range(20)), "an outside trainer"
