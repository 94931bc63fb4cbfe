"""Calls of AWS Lambda with the real aiobotocore over HTTP, answered by the real `awslambdaric` in processes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import pathlib
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from serverless.deploy.aws import AwsDeployer
from serverless.deploy.package import Package
from serverless.errors import CredentialsMissing, UnknownFunction
from serverless.pipeline.offload import Offload
from serverless.pipeline.stages import PipelineSpec, RetrySpec
from serverless.providers.aws import AwsLambdaBackend
from serverless.types import Cause, FaultKind, InfraFault, Scored, Throttle
from serverless.wire import encode
from tests.serverless.aws.provider import MISSING, REGION, at, client, environment, settings
from tests.serverless.aws.provider import plane as new_plane
from tests.serverless.support import Books, alive, item, package, until

if TYPE_CHECKING:
    from tests.serverless.aws.plane import Plane

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(MISSING), reason=f"not installed: {MISSING}")]


@pytest.fixture
def plane() -> Iterator[Plane]:
    with new_plane() as one:
        yield one


@contextlib.asynccontextmanager
async def lambdas(
    plane: Plane, *packages: Package, books: Books | None = None, **changes: Any
) -> AsyncIterator[AwsLambdaBackend]:
    async with AwsLambdaBackend(settings(plane, **changes), meter=books) as backend:
        for one in packages:
            await backend.deploy(one)
        yield backend


def calls(books: Books) -> list[Any]:
    """Without the trials of deployments."""
    return [i for i in books.invocations if i.cause is not Cause.SMOKE]


def call(plane: Plane, one: Package, books: Books | None = None, deadline_s: float = 20.0, **metadata: Any) -> Any:
    """One call of one function, and its result."""

    async def main() -> Any:
        async with lambdas(plane, one, books=books) as backend:
            return await backend.invoke(one.spec.name, [encode(item(**metadata))], deadline_s=deadline_s)

    return asyncio.run(main())


def test_a_call_and_its_bill(plane: Plane) -> None:
    books = Books()
    reply = call(plane, package(memory_mb=256), books)
    assert reply.body[0]["aggregate_reward_score"] == 1.0
    (one,) = calls(books)
    assert one == reply.invocation
    (report,) = [line for line in plane.reports if one.provider_id in line]
    assert f"Billed Duration: {round(one.billed_s * 1000)} ms" in report
    assert (one.memory_mb, one.items, one.status, one.provider) == (256, 1, "ok", "aws_lambda")


@pytest.mark.parametrize(
    ("source", "metadata", "kind", "words"),
    [
        ("behave", {"do": "exit"}, FaultKind.CRASH, "exit status 3"),
        ("behave", {"do": "leave"}, FaultKind.CRASH, "exit status 4"),
        ("behave", {"do": "eat"}, FaultKind.OUT_OF_MEMORY, "MemoryError"),
        ("memory:hungry", {"mb": 300}, FaultKind.OUT_OF_MEMORY, "signal: killed"),
        ("behave", {"do": "sleep", "seconds": 20.0}, FaultKind.TIMEOUT, "timed out after 1.00 seconds"),
    ],
)
def test_the_end_of_an_environment_is_a_typed_fault_and_is_billed(
    plane: Plane, source: str, metadata: dict[str, Any], kind: FaultKind, words: str
) -> None:
    books = Books()
    reply = call(plane, package(source, timeout_s=1.0 if "seconds" in metadata else 10.0), books, **metadata)
    assert (reply.fault.kind, reply.fault.retryable) == (kind, True)
    assert words in reply.fault.detail
    assert calls(books)[0].status == str(kind)
    assert sum(i.billed_s for i in books.invocations) == pytest.approx(plane.billed_s())


def test_what_is_larger_than_lambdas_payload_goes_through_a_bucket(plane: Plane) -> None:
    from tests.serverless.aws.plane import refusal

    books, text = Books(), "é" * 5_000_000
    s3 = client(plane, "s3")

    async def main() -> None:
        large = [
            encode(item("a", do="steps", text=text, count=1)),
            encode(item("b", do="steps", text="", count=600_000)),
        ]
        one = package(memory_mb=1024, timeout_s=30.0)
        async with lambdas(plane, one, books=books) as backend:
            refused = await backend.invoke("behave", large, deadline_s=20.0)
            assert refused.fault is not None
            assert (refused.fault.kind, "bucket" in refused.fault.detail) == (FaultKind.ENVIRONMENT, True)
        s3.create_bucket(Bucket="ours")
        async with lambdas(plane, one, books=books, bucket="ours") as backend:
            reply = await backend.invoke("behave", large, deadline_s=60.0)
            assert reply.fault is None, reply.fault
            assert [len(answer["step_rewards"]) for answer in reply.body] == [1, 600_000]
            assert reply.body[0]["aggregate_reward_score"] == 5_000_000
            plane.failures.append(refusal(500, "ServiceException", "try again"))
            assert (await backend.invoke("behave", large, deadline_s=60.0)).fault is not None
            s3.delete_bucket(Bucket="ours")  # it is empty: nothing is left of either call
            lost = await backend.invoke("behave", large, deadline_s=20.0)
            assert lost.fault is not None
            assert (lost.fault.kind, lost.fault.retryable, lost.invocation) == (FaultKind.UNAVAILABLE, True, None)
        assert [i.status for i in calls(books)] == ["ok"]

    asyncio.run(main())


def test_a_crash_loop_ends_as_a_fault_and_every_start_is_billed(plane: Plane) -> None:
    books = Books()

    async def main() -> Any:
        one = package()
        async with (
            lambdas(plane, one, books=books) as backend,
            Offload([one], backend, settings=PipelineSpec(retry=RetrySpec(max_attempts=4, base_s=0.01))) as offload,
        ):
            return await offload.submit("behave", item(do="exit"), 30.0)

    outcome = asyncio.run(main())
    assert isinstance(outcome, InfraFault)
    assert outcome.kind is FaultKind.CRASH
    assert 2 <= len(calls(books)) <= 8
    assert plane.starts["rollart-behave"] >= len(calls(books))
    assert sum(i.billed_s for i in books.invocations) == pytest.approx(plane.billed_s())


def constant(tmp_path: pathlib.Path, value: float, name: str = "same", **more: Any) -> Package:
    """A reward that returns one value, in a file of its own; another value is another version."""
    folder = tmp_path / str(value)
    folder.mkdir(exist_ok=True)
    (folder / "same.py").write_text(f"def same(sample):\n    return {value}\n")
    return at(folder / "same.py", name=name, handler="same", memory_mb=128, **more)


async def score(backend: AwsLambdaBackend) -> Any:
    """The result of the backend's `same`: a score, or the fault."""
    reply = await backend.invoke("same", [encode(item())], deadline_s=20.0)
    return reply.fault or reply.body[0]["aggregate_reward_score"]  # type: ignore[index]


