"""Each stage of the pipeline on virtual time: its effect, its cost, and that it can be switched off."""

from __future__ import annotations

import asyncio
import bisect
import math
import pathlib
import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.sim import loop as virtual
from serverless.deploy.package import Package
from serverless.pipeline.offload import Offload
from serverless.pipeline.queues import run_seconds
from serverless.pipeline.stages import OffloadStage, PipelineSpec
from serverless.providers.base import Reply
from serverless.types import Cause, FaultKind, InfraFault, Invocation, Item, ModelFault, Outcome, Scored, Throttle
from tests.serverless.modelled import Modelled, fails, takes
from tests.serverless.support import Books, Simulated, item, package

ALONE = {"max_items": 1}
BEHAVE = package(batch=ALONE, concurrency=50)


def with_spec(**changed: Any) -> Package:
    spec = BEHAVE.spec.model_validate({**BEHAVE.spec.model_dump(), **changed})
    return Package(spec, BEHAVE.version, BEHAVE.files)


def numbered(n: int, **metadata: Any) -> Item:
    return item(str(n), value=float(n), **metadata)


def drive(
    main: Any, *providers: Modelled, seed: int | None = None, spec: dict[str, Any] | None = None, **kw: Any
) -> Any:
    async def inner() -> Any:
        async with Offload([with_spec(**(spec or {}))], providers, seed=seed or 0, **kw) as offload:
            return await main(offload)

    return virtual.run(inner(), seed=seed)


async def submit_all(o: Offload, items: Sequence[Item], *, deadline_s: float = 1000.0, gap_s: float = 0.0) -> Any:
    async with asyncio.TaskGroup() as group:
        tasks = []
        for one in items:
            tasks.append(group.create_task(o.submit("behave", one, deadline_s)))
            if gap_s:
                await asyncio.sleep(gap_s)
    return [task.result() for task in tasks]


# Dedupe and cache


def test_equal_items_under_way_are_one_call_and_each_gets_its_own_outcome() -> None:
    provider, books = Modelled(takes(1.0)), Books()

    async def main(o: Offload) -> Any:
        outcomes = await submit_all(o, [item(str(n), value=3.0) for n in range(5)])
        return outcomes, o.stages()["behave"]

    outcomes, stages = drive(main, provider, meter=books)
    assert outcomes == [Scored(3.0)] * 5
    assert len({id(o.metrics) for o in outcomes}) == 5
    assert len(provider.calls) == 1
    assert (
        stages[OffloadStage.DEDUPE].entered,
        stages[OffloadStage.DEDUPE].acted,
        stages[OffloadStage.DEDUPE].saved_calls,
    ) == (5, 4, 4)
    assert stages[OffloadStage.DEDUPE].saved_billed_s == pytest.approx(4.0)
    assert (books.usage["behave"].saved_items, books.usage["behave"].saved_s) == (4, pytest.approx(4.0))


def test_a_leader_that_is_cancelled_or_late_takes_nobody_with_it() -> None:
    provider = Modelled(takes(1.0))

    async def main(o: Offload) -> Any:
        async with asyncio.TaskGroup() as group:
            leader = group.create_task(o.submit("behave", item("a"), 10.0))
            late = group.create_task(o.submit("behave", item("b"), 0.5))
            follower = group.create_task(o.submit("behave", item("c"), 10.0))
            await asyncio.sleep(0.1)
            leader.cancel()
        return leader.cancelled(), late.result(), follower.result()

    cancelled, late, follower = drive(main, provider)
    assert cancelled
    assert late.kind is FaultKind.DEADLINE
    assert follower == Scored(1.0)
    assert len(provider.calls) == 1


def test_who_joins_with_more_time_is_called_again_if_the_leaders_was_too_short() -> None:
    provider = Modelled(takes(1.0))

    async def main(o: Offload) -> Any:
        async with asyncio.TaskGroup() as group:
            leader = group.create_task(o.submit("behave", item("a"), 0.5))
            await asyncio.sleep(0.1)
            follower = group.create_task(o.submit("behave", item("b"), 100.0))
        return leader.result(), follower.result()

    leader, follower = drive(main, provider)
    assert leader.kind is FaultKind.DEADLINE
    assert follower == Scored(1.0)
    assert [c.status for c in provider.calls] == ["deadline", "ok"]


