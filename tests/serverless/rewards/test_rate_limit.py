"""Limits per minute: what begins in any 60 seconds, for any number of processes that share the state."""

from __future__ import annotations

import asyncio
import itertools
import pathlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.sim import loop as virtual
from serverless.rewards.rate_limit import MINUTE_S, RateLimit, SharedLimit


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from([1, 2, 5, 30, 600]),
    st.sampled_from([0, 1000, 50_000]),
    st.lists(st.tuples(st.floats(0, 20), st.integers(1, 2000), st.integers(1, 4)), min_size=1, max_size=40),
)
def test_a_minute_has_at_most_its_limits(requests: int, tokens: int, asks: list[tuple[float, int, int]]) -> None:
    """Requests begin in order; in any 60 s at most `requests` begin, with at most `tokens` and the largest of them."""
    clock, begun = Clock(), []
    shared = SharedLimit(RateLimit(requests, tokens), clock=clock)
    for pause, size, count in asks:
        clock.now += pause
        taken, waits = shared.take(*[size] * count, most_s=1e9)
        assert taken
        begun += [(clock.now + wait, size) for wait in waits]
    times = [at for at, _ in begun]
    assert times == sorted(times)
    for start in times:
        window = [size for at, size in begun if start <= at < start + MINUTE_S - 1e-6]
        assert len(window) <= requests
        assert not tokens or sum(window) <= tokens + max(size for _, size in begun)


def test_the_steady_rate_is_nine_tenths_of_the_limit() -> None:
    clock, shared = Clock(), None
    shared = SharedLimit(RateLimit(600), clock=clock)
    ends = [clock.now + shared.take(1, most_s=1e9)[1][0] for _ in range(6000)]
    assert ends[-1] - ends[0] == pytest.approx(6000 / (0.9 * 600) * 60, rel=0.02)


def test_a_wait_that_is_too_long_reserves_nothing() -> None:
    clock = Clock()
    shared = SharedLimit(RateLimit(1), clock=clock)
    assert shared.take(1, most_s=1.0) == (True, (0.0,))
    for _ in range(5):
        taken, (wait,) = shared.take(1, most_s=1.0)
        assert not taken
        assert wait == pytest.approx(120.0)
    clock.now += 120.0
    assert shared.take(1, most_s=1.0) == (True, (0.0,))


@pytest.mark.parametrize(("requests", "samples"), [(60, 3), (30, 2), (500, 30), (60, 20), (1, 3)])
def test_an_item_is_asked_for_whole_at_the_steady_rate(requests: int, samples: int) -> None:
    """No request is made for an item whose other requests have to wait: they would be paid for and thrown away."""
    clock, begun = Clock(), []
    shared = SharedLimit(RateLimit(requests), clock=clock)
    for _ in range(6):
        taken, waits = shared.take(*[1] * samples, most_s=1.0)
        if not taken:
            clock.now += waits[0]
            taken, waits = shared.take(*[1] * samples, most_s=1.0)
        assert taken, "once the announced wait is over"
        begun += [clock.now + wait for wait in waits]
        clock.now += waits[-1]
    burst = max(1.0, requests / 10)
    rate = max(requests - burst, requests / 2) / 60
    assert begun[-1] - begun[0] == pytest.approx((6 * samples - burst) / rate, abs=2 / rate + 1.0)


def test_an_absurd_wait_is_not_believed() -> None:
    clock = Clock()
    shared = SharedLimit(RateLimit(60), clock=clock)
    shared.hold(1e9)
    assert shared.take(1, most_s=0.0) == (False, (3600.0,))


def test_tokens_are_settled_by_what_was_used() -> None:
    clock = Clock()
    shared = SharedLimit(RateLimit(0, 1000), clock=clock)
    shared.take(100, most_s=0.0)
    assert not shared.take(100, most_s=0.0)[0]
    shared.settle(100, 20)
    assert shared.take(80, most_s=0.0)[0]
    shared.settle(80, 500)
    assert shared.take(1, most_s=0.0)[1][0] == pytest.approx((1 + 420) / (900 / 60))


def test_processes_share_the_state(tmp_path: pathlib.Path) -> None:
    """Each opens the file itself, as each worker does; a hold of one holds all."""
    clock, path = Clock(), tmp_path / "limit"
    workers = [SharedLimit(RateLimit(20), path, clock) for _ in range(4)]
    assert all(worker.shared for worker in workers)
    taken = [worker.take(1, most_s=0.0)[0] for worker in workers]
    assert taken == [True, True, False, False], "the burst of a limit of 20 is two"
    clock.now += 60.0
    workers[0].hold(5.0)
    assert workers[3].take(1, most_s=0.0) == (False, (5.0,))


def test_without_a_writable_directory_a_worker_has_its_own_state(tmp_path: pathlib.Path) -> None:
    shared = SharedLimit(RateLimit(1), tmp_path / "missing" / "limit")
    assert not shared.shared
    assert shared.take(1, most_s=0.0)[0]
    assert not shared.take(1, most_s=0.0)[0]


def test_waiting_callers_begin_one_after_another() -> None:
    begun: list[float] = []

    async def main() -> None:
        began = asyncio.get_running_loop().time() - 1000.0

        def clock() -> float:
            return asyncio.get_running_loop().time() - began

        shared = SharedLimit(RateLimit(60), clock=clock)

        async def ask() -> None:
            _, (wait,) = shared.take(1, most_s=100.0)
            await asyncio.sleep(wait)
            begun.append(clock())

        await asyncio.gather(*(ask() for _ in range(12)))

    virtual.run(main())
    gaps = [b - a for a, b in itertools.pairwise(begun[6:])]
    assert gaps == pytest.approx([60 / 54] * len(gaps))