def aliases(plane: Plane) -> dict[str, str]:
    found = client(plane).list_aliases(FunctionName="rollart-same")["Aliases"]
    return {one["Name"]: one["FunctionVersion"] for one in found}


def test_a_run_calls_its_own_version_whatever_others_deploy(plane: Plane, tmp_path: pathlib.Path) -> None:
    ours, theirs, third = (constant(tmp_path, value) for value in (1.0, -7.0, 0.5))

    async def main() -> Any:
        async with (
            AwsLambdaBackend(settings(plane, keep_versions=1), run="a") as a,
            AwsLambdaBackend(settings(plane, keep_versions=1), run="b") as b,
            AwsDeployer(settings(plane, keep_versions=1)) as elsewhere,
        ):
            await a.deploy(ours)
            await b.deploy(theirs)
            found = [await score(a), await score(b)]
            await elsewhere.deploy(third)
            found += [await score(a), await score(b)]
            await elsewhere.rollback("same", ours.version)
            found += [await score(a), await score(b)]
            await b.deploy(third)
            return [*found, await score(a), await score(b)], aliases(plane)

    scores, during = asyncio.run(main())
    assert scores == [1.0, -7.0, 1.0, -7.0, 1.0, -7.0, 1.0, 0.5]
    assert during == {"live": "1", "run-a": "1", "run-b": "3"}
    assert aliases(plane) == {"live": "1"}, "a run's alias goes with it"


def test_runs_that_start_at_once_each_get_their_version(plane: Plane, tmp_path: pathlib.Path) -> None:
    """Role and function are not there yet, and the code of one lies over that of another before it is published."""
    packages = [constant(tmp_path, value) for value in (1.0, -7.0, 0.5)]

    async def main() -> Any:
        async with contextlib.AsyncExitStack() as stack:
            runs = [
                await stack.enter_async_context(AwsLambdaBackend(settings(plane), run=name)) for name in ("a", "b", "c")
            ]
            await asyncio.gather(*(run.deploy(one) for run, one in zip(runs, packages, strict=True)))
            return [await score(run) for run in runs]

    assert asyncio.run(main()) == [1.0, -7.0, 0.5]