def test_when_all_who_wait_for_a_call_are_gone_it_is_cancelled() -> None:
    provider = Modelled(takes(100.0))

    async def main(o: Offload) -> None:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(o.submit("behave", item(str(n)), 10.0)) for n in range(3)]
            await asyncio.sleep(0.1)
            for task in tasks:
                task.cancel()
        await asyncio.sleep(0.1)
        assert (provider.cancelled, provider.running) == (1, 0)

    drive(main, provider)


def test_what_is_not_deterministic_is_never_shared() -> None:
    provider = Modelled(takes(1.0))
    drive(lambda o: submit_all(o, [item()] * 4), provider, spec={"deterministic": False})
    assert len(provider.calls) == 4


def test_a_result_is_remembered_between_runs_and_faults_never_are(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "results.sqlite"
    books, broken, sound, unused = Books(), *(Modelled(b) for b in (fails(FaultKind.CRASH), takes(0.1), takes(0.1)))
    ask = [numbered(n) for n in range(4)]
    first = drive(lambda o: submit_all(o, ask), broken, cache=file)
    assert all(isinstance(o, InfraFault) for o in first)
    second = drive(lambda o: submit_all(o, ask), sound, cache=file)
    third = drive(lambda o: submit_all(o, [numbered(n) for n in range(5)]), unused, cache=file, meter=books)
    assert second == third[:4] == [Scored(float(n)) for n in range(4)]
    assert [len(sound.calls), len(unused.calls)] == [4, 1]
    assert books.usage["behave"].saved_items == 4


# Admission


def goodput(provider: Modelled, count: int, **kw: Any) -> float:
    async def main(o: Offload) -> float:
        outcomes = await submit_all(o, [numbered(n) for n in range(count)])
        assert outcomes == [Scored(float(n)) for n in range(count)]
        return count / asyncio.get_running_loop().time()

    rate: float = drive(main, provider, **kw)
    return rate


@pytest.mark.parametrize("reason", [Throttle.CONCURRENCY, Throttle.RESERVED, None])
@pytest.mark.parametrize("seed", [None, 1, 2])
def test_a_throttle_storm_converges_to_what_the_provider_bears(reason: Throttle | None, seed: int | None) -> None:
    async def body(provider: Modelled, event: Any, cause: Cause) -> None:
        await asyncio.sleep(provider_rng.uniform(0.05, 0.15))

    provider_rng = random.Random(0)
    fixed = goodput(Modelled(body, capacity=6), 300, spec={"concurrency": 6}, seed=seed)
    provider_rng = random.Random(0)
    storm = Modelled(body, capacity=6, reason=reason)
    found = goodput(storm, 300, spec={"concurrency": 60}, seed=seed)
    assert found >= 0.8 * fixed
    assert storm.refused < 150
    assert storm.peak <= 6


def storm(
    provider: Modelled, count: int, concurrency: int, *, retry_after_s: float, seed: int | None = None
) -> tuple[float, int]:
    """Seconds that a provider of limited capacity took for `count` items, and how many calls it refused. No item was
    called again before the time that its refusal had named."""
    allowed: dict[str, float] = {}
    invoke = provider.invoke

    async def watched(function: str, event: Any, *, deadline_s: float, cause: Cause = Cause.CALL) -> Reply:
        (one,) = event
        assert asyncio.get_running_loop().time() >= allowed.get(one["id"], 0.0) - 1e-9
        reply = await invoke(function, event, deadline_s=deadline_s, cause=cause)
        if reply.fault is not None:
            allowed[one["id"]] = asyncio.get_running_loop().time() + retry_after_s
        return reply

    async def main(o: Offload) -> float:
        outcomes = await submit_all(o, [numbered(n) for n in range(count)])
        assert outcomes == [Scored(float(n)) for n in range(count)]
        return asyncio.get_running_loop().time()

    provider.retry_after_s, provider.invoke = retry_after_s, watched  # type: ignore[method-assign]
    took: float = drive(main, provider, spec={"concurrency": concurrency}, seed=seed)
    return took, provider.refused


@pytest.mark.parametrize("reason", [Throttle.CONCURRENCY, Throttle.RESERVED, None])
def test_a_refused_call_waits_as_long_as_it_is_told_and_the_others_go_on(reason: Throttle | None) -> None:
    """200 calls of 50 ms where 6 run at once: a semaphore of 6 takes 1.7 s, one stop of a second per burst 33 s."""
    took, refused = storm(Modelled(takes(0.05), capacity=6, reason=reason), 200, 32, retry_after_s=1.0)
    assert took <= 1.5 * 1.7
    assert refused <= 40


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    capacity=st.integers(1, 40),
    more=st.integers(0, 60),
    rounds=st.integers(1, 30),
    call_s=st.floats(0.01, 2.0),
    retry_after_s=st.floats(0.1, 5.0),
    reason=st.sampled_from([Throttle.CONCURRENCY, Throttle.RESERVED, None]),
    seed=st.none() | st.integers(0, 99),
)
def test_a_storm_of_refusals_costs_little_more_than_a_semaphore(
    capacity: int,
    more: int,
    rounds: int,
    call_s: float,
    retry_after_s: float,
    reason: Throttle | None,
    seed: int | None,
) -> None:
    provider, concurrency = Modelled(takes(call_s), capacity=capacity, reason=reason), capacity + more
    took, refused = storm(provider, capacity * rounds, concurrency, retry_after_s=retry_after_s, seed=seed)
    bursts = math.ceil(math.log2(concurrency / capacity)) + 1  # each halves the window
    assert took <= 1.5 * rounds * call_s + bursts * retry_after_s + 0.1
    assert refused <= more + concurrency + bursts + 2 * took / retry_after_s


