"""The conformance suite of function backends, through `Offload` and directly.

Our own backends and those of other packages run these tests: `rollart.testing.backends` shows how. They need the
fixture `provider`, a `Provider`, and pytest (extra `dev`).
"""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any

import pytest

from rollart.testing.backends import Books, Provider, item, package, until
from serverless.deploy.package import Package
from serverless.errors import UnknownFunction
from serverless.pipeline.offload import Offload
from serverless.providers.base import Backend, Reply
from serverless.types import Cause, FaultKind, InfraFault, ModelFault, Outcome, Scored, Throttle
from serverless.wire import encode

LIMIT_S = 60.0
"""That no call comes near, whatever else its host does."""


def test_return_values_of_functions_become_typed_outcomes(provider: Provider) -> None:
    expected: dict[str, Outcome | FaultKind] = {
        "score": Scored(1.0),
        "true": Scored(1.0),
        "completion": Scored(1.0),
        "scored": Scored(0.5, {"m": 2.0}, (0.25, 0.25)),
        "dict": Scored(0.5, {"m": 2.0}, (0.25, 0.25)),
        "model_fault": ModelFault(0.25, "too long"),
        "model_fault_dict": ModelFault(0.25, "too long"),
        "policy": ModelFault(-1.0, "not JSON"),
        "raise": InfraFault(FaultKind.CRASH, retryable=False, detail="ValueError: no such raise"),
        "infra": InfraFault(FaultKind.THROTTLED, retryable=False, detail="InfraFault: judge"),
        "nan": FaultKind.BAD_ANSWER,
        "inf": FaultKind.BAD_ANSWER,
        "none": FaultKind.BAD_ANSWER,
        "text": FaultKind.BAD_ANSWER,
    }

    async def main() -> dict[str, Outcome]:
        one = package(batch={"max_items": 4})
        async with provider.open([one]) as backend, Offload([one], backend) as offload:
            async with asyncio.TaskGroup() as group:
                tasks = {do: group.create_task(offload.submit("behave", item(do, do=do), LIMIT_S)) for do in expected}
            return {do: task.result() for do, task in tasks.items()}

    for do, outcome in provider.run(main()).items():
        if isinstance(expected[do], FaultKind):
            assert isinstance(outcome, InfraFault), (do, outcome)
            assert (outcome.kind, outcome.retryable) == (expected[do], False), (do, outcome)
        else:
            assert outcome == expected[do], do


def test_handlers_as_people_have_them(provider: Provider) -> None:
    expected: dict[str, Scored | FaultKind] = {
        "listed": Scored(1.0),
        "concurrent": Scored(1.0),
        "raising": Scored(1.0),
        "short": FaultKind.BAD_ANSWER,
        "confused": FaultKind.BAD_ANSWER,
        "unserialisable": FaultKind.BAD_ANSWER,
    }

    async def main() -> dict[str, Outcome]:
        packages = [package(f"lambdas:{name}", memory_mb=128, timeout_s=30.0) for name in expected]
        async with provider.open(packages) as backend, Offload(packages, backend) as offload:
            async with asyncio.TaskGroup() as group:
                tasks = {name: group.create_task(offload.submit(name, item(), LIMIT_S)) for name in expected}
            return {name: task.result() for name, task in tasks.items()}

    outcomes = provider.run(main())
    assert {name: one.kind if isinstance(one, InfraFault) else one for name, one in outcomes.items()} == expected


def test_a_handler_that_fails_on_one_item_fails_that_item_only(provider: Provider) -> None:
    async def main() -> list[Outcome]:
        one = package("lambdas:raising", batch={"max_items": 8, "max_wait_ms": 50})
        async with provider.open([one]) as backend, Offload([one], backend) as offload:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(offload.submit("raising", item(str(n), poison=n == 3), LIMIT_S)) for n in range(8)
                ]
            return [task.result() for task in tasks]

    outcomes = provider.run(main())
    assert [isinstance(o, Scored) for o in outcomes] == [n != 3 for n in range(8)]
    assert outcomes[3] == InfraFault(FaultKind.CRASH, retryable=False, detail="RuntimeError: poison")


