"""The http backend against faulty hosts: the meaning of each answer, and that a call is sent once."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import datetime
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web

from serverless.errors import BackendFailed, UnknownFunction
from serverless.pipeline.retrying import is_outcome_unknown
from serverless.providers import signing
from serverless.providers.base import Reply
from serverless.providers.http import Bearer, Endpoint, HttpBackend, Signed
from serverless.secrets import HEADER
from serverless.types import FaultKind
from serverless.wire import encode
from tests.serverless.support import Books, item, package, until

pytestmark = pytest.mark.slow  # real sockets

EVENT = [encode(item())]
OK = [{"id": "a", "aggregate_reward_score": 1.0}]


class Host:
    """A real server that gives prepared answers and counts its requests."""

    def __init__(self, answer: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]) -> None:
        self._answer = answer
        self.requests: list[dict[str, str]] = []
        self.ended = 0
        self.url = ""

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        self.requests.append(dict(request.headers))
        await request.read()
        try:
            return await self._answer(request)
        finally:
            self.ended += 1


@contextlib.asynccontextmanager
async def hosted(
    answer: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]],
    books: Books | None = None,
    auth: Bearer | Signed | None = None,
    path: str = "/f",
    **settings: Any,
) -> AsyncIterator[tuple[HttpBackend, Host]]:
    host = Host(answer)
    handler = web.Server(host.handle, access_log=None, handler_cancellation=True)
    server = await asyncio.get_running_loop().create_server(handler, "127.0.0.1", 0)
    url = host.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}{path}"
    try:
        async with HttpBackend({"behave": Endpoint(url, auth or Bearer("t0"))}, meter=books) as backend:
            await backend.deploy(package(**settings))
            yield backend, host
    finally:
        server.close()
        await handler.shutdown(1.0)


def answering(response: Callable[[], web.StreamResponse], **settings: Any) -> tuple[Reply, Books, Host]:
    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        return response()

    async def main() -> tuple[Reply, Host]:
        async with hosted(answer, books, **settings) as (backend, host):
            return await backend.invoke("behave", EVENT, deadline_s=20.0), host

    books = Books()
    reply, host = asyncio.run(main())
    assert len(host.requests) == 1
    return reply, books, host


def json_answer(**headers: str) -> web.Response:
    return web.Response(body=json.dumps(OK).encode(), headers=headers)


def test_an_answer_its_caller_and_its_deadline() -> None:
    reply, books, host = answering(json_answer)
    assert (reply.body, reply.fault) == (OK, None)
    assert host.requests[0]["Authorization"] == "Bearer t0"
    assert 0 < int(host.requests[0]["X-Rollart-Deadline-Ms"]) <= 20_000
    [bill] = books.invocations
    assert bill.billed_s == pytest.approx(bill.t1 - bill.t0, abs=0.0011)
    assert (bill.items, bill.status, bill.memory_mb) == (1, "ok", 128)


def test_a_signed_call_covers_its_path_and_body() -> None:
    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        header, body = request.headers["Authorization"], await request.read()
        now = datetime.datetime.now(datetime.UTC).timestamp()
        for path in (request.raw_path, "/other"):
            signed = {"method": request.method, "path": path, "body": body, "now": now}
            refusals.append(signing.verify(header, {"k": "s"}, **signed))  # type: ignore[arg-type]
        return json_answer()

    async def main() -> None:
        async with hosted(answer, auth=Signed("k", "s"), path="/f?x=1") as (backend, _):
            await backend.invoke("behave", EVENT, deadline_s=20.0)

    refusals: list[str | None] = []
    asyncio.run(main())
    assert refusals == [None, "the signature does not match"]


def test_the_bill_is_the_hosts_if_it_gives_one() -> None:
    headers = {"X-Rollart-Billed-Ms": "1234", "X-Rollart-Cold-Ms": "250.5", "X-Rollart-Request-Id": "r7"}
    reply, _, _ = answering(lambda: json_answer(**headers))
    assert reply.invocation is not None
    assert (reply.invocation.billed_s, reply.invocation.cold_start_s) == (1.234, 0.2505)
    assert reply.invocation.provider_id == "r7"


def test_the_bill_is_lambdas_report_if_there_is_one() -> None:
    line = (
        "REPORT RequestId: abc\tDuration: 2.50 ms\tBilled Duration: 3 ms\tMemory Size: 256 MB\t"
        "Max Memory Used: 40 MB\tInit Duration: 100.00 ms\n"
    )
    log = base64.b64encode(line.encode()).decode()
    reply, _, _ = answering(lambda: json_answer(**{"X-Amz-Log-Result": log}))
    bill = reply.invocation
    assert bill is not None
    assert (bill.billed_s, bill.cold_start_s, bill.memory_mb, bill.provider_id) == (0.003, 0.1, 256, "abc")


def test_a_throttle_is_retryable_after_what_the_host_says_and_costs_nothing() -> None:
    reply, books, _ = answering(lambda: web.Response(status=429, headers={"Retry-After": "7"}))
    assert reply.fault is not None
    assert (reply.fault.kind, reply.fault.throttle) == (FaultKind.THROTTLED, None)
    assert (reply.fault.retryable, reply.fault.retry_after_s) == (True, 7.0)
    assert reply.invocation is None
    assert books.invocations == []


@pytest.mark.parametrize(("deterministic", "retryable"), [(True, False), (False, True)])
def test_an_answer_that_is_not_json(deterministic: bool, retryable: bool) -> None:
    reply, books, _ = answering(lambda: web.Response(text="<html>"), deterministic=deterministic)
    assert reply.fault is not None
    assert (reply.fault.kind, reply.fault.retryable) == (FaultKind.BAD_ANSWER, retryable)
    assert [i.status for i in books.invocations] == ["bad_answer"]


@pytest.mark.parametrize("value", ["sk-0123456789/+ab", "sk-short", "k" * 40 + "".join(map(str, range(900)))])
@pytest.mark.parametrize("shown", ["header", "body", "json"])
@pytest.mark.parametrize("size", [None, 100, 60])
def test_a_host_that_repeats_the_secrets_of_a_call_does_not_bring_them_into_a_fault(
    value: str, shown: str, size: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEY", value)

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        header = request.headers[HEADER]
        if shown == "header":
            return web.Response(status=400, text=f"Got more than 8190 bytes when reading: b'{header[:size]}...'")
        text = json.loads(base64.urlsafe_b64decode(header))["KEY"][:size]
        if shown == "json":
            fault = {"kind": "crash", "retryable": False, "detail": f"no {text}", "throttle": None}
            return web.json_response({"fault": {**fault, "retry_after_s": None}}, status=500)
        return web.Response(status=401, text=f"Bearer {text}")

    async def main() -> Reply:
        async with hosted(answer, secrets=["KEY"]) as (_, host):
            endpoint = Endpoint(host.url, send_secrets=True)
            async with HttpBackend({"behave": endpoint}) as backend:
                await backend.deploy(package(secrets=["KEY"]))
                return await backend.invoke("behave", EVENT, deadline_s=20.0)

    fault = asyncio.run(main()).fault
    assert fault is not None
    assert "[secret" in fault.detail
    encoded = base64.urlsafe_b64encode(json.dumps({"KEY": value}).encode()).decode()
    for source in (value, encoded):
        parts = {source[n : n + 12] for n in range(len(source)) if len(source) - n >= min(12, len(source))}
        assert not [part for part in parts if part in fault.detail], fault.detail


def test_a_redirect_is_not_followed() -> None:
    reply, _, _ = answering(lambda: web.Response(status=307, headers={"Location": "/f"}))
    assert reply.fault is not None
    assert (reply.fault.kind, reply.fault.retryable) == (FaultKind.UNAVAILABLE, False)


def test_a_connection_that_is_lost_under_a_call_is_not_tried_again() -> None:
    async def hang_up(request: web.BaseRequest) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.abort()
        await asyncio.sleep(60.0)
        raise AssertionError

    async def main() -> tuple[Reply, int]:
        async with hosted(hang_up) as (backend, host):
            return await backend.invoke("behave", EVENT, deadline_s=20.0), len(host.requests)

    reply, requests = asyncio.run(main())
    assert reply.fault is not None
    assert (reply.fault.kind, reply.fault.retryable, requests) == (FaultKind.UNAVAILABLE, False, 1)
    assert is_outcome_unknown(reply.fault, reply.invocation)


def test_a_host_slower_than_the_deadline_has_one_execution_and_is_told_to_end() -> None:
    async def sleep(request: web.BaseRequest) -> web.StreamResponse:
        await asyncio.sleep(60.0)
        raise AssertionError

    async def main() -> tuple[Reply, int]:
        async with hosted(sleep) as (backend, host):
            reply = await backend.invoke("behave", EVENT, deadline_s=2.0)
            await until(lambda: host.ended == 1)
            return reply, len(host.requests)

    reply, requests = asyncio.run(main())
    assert reply.fault is not None
    assert (reply.fault.kind, reply.fault.retryable, requests) == (FaultKind.DEADLINE, False, 1)


def test_a_long_call_becomes_a_job_that_is_asked_for_until_it_answers() -> None:
    answers: list[Callable[[], web.StreamResponse] | None] = [
        lambda: web.Response(status=202, headers={"Location": "/jobs/7"}),
        None,
        lambda: web.Response(status=503),
        lambda: web.Response(status=202),
        lambda: json_answer(**{"X-Rollart-Billed-Ms": "2000", "X-Rollart-Request-Id": "r"}),
    ]
    asked = []

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        assert request.headers["Authorization"] == "Bearer t0"
        asked.append(f"{request.method} {request.path} {request.headers['Prefer']}")
        chosen = answers[len(asked) - 1]
        if chosen is None:
            assert request.transport is not None
            request.transport.abort()
            await asyncio.sleep(60.0)
        assert chosen is not None
        return chosen()

    async def main() -> Reply:
        async with hosted(answer, books, timeout_s=901.0) as (backend, _):
            return await backend.invoke("behave", EVENT, deadline_s=900.0)

    books = Books()
    reply = asyncio.run(main())
    assert (reply.body, reply.fault) == (OK, None)
    assert [(i.billed_s, i.provider_id, i.status) for i in books.invocations] == [(2.0, "r", "ok")]
    assert asked == ["POST /f respond-async, wait=30"] + ["GET /jobs/7 respond-async, wait=30"] * 4


def test_a_job_is_ended_at_its_deadline_and_a_job_elsewhere_is_not_followed() -> None:
    async def main(location: str) -> tuple[Reply, list[str]]:
        asked = []

        async def answer(request: web.BaseRequest) -> web.StreamResponse:
            asked.append(request.method)
            return web.Response(status=202, headers={"Location": location})

        async with hosted(answer, timeout_s=901.0) as (backend, _):
            return await backend.invoke("behave", EVENT, deadline_s=0.7), asked

    reply, asked = asyncio.run(main("/jobs/7"))
    assert (reply.fault and reply.fault.kind, asked) == (FaultKind.DEADLINE, ["POST", "GET", "GET", "DELETE"])
    reply, asked = asyncio.run(main("http://elsewhere.invalid/jobs/7"))
    assert (reply.fault and reply.fault.kind, asked) == (FaultKind.UNAVAILABLE, ["POST"])


def test_a_cancelled_call_closes_its_connection_and_is_billed() -> None:
    books = Books()

    async def sleep(request: web.BaseRequest) -> web.StreamResponse:
        await asyncio.sleep(60.0)
        raise AssertionError

    async def main() -> None:
        async with hosted(sleep, books) as (backend, host), asyncio.TaskGroup() as group:
            call = group.create_task(backend.invoke("behave", EVENT, deadline_s=60.0))
            await until(lambda: host.requests)
            call.cancel()
            await until(lambda: host.ended == 1)

    asyncio.run(main())
    assert [i.status for i in books.invocations] == ["cancelled"]


def test_a_host_that_is_not_there_is_unavailable_and_costs_nothing() -> None:
    with socket.socket() as taken:  # bound and not listening: connections are refused
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/f"

        async def main() -> Reply:
            async with HttpBackend({"behave": Endpoint(url)}) as backend:
                await backend.deploy(package())
                return await backend.invoke("behave", EVENT, deadline_s=20.0)

        reply = asyncio.run(main())
    assert reply.fault is not None
    assert (reply.fault.kind, reply.fault.retryable, reply.invocation) == (FaultKind.UNAVAILABLE, True, None)


def test_mistakes_of_the_caller() -> None:
    async def main() -> None:
        backend = HttpBackend({"other": Endpoint("http://127.0.0.1:9/f")})
        with pytest.raises(UnknownFunction, match="with a URL: other"):
            await backend.deploy(package())
        await backend.deploy(package(name="other"))
        with pytest.raises(BackendFailed, match="not open"):
            await backend.invoke("other", [], deadline_s=1.0)

    asyncio.run(main())
    with pytest.raises(ValueError, match="not an http or https URL"):
        Endpoint("ftp://host/f")
    shown = repr(Endpoint("http://h/", Signed("k", "topsecret"))) + repr(Bearer("topsecret"))
    assert "topsecret" not in shown


@pytest.mark.parametrize(
    "wrapped",
    [
        {"statusCode": 200, "body": json.dumps(OK)},
        {"statusCode": "200", "headers": {"Content-Type": "application/json"}, "body": OK},
        {"statusCode": 200, "isBase64Encoded": True, "body": base64.b64encode(json.dumps(OK).encode()).decode()},
    ],
)
def test_the_answer_of_a_handler_for_api_gateway_is_taken_out(wrapped: dict[str, Any]) -> None:
    reply, _, _ = answering(lambda: web.json_response(wrapped))
    assert (reply.fault, reply.body) == (None, OK)


@pytest.mark.parametrize(
    ("wrapped", "kind"),
    [
        ({"statusCode": 503, "body": "busy"}, FaultKind.UNAVAILABLE),
        ({"statusCode": 429, "body": ""}, FaultKind.THROTTLED),
        ({"statusCode": 200, "body": "oops"}, FaultKind.BAD_ANSWER),
        ({"statusCode": 200, "isBase64Encoded": True, "body": "."}, FaultKind.BAD_ANSWER),
    ],
)
def test_a_failure_inside_of_an_api_gateway_answer_is_that_failure(wrapped: dict[str, Any], kind: FaultKind) -> None:
    reply, _, _ = answering(lambda: web.json_response(wrapped))
    assert reply.fault is not None
    assert reply.fault.kind is kind