def test_a_rate_limit_is_waited_out_with_the_window_as_it_was() -> None:
    state = {"tokens": 5}

    async def body(provider: Modelled, event: Any, cause: Cause) -> InfraFault | None:
        if not state["tokens"]:
            refused.append(asyncio.get_running_loop().time())
            return InfraFault(FaultKind.THROTTLED, True, "rate", Throttle.RATE, retry_after_s=2.0)
        state["tokens"] -= 1
        await asyncio.sleep(0.01)
        return None

    refused: list[float] = []
    provider = Modelled(body)

    async def refill() -> None:
        while True:
            await asyncio.sleep(2.0)
            state["tokens"] = 5

    async def main(o: Offload) -> Any:
        task = asyncio.get_running_loop().create_task(refill())
        outcomes = await submit_all(o, [numbered(n) for n in range(20)])
        task.cancel()
        return outcomes, o.providers("behave")

    outcomes, providers = drive(main, provider, spec={"concurrency": 8})
    assert outcomes == [Scored(float(n)) for n in range(20)]
    assert providers == {"modelled": ("closed", 8)}
    assert len(set(refused)) == 3  # once per refill, not over and over


def test_throttling_costs_no_attempt_but_ends() -> None:
    provider = Modelled(takes(0.1), capacity=0)

    async def main(o: Offload) -> Any:
        return await o.submit("behave", item(), 1000.0), o.stages()["behave"]

    outcome, stages = drive(main, provider, settings=PipelineSpec.model_validate({"retry": {"enabled": False}}))
    assert outcome.kind is FaultKind.THROTTLED
    assert provider.refused == 13
    assert stages[OffloadStage.ADMISSION].extra_calls == 13


# Isolation


@settings(max_examples=30, deadline=None)
@given(n=st.integers(2, 64), guilty=st.integers(0, 63), seed=st.integers(0, 99))
def test_one_poisoned_item_is_found_and_only_it_fails(n: int, guilty: int, seed: int) -> None:
    guilty %= n

    async def body(provider: Modelled, event: list[dict[str, Any]], cause: Cause) -> InfraFault | None:
        await asyncio.sleep(0.01)
        poisoned = any(e["metadata"]["value"] == guilty for e in event)
        return InfraFault(FaultKind.OUT_OF_MEMORY, retryable=False) if poisoned else None

    provider = Modelled(body)
    outcomes = drive(
        lambda o: submit_all(o, [numbered(k) for k in range(n)]),
        provider,
        seed=seed,
        spec={"batch": {"max_items": n, "max_wait_ms": 5.0}},
    )
    assert [isinstance(o, Scored) for o in outcomes] == [k != guilty for k in range(n)]
    assert len(provider.calls) - 1 == provider.caused(Cause.ISOLATION) <= 2 * math.ceil(math.log2(n))


# Hedging


def stragglers(seed: int) -> Any:
    """One invocation in twenty takes 1 s."""
    rng = random.Random(seed)
    block: list[bool] = []

    async def body(provider: Modelled, event: Any, cause: Cause) -> None:
        if not block:
            block.extend([True] + [False] * 19)
            rng.shuffle(block)
        await asyncio.sleep(1.0 if block.pop() else rng.uniform(0.02, 0.03))

    return body


