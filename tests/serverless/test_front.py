"""The HTTP front over real workers, called by boto3 and by plain clients."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import datetime
import json
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import aiohttp
import pytest

from serverless.backends import signing
from serverless.backends.aws_answers import parse_report
from serverless.backends.front import FunctionHttpServer
from serverless.backends.local import LocalBackend
from serverless.deploy.package import Package
from serverless.meter import WorkerState
from serverless.wire import encode
from tests.serverless.support import Books, item, package, until

pytestmark = pytest.mark.slow  # real sockets and processes


@contextlib.asynccontextmanager
async def opened(
    packages: Sequence[Package], books: Books | None = None, **settings: Any
) -> AsyncIterator[tuple[FunctionHttpServer, LocalBackend]]:
    async with LocalBackend(meter=books) as backend:
        for one in packages:
            await backend.deploy(one)
        async with FunctionHttpServer(backend, tail=backend.tail, **settings) as front:
            yield front, backend


def body(**metadata: Any) -> bytes:
    return json.dumps([encode(item(**metadata))]).encode()


async def _post(session: aiohttp.ClientSession, url: str, data: bytes) -> None:
    async with session.post(url, data=data) as response:
        await response.read()


def with_boto3(work: Callable[[Any], Any], *packages: Package) -> Any:
    boto3 = pytest.importorskip("boto3")
    from botocore.config import Config

    def calls(url: str) -> Any:
        client = boto3.client(
            "lambda",
            endpoint_url=url,
            region_name="us-east-1",
            aws_access_key_id="a",
            aws_secret_access_key="b",
            config=Config(retries={"total_max_attempts": 1}),
        )
        try:
            return work(client)
        finally:
            client.close()

    async def main() -> Any:
        async with opened(packages) as (front, _):
            return await asyncio.to_thread(calls, front.url)

    return asyncio.run(main())


def test_boto3_invokes_with_a_log_and_a_report() -> None:
    def work(client: Any) -> tuple[Any, ...]:
        first = client.invoke(FunctionName="behave", Payload=body(do="raise"), LogType="Tail")
        arn = "arn:aws:lambda:us-east-1:000000000000:function:behave"
        second = client.invoke(FunctionName=arn, Qualifier="live", Payload=body(), LogType="Tail")
        return first, first["Payload"].read(), second, second["Payload"].read()

    first, raised, second, scored = with_boto3(work, package())
    assert json.loads(raised)[0]["error"]["message"] == "no such a"
    assert "ValueError: no such a" in base64.b64decode(first["LogResult"]).decode()
    used, warm = parse_report(first["LogResult"]), parse_report(second["LogResult"])
    assert used is not None
    assert warm is not None
    assert used.init_s > 0.0
    assert warm.init_s == 0.0
    assert warm.memory_mb == 128
    assert warm.request_id != used.request_id
    assert json.loads(scored)[0]["aggregate_reward_score"] == 1.0
    assert "ValueError" not in base64.b64decode(second["LogResult"]).decode()
    assert "FunctionError" not in second


def test_boto3_sees_the_functions_errors_as_lambda_tells_them() -> None:
    def work(client: Any) -> list[tuple[str, str]]:
        seen = []
        for do in ("exit", "eat", "sleep"):
            name = "late" if do == "sleep" else "behave"
            answer = client.invoke(FunctionName=name, Payload=body(do=do, seconds=30.0))
            seen.append((answer["FunctionError"], json.loads(answer["Payload"].read())["errorType"]))
        raised = client.invoke(FunctionName="raising", Payload=body(poison=True))
        return [*seen, (raised["FunctionError"], json.loads(raised["Payload"].read())["errorType"])]

    late = package(name="late", timeout_s=1.0)
    assert with_boto3(work, package(timeout_s=30.0), late, package("lambdas:raising")) == [
        ("Unhandled", "Runtime.ExitError"),
        ("Unhandled", "Runtime.OutOfMemory"),
        ("Unhandled", "Sandbox.Timedout"),
        ("Unhandled", "RuntimeError"),
    ]


def test_boto3_sees_unknown_functions_and_versions_and_other_ways_to_call() -> None:
    def work(client: Any) -> tuple[int, int]:
        with pytest.raises(client.exceptions.ResourceNotFoundException):
            client.invoke(FunctionName="nobody", Payload=body())
        with pytest.raises(client.exceptions.ResourceNotFoundException):
            client.invoke(FunctionName="behave", Qualifier="7", Payload=body())
        with pytest.raises(client.exceptions.InvalidRequestContentException):
            client.invoke(FunctionName="behave", Payload=b"{")
        with pytest.raises(client.exceptions.InvalidRequestContentException, match="item 1 has no `id`"):
            client.invoke(FunctionName="behave", Payload=b'[{"messages": []}]')
        with pytest.raises(client.exceptions.RequestTooLargeException):
            client.invoke(FunctionName="behave", Payload=b"[" + b" " * (7 * 2**20) + b"]")
        event = client.invoke(FunctionName="behave", InvocationType="Event", Payload=body())
        dry = client.invoke(FunctionName="behave", InvocationType="DryRun", Payload=body())
        return event["StatusCode"], dry["StatusCode"]

    assert with_boto3(work, package()) == (202, 204)


def test_boto3_sees_a_throttle_with_its_reason() -> None:
    from concurrent.futures import ThreadPoolExecutor

    def work(client: Any) -> list[str]:
        def call(_: int) -> str:
            try:
                client.invoke(FunctionName="behave", Payload=body(do="sleep", seconds=3.0))
            except client.exceptions.TooManyRequestsException as error:
                return "{HTTPStatusCode} ".format(**error.response["ResponseMetadata"]) + error.response["Reason"]
            return "ok"

        with ThreadPoolExecutor(6) as threads:
            return list(threads.map(call, range(6)))

    seen = with_boto3(work, package(concurrency=1, queue=1))
    assert set(seen) == {"ok", "429 ConcurrentInvocationLimitExceeded"}


def test_only_callers_who_prove_themselves_get_in() -> None:
    now = datetime.datetime.now(datetime.UTC).timestamp()

    def signed(path: str, data: bytes, at: float = now) -> str:
        return signing.sign("k", "s", method="POST", path=path, body=data, now=at)

    async def main() -> list[int]:
        path, data = "/functions/behave", body()
        async with opened([package()], token="t", secrets={"k": "s"}) as (front, _), aiohttp.ClientSession() as session:
            statuses = []
            for header in (
                "",
                "Bearer u",
                "Bearer t",
                signed(path, data),
                signed(path, b"[]"),
                signed("/functions/other", data),
                signed(path, data, now - 3600.0),
            ):
                headers = {"Authorization": header}
                async with session.post(front.url + path, data=data, headers=headers) as response:
                    statuses.append(response.status)
            async with session.get(front.url + "/health") as response:
                return [*statuses, response.status]

    assert asyncio.run(main()) == [403, 403, 200, 200, 403, 403, 403, 200]


@pytest.mark.parametrize(
    ("path", "status"),
    [("/functions/behave", "cancelled"), ("/2015-03-31/functions/behave/invocations", "ok")],
)
def test_a_caller_who_hangs_up_ends_a_plain_call_and_not_one_of_lambdas(path: str, status: str) -> None:
    books = Books()

    async def main() -> None:
        # Four seconds of work: time enough to hang up in.
        busy = body(do="sleep", seconds=4.0)
        async with opened([package(timeout_s=60.0)], books) as (front, backend), aiohttp.ClientSession() as session:
            async with asyncio.TaskGroup() as group:
                call = group.create_task(_post(session, front.url + path, busy))
                # Its worker has started, and so has, at once, the call that it was started for.
                await until(lambda: any(span.state is WorkerState.COLD for span in books.spans))
                call.cancel()
            await until(lambda: books.invocations, seconds=60.0)
            assert backend.workers("behave") == (1 if status == "ok" else 0)

    asyncio.run(main())
    assert [i.status for i in books.invocations] == [status]


def test_closing_with_calls_in_flight_is_quick() -> None:
    async def call(url: str, session: aiohttp.ClientSession) -> None:
        with contextlib.suppress(aiohttp.ClientError):
            await session.post(url, data=body(do="sleep", seconds=60.0))

    async def main() -> float:
        loop = asyncio.get_running_loop()
        one = package(timeout_s=60.0)
        async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as group:
            async with opened([one]) as (front, backend):
                for path in ("/functions/behave", "/2015-03-31/functions/behave/invocations"):
                    group.create_task(call(front.url + path, session))
                await until(lambda: backend.workers("behave") == 2)
                began = loop.time()
            return loop.time() - began

    assert asyncio.run(main()) < 30.0
