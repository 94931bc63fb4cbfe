"""The HTTP front over real workers, called by boto3 and by plain clients.

One execution per key, on virtual time.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import pathlib
import random
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import aiohttp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.sim import loop as virtual
from serverless.deploy.package import Package
from serverless.errors import BackendFailed
from serverless.meter import WorkerState
from serverless.providers.base import Reply
from serverless.providers.faults import decode, parse_report
from serverless.providers.http import Endpoint, HttpBackend
from serverless.providers.http_server import (
    FunctionHttpServer,
    IdempotencyStore,
    IdempotentResponse,
    KeyReused,
    ResponseGone,
)
from serverless.secrets import HEADER, HEADER_BYTES, Secrets
from serverless.types import Cause, FaultKind, InfraFault
from serverless.wire import encode, outcomes
from serverless.workers.local import LocalBackend
from tests.serverless.support import Books, item, package, until

pytestmark = pytest.mark.slow  # real sockets and processes


@contextlib.asynccontextmanager
async def opened(
    packages: Sequence[Package], books: Books | None = None, **settings: Any
) -> AsyncIterator[tuple[FunctionHttpServer, LocalBackend]]:
    async with LocalBackend(meter=books) as backend:
        for one in packages:
            await backend.deploy(one)
        async with FunctionHttpServer(backend, **settings) as front:
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
    used, warm = parse_report(first["LogResult"]), parse_report(second["LogResult"])
    assert used is not None
    assert warm is not None
    assert used.init_s > 0.0
    assert warm.init_s == 0.0
    assert warm.memory_mb == 128
    assert warm.request_id != used.request_id
    assert json.loads(scored)[0]["aggregate_reward_score"] == 1.0
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
    async def main() -> list[int]:
        url, statuses = "/functions/behave", []
        async with opened([package()], token="t") as (front, _), aiohttp.ClientSession() as session:
            for header in ("", "Bearer u", "Bearer t"):
                headers = {"Authorization": header}
                async with session.post(front.url + url, data=body(), headers=headers) as response:
                    statuses.append(response.status)
            async with session.get(front.url + "/health") as response:
                return [*statuses, response.status]

    assert asyncio.run(main()) == [403, 403, 200, 200]


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
            assert backend.load("behave").workers == (1 if status == "ok" else 0)

    asyncio.run(main())
    assert [i.status for i in books.invocations] == [status]


def test_a_call_becomes_a_job_that_is_asked_for_and_ended() -> None:
    books = Books()
    job = {"Prefer": "respond-async, wait=0", "Authorization": "Bearer t"}

    async def main() -> None:
        one = package(timeout_s=901.0, concurrency=2)
        async with opened([one], books, token="t") as (front, _), aiohttp.ClientSession(front.url) as session:
            for seconds in (0.3, 60.0):
                call = body(do="sleep", seconds=seconds)
                async with session.post("/functions/behave", data=call, headers=job) as response:
                    assert (response.status, float(response.headers["X-Rollart-Lease-S"])) == (202, 60.0)
                    url = response.headers["Location"]
                async with session.get(url) as response:
                    assert response.status == 403
                if seconds > 1.0:
                    async with session.delete(url, headers=job) as response:
                        assert response.status == 204
                async with session.get(url, headers=job | {"Prefer": "respond-async, wait=30"}) as response:
                    answer = await response.read()
                if seconds > 1.0:
                    assert (response.status, decode(answer) is not None) == (409, True)
                else:
                    assert (response.status, len(json.loads(answer))) == (200, 1)
                    assert float(response.headers["X-Rollart-Billed-Ms"]) >= 300
            async with session.get("/jobs/other", headers=job) as response:
                assert response.status == 409

    asyncio.run(main())
    assert [i.status for i in books.invocations] == ["ok", "cancelled"]


class Answering:
    """A backend whose calls answer `body`."""

    provider = "answering"

    def __init__(self, body: object) -> None:
        self.body = body

    async def deploy(self, package: Package) -> None: ...

    async def invoke(
        self, function: str, event: Sequence[dict[str, Any]], *, deadline_s: float, cause: Cause = Cause.CALL
    ) -> Reply:
        return Reply(self.body)

    async def __aenter__(self) -> Answering:
        return self

    async def __aexit__(self, *exc: object) -> None: ...


@pytest.mark.parametrize("path", ["/functions/f", "/2015-03-31/functions/f/invocations"])
def test_an_answer_is_strict_json_and_an_item_without_a_number_is_an_error(path: str) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    async def main(body: object) -> Any:
        async with (
            FunctionHttpServer(Answering(body)) as front,
            aiohttp.ClientSession() as session,
            session.post(front.url + path, data=b"[]") as response,
        ):
            assert response.status == 200
            return json.loads(await response.read(), parse_constant=refuse)

    nan, inf = float("nan"), float("inf")
    good = {"id": "good", "aggregate_reward_score": 1.0, "metrics_list": [], "note": 0.5}
    spent = [{"endpoint": "e", "model": "m", "requests": 1}]
    given = [
        good,
        {"id": "nan", "aggregate_reward_score": nan, "usage": spent},
        {"id": "metric", "aggregate_reward_score": 1.0, "metrics_list": [{"name": "m", "value": -inf}]},
        {"id": "steps", "aggregate_reward_score": 1.0, "step_rewards": [0.0, inf]},
        {"id": "note", "aggregate_reward_score": 1.0, "note": {"deep": [nan]}},
        {"id": "wait", "error": {"type": "E", "kind": "throttled", "retry_after_s": inf}},
    ]
    answer = asyncio.run(main(given))
    assert answer[0] == good
    assert answer[1]["error"]["message"] == "aggregate_reward_score is nan, not a number"
    assert answer[1]["usage"] == spent
    assert answer[4:] == [
        {"id": "note", "aggregate_reward_score": 1.0, "note": {"deep": [None]}},
        {"id": "wait", "error": {"type": "E", "kind": "throttled", "retry_after_s": None}},
    ]
    read = outcomes(answer, given, deterministic=True)
    assert [one.kind for one in read[1:4] if isinstance(one, InfraFault)] == [FaultKind.BAD_ANSWER] * 3
    assert asyncio.run(main({"score": nan})) == {"score": None}


@contextlib.asynccontextmanager
async def late_front() -> AsyncIterator[FunctionHttpServer]:
    """The front of a function whose secrets come with the calls."""
    async with LocalBackend(secrets=Secrets(late=True)) as backend, FunctionHttpServer(backend) as front:
        await backend.deploy(package("secretive"))
        yield front


def test_workers_with_a_callers_secrets_answer_no_other_request() -> None:
    async def main() -> list[int]:
        header = base64.urlsafe_b64encode(json.dumps({"JUDGE_KEY": "a caller's"}).encode()).decode()
        statuses = []
        async with late_front() as front, aiohttp.ClientSession() as session:
            for name, headers in (("secretive", {HEADER: header}), ("secretive~1", {}), ("secretive%7E1", {})):
                async with session.post(f"{front.url}/functions/{name}", data=body(), headers=headers) as response:
                    statuses.append(response.status)
        return statuses

    assert asyncio.run(main()) == [200, 404, 404]


def test_secrets_of_many_kilobytes_arrive_and_longer_ones_are_refused_before_a_call(tmp_path: pathlib.Path) -> None:
    async def main() -> Reply:
        async with late_front() as front:
            endpoints = {"secretive": Endpoint(f"{front.url}/functions/secretive", send_secrets=True)}
            async with HttpBackend(endpoints, secrets=Secrets(directory=tmp_path)) as backend:
                (tmp_path / ".env").write_text(f"JUDGE_KEY={'k' * HEADER_BYTES}\n")
                with pytest.raises(BackendFailed, match=r"JUDGE_KEY.* header .* of 87,\d+ bytes.*at most 65,536"):
                    await backend.deploy(package("secretive"))
                (tmp_path / ".env").write_text(f"JUDGE_KEY={'k' * 48_000}\n")
                await backend.deploy(package("secretive"))
                return await backend.invoke("secretive", [encode(item())], deadline_s=60.0)

    reply = asyncio.run(main())
    assert reply.fault is None
    assert reply.invocation is not None


@pytest.mark.parametrize("value", ["c2VjcmV0" * (HEADER_BYTES // 8 + 4), "c2VjcmV0\x00"], ids=["long", "invalid"])
def test_a_request_that_cannot_be_read_is_not_repeated(value: str, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> bytes:
        async with opened([]) as (front, _):
            reader, writer = await asyncio.open_connection("127.0.0.1", int(front.url.rpartition(":")[2]))
            writer.write(f"POST /functions/f HTTP/1.1\r\nHost: h\r\n{HEADER}: {value}\r\n\r\n".encode())
            answer = await reader.read()
            writer.close()
            return answer

    answer = asyncio.run(main())
    assert answer.split()[1] in (b"400", b"431")
    assert b"c2VjcmV0" not in answer
    assert "c2VjcmV0" not in caplog.text


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
                await until(lambda: backend.load("behave").workers == 2)
                began = loop.time()
            return loop.time() - began

    assert asyncio.run(main()) < 30.0


class Work:
    def __init__(self, group: asyncio.TaskGroup, **settings: Any) -> None:
        self.once = IdempotencyStore(group.create_task, **settings)
        self.runs: list[str] = []

    async def call(
        self,
        key: str,
        *,
        seconds: float = 1.0,
        body: bytes = b"x",
        executed: bool = True,
        linger_s: float | None = None,
    ) -> IdempotentResponse:
        async def run() -> IdempotentResponse:
            self.runs.append(key)
            await asyncio.sleep(seconds)
            return IdempotentResponse(200, body, executed=executed)

        return await self.once.call(key, b"digest", run, linger_s=linger_s)


def test_calls_of_one_key_share_one_execution_while_it_runs_and_after() -> None:
    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            work = Work(group)
            first = group.create_task(work.call("k"))
            await asyncio.sleep(0.5)
            assert await work.call("k") == await first == await work.call("k")
            assert work.runs == ["k"]
            await asyncio.sleep(31.0)
            await work.call("k")
            assert work.runs == ["k", "k"], "half a minute later it is another call's"
            with pytest.raises(KeyReused):
                await work.once.call("k", b"another", lambda: asyncio.sleep(0.0, IdempotentResponse(200, b"")))

    virtual.run(main())


def test_who_comes_back_in_time_finds_the_call_and_who_does_not_ends_it() -> None:
    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            work = Work(group, linger_s=1.0)
            for away, outcome in ((0.9, IdempotentResponse(200, b"x")), (1.1, ResponseGone)):
                key = str(away)
                first = group.create_task(work.call(key, seconds=5.0))
                await asyncio.sleep(0.1)
                first.cancel()
                await asyncio.sleep(away)
                if outcome is ResponseGone:
                    with pytest.raises(ResponseGone):
                        await work.call(key)
                else:
                    assert await work.call(key) == outcome
            assert work.runs == ["0.9", "1.1"]

    virtual.run(main())


def test_a_job_lives_as_long_as_it_is_asked_for_and_its_lease_after_that() -> None:
    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            work = Work(group)
            for seconds, away, polls in ((300.0, 59.0, 4), (300.0, 61.0, 1), (30.0, 59.0, 0)):
                key = f"{seconds} {away}"
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(1.0):
                        await work.call(key, seconds=seconds, linger_s=60.0)
                for _ in range(polls):
                    await asyncio.sleep(away)
                    with contextlib.suppress(TimeoutError, ResponseGone):
                        async with asyncio.timeout(1.0):
                            await work.once.join(key)
                if away < 60.0:
                    await asyncio.sleep(away)
                    assert (await work.once.join(key)).status == 200
                else:
                    with pytest.raises(ResponseGone):
                        await work.once.join(key)
            assert len(work.runs) == 3

    virtual.run(main())


def test_what_was_not_executed_leaves_its_key_free() -> None:
    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            work = Work(group)
            await work.call("k", executed=False)
            await work.call("k")
            assert work.runs == ["k", "k"]

    virtual.run(main())


def test_answers_are_bounded_in_bytes_and_a_key_without_its_answer_is_not_repeated() -> None:
    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            work = Work(group, most_bytes=100)
            for key in "abc":
                await work.call(key, body=bytes(40))
            with pytest.raises(ResponseGone):
                await work.call("a")
            assert (await work.call("c")).body == bytes(40)
            assert work.runs == ["a", "b", "c"]

    virtual.run(main())


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**16), keys=st.integers(1, 6), count=st.integers(1, 60))
def test_no_key_is_executed_twice_whoever_comes_and_goes(seed: int, keys: int, count: int) -> None:
    rng = random.Random(seed)

    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            work = Work(group, linger_s=0.3, most_bytes=200)
            tasks: list[asyncio.Task[None]] = []

            async def one(key: str, seconds: float) -> None:
                try:
                    answer = await work.call(key, seconds=seconds, body=key.encode() * 40)
                    assert answer.body == key.encode() * 40
                except ResponseGone:
                    pass

            for _ in range(count):
                tasks.append(group.create_task(one(str(rng.randrange(keys)), rng.choice([0.0, 0.1, 1.0]))))
                await asyncio.sleep(rng.choice([0.0, 0.01, 0.2]))
                if rng.random() < 0.4:
                    rng.choice(tasks).cancel()
            await asyncio.sleep(2.0)
            assert len(work.runs) == len(set(work.runs))
            await asyncio.sleep(40.0)
            await work.call("last", seconds=0.0)
            assert len(work.once) == 1, "nothing is remembered for ever"

    virtual.run(main(), seed=seed)