def test_an_answer_of_another_version_is_a_fault_and_no_score(plane: Plane, tmp_path: pathlib.Path) -> None:
    """If the run's alias is moved, answers of the other version are dropped, and the alias is reset."""
    ours, theirs = constant(tmp_path, 1.0), constant(tmp_path, -7.0)
    books = Books()

    async def main() -> Any:
        async with (
            AwsLambdaBackend(settings(plane), run="a", meter=books) as a,
            AwsDeployer(settings(plane)) as elsewhere,
            Offload([ours], a, cache=tmp_path / "cache.sqlite") as offload,
        ):
            await elsewhere.deploy(theirs)
            client(plane).update_alias(FunctionName="rollart-same", Name="run-a", FunctionVersion="2")
            fault = await score(a)
            back = await score(a)
            client(plane).update_alias(FunctionName="rollart-same", Name="run-a", FunctionVersion="2")
            retried = await offload.submit("same", item(), 60.0)
            client(plane).delete_alias(FunctionName="rollart-same", Name="run-a")
            return fault, back, retried, await score(a), await score(a), await offload.submit("same", item(), 60.0)

    fault, back, retried, gone, again, cached = asyncio.run(main())
    assert isinstance(fault, InfraFault)
    assert (fault.kind, fault.retryable) == (FaultKind.UNAVAILABLE, True)
    assert "was set to version 1, but version 2 answered" in fault.detail
    assert isinstance(gone, InfraFault)
    assert "it is gone" in gone.detail
    assert (back, again, retried, cached) == (1.0, 1.0, Scored(1.0), Scored(1.0))
    assert sum(i.billed_s for i in books.invocations) < plane.billed_s(), "the other deployment's trial is not ours"


def test_warm_environments_are_those_of_the_runs_alias(plane: Plane, tmp_path: pathlib.Path) -> None:
    ours, theirs = constant(tmp_path, 1.0, warm=1), constant(tmp_path, -7.0)

    def warm(alias: str) -> int:
        lambdas = client(plane)
        try:
            found = lambdas.get_provisioned_concurrency_config(FunctionName="rollart-same", Qualifier=alias)
        except lambdas.exceptions.ProvisionedConcurrencyConfigNotFoundException:
            return 0
        return int(found["RequestedProvisionedConcurrentExecutions"])

    async def main() -> Any:
        async with AwsLambdaBackend(settings(plane), run="a") as a, AwsDeployer(settings(plane)) as elsewhere:
            await a.deploy(constant(tmp_path, 1.0))
            await a.deploy(constant(tmp_path, 1.0, warm=2))  # as a resume with another setting
            found = [warm("run-a")]
            await a.deploy(ours)
            found += [warm("run-a"), warm("live"), await a.provisioned("same")]
            await elsewhere.deploy(theirs)
            async with AwsLambdaBackend(settings(plane), run="b") as b:
                await b.deploy(ours)  # Lambda gives warm environments to one alias of a version
                found += [warm("run-b"), await b.provisioned("same"), await score(b)]
            return [*found, warm("run-a")]

    assert asyncio.run(main()) == [2, 1, 0, 1, 0, 1, 1.0, 1]
    assert warm("run-a") == 0


def test_an_alias_that_cannot_be_set_anew_at_once_costs_calls_and_not_the_run(
    plane: Plane, tmp_path: pathlib.Path
) -> None:
    """As where the run ends whose alias had the warm environments, while AWS refuses requests."""
    from tests.serverless.aws.plane import refusal

    path = "/2015-03-31/functions/rollart-same/aliases"
    warm = "/2019-09-30/functions/rollart-same/provisioned-concurrency"

    async def main() -> Any:
        async with AwsLambdaBackend(settings(plane), run="a") as a:
            await a.deploy(constant(tmp_path, 1.0, warm=1))
            client(plane).delete_provisioned_concurrency_config(FunctionName="rollart-same", Qualifier="run-a")
            client(plane).delete_alias(FunctionName="rollart-same", Name="run-a")
            plane.refusals[f"GET {path}"] = [refusal(400, "InvalidRequestContentException", "not now")]
            plane.refusals[f"PUT {warm}"] = [refusal(400, "InvalidRequestContentException", "no capacity")]
            return [await score(a) for _ in range(3)]

    refused, gone, again = asyncio.run(main())
    assert isinstance(refused, InfraFault)
    assert refused.retryable
    assert "not now" in refused.detail
    assert isinstance(gone, InfraFault)
    assert again == 1.0