async def latencies(o: Offload, count: int) -> list[float]:
    loop = asyncio.get_running_loop()
    taken: list[float] = []
    numbers = iter(range(count))

    async def worker() -> None:
        for n in numbers:
            began = loop.time()
            assert await o.submit("behave", numbered(n), 100.0) == Scored(float(n))
            taken.append(loop.time() - began)

    async with asyncio.TaskGroup() as group:
        for _ in range(8):
            group.create_task(worker())
    return sorted(taken)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_hedges_cut_the_tail_within_their_budget(seed: int) -> None:
    plain, hedged = Modelled(stragglers(seed)), Modelled(stragglers(seed))
    count = 600
    off = PipelineSpec.model_validate({"hedge": {"enabled": False}})
    before = drive(lambda o: latencies(o, count), plain, settings=off, spec={"concurrency": 16})

    async def main(o: Offload) -> Any:
        return await latencies(o, count), o.stages()["behave"][OffloadStage.HEDGE]

    after, stage = drive(main, hedged, spec={"concurrency": 16})
    hedges = hedged.caused(Cause.HEDGE)
    assert 0 < hedges <= 0.05 * count
    assert len(hedged.calls) == count + hedges
    assert (stage.acted, stage.extra_calls) == (hedges, hedges)
    assert 0 < stage.helped <= hedges
    assert before[int(0.99 * count)] >= 4 * after[int(0.99 * count)]


@settings(max_examples=25, deadline=None)
@given(
    bursts=st.lists(st.tuples(st.integers(1, 60), st.floats(0.0, 2.0)), min_size=1, max_size=5),
    late=st.floats(0.0, 0.5),
    fails_=st.floats(0.0, 0.3),
    budget=st.sampled_from([0.0, 0.05, 0.2]),
    seed=st.integers(0, 2**16),
)
def test_at_every_moment_hedges_are_within_their_share_of_calls(
    bursts: list[tuple[int, float]], late: float, fails_: float, budget: float, seed: int
) -> None:
    rng = random.Random(seed)
    calls, hedges = list[float](), list[float]()

    async def body(provider: Modelled, event: Any, cause: Cause) -> InfraFault | None:
        await asyncio.sleep(1.0 if rng.random() < late else rng.uniform(0.01, 0.02))
        return InfraFault(FaultKind.CRASH, retryable=True) if rng.random() < fails_ else None

    class Counting(Modelled):
        async def invoke(self, function: str, event: Any, *, deadline_s: float, cause: Cause = Cause.CALL) -> Any:
            (hedges if cause is Cause.HEDGE else calls).append(asyncio.get_running_loop().time())
            return await super().invoke(function, event, deadline_s=deadline_s, cause=cause)

    async def main(o: Offload) -> None:
        async with asyncio.TaskGroup() as group:
            for burst, (count, pause) in enumerate(bursts):
                group.create_task(submit_all(o, [numbered(1000 * burst + n) for n in range(count)]))
                await asyncio.sleep(pause)

    spec = {"hedge": {"budget": budget, "min_observations": 5}}
    drive(main, Counting(body, capacity=30), seed=seed, settings=PipelineSpec.model_validate(spec))
    for n, at in enumerate(hedges, 1):  # within an instant, the loop's order is not that in which they were begun
        assert n <= budget * bisect.bisect_right(calls, at) + 1e-9


def test_a_uniformly_slow_function_is_never_called_twice() -> None:
    provider = Modelled(takes(30.0))
    outcomes = drive(lambda o: submit_all(o, [numbered(n) for n in range(200)]), provider, spec={"timeout_s": 60.0})
    assert outcomes == [Scored(float(n)) for n in range(200)]
    assert len(provider.calls) == 200


# Breaker and fallback


def test_a_breaker_opens_and_closes_and_nobody_is_lost() -> None:
    async def body(provider: Modelled, event: Any, cause: Cause) -> InfraFault | None:
        await asyncio.sleep(0.01)
        away = 1.0 < asyncio.get_running_loop().time() < 5.0
        return InfraFault(FaultKind.UNAVAILABLE, retryable=True) if away else None

    provider = Modelled(body)
    states: list[str] = []

    async def main(o: Offload) -> Any:
        async with asyncio.TaskGroup() as group:
            tasks = []
            for n in range(100):
                tasks.append(group.create_task(o.submit("behave", numbered(n), 1000.0)))
                await asyncio.sleep(0.1)
                states.append(o.providers("behave")["modelled"][0])
        return [task.result() for task in tasks], o.stages()["behave"]

    outcomes, stages = drive(main, provider)
    assert states[0] == states[-1] == "closed"
    assert {"open"} < set(states)
    assert sum(isinstance(o, InfraFault) for o in outcomes) <= 5
    while_away = [c for c in provider.calls if 1.0 < c.t0 < 5.0]
    assert len(while_away) < 20  # about 40 items came
    assert stages[OffloadStage.BREAKER].acted >= 1


