"""The decisions of the stages, from values alone: window, breaker, hedging, time limits, batching and retrying.

Deadlines on one timer: each at its time, none that is over, and no memory for those.
"""

from __future__ import annotations

import asyncio
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.sim import loop as virtual
from serverless.pipeline.admission import BreakerState, CircuitBreaker, ConcurrencyWindow
from serverless.pipeline.answer_times import AnchorTimes, Latencies, prompt_key
from serverless.pipeline.items import PendingItem, Timers, WaitingItems
from serverless.pipeline.retrying import TokenBucket, retry_delay
from serverless.pipeline.stages import AdmissionSpec, BreakerSpec, HedgeSpec, LimitsSpec, RetrySpec
from serverless.spec import FunctionBatchSpec
from serverless.types import FaultKind, InfraFault, Item, Scored, Throttle
from serverless.wire import WireItem

RNG = random.Random(0)


def refusal(reason: Throttle | None, retry_after_s: float | None = None) -> InfraFault:
    return InfraFault(FaultKind.THROTTLED, True, "", reason, retry_after_s)


# The window


@pytest.mark.parametrize(
    ("reason", "size", "waits"),
    [
        (Throttle.CONCURRENCY, 6, False),
        (None, 6, False),
        (Throttle.RESERVED, 6, False),
        (Throttle.RATE, 30, True),
        (Throttle.SCALING, 30, True),
        (Throttle.QUEUE, 30, True),
    ],
)
def test_each_refusal_asks_for_something_else(reason: Throttle | None, size: int, waits: bool) -> None:
    window = ConcurrencyWindow(30)
    window.throttled(refusal(reason), 10.0, window.begin(), RNG, in_flight=7)
    assert window.size == size
    assert (window.ready > 10.0) is waits
    window.throttled(refusal(reason, retry_after_s=3.0), 10.0, window.begin(), RNG, in_flight=7)
    assert (window.ready >= 13.0) is waits, "only a limit of all calls stops them all"
    window.throttled(refusal(reason, retry_after_s=3.0), 10.0, window.begin(), RNG, in_flight=0)
    assert window.ready > 10.0, "with none in flight, no answer would make room"


def test_refusals_of_one_burst_yield_once_and_an_unknown_capacity_is_halved() -> None:
    window = ConcurrencyWindow(32)
    numbers = [window.begin() for _ in range(32)]
    for in_flight, number in zip(range(31, 5, -1), numbers, strict=False):
        window.throttled(refusal(Throttle.CONCURRENCY), 1.0, number, RNG, in_flight=in_flight)
    assert window.size == 5
    window = ConcurrencyWindow(32)
    window.throttled(refusal(Throttle.CONCURRENCY), 1.0, window.begin(), RNG, in_flight=0)
    assert window.size == 15


def test_a_burst_widens_in_steps_until_a_call_is_refused() -> None:
    window = ConcurrencyWindow(200)
    sizes = []
    for tick in range(6):
        window.widen(0.02 * tick)
        sizes.append(window.size)
    assert sizes == [32, 64, 128, 200, 200, 200]
    window = ConcurrencyWindow(200)
    window.widen(0.0)
    window.throttled(refusal(Throttle.CONCURRENCY), 0.01, window.begin(), RNG, in_flight=20)
    window.widen(1.0)
    assert window.size == 19


def test_an_only_call_that_is_refused_waits_longer_each_time_and_an_answer_forgets_it() -> None:
    window = ConcurrencyWindow(1, AdmissionSpec(wait_s=0.1, max_wait_s=1.0))
    now = 0.0
    waits = []
    for _ in range(8):
        window.throttled(refusal(Throttle.CONCURRENCY), now, window.begin(), RNG, in_flight=0)
        waits.append(window.ready - now)
        now = window.ready
    assert all(0.05 * 2**n <= w <= 0.1 * 2**n for n, w in enumerate(waits[:4]))
    assert all(0.5 <= w <= 1.0 for w in waits[4:])
    window.answered(now, 0.1, 1, in_flight=0)
    window.throttled(refusal(Throttle.CONCURRENCY), now, window.begin(), RNG, in_flight=0)
    assert window.ready - now <= 0.1


