"""Accounting laws hold by construction: every second in one state, every sum the same total."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollart.ledger.intervals import (
    RESOURCE_CLOSED,
    RESOURCE_OPENED,
    EngineShares,
    ResourceClock,
    ResourceState,
)
from rollart.ports import Interval
from rollart.testing.laws import TilingError, find_tiling_errors, sum_intervals
from rollart.testing.ledger import MemoryRecorder


class FakeClock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def clocked(units: float = 1.0, price: float = 3600.0) -> tuple[ResourceClock, MemoryRecorder, FakeClock]:
    recorder, clock = MemoryRecorder(), FakeClock()
    resource = ResourceClock(
        role="engine", resource="engine-0", recorder=recorder, clock=clock, units=units, usd_per_unit_hour=price
    )
    return resource, recorder, clock


def interval(resource: str, t0: float, t1: float) -> Interval:
    return Interval("engine", resource, t0, t1, "busy")


def test_tears_are_found() -> None:
    torn = [interval("a", 0, 1), interval("a", 2, 4), interval("a", 3, 5), interval("b", 0, 5), interval("c", 2, 1)]
    assert find_tiling_errors(torn) == [
        TilingError("a", "gap", 1, 2),
        TilingError("a", "overlap", 3, 4),
        TilingError("c", "backwards", 2, 1),
    ]
    assert find_tiling_errors([interval("b", 0, 5)], start=0, end=5) == []
    assert find_tiling_errors([interval("b", 1, 5)], start=0, end=6) == [
        TilingError("b", "gap", 0, 1),
        TilingError("b", "gap", 5, 6),
    ]
    assert find_tiling_errors([]) == []


def test_a_clock_emits_what_ended() -> None:
    resource, recorder, clock = clocked(units=2)
    clock.now += 1
    resource.enter(ResourceState.BUSY)
    resource.enter(ResourceState.BUSY)
    clock.now += 2
    resource.enter(ResourceState.IDLE, "starved")
    resource.enter(ResourceState.SYNC)
    clock.now += 3
    resource.close()
    resource.close()
    resource.enter(ResourceState.BUSY)
    assert [(i.state, i.cause, i.t0, i.t1, i.usd) for i in recorder.intervals] == [
        ("startup", "", 100, 101, 2),
        ("busy", "", 101, 103, 4),
        ("sync", "", 103, 106, 6),
    ]
    assert [e.kind for e in recorder.events] == [RESOURCE_OPENED, RESOURCE_CLOSED]
    assert recorder.events[0].fields == {"role": "engine", "units": 2, "usd_per_unit_hour": 3600.0}


@given(
    st.lists(
        st.tuples(st.floats(0, 50), st.sampled_from(list(ResourceState)), st.sampled_from(["", "stale"]), st.booleans())
    )
)
def test_every_second_is_in_exactly_one_state(changes: list[tuple[float, ResourceState, str, bool]]) -> None:
    resource, recorder, clock = clocked()
    for seconds, state, cause, flush in changes:
        clock.now += seconds
        resource.enter(state, cause)
        if flush:
            resource.flush()
    resource.close()
    assert find_tiling_errors(recorder.intervals) == []
    assert math.isclose(sum(i.seconds for i in recorder.intervals), clock.now - 100, abs_tol=1e-9)


@given(
    st.lists(
        st.builds(
            Interval,
            role=st.sampled_from(["engine", "trainer", "reward"]),
            resource=st.sampled_from(["a", "b", "c", "d"]),
            t0=st.floats(0, 10),
            t1=st.floats(10, 1e6),
            state=st.sampled_from(list(ResourceState)),
            cause=st.sampled_from(["", "stale"]),
            units=st.floats(0, 64),
            price_usd_per_unit_hour=st.floats(0, 100),
        )
    )
)
def test_sums_by_state_and_cause_are_the_total(intervals: list[Interval]) -> None:
    total = math.fsum(i.usd for i in intervals)
    assert math.isclose(math.fsum(s.usd for s in sum_intervals(intervals)), total, rel_tol=1e-9, abs_tol=1e-9)


class TestEngineShares:
    def test_requests_share_the_time_they_overlap(self) -> None:
        resource, recorder, clock = clocked()
        shares = EngineShares(resource, clock=clock)
        shares.begin("a")
        clock.now += 2
        shares.begin("b")
        clock.now += 2
        assert shares.end("a") == pytest.approx(3)
        clock.now += 1
        assert shares.end("b") == pytest.approx(2)
        assert shares.end("b") == 0.0
        clock.now += 9
        resource.close()
        assert [(i.state, i.seconds) for i in recorder.intervals] == [("busy", 5), ("idle", 9)]

    def test_nobody_pays_while_held(self) -> None:
        resource, recorder, clock = clocked()
        shares = EngineShares(resource, clock=clock)
        shares.begin("a")
        clock.now += 1
        shares.hold(cause="publish")
        clock.now += 5
        shares.begin("b")
        shares.release()
        clock.now += 2
        assert (shares.end("a"), shares.end("b")) == (2.0, 1.0)
        assert [(i.state, i.cause, i.seconds) for i in recorder.intervals] == [
            ("busy", "", 1),
            ("sync", "publish", 5),
            ("busy", "", 2),
        ]

    def test_a_request_enters_once(self) -> None:
        resource, _, clock = clocked()
        shares = EngineShares(resource, clock=clock)
        shares.begin("a")
        with pytest.raises(ValueError, match="already in flight"):
            shares.begin("a")

    @given(st.lists(st.tuples(st.floats(0, 10), st.integers(0, 7), st.sampled_from(["toggle", "hold", "release"]))))
    def test_shares_add_up_to_busy_time(self, steps: list[tuple[float, int, str]]) -> None:
        resource, recorder, clock = clocked()
        shares = EngineShares(resource, clock=clock)
        live: set[str] = set()
        paid: list[float] = []
        for seconds, who, what in steps:
            clock.now += seconds
            if what == "hold":
                shares.hold()
            elif what == "release":
                shares.release()
            elif (name := str(who)) in live:
                live.remove(name)
                paid.append(shares.end(name))
            else:
                live.add(name)
                shares.begin(name)
        paid += [shares.end(name) for name in sorted(live)]
        resource.close()
        busy = math.fsum(i.seconds for i in recorder.intervals if i.state == ResourceState.BUSY)
        assert math.isclose(math.fsum(paid), busy, rel_tol=1e-9, abs_tol=1e-7)
        assert all(share >= 0 for share in paid)
        assert find_tiling_errors(recorder.intervals) == []
