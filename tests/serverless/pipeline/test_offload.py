"""The pipeline on virtual time: bounds, conservation and exactly one outcome, under any schedule and any faults."""

from __future__ import annotations

import asyncio
import itertools
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.sim import loop as virtual
from serverless.errors import BackendFailed, UnknownFunction
from serverless.meter import WorkerState
from serverless.pipeline.offload import Offload
from serverless.pipeline.stages import PipelineSpec, RetrySpec
from serverless.types import Cause, FaultKind, InfraFault, ModelFault, Outcome, Scored
from tests.serverless.support import Books, Simulated, item, package

BEHAVE = package(batch={"max_items": 4, "max_wait_ms": 2.0})
"""Packed once: property tests vary its spec through `with_spec`."""


def with_spec(**settings: Any) -> Any:
    spec = BEHAVE.spec.model_validate({**BEHAVE.spec.model_dump(), **settings})
    return type(BEHAVE)(spec, BEHAVE.version, BEHAVE.files)


def offload(
    main: Any,
    *,
    books: Books | None = None,
    retry: RetrySpec | None = None,
    seed: int | None = None,
    profile: dict[str, Any] | None = None,
    **settings: Any,
) -> Any:
    """Run `main(offload)` on virtual time."""
    one = with_spec(**settings)
    provider = Simulated(seed, **(profile or {}))

    async def inner() -> Any:
        stages = PipelineSpec(retry=retry or RetrySpec())
        async with (
            provider.open([one], books) as backend,
            Offload([one], backend, seed=seed or 0, settings=stages) as o,
        ):
            return await main(o)

    return provider.run(inner())


async def submit_all(o: Offload, count: int, *, deadline_s: float = 1000.0, gap_s: float = 0.0) -> list[Outcome]:
    async with asyncio.TaskGroup() as group:
        tasks = []
        for n in range(count):
            tasks.append(group.create_task(o.submit("behave", item(str(n), value=float(n)), deadline_s)))
            if gap_s:
                await asyncio.sleep(gap_s)
    return [task.result() for task in tasks]


def test_items_that_come_together_share_a_call() -> None:
    books = Books()
    outcomes = offload(lambda o: submit_all(o, 10), books=books)
    assert outcomes == [Scored(float(n)) for n in range(10)]
    assert sorted(i.items for i in books.invocations) == [2, 4, 4]


def test_a_lone_item_leaves_after_the_longest_wait() -> None:
    books = Books()
    offload(lambda o: submit_all(o, 1), books=books, profile={"cold_start_s": 0.0}, batch={"max_wait_ms": 7.0})
    assert books.invocations[0].t0 == pytest.approx(0.007)


def test_while_all_workers_are_busy_items_gather_into_full_calls() -> None:
    books = Books()
    offload(
        lambda o: submit_all(o, 17, gap_s=0.01),
        books=books,
        concurrency=1,
        profile={"cold_start_s": 0.0, "call_s": 0.1, "item_s": 0.0},
    )
    assert [i.items for i in books.invocations] == [1, 4, 4, 4, 4]


def test_a_large_item_goes_alone() -> None:
    books = Books()

    async def main(o: Offload) -> None:
        async with asyncio.TaskGroup() as group:
            for n in range(3):
                group.create_task(o.submit("behave", item(str(n), n=n, pad="x" * 900), 10.0))

    offload(main, books=books, batch={"max_bytes": 1000})
    assert [i.items for i in books.invocations] == [1, 1, 1]


def test_a_crash_is_isolated_then_retried_and_then_typed() -> None:
    books = Books()
    outcomes = offload(lambda o: submit_all(o, 3), books=books, profile={"faults": {FaultKind.CRASH: 1.0}})
    assert {(o.kind, o.retryable) for o in outcomes} == {(FaultKind.CRASH, True)}
    found = [i.items for i in books.invocations if i.cause is not Cause.RETRY]
    assert sorted(found) == [1, 1, 1, 2, 3]
    assert [i.items for i in books.invocations if i.cause is Cause.RETRY] == [1] * 6