def test_growing_latency_makes_room_and_a_lasting_change_becomes_usual() -> None:
    window = ConcurrencyWindow(40)
    for _ in range(100):
        window.answered(0.0, 0.1, 4, in_flight=39)
    assert window.size == 40
    sizes = []
    for _ in range(100):
        window.answered(0.0, 0.5, 4, in_flight=39)
        sizes.append(window.size)
    assert 10 <= min(sizes) < 40
    for _ in range(1000):
        window.answered(0.0, 0.5, 4, in_flight=window.size - 1)
    assert window.size == 40


def test_single_stragglers_and_larger_batches_are_no_overload() -> None:
    window = ConcurrencyWindow(30)
    rng = random.Random(0)
    for n in range(2000):
        items = rng.choice((1, 4, 16))
        slower = 30.0 if n % 20 == 0 else rng.lognormvariate(0.0, 0.3)
        window.answered(0.0, 0.01 * items * slower, items, in_flight=10)
    assert window.size == 30


@given(
    steps=st.lists(
        st.tuples(st.sampled_from([*Throttle, None, "ok"]), st.integers(0, 40), st.floats(0.001, 10.0)), max_size=200
    ),
    most=st.integers(1, 40),
)
def test_the_window_stays_in_its_bounds(steps: list[tuple[Throttle | str | None, int, float]], most: int) -> None:
    window = ConcurrencyWindow(most)
    now = 0.0
    for what, in_flight, seconds in steps:
        now += seconds
        if what == "ok":
            window.answered(now, seconds, 1, in_flight=in_flight)
        else:
            assert what is None or isinstance(what, Throttle)
            window.throttled(refusal(what), now, window.begin(), RNG, in_flight=in_flight)
        assert 1 <= window.size <= most
        assert window.ready <= now + 5.0 or window.ready == float("-inf")


def test_a_raised_reserved_limit_is_found_in_time() -> None:
    window = ConcurrencyWindow(40)
    window.throttled(refusal(Throttle.RESERVED), 0.0, window.begin(), RNG, in_flight=6)
    sizes = []
    for second in range(1200):
        window.answered(float(second), 0.1, 1, in_flight=window.size - 1)
        sizes.append(window.size)
    assert sizes[20] == 6
    assert sizes[-1] == 40


# Hedging


@given(steps=st.lists(st.booleans(), max_size=500), budget=st.floats(0.0, 1.0))
def test_hedges_stay_within_the_budget(steps: list[bool], budget: float) -> None:
    bucket = TokenBucket(budget, most=5.0)
    calls = hedges = 0
    for is_call in steps:
        if is_call:
            bucket.earn()
            calls += 1
        else:
            hedges += bucket.take()
        assert hedges <= budget * calls + 1e-6