@pytest.mark.parametrize("kind", [FaultKind.CRASH, FaultKind.TIMEOUT, FaultKind.OUT_OF_MEMORY, FaultKind.BAD_ANSWER])
def test_a_function_that_always_breaks_says_so_at_once(kind: FaultKind) -> None:
    """With nowhere else to go: a run that is to end by its rate of faults must not wait for a breaker's trials."""
    provider = Modelled(fails(kind, retryable=True))

    async def main(o: Offload) -> Any:
        outcomes = await submit_all(o, [numbered(n) for n in range(60)])
        return outcomes, asyncio.get_running_loop().time(), o.providers("behave")["modelled"][0]

    outcomes, ended, state = drive(main, provider)
    assert {o.kind for o in outcomes} == {kind}
    assert state == "closed"
    assert ended < 10.0


def test_model_faults_and_refusals_do_not_open_a_breaker() -> None:
    async def main(o: Offload) -> Any:
        outcomes = await submit_all(o, [item(str(n), do="policy", n=n) for n in range(30)])
        return outcomes, o.providers("behave")["simulated"][0]

    async def inner() -> Any:
        async with Simulated().open([BEHAVE]) as backend, Offload([BEHAVE], backend) as o:
            return await main(o)

    outcomes, state = virtual.run(inner())
    assert {type(o) for o in outcomes} == {ModelFault}
    assert state == "closed"
    refused = Modelled(takes(0.1), capacity=0)

    async def throttled(o: Offload) -> str:
        await submit_all(o, [numbered(n) for n in range(10)])
        return o.providers("behave")["modelled"][0]

    assert drive(throttled, refused) == "closed"


@pytest.mark.parametrize(
    "first", [fails(FaultKind.UNAVAILABLE), fails(FaultKind.UNAVAILABLE, retryable=False)], ids=["passing", "lasting"]
)
def test_calls_fall_back_in_the_order_of_the_chain(first: Any) -> None:
    chain = [
        Modelled(first, provider="modal"),
        Modelled(takes(0.1), provider="aws", capacity=0),
        Modelled(takes(0.1), provider="local"),
    ]

    async def main(o: Offload) -> Any:
        return await submit_all(o, [numbered(n) for n in range(40)], gap_s=0.05), o.stages()["behave"]

    outcomes, stages = drive(main, *chain)
    assert outcomes == [Scored(float(n)) for n in range(40)]
    assert 5 <= len(chain[0].calls) < 40  # until its breaker opened, and trials
    assert {c.cause for c in chain[2].calls} == {Cause.FALLBACK}
    assert stages[OffloadStage.FALLBACK].helped == 40
    assert all(one.deployed == ["behave"] for one in chain)


def test_a_provider_that_recovers_is_used_again() -> None:
    async def body(provider: Modelled, event: Any, cause: Cause) -> InfraFault | None:
        await asyncio.sleep(0.01)
        away = asyncio.get_running_loop().time() < 3.0
        return InfraFault(FaultKind.UNAVAILABLE, retryable=True) if away else None

    first, second = Modelled(body, provider="aws"), Modelled(takes(0.01), provider="local")
    outcomes = drive(lambda o: submit_all(o, [numbered(n) for n in range(200)], gap_s=0.05), first, second)
    assert outcomes == [Scored(float(n)) for n in range(200)]
    assert max(c.t0 for c in second.calls) < 7.0
    assert len([c for c in first.calls if c.t0 > 7.0 and c.cause is Cause.CALL]) >= 50


def test_what_the_code_did_is_not_tried_elsewhere() -> None:
    first = Modelled(fails(FaultKind.CRASH, retryable=False), provider="aws")
    second = Modelled(takes(0.1), provider="local")
    outcome = drive(lambda o: o.submit("behave", item(), 10.0), first, second)
    assert outcome.kind is FaultKind.CRASH
    assert second.calls == []