def test_items_with_one_id_in_one_call_get_their_own_answers(provider: Provider) -> None:
    async def main() -> list[Outcome]:
        one = package(batch={"max_items": 3, "max_wait_ms": 1000})
        async with provider.open([one]) as backend, Offload([one], backend) as offload:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(offload.submit("behave", item("x", value=n), LIMIT_S)) for n in range(3)]
            return [task.result() for task in tasks]

    assert provider.run(main()) == [Scored(0.0), Scored(1.0), Scored(2.0)]


def test_concurrency_is_a_bound_and_workers_are_reused(provider: Provider) -> None:
    books = Books()

    async def main() -> None:
        one = package("lambdas:concurrent", name="f", concurrency=2, batch={"max_items": 1})
        async with (
            provider.open([one], books) as backend,
            Offload([one], backend) as offload,
            asyncio.TaskGroup() as group,
        ):
            for n in range(8):
                group.create_task(offload.submit("f", item(str(n), n=n), LIMIT_S))

    provider.run(main())
    assert len({i.worker for i in books.invocations}) == 2
    assert books.usage["f"].cold_starts == 2
    assert books.usage["f"].items == 8
    for now in books.invocations:
        assert sum(i.t0 <= now.t0 < i.t1 for i in books.invocations) <= 2


def test_an_idle_function_scales_to_zero_and_back(provider: Provider) -> None:
    books = Books()

    async def main() -> None:
        one = package(keep_alive_s=0.05)
        async with provider.open([one], books) as backend, Offload([one], backend) as offload:
            await offload.submit("behave", item(), LIMIT_S)
            if provider.workers(backend, "behave") is None:
                pytest.skip("its caller cannot see workers")
            await until(lambda: provider.workers(backend, "behave") == 0)
            assert await offload.submit("behave", item(), LIMIT_S) == Scored(1.0)

    provider.run(main())
    assert books.usage["behave"].cold_starts == 2
    assert all(i.cold_start_s > 0.0 and i.billed_s > 0.0 for i in books.invocations)


def test_warm_workers_serve_without_a_cold_start_and_stay(provider: Provider) -> None:
    books = Books()

    async def main() -> None:
        one = package(warm=1, keep_alive_s=0.05)
        async with provider.open([one], books) as backend:
            if provider.workers(backend, "behave") is None:
                pytest.skip("its caller cannot see workers")
            await until(lambda: provider.workers(backend, "behave") == 1)
            reply = await backend.invoke("behave", [encode(item())], deadline_s=LIMIT_S)
            assert reply.fault is None
            await asyncio.sleep(0.2)
            assert provider.workers(backend, "behave") == 1

    provider.run(main())


def test_a_call_past_its_deadline_is_a_deadline_fault(provider: Provider) -> None:
    async def main() -> tuple[Outcome, float]:
        one = package("lambdas:concurrent")
        async with provider.open([one]) as backend, Offload([one], backend) as offload:
            loop = asyncio.get_running_loop()
            await offload.submit("concurrent", item(), LIMIT_S)
            began = loop.time()
            return await offload.submit("concurrent", item(), 0.004), loop.time() - began

    outcome, seconds = provider.run(main())
    assert isinstance(outcome, InfraFault)
    assert outcome.kind is FaultKind.DEADLINE
    assert provider.real or seconds == pytest.approx(0.004)


def test_a_cancelled_call_is_billed_and_leaves_a_working_function(provider: Provider, tmp_path: Path) -> None:
    books, begun = Books(), tmp_path / "begun"

    async def main() -> Outcome:
        one = package("lambdas:concurrent", concurrency=1, timeout_s=60.0, batch={"max_wait_ms": 0})
        async with provider.open([one], books) as backend, Offload([one], backend) as offload:
            await offload.submit("concurrent", item(), LIMIT_S)
            async with asyncio.TaskGroup() as group:
                long = item(seconds=50.0, begun=str(begun))
                call = group.create_task(offload.submit("concurrent", long, LIMIT_S))
                await until(begun.exists)
                call.cancel()
            return await offload.submit("concurrent", item(), LIMIT_S)

    assert provider.run(main()) == Scored(1.0)
    assert [i.status for i in books.invocations] == ["ok", "cancelled", "ok"]
    assert books.usage["concurrent"].cold_starts == 2


