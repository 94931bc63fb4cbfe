"""Notices reach a real HTTP server, and a server that is dead, slow or unwilling costs the run nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from rollart.adapters.webhook import Webhook, webhook_url
from rollart.errors import UsageError
from rollart.ports import RunEvent
from rollart.testing.ledger import MemoryRecorder
from serverless.retries import RetryPolicy

FAST = RetryPolicy("test", "test", 3, 0.001, 0.001)


@asynccontextmanager
async def server(answer: Callable[[int], Awaitable[int]]) -> AsyncIterator[tuple[str, list[Any]]]:
    """A webhook's URL, and the bodies posted to it; `answer` gives the status of the n-th request."""
    bodies: list[Any] = []

    async def handle(request: web.Request) -> web.Response:
        bodies.append(await request.json())
        return web.Response(status=await answer(len(bodies)))

    app = web.Application()
    app.router.add_post("/services/SECRET", handle)
    runner = web.AppRunner(app, shutdown_timeout=0.0)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        host, port = runner.addresses[0][:2]
        yield f"http://{host}:{port}/services/SECRET", bodies
    finally:
        await runner.cleanup()


async def post(url: str, *texts: str, last_s: float = 5.0, attempt_s: float = 2.0) -> list[RunEvent]:
    """Post at once, and end the run at once: the notices are sent while it ends."""
    ledger = MemoryRecorder()
    webhook = Webhook(url, ledger, policy=FAST, attempt_s=attempt_s, last_s=last_s)
    task = asyncio.create_task(webhook.run())
    await asyncio.sleep(0)
    for text in texts:
        webhook.post("warn_at", text)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    return [event for event in ledger.events if event.kind == "notice"]


def test_notices_arrive_in_order_in_slacks_format() -> None:
    async def main() -> None:
        async with server(lambda n: status(200)) as (url, bodies):
            noted = await post(url, "80 % spent", "the budget is spent")
        assert bodies == [{"text": "80 % spent"}, {"text": "the budget is spent"}]
        assert [dict(event.fields) for event in noted] == [{"sent": True, "host": "127.0.0.1"}] * 2

    asyncio.run(main())


def test_a_failing_server_is_asked_again_and_a_refusal_is_final() -> None:
    async def main() -> None:
        async with server(lambda n: status([503, 429, 204][n - 1])) as (url, bodies):
            (noted,) = await post(url, "x")
            assert (noted.fields["sent"], len(bodies)) == (True, 3)
        async with server(lambda n: status(404)) as (url, bodies):
            (noted,) = await post(url, "x")
            assert (noted.fields["sent"], noted.fields["why"], len(bodies)) == (False, "status 404", 1)

    asyncio.run(main())


def test_a_dead_server_is_an_event_without_the_url() -> None:
    async def main() -> None:
        async with server(lambda n: status(200)) as (url, _):
            pass  # its port is free again
        (noted,) = await post(url, "x")
        assert not noted.fields["sent"]
        assert "failed" in str(noted.fields["why"])
        assert "SECRET" not in repr(noted)

    asyncio.run(main())


def test_a_slow_server_holds_the_end_of_a_run_no_longer_than_its_limit() -> None:
    async def main() -> None:
        loop, release = asyncio.get_running_loop(), asyncio.Event()

        async def wait(n: int) -> int:
            await release.wait()
            return 200

        async with server(wait) as (url, _):
            began = loop.time()
            first, second = await post(url, "x", "y", last_s=0.1)
            assert loop.time() - began < 2.0
            assert {first.fields["sent"], second.fields["sent"]} == {False}
            assert "the run ended" in str(first.fields["why"])
            (noted,) = await post(url, "x", attempt_s=0.03)
            assert noted.fields["why"] == "no answer within 0.03 s"
            release.set()

    asyncio.run(main())


def test_the_url_may_be_in_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    assert webhook_url("https://a.example/x") == "https://a.example/x"
    with pytest.raises(UsageError, match="HOOK, and this environment variable is not set"):
        webhook_url("HOOK")
    monkeypatch.setenv("HOOK", "no url")
    with pytest.raises(UsageError, match="holds no http or https URL"):
        webhook_url("HOOK")
    monkeypatch.setenv("HOOK", "https://a.example/y")
    assert webhook_url("HOOK") == "https://a.example/y"


async def status(value: int) -> int:
    return value