@given(values=st.lists(st.floats(0.0, 10.0), min_size=1, max_size=450))
def test_late_is_beyond_the_rolling_quantile(values: list[float]) -> None:
    latencies = Latencies(HedgeSpec(min_observations=20))
    for value in values:
        latencies.add(value, 3)
    late = latencies.late_after(3)
    assert latencies.late_after(8) is None
    if len(values) < 20:
        assert late is None
    else:
        kept = sorted(values[-200:])
        middle = kept[(len(kept) - 1) // 2]
        assert late is not None
        quantile = kept[math.ceil(0.95 * len(kept)) - 1]
        assert quantile <= late or late == pytest.approx(10.0 * middle)
        assert sum(value > late for value in kept) <= 0.05 * len(kept) or late == pytest.approx(10.0 * middle)


def test_stragglers_are_not_the_measure_of_themselves() -> None:
    latencies = Latencies(HedgeSpec(min_observations=20))
    for n in range(40):
        latencies.add(1.0 if n % 10 == 0 else 0.02, 1)
    assert latencies.late_after(1) == pytest.approx(0.2)


# The breaker


def test_a_breaker_opens_tries_and_closes() -> None:
    breaker = CircuitBreaker(BreakerSpec(consecutive=3, open_s=1.0, max_open_s=3.0))
    for _ in range(2):
        assert not breaker.ended(0.0, True, trial=breaker.begin())
    breaker.ended(0.0, False, trial=False)
    assert [breaker.ended(0.0, True, trial=False) for _ in range(3)] == [False, False, True]
    pauses = []
    now = 0.0
    for _ in range(4):
        assert not breaker.admits(breaker.until - 0.01)
        pauses.append(breaker.until - now)
        now = breaker.until
        assert breaker.admits(now)
        assert breaker.begin()
        assert not breaker.admits(now + 100.0), "one trial at a time"
        assert not breaker.ended(now, True, trial=False), "a call from before says nothing"
        assert breaker.ended(now, True, trial=True)
    assert pauses == [1.0, 2.0, 3.0, 3.0]
    now = breaker.until
    breaker.begin()
    breaker.ended(now, None, trial=True)
    assert breaker.admits(now), "a trial that was cancelled leaves room for another"
    breaker.begin()
    breaker.ended(now, False, trial=True)
    assert breaker.state is BreakerState.CLOSED


def test_a_breaker_opens_on_a_rate() -> None:
    breaker = CircuitBreaker(BreakerSpec(consecutive=100, rate=0.5, window=10))
    opened = [breaker.ended(0.0, n % 2 == 0, trial=False) for n in range(11)]
    assert opened == [False] * 10 + [True]


# Time limits


@given(
    answers=st.lists(st.tuples(st.sampled_from(["a", "b"]), st.booleans(), st.floats(0.0, 100.0)), max_size=100),
)
def test_limits_never_fall_and_keep_their_bounds(answers: list[tuple[str, bool, float]]) -> None:
    anchors = AnchorTimes(LimitsSpec())
    slowest: dict[str, float] = {}
    for key, correct, seconds in answers:
        before = anchors.limit(key) if key in slowest else 0.0
        anchors.learn(key, Scored(1.0 if correct else 0.5), seconds)
        if correct:
            slowest[key] = max(slowest.get(key, 0.0), seconds)
        expected = min(max(2.0, 1.5 * slowest[key]), 30.0) if key in slowest else 30.0
        assert anchors.limit(key) == expected >= before


def test_a_function_may_report_an_items_own_time_and_old_prompts_are_forgotten() -> None:
    anchors = AnchorTimes(LimitsSpec(), most=2)
    anchors.learn("a", Scored(1.0, {"seconds": 4.0}), 20.0)
    assert anchors.limit("a") == 6.0
    for key in ("b", "c"):
        anchors.learn(key, Scored(1.0), 2.0)
    assert [anchors.limit(k) for k in "abc"] == [30.0, 3.0, 3.0]


def test_answers_to_one_prompt_share_a_key() -> None:
    def of(prompt: str, answer: str, reference: str = "r", **metadata: object) -> str:
        messages = ({"role": "user", "content": prompt}, {"role": "assistant", "content": answer})
        return prompt_key(Item("x", messages, reference, metadata))

    assert of("p", "one") == of("p", "another")
    assert len({of("p", "a"), of("q", "a"), of("p", "a", "s"), of("p", "a", group="g")}) == 4
    assert of("p", "a", group="g") == of("q", "b", group="g") == "g"


def test_a_retry_waits_as_long_as_the_provider_asks() -> None:
    fault = InfraFault(FaultKind.UNAVAILABLE, True, retry_after_s=7.0)
    assert retry_delay(RetrySpec(), fault, 1, 100.0, RNG) == 7.0
    assert retry_delay(RetrySpec(), fault, 1, 6.0, RNG) is None


WIRE: WireItem = {"id": "1", "messages": [], "reference_answer": None, "metadata": {}}
FAULT = InfraFault(FaultKind.CRASH, retryable=True)


@given(
    sizes=st.lists(st.integers(0, 6000), min_size=1, max_size=20),
    waited=st.floats(0.0, 1.0),
    max_items=st.integers(1, 20),
    max_wait_ms=st.floats(0.0, 500.0),
    max_bytes=st.integers(1000, 5000),
)
def test_a_batch_keeps_its_bounds(
    sizes: list[int], waited: float, max_items: int, max_wait_ms: float, max_bytes: int
) -> None:
    spec = FunctionBatchSpec(max_items=max_items, max_wait_ms=max_wait_ms, max_bytes=max_bytes)
    waiting = WaitingItems(spec, by_length=False)
    for size in sizes:
        waiting.add(PendingItem(WIRE, size, None, "", expires=9.0, since=0.0))
    batch, wait_s = waiting.take(waited)
    count = len(batch)
    assert len(waiting) == len(sizes) - count
    if wait_s is not None:
        assert not batch
        assert 0.0 < wait_s <= max_wait_ms / 1000.0
        assert len(sizes) < max_items
        assert sum(sizes) <= max_bytes or len(sizes) == 1
    else:
        assert 1 <= count <= max_items
        assert [entry.size for entry in batch] == sizes[:count]
        assert sum(sizes[:count]) <= max_bytes or count == 1
        assert count == max_items or count < len(sizes) or waited >= max_wait_ms / 1000.0 - 1e-9
        if count < min(len(sizes), max_items):
            assert sum(sizes[: count + 1]) > max_bytes


@given(attempt=st.integers(1, 10), remaining=st.floats(0.0, 10.0), seed=st.integers(0, 99))
def test_a_delay_is_jittered_bounded_and_before_the_deadline(attempt: int, remaining: float, seed: int) -> None:
    settings = RetrySpec(max_attempts=5)
    delay = retry_delay(settings, FAULT, attempt, remaining, random.Random(seed))
    if delay is None:
        assert attempt >= 5 or remaining <= min(settings.cap_s, settings.base_s * 2 ** (attempt - 1))
    else:
        assert 0.0 <= delay <= min(settings.cap_s, settings.base_s * 2 ** (attempt - 1))
        assert delay < remaining
        assert attempt < 5


def test_what_is_not_retryable_is_not_retried() -> None:
    fault = InfraFault(FaultKind.CRASH, retryable=False)
    assert retry_delay(RetrySpec(), fault, 1, 10.0, random.Random(0)) is None


@given(steps=st.lists(st.booleans(), max_size=300), budget=st.floats(0.0, 1.0), reserve=st.floats(0.0, 30.0))
def test_retries_stay_within_the_budget(steps: list[bool], budget: float, reserve: float) -> None:
    bucket = TokenBucket(budget, most=reserve, tokens=reserve)
    retries = items = 0
    for is_item in steps:
        if is_item:
            bucket.earn()
            items += 1
        else:
            retries += bucket.take()
        assert retries <= reserve + budget * items + 1e-6


@settings(max_examples=40, deadline=None)
@given(steps=st.lists(st.tuples(st.floats(0.0, 0.5), st.floats(0.0, 5.0), st.booleans()), max_size=60))
def test_each_fires_once_at_its_time_unless_over(steps: list[tuple[float, float, bool]]) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        fired: dict[int, float] = {}
        over: set[int] = set()
        timers: Timers[int] = Timers(lambda n: fired.__setitem__(n, loop.time()), lambda n: n in over or n in fired)
        due: dict[int, float] = {}
        for n, (gap, wait, ends) in enumerate(steps):
            due[n] = loop.time() + wait
            timers.add(due[n], n)
            await asyncio.sleep(gap)
            if ends and n not in fired:
                over.add(n)
        await asyncio.sleep(10.0)
        assert set(fired) == set(due) - over
        assert all(abs(fired[n] - due[n]) < 1e-6 for n in fired)

    virtual.run(main())


def test_what_is_over_is_forgotten() -> None:
    async def main() -> None:
        over: set[int] = set()
        timers: Timers[int] = Timers(over.add, over.__contains__)
        for n in range(10_000):
            timers.add(1e6, n)
            over.add(n)
            assert len(timers) <= 65
        timers.close()

    virtual.run(main())