@pytest.mark.parametrize(("deterministic", "allowed"), [(False, False), (False, True), (True, False), (True, True)])
def test_a_call_that_was_lost_is_executed_again_only_where_that_is_allowed(deterministic: bool, allowed: bool) -> None:
    """Neither by a retry, nor by another provider, nor to find a guilty item."""
    first = Modelled(fails(FaultKind.UNAVAILABLE), provider="aws", answers=False)
    second = Modelled(takes(0.1), provider="local")
    outcomes = drive(
        lambda o: submit_all(o, [numbered(n) for n in range(4)]),
        first,
        second,
        settings=PipelineSpec.model_validate({"retry": {"lost": allowed}}),
        spec={"deterministic": deterministic, "batch": {"max_items": 4, "max_wait_ms": 1.0}},
    )
    if deterministic and allowed:
        assert outcomes == [Scored(float(n)) for n in range(4)]
    else:
        assert [(o.kind, o.retryable) for o in outcomes] == [(FaultKind.UNAVAILABLE, False)] * 4
        assert (len(first.calls), len(second.calls)) == (1, 0)


def test_a_batch_whose_caller_lost_patience_is_not_taken_apart() -> None:
    """It may still run, all of it: each half would be executed a second time."""
    provider = Modelled(fails(FaultKind.TIMEOUT, retryable=False), answers=False)
    outcomes = drive(
        lambda o: submit_all(o, [numbered(n) for n in range(8)]),
        provider,
        spec={"batch": {"max_items": 8, "max_wait_ms": 1.0}},
    )
    assert {o.kind for o in outcomes} == {FaultKind.TIMEOUT}
    assert len(provider.calls) == 1


@pytest.mark.parametrize("chain", [1, 2])
def test_an_item_that_no_provider_can_be_sent_does_not_fail_those_that_share_its_call(chain: int) -> None:
    class Small(Modelled):
        async def invoke(self, function: str, event: Any, *, deadline_s: float, cause: Cause = Cause.CALL) -> Any:
            if sum(len(str(e["metadata"])) for e in event) > 1000:
                self.refused += 1
                return Reply(fault=InfraFault(FaultKind.ENVIRONMENT, retryable=False, detail="too many bytes"))
            return await super().invoke(function, event, deadline_s=deadline_s, cause=cause)

    providers = [Small(takes(0.1), provider=f"p{n}") for n in range(chain)]
    items = [numbered(n, pad="x" * (2000 if n == 5 else 10)) for n in range(8)]

    async def main(o: Offload) -> Any:
        return await submit_all(o, items * 3), o.providers("behave")

    outcomes, states = drive(main, *providers, spec={"batch": {"max_items": 8, "max_wait_ms": 1.0}})
    assert [isinstance(o, Scored) for o in outcomes] == [n != 5 for n in range(8)] * 3
    assert {outcomes[n].kind for n in (5, 13, 21)} == {FaultKind.ENVIRONMENT}
    assert {state for state, _ in states.values()} == {"closed"}, "an item's size says nothing about a provider"


# Time limits


def test_limits_follow_correct_answers_and_never_cut_one() -> None:
    rng = random.Random(3)
    took: dict[float, float] = {}

    async def body(provider: Modelled, event: list[dict[str, Any]], cause: Cause) -> None:
        (one,) = event
        assert 2.0 <= one["metadata"]["timeout_s"] <= 30.0
        await asyncio.sleep(one["metadata"]["seconds"])

    provider = Modelled(body)
    slowly = [1.9, 2.5, *(rng.uniform(0.5, 3.7) for _ in range(8)), 4.0, *(rng.uniform(0.5, 5.0) for _ in range(8))]
    correct = [numbered(n, group="g", seconds=s) for n, s in enumerate(slowly, 1)]
    loops = [numbered(n, group="g", seconds=1e4) for n in range(100, 110)]
    other = numbered(999, group="h", seconds=20.0)

    async def main(o: Offload) -> Any:
        loop = asyncio.get_running_loop()
        first = [await o.submit("behave", one, 1000.0) for one in correct]
        cut = []
        for one in loops:
            began = loop.time()
            cut.append(await o.submit("behave", one, 1000.0))
            took[one.metadata["value"]] = loop.time() - began  # type: ignore[index]
        return first, cut, await o.submit("behave", other, 1000.0)

    first, cut, unseen = drive(main, provider, spec={"timeout_s": 60.0, "timeout_floor": -1.0})
    assert all(isinstance(o, Scored) for o in first)
    assert {type(o) for o in cut} == {ModelFault}
    assert {o.floor for o in cut} == {-1.0}
    slowest = max(float(one.metadata["seconds"]) for one in correct)  # type: ignore[arg-type]
    assert list(took.values()) == [pytest.approx(1.5 * slowest)] * len(loops)
    assert isinstance(unseen, Scored)