def test_the_alias_of_a_dead_run_goes_when_its_lease_has_ended(plane: Plane, tmp_path: pathlib.Path) -> None:
    ours, theirs = constant(tmp_path, 1.0), constant(tmp_path, -7.0)
    lambdas = client(plane)

    async def main() -> None:
        async with AwsDeployer(settings(plane)) as elsewhere:
            dead = await elsewhere.pin(ours, "dead")
            await elsewhere.pin(ours, "alive")
            assert set(aliases(plane)) == {"live", "run-dead", "run-alive"}
            lambdas.update_alias(
                FunctionName="rollart-same",
                Name=dead.alias,
                FunctionVersion=dead.number,
                Description="rollart: lease until 2026-01-01T00:00:00+00:00",
            )
            await elsewhere.deploy(theirs)

    asyncio.run(main())
    assert set(aliases(plane)) == {"live", "run-alive"}


def test_a_rollback_goes_to_a_version_that_was_current(plane: Plane, tmp_path: pathlib.Path) -> None:
    """A version that only a run called is not a target."""
    first, tried, second = (constant(tmp_path, value) for value in (1.0, -7.0, 0.5))

    async def main() -> Any:
        async with AwsDeployer(settings(plane)) as elsewhere:
            await elsewhere.deploy(first)
            async with AwsLambdaBackend(settings(plane)) as a:
                await a.deploy(tried)
            await elsewhere.deploy(second)
            return await elsewhere.rollback("same")

    assert asyncio.run(main()).version == first.version


def test_concurrency_is_a_bound_and_environments_are_reused(plane: Plane) -> None:
    async def main() -> list[Any]:
        one = package("lambdas:concurrent", concurrency=2)
        async with lambdas(plane, one) as backend, asyncio.TaskGroup() as group:
            return [
                group.create_task(backend.invoke("concurrent", [encode(item(str(n)))], deadline_s=60.0))
                for n in range(8)
            ]

    replies = [task.result() for task in asyncio.run(main())]
    assert all(reply.fault is None for reply in replies)
    assert plane.peak == 2
    assert plane.starts["rollart-concurrent"] == 2
    assert not plane.throttled


@pytest.mark.parametrize("reserved", [False, True], ids=["account", "reserved"])
def test_a_throttle_storm_converges(plane: Plane, reserved: bool) -> None:
    """Two slots for twelve calls at once: with the pipeline as it comes, each item is scored and no call is lost."""
    books = Books()

    async def main() -> list[Any]:
        one = package("lambdas:concurrent", concurrency=12, batch={"max_items": 1}, timeout_s=20.0)
        async with lambdas(plane, one, books=books) as backend, Offload([one], backend) as offload:
            if reserved:
                await backend.deployer.scale("concurrent", concurrency=2)
            else:
                plane.account_limit = 2
            async with asyncio.TaskGroup() as group:
                return [
                    group.create_task(offload.submit("concurrent", item(str(n), n=n, seconds=0.1), 120.0))
                    for n in range(24)
                ]

    outcomes = [task.result() for task in asyncio.run(main())]
    assert outcomes == [Scored(1.0)] * 24
    assert plane.throttled["rollart-concurrent"] > 0, "or there was no storm"
    assert plane.peak <= 2
    assert plane.executions["rollart-concurrent"] == len(books.invocations)
    assert sum(i.billed_s for i in books.invocations) == pytest.approx(plane.billed_s())


def test_throttles_and_faults_of_the_service_are_told_apart_and_cost_nothing(plane: Plane) -> None:
    from tests.serverless.aws.plane import refusal, throttle

    books = Books()
    said = [
        (throttle("CallerRateLimitExceeded", 3), FaultKind.THROTTLED, Throttle.RATE),
        (throttle("ReservedFunctionConcurrentInvocationLimitExceeded"), FaultKind.THROTTLED, Throttle.RESERVED),
        (throttle("ConcurrentInvocationLimitExceeded"), FaultKind.THROTTLED, Throttle.CONCURRENCY),
        (refusal(502, "EC2ThrottledException", "m"), FaultKind.THROTTLED, Throttle.SCALING),
        (refusal(500, "ServiceException", "m"), FaultKind.UNAVAILABLE, None),
        (refusal(409, "ResourceConflictException", "m"), FaultKind.UNAVAILABLE, None),
    ]

    async def main() -> list[Any]:
        async with lambdas(plane, package(), books=books) as backend:
            plane.failures += [response for response, _, _ in said]
            return [await backend.invoke("behave", [encode(item())], deadline_s=20.0) for _ in said]

    replies = asyncio.run(main())
    assert [(r.fault.kind, r.fault.throttle) for r in replies] == [(kind, throttle) for _, kind, throttle in said]
    assert all(r.fault.retryable and r.invocation is None for r in replies)
    assert replies[0].fault.retry_after_s == 3.0
    assert calls(books) == []