def test_every_call_has_an_id_and_a_bill_of_its_own(provider: Provider) -> None:
    books = Books()

    async def main() -> list[Reply]:
        async with provider.open([package(concurrency=2)], books) as backend, asyncio.TaskGroup() as group:
            calls = [backend.invoke("behave", [encode(item("same"))], deadline_s=LIMIT_S) for _ in range(6)]
            tasks = [group.create_task(call) for call in calls]
        return [task.result() for task in tasks]

    bills = [reply.invocation for reply in provider.run(main())]
    names = {bill.provider_id for bill in bills if bill is not None}
    assert len(names - {""}) == 6
    assert names == {bill.provider_id for bill in books.invocations if bill.cause is not Cause.SMOKE}


def test_a_call_that_nobody_waited_for_has_the_providers_bill_or_an_estimate(
    provider: Provider, tmp_path: Path
) -> None:
    books, begun = Books(), tmp_path / "begun"

    async def main() -> None:
        one = package("lambdas:concurrent", concurrency=2, timeout_s=10.0)
        async with provider.open([one], books) as backend:
            await backend.invoke("concurrent", [encode(item())], deadline_s=LIMIT_S)
            event = [encode(item(seconds=0.6, begun=str(begun)))]
            await backend.invoke("concurrent", event, deadline_s=0.2)
            await until(begun.exists)

    provider.run(main())
    late = next(bill for bill in books.invocations if bill.status == "deadline")
    assert late.billed_s >= 0.2
    assert late.provider_id or late.billed_s == pytest.approx(late.t1 - late.t0, abs=0.01)


class Capped:
    """A backend whose provider refuses calls above a limit of those in flight."""

    def __init__(self, backend: Backend, most: int) -> None:
        self._backend = backend
        self.provider = backend.provider
        self._most, self._running = most, 0
        self.refused = 0

    async def deploy(self, package: Package) -> None:
        await self._backend.deploy(package)

    async def invoke(self, function: str, event: Any, *, deadline_s: float, cause: Cause = Cause.CALL) -> Reply:
        if self._running >= self._most:
            self.refused += 1
            limit = Throttle.CONCURRENCY
            return Reply(fault=InfraFault(FaultKind.THROTTLED, True, "above the limit", limit, retry_after_s=0.1))
        self._running += 1
        try:
            return await self._backend.invoke(function, event, deadline_s=deadline_s, cause=cause)
        finally:
            self._running -= 1

    async def __aenter__(self) -> Capped:
        return self

    async def __aexit__(self, *exc: object) -> None: ...


def test_a_storm_of_refusals_scores_every_item_in_one_call(provider: Provider) -> None:
    books = Books()

    async def main() -> tuple[list[Outcome], int]:
        one = package(concurrency=8, batch={"max_items": 1})
        async with provider.open([one], books) as backend:
            capped = Capped(backend, 2)
            async with Offload([one], capped) as offload, asyncio.TaskGroup() as group:
                names = (f"{n}" for n in range(24))
                tasks = [group.create_task(offload.submit("behave", item(n, n=n), LIMIT_S)) for n in names]
            return [task.result() for task in tasks], capped.refused

    outcomes, refused = provider.run(main())
    assert outcomes == [Scored(1.0)] * 24
    assert refused > 0
    assert [i.status for i in books.invocations if i.cause in (Cause.CALL, Cause.RETRY)] == ["ok"] * 24