def test_a_limit_that_passed_without_a_worker_is_the_platforms() -> None:
    class Busy(Modelled):
        async def invoke(self, function: str, event: Any, *, deadline_s: float, cause: Cause = Cause.CALL) -> Any:
            await asyncio.sleep(deadline_s)
            from serverless.providers.base import Reply

            return Reply(fault=InfraFault(FaultKind.DEADLINE, retryable=False, detail="no worker"))

    outcome = drive(
        lambda o: o.submit("behave", item(), 1000.0), Busy(takes(0)), spec={"timeout_s": 60.0, "timeout_floor": -1.0}
    )
    assert isinstance(outcome, InfraFault)
    assert outcome.kind is FaultKind.TIMEOUT


@pytest.mark.parametrize("queued_s", [2.0, 1.0])
def test_a_limit_that_passed_in_a_worker_that_had_just_started_is_the_policys(queued_s: float) -> None:
    """The call waited `queued_s` for a start of 5 s: its own time begins after it."""

    class Cold(Modelled):
        async def invoke(self, function: str, event: Any, *, deadline_s: float, cause: Cause = Cause.CALL) -> Reply:
            asked = asyncio.get_running_loop().time()
            await asyncio.sleep(deadline_s)
            t0, t1 = asked + queued_s, asked + deadline_s
            bill = Invocation(function, "pool", "w", t0, t1, 5.0, 60.0, 512, 1, "deadline", cause, "m", queued_s)
            return Reply(None, InfraFault(FaultKind.DEADLINE, retryable=False, detail="too late"), bill)

    outcome = drive(
        lambda o: o.submit("behave", item(), 1000.0), Cold(takes(0)), spec={"timeout_s": 60.0, "timeout_floor": -1.0}
    )
    assert isinstance(outcome, ModelFault)
    assert outcome.floor == -1.0


@pytest.mark.parametrize(
    ("cold_s", "queued_s", "seconds"), [(0.0, 0.0, 2.0), (0.5, 0.0, 1.5), (0.5, 0.5, 2.0), (0.5, 3.0, 2.0), (3.0, 0, 0)]
)
def test_a_start_counts_once(cold_s: float, queued_s: float, seconds: float) -> None:
    """Lambda's and Modal's calls include their start, those of a pool of workers follow it."""
    bill = Invocation("f", "p", "w", 10.0, 12.0, cold_s, 2.0, 512, 1, "ok", queued_s=queued_s)
    assert run_seconds(bill) == seconds


def test_without_a_floor_an_expired_limit_is_an_infrastructure_fault() -> None:
    outcome = drive(
        lambda o: o.submit("behave", item(), 1000.0),
        Modelled(takes(1e4)),
        spec={"timeout_s": 60.0},
        settings=PipelineSpec.model_validate({"limits": {"scope": "all"}, "retry": {"enabled": False}}),
    )
    assert isinstance(outcome, InfraFault)
    assert outcome.kind is FaultKind.TIMEOUT


# All of it


def test_long_items_do_not_hold_short_ones() -> None:
    async def body(provider: Modelled, event: list[dict[str, Any]], cause: Cause) -> None:
        await asyncio.sleep(max(len(str(e["metadata"])) for e in event) * 1e-3)

    provider = Modelled(body)
    items = [numbered(n, pad="x" * (5000 if n % 4 == 0 else 100)) for n in range(16)]
    drive(
        lambda o: submit_all(o, items),
        provider,
        spec={"batch": {"max_items": 16, "max_wait_ms": 2.0}},
        settings=PipelineSpec.model_validate({"batch": {"by_length": True}}),
    )
    assert sorted(len(event) for event in provider.events) == [4, 12]
    assert all(len({len(str(e["metadata"])) > 1000 for e in event}) == 1 for event in provider.events)


STAGES = ["dedupe", "cache", "admission", "batch", "hedge", "isolation", "retry", "breaker", "fallback"]