def test_a_function_slower_than_the_read_timeout_is_executed_once(plane: Plane) -> None:
    """The bill that boto's defaults run up: see `test_what_botos_own_retries_would_have_done`."""
    books = Books()

    async def main() -> Any:
        one = package(timeout_s=10.0)
        async with (
            lambdas(plane, one, books=books, read_timeout_s=1.0, drain_s=0.0) as backend,
            Offload([one], backend) as offload,
        ):
            before = plane.executions["rollart-behave"]
            outcome = await offload.submit("behave", item(do="sleep", seconds=3.0), 60.0)
            await until(lambda: plane.busy == 0, 30.0)
            return outcome, plane.executions["rollart-behave"] - before

    outcome, executions = asyncio.run(main())
    assert isinstance(outcome, InfraFault)
    assert (outcome.kind, outcome.retryable) == (FaultKind.TIMEOUT, False)
    assert executions == 1
    (bill,) = calls(books)
    assert (bill.provider_id, bill.status) == ("", "timeout"), "an estimate: Lambda's own account never came"
    assert bill.billed_s >= 1.0


def test_what_botos_own_retries_would_have_done(plane: Plane) -> None:
    """So that the test before can fail: the same call with a client that retries is executed twice."""
    import boto3
    from botocore.config import Config
    from botocore.exceptions import ReadTimeoutError

    async def main() -> None:
        async with lambdas(plane, package(timeout_s=10.0)):
            pass

    asyncio.run(main())
    config = Config(read_timeout=1, retries={"mode": "standard", "total_max_attempts": 2})
    client = boto3.client("lambda", region_name=REGION, endpoint_url=plane.url, config=config)
    before = plane.executions["rollart-behave"]
    event = json.dumps([encode(item(do="sleep", seconds=3.0))]).encode()
    with pytest.raises(ReadTimeoutError):
        client.invoke(FunctionName="rollart-behave", Qualifier="live", Payload=event)
    assert plane.executions["rollart-behave"] - before == 2


def test_a_cancelled_call_runs_on_and_its_bill_comes_later(plane: Plane) -> None:
    books = Books()

    async def main() -> None:
        one = package("lambdas:concurrent", concurrency=2)
        async with lambdas(plane, one, books=books, drain_s=60.0) as backend:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.5):
                    await backend.invoke("concurrent", [encode(item(seconds=2.0))], deadline_s=20.0)
            assert calls(books) == []
            reply = await backend.invoke("concurrent", [encode(item())], deadline_s=20.0)
            assert reply.fault is None

    asyncio.run(main())
    assert [i.status for i in calls(books)] == ["ok", "cancelled"]
    assert calls(books)[1].billed_s >= 2.0, "all of it: Lambda does not know that nobody waits"
    assert sum(i.billed_s for i in books.invocations) == pytest.approx(plane.billed_s())


def test_a_deadline_is_a_fault_at_once_and_is_billed_in_full(plane: Plane) -> None:
    books = Books()

    async def main() -> Any:
        one = package("lambdas:concurrent")
        async with lambdas(plane, one, books=books, drain_s=60.0) as backend:
            return await backend.invoke("concurrent", [encode(item(seconds=2.0))], deadline_s=0.5)

    reply = asyncio.run(main())
    assert (reply.fault.kind, reply.fault.retryable) == (FaultKind.DEADLINE, False)
    assert [i.status for i in calls(books)] == ["deadline"]
    assert sum(i.billed_s for i in books.invocations) == pytest.approx(plane.billed_s())


