"""Refusals by the hundred, and runs that share an account, on virtual time: beside a semaphore that knew the limit."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.sim import loop as virtual
from rollart.testing.functions import LimitedAccount, LimitedBackend, fairness
from serverless.pipeline.offload import Offload
from serverless.pipeline.stages import OffloadStage
from serverless.providers.base import Backend, Reply
from serverless.types import Cause, FaultKind, InfraFault, Scored, Throttle
from tests.serverless.modelled import Modelled, takes
from tests.serverless.support import item, package

BEHAVE = {limit: package(batch={"max_items": 1}, concurrency=limit) for limit in (2, 6, 8, 32, 64, 200)}

TURNS = {name: package("behave", name=name, batch={"max_items": 1}, concurrency=20) for name in ("f0", "f1", "f2")}


async def send(backends: Backend | list[Backend], concurrency: int, calls: int, bursts: int = 1) -> float:
    """Seconds until calls have scored that arrive in bursts of equal size, half a second apart."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    async with Offload([BEHAVE[concurrency]], backends) as offload, asyncio.TaskGroup() as group:
        tasks = []
        for n in range(calls):
            if n and n % (calls // bursts) == 0:
                await asyncio.sleep(0.5)
            tasks.append(group.create_task(offload.submit("behave", item(str(n), value=n), 1000.0)))
        assert all([isinstance(await task, Scored) for task in tasks])
        return loop.time() - began


async def with_semaphore(account: LimitedAccount, calls: int, bursts: int) -> float:
    """The same with the account's limit known at every moment."""
    loop = asyncio.get_running_loop()
    backend, began, numbers = account.backend(0.05), loop.time(), iter(range(calls))

    async def worker() -> None:
        for n in numbers:
            await asyncio.sleep(max(0.0, began + 0.5 * (n // (calls // bursts)) - loop.time()))
            while account.running >= account.capacity:
                await asyncio.sleep(0.01)
            assert (await backend.invoke("behave", [{"id": str(n)}], deadline_s=1000.0)).fault is None

    async with asyncio.TaskGroup() as group:
        for _ in range(account.capacity):
            group.create_task(worker())
    return loop.time() - began


@pytest.mark.parametrize("concurrency", [32, 200])
@pytest.mark.parametrize(("bursts", "dips"), [(1, None), (4, None), (1, 2)], ids=["one burst", "four bursts", "dips"])
@pytest.mark.parametrize("retry_after_s", [None, 1.0])
@pytest.mark.parametrize("throttle", [Throttle.CONCURRENCY, Throttle.RESERVED, None])
def test_a_storm_takes_at_most_a_third_longer_than_with_a_semaphore_that_knew_the_limit(
    throttle: Throttle | None, retry_after_s: float | None, bursts: int, dips: int | None, concurrency: int
) -> None:
    known = virtual.run(with_semaphore(LimitedAccount(6, dips=dips), 200, bursts))
    backend = LimitedAccount(6, dips=dips).backend(0.05, throttle=throttle, retry_after_s=retry_after_s)
    took = virtual.run(send(backend, concurrency, 200, bursts))
    # A call that is refused in the last dip cannot end earlier than its wait.
    assert took <= 1.3 * known + 1.1 * (retry_after_s or 0.0) * bool(dips)
    assert backend.refused <= (60 if dips else 30)


@pytest.mark.slow
def test_the_limit_is_remembered_and_probed_rarely_and_a_higher_one_is_found() -> None:
    account = LimitedAccount(6)
    backend = account.backend(0.05)

    async def main() -> tuple[int, int, int]:
        async with asyncio.TaskGroup() as group:
            task = group.create_task(send(backend, 64, 6500))
            await asyncio.sleep(1.0)
            first = backend.refused
            await asyncio.sleep(20.0)
            later, account.full = backend.refused - first, 60
            began = len(backend.ended)
            await asyncio.sleep(3.0)
            found = len(backend.ended) - began
            await task
        return first, later, found

    first, later, found = virtual.run(main())
    assert first <= 30
    assert later <= 30, "in 400 windows of answers"
    assert found >= 0.5 * 60 * 3.0 / 0.05, "half of the capacity of three seconds"


# Runs that share an account


async def share(runs: int, capacity: int, *, late_s: float, seconds: float, seed: int = 0) -> list[LimitedBackend]:
    """Runs that always have calls to make, each `late_s` after the one before."""
    account, rng, loop = LimitedAccount(capacity), random.Random(seed), asyncio.get_running_loop()
    backends = [
        account.backend(0.05, spread=0.3, network_s=0.004, retry_after_s=1.0 if seed % 2 else None, seed=10 * seed + n)
        for n in range(runs)
    ]

    async def run(position: int) -> None:
        await asyncio.sleep(late_s * position + rng.uniform(0.0, 0.05))
        numbers = iter(range(1_000_000))

        async def caller(offload: Offload) -> None:
            while loop.time() < seconds:
                n = next(numbers)
                await offload.submit("behave", item(f"{position}.{n}", value=n), 1000.0)

        async with (
            Offload([BEHAVE[64]], [backends[position]], seed=100 * seed + position) as offload,
            asyncio.TaskGroup() as group,
        ):
            for _ in range(4 * capacity):
                group.create_task(caller(offload))

    async with asyncio.TaskGroup() as group:
        for position in range(runs):
            group.create_task(run(position))
    return backends


def ended(backend: LimitedBackend, since: float, until: float) -> int:
    return sum(since <= time < until for time in backend.ended)


@pytest.mark.slow
@pytest.mark.parametrize(("runs", "capacity", "seed"), [(2, 12, 1), (3, 24, 2), (4, 24, 1), (4, 24, 2)])
def test_runs_share_an_account_fairly_and_a_late_one_gets_its_share(runs: int, capacity: int, seed: int) -> None:
    last, end = 3.0 * (runs - 1), 3.0 * (runs - 1) + 30.0
    backends = virtual.run(share(runs, capacity, late_s=3.0, seconds=end, seed=seed), seed=seed)
    shares = [ended(backend, last + 10.0, end) for backend in backends]
    assert fairness(shares) >= 0.95
    most = capacity * 20.0 / 0.058
    assert sum(shares) >= 0.9 * most
    latest = ended(backends[-1], last + 2.0, last + 10.0)
    assert latest >= 0.6 * capacity / runs * 8.0 / 0.058, "within 200 calls one after the other"


@settings(max_examples=25, deadline=None)
@given(
    quota=st.integers(1, 12),
    functions=st.integers(1, 3),
    capacity=st.integers(1, 12),
    seed=st.none() | st.integers(0, 99),
)
def test_a_quota_bounds_a_run_and_its_functions_take_turns(
    quota: int, functions: int, capacity: int, seed: int | None
) -> None:
    account, peak, order = LimitedAccount(capacity), [0], list[str]()
    backend = account.backend(0.05)
    invoke = backend.invoke

    async def watched(function: str, event: Any, *, deadline_s: float, cause: Cause = Cause.CALL) -> Reply:
        order.append(function)
        peak[0] = max(peak[0], account.running + 1)
        return await invoke(function, event, deadline_s=deadline_s, cause=cause)

    backend.invoke = watched  # type: ignore[method-assign]
    names = list(TURNS)[:functions]
    packages = list(TURNS.values())[:functions]

    async def main() -> dict[str, dict[str, dict[str, int]]]:
        async with Offload(packages, backend, quota=quota, seed=seed or 0) as offload:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(offload.submit(name, item(f"{name}.{n}", value=n), 1000.0))
                    for name in names
                    for n in range(12)
                ]
            assert all(isinstance(task.result(), Scored) for task in tasks)
            return offload.refusals()

    refused = virtual.run(main(), seed=seed)
    assert peak[0] <= min(quota, capacity) + (quota > capacity)
    limits = set().union(*(one["limited"] for one in refused.values()))
    assert ("quota" in limits) == (quota < 12 * functions)
    if quota <= capacity:
        assert "concurrency" not in limits, "no call was refused"
        if seed is None and quota + functions <= 12 * functions:
            assert len(set(order[quota : quota + functions])) == functions


# An API behind the function


class Judged(Modelled):
    """A function whose API permits `rate` requests a second in bursts of as many."""

    def __init__(self, rate: float, retry_after_s: float | None) -> None:
        super().__init__(takes(0.05))
        self.rate, self.tokens, self.at = rate, rate, 0.0
        self.limited: list[float] = []
        self.wait = {} if retry_after_s is None else {"retry_after_s": retry_after_s}
        self.begun: list[float] = []

    async def invoke(self, function: str, event: Any, *, deadline_s: float, cause: Cause = Cause.CALL) -> Reply:
        loop = asyncio.get_running_loop()
        self.begun.append(loop.time())
        reply = await super().invoke(function, event, deadline_s=deadline_s, cause=cause)
        self.tokens, self.at = min(self.rate, self.tokens + (loop.time() - self.at) * self.rate), loop.time()
        if self.tokens >= 1.0:
            self.tokens -= 1.0
            return reply
        self.limited.append(loop.time())
        error = {"type": "RateLimitError", "kind": "throttled", "throttle": "rate", "retryable": True, **self.wait}
        return replace(reply, body=[{"id": one["id"], "error": error} for one in event])


@pytest.mark.parametrize("retry_after_s", [None, 1.0])
def test_a_rate_limit_behind_a_function_holds_its_queue_at_every_provider(retry_after_s: float | None) -> None:
    judge, other = Judged(10.0, retry_after_s), Modelled(takes(0.05), provider="other")
    took = virtual.run(send([judge, other], 32, 100))
    assert not other.calls, "the limit is not the provider's"
    assert took <= 1.3 * 90 / 10.0
    if retry_after_s is not None:
        for refused in judge.limited:
            assert not [time for time in judge.begun if refused + 1e-6 < time < refused + retry_after_s - 1e-6]
        assert len(judge.limited) <= 60


def test_an_api_that_never_admits_an_item_ends_it_as_throttled() -> None:
    async def main() -> tuple[Any, Any]:
        async with Offload([BEHAVE[8]], [Judged(0.0, 1.0)]) as offload:
            outcome = await offload.submit("behave", item(), 1000.0)
            return outcome, offload.stages()["behave"][OffloadStage.ADMISSION]

    outcome, stage = virtual.run(main())
    assert isinstance(outcome, InfraFault)
    assert (outcome.kind, outcome.throttle, stage.acted) == (FaultKind.THROTTLED, Throttle.RATE, 12)


def test_a_long_wait_for_an_api_ends_at_the_deadline() -> None:
    async def main() -> tuple[Any, float]:
        async with Offload([BEHAVE[8]], [Judged(0.0, 1e9)]) as offload:
            outcome = await offload.submit("behave", item(), 30.0)
            return outcome, asyncio.get_running_loop().time()

    outcome, now = virtual.run(main())
    assert isinstance(outcome, InfraFault)
    assert (outcome.kind, now) == (FaultKind.DEADLINE, 30.0)


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(
    rate=st.integers(1, 40).map(float),
    concurrency=st.sampled_from([2, 8, 32]),
    retry_after_s=st.none() | st.floats(0.05, 3.0),
)
def test_every_item_behind_a_rate_limit_is_scored_and_none_twice(
    rate: float, concurrency: int, retry_after_s: float | None
) -> None:
    judge = Judged(rate, retry_after_s)
    virtual.run(send(judge, concurrency, 40))
    assert 40 <= len(judge.begun) - len(judge.limited) <= 40 + judge.caused(Cause.HEDGE)