@pytest.mark.parametrize("stage", [*STAGES, "limits", "all"])
def test_every_stage_can_be_left_out(stage: str, tmp_path: pathlib.Path) -> None:
    rng = random.Random(5)

    async def body(provider: Modelled, event: list[dict[str, Any]], cause: Cause) -> InfraFault | None:
        await asyncio.sleep(rng.uniform(0.01, 0.05))
        return InfraFault(FaultKind.CRASH, retryable=True) if rng.random() < 0.1 else None

    off: dict[str, Any] = {name: {"enabled": False} for name in STAGES} | {"limits": {"scope": "off"}}
    chosen = PipelineSpec.model_validate(off if stage == "all" else {stage: off[stage]})
    provider = Modelled(body, capacity=3)

    async def main(o: Offload) -> Any:
        return await submit_all(o, [numbered(n % 40) for n in range(80)], gap_s=0.003), o.stages()["behave"]

    outcomes, stages = drive(
        main,
        provider,
        settings=chosen,
        cache=tmp_path / "cache.sqlite",
        spec={"concurrency": 5, "timeout_floor": 0.0, "batch": {"max_items": 4}},
    )
    assert all(o == Scored(float(n % 40)) for n, o in enumerate(outcomes) if not isinstance(o, InfraFault))
    assert sum(isinstance(o, Scored) for o in outcomes) >= (20 if stage in ("admission", "all") else 60)
    for left_out in STAGES if stage == "all" else [stage]:
        counts = stages[OffloadStage(left_out)]
        assert (counts.acted, counts.extra_calls, counts.saved_calls) == (0, 0, 0), left_out


@settings(max_examples=40, deadline=None)
@given(
    faults=st.dictionaries(st.sampled_from(list(FaultKind)), st.floats(0.0, 0.2), max_size=3),
    tail=st.sampled_from([0.0, 0.05, 0.3]),
    count=st.integers(1, 150),
    distinct=st.integers(1, 150),
    gap_s=st.sampled_from([0.0, 0.002]),
    deadline_s=st.sampled_from([0.5, 500.0]),
    concurrency=st.integers(1, 8),
    capacity=st.integers(1, 8),
    max_items=st.integers(1, 8),
    chain=st.integers(1, 3),
    by_length=st.booleans(),
    cancel=st.integers(0, 20),
    seed=st.integers(0, 2**16),
)
def test_whatever_happens_the_bounds_hold(
    faults: dict[FaultKind, float],
    tail: float,
    count: int,
    distinct: int,
    gap_s: float,
    deadline_s: float,
    concurrency: int,
    capacity: int,
    max_items: int,
    chain: int,
    by_length: bool,
    cancel: int,
    seed: int,
) -> None:
    rng = random.Random(seed)

    async def body(provider: Modelled, event: Any, cause: Cause) -> InfraFault | None:
        await asyncio.sleep(1.0 if rng.random() < tail else rng.uniform(0.01, 0.02))
        draw = rng.random()
        for kind, share in faults.items():
            draw -= share
            if draw < 0.0:
                return InfraFault(kind, retryable=rng.random() < 0.8)
        return None

    providers = [Modelled(body, provider=f"p{n}", capacity=capacity) for n in range(chain)]
    delivered: list[tuple[int, Outcome]] = []

    async def one(o: Offload, n: int) -> None:
        delivered.append((n, await o.submit("behave", numbered(n % distinct), deadline_s)))

    async def main(o: Offload) -> Any:
        began = asyncio.get_running_loop().time()
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(o, n)) for n in range(count)]
            await asyncio.sleep(gap_s)
            for task in tasks[:cancel]:
                task.cancel()
        assert deadline_s > 1.0 or asyncio.get_running_loop().time() <= began + gap_s + deadline_s + 1e-9
        await asyncio.sleep(0.0)
        await asyncio.sleep(0.01)
        if deadline_s > 1.0:
            assert sum(map(o.waiting_for, o.functions)) == 0
        assert sum(p.running for p in providers) == 0
        return o.stages()["behave"]

    stages = drive(
        main,
        *providers,
        seed=seed,
        settings=PipelineSpec.model_validate({"batch": {"by_length": by_length}}),
        spec={"concurrency": concurrency, "batch": {"max_items": max_items, "max_wait_ms": 1.0}},
    )
    # Exactly one outcome each, and an answer is the answer to that item.
    numbers = [n for n, _ in delivered]
    assert len(numbers) == len(set(numbers)) >= count - cancel
    assert all(isinstance(o, InfraFault) or o == Scored(float(n % distinct)) for n, o in delivered)
    for provider in providers:
        assert provider.peak <= min(concurrency, capacity)
        hedges = provider.caused(Cause.HEDGE)
        assert hedges <= 0.05 * (len(provider.calls) - hedges + provider.refused)
        assert all(call.items <= max_items for call in provider.calls)
    assert stages[OffloadStage.RETRY].acted <= 20 + 0.1 * count