def test_a_retry_that_would_pass_the_deadline_is_not_made() -> None:
    books = Books()
    outcome = offload(
        lambda o: o.submit("behave", item(), 0.13),
        books=books,
        retry=RetrySpec(base_s=1e6, cap_s=1e6),
        profile={"faults": {FaultKind.CRASH: 1.0}},
    )
    assert outcome.kind is FaultKind.CRASH
    assert len(books.invocations) == 1


def test_a_call_that_nobody_waits_for_is_cancelled_and_its_place_freed() -> None:
    books = Books()

    async def main(o: Offload) -> Outcome:
        assert (await o.submit("behave", item("a"), 0.2)).kind is FaultKind.DEADLINE  # type: ignore[union-attr]
        return await o.submit("behave", item("b"), 100.0)

    outcome = offload(main, books=books, concurrency=1, profile={"call_s": 3.0})
    assert outcome == Scored(1.0)
    assert [i.status for i in books.invocations] == ["cancelled", "ok"]


def test_a_cancellation_before_the_first_step_frees_the_place() -> None:
    async def main(o: Offload) -> Outcome:
        task = asyncio.get_running_loop().create_task(o.submit("behave", item("a"), 10.0))
        await asyncio.sleep(0.0)
        task.cancel()
        return await o.submit("behave", item("b"), 10.0)

    assert offload(main, concurrency=1, batch={"max_wait_ms": 0.0}) == Scored(1.0)


def test_a_full_line_throttles_and_expired_items_make_room() -> None:
    async def main(o: Offload) -> list[Outcome]:
        first = await submit_all(o, 9, deadline_s=0.3)
        return [*first, await o.submit("behave", item(), 100.0)]

    outcomes = offload(main, concurrency=1, queue=4, timeout_s=20.0, profile={"call_s": 10.0}, batch={"max_items": 2})
    assert [o.kind for o in outcomes[:9]].count(FaultKind.THROTTLED) == 3
    assert outcomes[9] == Scored(1.0)


def test_what_cannot_be_sent_is_the_environments_fault() -> None:
    outcome = offload(lambda o: o.submit("behave", item(board=object()), 10.0))
    assert (outcome.kind, outcome.retryable) == (FaultKind.ENVIRONMENT, False)


def test_closing_tells_everyone() -> None:
    async def main() -> list[Outcome]:
        provider = Simulated(call_s=50.0)
        one = with_spec(concurrency=1, timeout_s=100.0)
        async with asyncio.TaskGroup() as group, provider.open([one]) as backend, Offload([one], backend) as o:
            tasks = [group.create_task(o.submit("behave", item(str(n)), 1000.0)) for n in range(9)]
            await asyncio.sleep(1.0)
        return [task.result() for task in tasks]

    assert {o.kind for o in virtual.run(main())} == {FaultKind.UNAVAILABLE}  # type: ignore[union-attr]


def test_a_backend_that_breaks_its_contract_fails_the_run_loudly() -> None:
    class Broken:
        provider = "broken"

        async def deploy(self, package: Any) -> None: ...

        async def invoke(self, function: str, event: Any, *, deadline_s: float, cause: Any = None) -> Any:
            raise RuntimeError("a bug")

    async def main() -> None:
        async with Offload([BEHAVE], Broken()) as o:  # type: ignore[arg-type]
            await o.submit("behave", item(), 10.0)

    with pytest.raises(ExceptionGroup) as raised:
        virtual.run(main())
    assert raised.group_contains(RuntimeError, match="a bug")


def test_mistakes_of_the_caller_raise() -> None:
    async def main(o: Offload) -> Offload:
        with pytest.raises(UnknownFunction):
            await o.submit("nobody", item(), 1.0)
        return o

    closed = offload(main)
    with pytest.raises(BackendFailed):
        asyncio.run(closed.submit("behave", item(), 1.0))


FAULTS = st.dictionaries(
    st.sampled_from([FaultKind.CRASH, FaultKind.TIMEOUT, FaultKind.OUT_OF_MEMORY, FaultKind.THROTTLED]),
    st.floats(0.0, 0.25),
    max_size=4,
)


