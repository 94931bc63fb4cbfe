"""Adaptive concurrency against a small model of an engine's KV cache."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.serving.kv_admission import ConcurrencyLimits, KvPressure, LimitChange
from rollart.settings.rollout import ConcurrencySpec

pressures = st.builds(KvPressure, st.floats(0, 1), st.integers(0, 50), st.integers(0, 200), st.integers(0, 20))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 20), st.sampled_from("xy"), pressures), max_size=60))
def test_limits_stay_within_bounds_and_steps(reports: list[tuple[float, str, KvPressure]]) -> None:
    settings = ConcurrencySpec(start=8, least=2, most=40)
    limits, now = ConcurrencyLimits(settings), 0.0
    for seconds, engine, pressure in reports:
        now += seconds
        before, others = limits.limit(engine), {e: limits.limit(e) for e in "xy" if e != engine}
        decision = limits.observe(engine, pressure, now=now)
        assert decision.limit == limits.limit(engine)
        assert 2 <= decision.limit <= 40
        assert decision.limit - before <= settings.increase
        if decision.limit > before:
            assert pressure.kv_used <= settings.low
        if decision.limit < before:
            assert decision.change in (LimitChange.DOWN_PREEMPTED, LimitChange.DOWN_FULL)
            assert decision.limit >= int(before * settings.decrease)
        assert others == {e: limits.limit(e) for e in others}, "engines do not share a limit"


@settings(max_examples=20, deadline=None)
@given(st.integers(10, 400), st.integers(1, 400))
def test_it_finds_what_the_kv_cache_holds(fits: int, start: int) -> None:
    """An engine whose KV holds `fits` trajectories and that always has work: the limit ends in the band and stays
    there, with no preemption after the first search."""
    settings = ConcurrencySpec(start=start, most=1000, interval_s=5.0, settle_s=30.0)
    limits, preempted, now = ConcurrencyLimits(settings), 0, 0.0
    seen, late = [], 0
    for step in range(600):
        running = limits.limit("e")
        if running > fits:
            preempted += 1
            late += step >= 300
        limits.observe("e", KvPressure(min(running / fits, 1.0), preempted, running, 0), now=now)
        seen.append(limits.limit("e"))
        now += 5.0
    tail = seen[300:]
    assert max(tail) <= max(0.95 * fits + settings.increase, 1)
    assert min(tail) >= int(0.75 * 0.8 * fits), "never much less than fits"
    if fits * 0.15 >= settings.increase:
        assert late == 0, "the band is wider than a step: no preemption once it is found"
        assert len(set(tail)) == 1, "and inside of it nothing moves"


def test_lasting_pressure_ends_at_the_least_and_lasting_room_at_the_most() -> None:
    settings_ = ConcurrencySpec(start=30, least=7, most=45, increase=4)
    limits = ConcurrencyLimits(settings_)
    for now in range(0, 1000, 40):
        limits.observe("full", KvPressure(1.0, 0, limits.limit("full"), 3), now=now)
        limits.observe("free", KvPressure(0.1, 0, limits.limit("free"), 0), now=now)
    assert (limits.limit("full"), limits.limit("free")) == (7, 45)


def test_each_reason() -> None:
    limits = ConcurrencyLimits(ConcurrencySpec(start=8, increase=2, interval_s=5, settle_s=30))

    def see(now: float, kv: float, preemptions: int = 0, running: int = 8, waiting: int = 0) -> tuple[int, LimitChange]:
        decision = limits.observe("e", KvPressure(kv, preemptions, running, waiting), now=now)
        return decision.limit, decision.change

    assert see(0, 0.5) == (10, LimitChange.UP)
    assert see(1, 0.5, running=10) == (10, LimitChange.HOLD_SETTLING)
    assert see(5, 0.5, running=7) == (10, LimitChange.HOLD_UNUSED)
    assert see(6, 0.5, running=10, waiting=3) == (10, LimitChange.HOLD_WAITING)
    assert see(7, 0.9, running=10) == (10, LimitChange.HOLD_BAND)
    assert see(8, 0.5, running=10) == (12, LimitChange.UP)
    assert see(9, 0.96, running=12) == (9, LimitChange.DOWN_FULL), "an increase that was too much is taken back at once"
    assert see(20, 1.0, preemptions=4, running=12) == (9, LimitChange.HOLD_SETTLING), (
        "use falls only as trajectories end"
    )
    assert see(40, 0.9, preemptions=4) == (9, LimitChange.HOLD_BAND), (
        "preemptions while it drained are not counted again"
    )
    assert see(41, 0.9, preemptions=5) == (6, LimitChange.DOWN_PREEMPTED)
    assert see(80, 0.9, preemptions=0) == (6, LimitChange.HOLD_BAND), "a restarted engine counts anew"