def test_what_waits_when_it_is_cancelled_is_never_sent(plane: Plane) -> None:
    books = Books()

    async def main() -> None:
        one = package("lambdas:concurrent", concurrency=1, queue=3)
        async with lambdas(plane, one, books=books) as backend, asyncio.TaskGroup() as group:
            first = group.create_task(backend.invoke("concurrent", [encode(item(seconds=1.0))], deadline_s=20.0))
            await until(lambda: plane.busy == 1, 20.0)
            others = [
                group.create_task(backend.invoke("concurrent", [encode(item())], deadline_s=20.0)) for _ in range(3)
            ]
            await asyncio.sleep(0)
            full = await backend.invoke("concurrent", [encode(item())], deadline_s=20.0)
            assert full.fault is not None
            assert full.fault.throttle is Throttle.QUEUE
            for task in others:
                task.cancel()
            assert (await first).fault is None
            assert (await backend.invoke("concurrent", [encode(item())], deadline_s=20.0)).fault is None

    asyncio.run(main())
    assert [i.status for i in calls(books)] == ["ok", "ok"]


def test_a_close_does_not_wait_longer_than_it_says(plane: Plane) -> None:
    """Calls that Lambda still runs are metered as an estimate."""
    books = Books()

    async def main() -> float:
        loop = asyncio.get_running_loop()
        async with lambdas(plane, package(timeout_s=60.0), books=books, drain_s=0.2) as backend:
            await backend.invoke("behave", [encode(item(do="sleep", seconds=50.0))], deadline_s=0.5)
            began = loop.time()
        return loop.time() - began

    assert asyncio.run(main()) < 10.0
    (bill,) = calls(books)
    assert (bill.status, bill.provider_id) == ("deadline", "")
    assert bill.billed_s >= 0.5


def test_calls_that_lambda_would_not_take(plane: Plane) -> None:
    async def main() -> Any:
        async with lambdas(plane, package()) as backend:
            before = plane.executions.total()
            large = await backend.invoke("behave", [encode(item(text="x" * 6_300_000))], deadline_s=20.0)
            odd = [
                await backend.invoke("behave", [{"id": "a", "metadata": value}], deadline_s=20.0)
                for value in (object(), float("nan"), "\ud800")
            ]
            return large.fault, [reply.fault for reply in odd], plane.executions.total() - before

    large, odd, executions = asyncio.run(main())
    assert {fault.kind for fault in (large, *odd)} == {FaultKind.ENVIRONMENT}
    assert executions == 0, "none of them was sent"
    assert "lower batch.max_bytes" in large.detail


def test_a_batch_of_many_items(plane: Plane) -> None:
    async def main() -> Any:
        one = package("lambdas:listed", batch={"max_items": 50, "max_wait_ms": 50}, concurrency=4)
        async with lambdas(plane, one) as backend, Offload([one], backend) as offload, asyncio.TaskGroup() as group:
            return [group.create_task(offload.submit("listed", item(str(n), n=n), 60.0)) for n in range(500)]

    outcomes = [task.result() for task in asyncio.run(main())]
    assert all(isinstance(outcome, Scored) for outcome in outcomes)
    assert max(outcome.value for outcome in outcomes) > 1.0


def test_no_credentials_no_function_no_network(plane: Plane) -> None:
    async def gone() -> None:
        async with lambdas(plane, package()) as backend:
            await backend.deployer.delete("behave")
            with pytest.raises(UnknownFunction, match="deploy it again"):
                await backend.invoke("behave", [encode(item())], deadline_s=20.0)

    async def refused() -> None:
        async with AwsLambdaBackend(settings(plane)) as backend:
            with pytest.raises(CredentialsMissing, match="aws configure"):
                await backend.deploy(package())

    asyncio.run(gone())
    for changes in ({"AWS_ACCESS_KEY_ID": None, "AWS_SECRET_ACCESS_KEY": None}, {"AWS_ACCESS_KEY_ID": "AKIAREFUSED"}):
        with environment(**changes):
            asyncio.run(refused())

    async def unplugged() -> Any:
        async with lambdas(plane, package()) as backend:
            assert (await backend.invoke("behave", [encode(item())], deadline_s=20.0)).fault is None
            plane.unplug()
            return await backend.invoke("behave", [encode(item())], deadline_s=20.0)

    fault = asyncio.run(unplugged()).fault
    assert (fault.kind, fault.retryable) == (FaultKind.UNAVAILABLE, True)


def test_nothing_is_left_running() -> None:
    with new_plane() as plane:
        call(plane, package())
        pids = plane.pids()
        assert pids
    assert not any(alive(pid) for pid in pids)