@pytest.mark.parametrize("gap_s", [0.0, 0.003, 0.05])
@settings(max_examples=14, deadline=None)
@given(
    faults=FAULTS,
    count=st.integers(1, 60),
    deadline_s=st.sampled_from([0.15, 1.0, 1000.0]),
    concurrency=st.integers(1, 4),
    max_items=st.integers(1, 8),
    attempts=st.integers(1, 4),
    failed_start=st.sampled_from([0.0, 0.3]),
    seed=st.integers(0, 2**16),
)
def test_under_any_faults_bounds_and_books_hold(
    faults: dict[FaultKind, float],
    count: int,
    gap_s: float,
    deadline_s: float,
    concurrency: int,
    max_items: int,
    attempts: int,
    failed_start: float,
    seed: int,
) -> None:
    books = Books()
    retry = RetrySpec(max_attempts=attempts)
    ended = 0.0

    async def main(o: Offload) -> list[Outcome]:
        nonlocal ended
        outcomes = await submit_all(o, count, deadline_s=deadline_s, gap_s=gap_s)
        assert sum(map(o.waiting_for, o.functions)) == 0 or deadline_s < 1000.0
        ended = asyncio.get_running_loop().time()
        return outcomes

    outcomes = offload(
        main,
        books=books,
        retry=retry,
        seed=seed,
        concurrency=concurrency,
        timeout_s=0.5,
        keep_alive_s=0.2,
        batch={"max_items": max_items, "max_wait_ms": 2.0},
        profile={"faults": faults, "failed_start": failed_start, "sigma": 0.5},
    )
    # Exactly one outcome each, and an answer is the answer to that item.
    assert len(outcomes) == count
    for n, outcome in enumerate(outcomes):
        assert isinstance(outcome, InfraFault) or outcome == Scored(float(n))
    assert faults or failed_start or deadline_s < 1000.0 or all(isinstance(o, Scored) for o in outcomes)
    # No item waits beyond its deadline.
    assert ended <= count * gap_s + deadline_s + 1e-9
    # Bounds of batching, concurrency and retrying.
    assert all(i.items <= max_items for i in books.invocations)
    events = [(s.t0, 1) for s in books.spans] + [(s.t1, -1) for s in books.spans]
    level = peak = 0
    for _, change in sorted(events):
        level += change
        peak = max(peak, level)
    assert peak <= concurrency
    search = 1 + math.ceil(math.log2(max_items)) if max_items > 1 else 0
    refusals = sum(i.items for i in books.invocations if i.status == FaultKind.THROTTLED)
    hedges = [i for i in books.invocations if i.cause is Cause.HEDGE]
    assert len(hedges) <= 0.05 * (len(books.invocations) - len(hedges))
    hedged = sum(i.items for i in hedges)
    assert sum(i.items for i in books.invocations) - hedged <= count * (attempts + search) + refusals
    # Conservation: per worker the spans follow each other, and its busy time is what its calls took.
    for worker in {s.worker for s in books.spans}:
        mine = [s for s in books.spans if s.worker == worker]
        assert all(a.t1 == b.t0 or b.state is WorkerState.COLD for a, b in itertools.pairwise(mine))
    usage = books.usage.get("behave")
    if usage is not None:
        busy = sum(i.t1 - i.t0 for i in books.invocations if i.items)
        assert usage.worker_s[WorkerState.BUSY] == pytest.approx(busy)
        assert usage.total_worker_s == pytest.approx(sum(s.t1 - s.t0 for s in books.spans))


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 1000))
def test_a_simulated_run_repeats_exactly(seed: int) -> None:
    def once() -> tuple[Any, ...]:
        books = Books()
        outcomes = offload(
            lambda o: submit_all(o, 30, gap_s=0.001),
            books=books,
            seed=seed,
            profile={"sigma": 1.0, "faults": {FaultKind.CRASH: 0.2}},
        )
        return outcomes, books.invocations, books.spans

    assert once() == once()


def test_a_declared_time_limit_is_the_policys_fault() -> None:
    outcome = offload(
        lambda o: o.submit("behave", item(), 100.0),
        timeout_s=0.5,
        timeout_floor=-1.0,
        profile={"faults": {FaultKind.TIMEOUT: 1.0}},
    )
    assert outcome == ModelFault(-1.0, "no answer in 0.5 s (timeout_s)")