def test_a_reward_that_forks_gets_the_answers_of_its_own_items(provider: Provider) -> None:
    """A child that returns from the handler must neither answer nor take a later call. Its exit code is its own."""
    if not provider.real:
        pytest.skip("functions run in this process")
    ways = [{"do": way, "raises": raises} for way in ("os", "libc") for raises in (False, True, "exit")]
    items = [item("same", value=float(n), **ways[n % 6]) for n in range(8)]
    items += [item("same", value=8.0, do="multiprocessing"), item("same", value=9.0, do="os", raises=False)]

    async def main() -> list[Outcome]:
        one = package("forks", concurrency=1, batch={"max_items": 1}, deterministic=False)
        async with provider.open([one]) as backend, Offload([one], backend) as offload:
            return [await offload.submit("forks", each, LIMIT_S) for each in items]

    assert provider.run(main()) == [Scored(float(n)) for n in range(10)]


def test_a_full_queue_throttles(provider: Provider) -> None:
    async def main() -> list[Any]:
        one = package(concurrency=1, queue=2)
        work: dict[str, Any] = (
            {"do": "sleep", "seconds": 0.4} if provider.real else {}
        )  # as they come, not as they are done
        async with provider.open([one]) as backend:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(backend.invoke("behave", [encode(item(**work))], deadline_s=LIMIT_S))
                    for _ in range(4)
                ]
            return [task.result().fault for task in tasks]

    faults = provider.run(main())
    refused = [f for f in faults if f is not None]
    assert len(refused) == 2
    assert {f.kind for f in refused} == {FaultKind.THROTTLED}
    assert all(f.retryable for f in refused)


def test_deploying_again_replaces_and_a_call_in_flight_ends_on_the_old_version(
    provider: Provider, tmp_path: Path
) -> None:
    begun = tmp_path / "begun"

    async def main() -> tuple[Any, Any]:
        old, new = package("lambdas:concurrent", name="f"), package("lambdas:concurrent", name="f", memory_mb=256)
        async with provider.open([old]) as backend:
            await backend.deploy(old)
            await backend.invoke("f", [encode(item())], deadline_s=LIMIT_S)
            async with asyncio.TaskGroup() as group:
                event = [encode(item(begun=str(begun), seconds=0.5))]
                task = group.create_task(backend.invoke("f", event, deadline_s=LIMIT_S))
                await until(begun.exists)
                await backend.deploy(new)
            return task.result(), await backend.invoke("f", [encode(item())], deadline_s=LIMIT_S)

    before, after = provider.run(main())
    assert (before.fault, before.invocation.memory_mb) == (None, 512)
    assert (after.fault, after.invocation.memory_mb) == (None, 256)


def test_an_unknown_function_is_the_callers_mistake(provider: Provider) -> None:
    async def main() -> None:
        async with provider.open([package()]) as backend:
            with pytest.raises(UnknownFunction, match="deployed: behave"):
                await backend.invoke("nobody", [], deadline_s=1.0)

    provider.run(main())


def test_worker_seconds_are_conserved(provider: Provider) -> None:
    if not provider.spans:
        pytest.skip("the provider does not report its workers' time")
    books = Books()

    async def main() -> None:
        one = package(concurrency=2, keep_alive_s=0.03, batch={"max_items": 2, "max_wait_ms": 1})
        async with provider.open([one], books) as backend, Offload([one], backend) as offload:
            for n in range(4):
                async with asyncio.TaskGroup() as group:
                    for k in range(5):
                        group.create_task(offload.submit("behave", item(f"{n}.{k}"), LIMIT_S))
                await asyncio.sleep(0.02 * n)

    provider.run(main())
    busy = sum(s.t1 - s.t0 for s in books.spans if s.state == "busy")
    calls = sum(i.t1 - i.t0 for i in books.invocations)
    assert busy == pytest.approx(calls, abs=0.01 * len(books.invocations))
    for worker in {s.worker for s in books.spans}:
        spans = [s for s in books.spans if s.worker == worker]
        assert all(a.t1 <= b.t0 for a, b in itertools.pairwise(spans))
        assert all(a.t1 == b.t0 for a, b in itertools.pairwise(spans) if b.state != "cold")


__all__ = [name for name in list(globals()) if name.startswith("test_")]
